"""Which broker and which queue a message goes to: client instances, routes, latency faults, selectors, heartbeats."""
