"""The producer for plain Python: what a Java program gets from ``DefaultMQProducer``."""
