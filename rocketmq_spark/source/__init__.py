"""Reads topics: queues, offsets, ranges, and the pulls that fetch them."""
