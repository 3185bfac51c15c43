"""Sends the rows of one partition until brokers have acknowledged every row."""
