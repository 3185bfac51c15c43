"""Test doubles: a transport that answers requests from a list of replies, without a network."""
