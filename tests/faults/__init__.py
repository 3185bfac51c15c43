"""Faults during writes and reads: no row may be lost."""
