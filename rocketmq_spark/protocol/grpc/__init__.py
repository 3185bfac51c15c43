"""Messages and codes of RocketMQ's gRPC protocol (v2), which proxies speak."""
