"""Reads topics: looks up their queues, resolves offsets, plans offset ranges, and pulls messages."""
