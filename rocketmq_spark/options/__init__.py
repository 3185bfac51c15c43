"""All options with kind of value, default and documentation, and the immutable dataclasses that hold parsed values."""
