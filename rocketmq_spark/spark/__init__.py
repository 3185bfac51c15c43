"""The Spark data source, its metrics, and helpers for sessions. Of the other folders only `cli/` imports pyspark."""
