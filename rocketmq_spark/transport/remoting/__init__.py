"""The remoting transport: one thread serves the connections to name servers and brokers."""
