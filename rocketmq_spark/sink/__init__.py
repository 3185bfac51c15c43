"""Writes the rows of one partition, until the brokers have acknowledged each."""
