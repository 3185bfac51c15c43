"""The remoting protocol as bytes: frames, headers, routes, records. No socket, no thread, no clock, no Arrow.

Rule 1: encoders are pure functions of their arguments; what they refuse is an ``MQClientException``.
Rule 2: decoders return frozen values; whatever is wrong with the bytes is a ``RemotingCommandException``.
Rule 3: every integer on the wire is big-endian and signed unless a comment says otherwise.

Follows spec/remoting.md.
"""
