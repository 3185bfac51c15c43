"""Sockets and channels: sends requests and returns answers. Knows no rows, no fault rules and no retry."""
