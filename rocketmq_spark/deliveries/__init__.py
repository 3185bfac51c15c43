"""How often a row of a write may be stored: the values of the option ``delivery``."""
