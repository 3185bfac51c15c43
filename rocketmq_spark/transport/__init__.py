"""Moves requests and answers; knows no rows, no fault rules and no retry."""
