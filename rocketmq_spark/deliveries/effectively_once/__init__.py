"""Writes that send only rows that are not stored yet (``delivery=effectivelyOnce``)."""
