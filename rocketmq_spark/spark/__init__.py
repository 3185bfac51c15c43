"""The only folder that imports pyspark."""
