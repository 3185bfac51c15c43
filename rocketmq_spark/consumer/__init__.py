"""Decisions of a reader: which queues, from where to where, how much at once, and what to do when one gives nothing."""
