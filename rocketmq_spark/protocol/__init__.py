"""Encodes and decodes the requests, answers and messages of RocketMQ's two protocols. No sockets, threads or Arrow."""
