"""The log in ``transactionTopic`` that records the progress of writes, and the requests to its brokers."""
