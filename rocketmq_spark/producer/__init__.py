"""Which broker, which queue, when again: decisions only. Clock, randomness and transport are handed in."""
