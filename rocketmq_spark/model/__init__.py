"""Values and small helpers that all other packages share: messages, queues, routes, results, names and hashes."""
