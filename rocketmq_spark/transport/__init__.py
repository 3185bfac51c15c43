"""Sends requests over sockets and gRPC channels, and returns the answers. Callers choose the broker and retry."""
