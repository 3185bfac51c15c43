"""The gRPC transport: channels and calls to proxies."""
