"""Arrow columns to request bodies and back, without a Python object per row. Knows neither Spark nor sockets."""
