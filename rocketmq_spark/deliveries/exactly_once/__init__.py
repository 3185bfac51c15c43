"""Writes that are visible once and completely: half messages, decisions and commits (``delivery=exactlyOnce``)."""
