"""Templates of the local cluster; read by rocketmq_spark/cluster/config.py."""
