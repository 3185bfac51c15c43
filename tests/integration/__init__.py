"""Real servers, without Spark."""
