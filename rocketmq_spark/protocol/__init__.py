"""Bytes: what RocketMQ's two protocols look like on the wire. No sockets, no threads, no Arrow."""
