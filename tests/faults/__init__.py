"""What may break, breaks, while rows are written: none is lost."""
