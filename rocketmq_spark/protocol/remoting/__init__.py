"""Frames, headers, records and routes of RocketMQ's remoting protocol."""
