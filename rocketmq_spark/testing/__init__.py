"""Test doubles: a transport that plays a script without a network."""
