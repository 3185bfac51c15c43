"""Tables for terminals, files and notebooks. Every folder may use it; it knows no other."""
