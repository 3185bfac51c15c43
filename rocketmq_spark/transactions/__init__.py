"""Exactly-once writes: half messages of tasks, the decision log, commits, and recovery after a crash."""
