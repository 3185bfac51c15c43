"""The ``rocketmq-spark`` command."""
