"""`rocketmq_spark.Producer`: sends messages and Arrow tables from plain Python."""
