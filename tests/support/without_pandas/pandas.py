"""Hides pandas from Spark's Python workers, whose PYTHONPATH has this folder (tests/worker_python).

Workers need no pandas, but pyarrow imports it for the commit message of a write, which takes half a second.
"""

raise ImportError("hidden from the workers of tests")
