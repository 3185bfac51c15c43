"""Reads topics: finds their queues, resolves offsets, plans offset ranges, and pulls messages."""
