"""Values that travel between the layers: messages, queues, routes, results, names and hashes."""
