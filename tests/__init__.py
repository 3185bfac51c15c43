"""The tests. A package, so that another ``tests`` on the path is not imported instead."""
