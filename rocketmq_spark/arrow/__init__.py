"""Encodes Arrow columns as request bodies, and decodes stored messages to columns, without a Python object per row."""
