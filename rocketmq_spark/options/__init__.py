"""All options with name, kind, default and documentation, and the frozen values that texts are parsed into."""
