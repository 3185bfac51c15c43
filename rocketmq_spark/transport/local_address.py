"""This host's address as others see it."""

from __future__ import annotations

import socket


def local_ip() -> str:
    """Return this host's IPv4 address as others see it, or loopback; nothing is sent (spec/producer.md section 1.3)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # TEST-NET-1: connecting a datagram socket only asks the routing table for the interface.
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
