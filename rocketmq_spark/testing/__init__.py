"""Test doubles: a transport that plays a script instead of using a network."""
