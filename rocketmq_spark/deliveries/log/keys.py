"""The keys of the option ``transactionalKey``, and the signatures of the decision log's records.

A signed message is the record, a line end, the position of its writer, a dot, and the signature in base64url. The
HMAC-SHA-256 covers the topic, the log, the queue and all that precedes the dot. So a copy in another queue, topic or
log is not valid. A copy in the same queue is valid; the position says how far its writer had read the queue (see
`RecordStore`). docs/internals/decision-log.md#copied-records has what copies can do.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, NoReturn

from rocketmq_spark.errors import OptionError
from rocketmq_spark.model.message import Buffer, MessageQueue
from rocketmq_spark.options.kinds import KEYS, is_reference, split_keys
from rocketmq_spark.options.sink import SinkOptions
from rocketmq_spark.transport.credentials import resolved_secret

_OPTION: Final = "transactionalKey"
_TRAILER: Final = re.compile(rb"\n(0|[1-9][0-9]{0,18})\.([A-Za-z0-9_-]{43})\Z")
_LONGEST_TRAILER: Final = 64


class Opened(NamedTuple):
    """A signed message: the bytes of the record, the position of its writer, and the fingerprint of its key."""

    body: bytes
    position: int
    key_id: str


@dataclass(frozen=True, slots=True, repr=False)
class LogKeys:
    """The keys of a log, by fingerprint. The first one signs, all verify. Without keys nothing is signed."""

    _keys: Mapping[str, bytes] = field(default_factory=dict)

    @classmethod
    def of(cls, *keys: bytes) -> LogKeys:
        """Return the keys of a log; the first one signs."""
        return cls({fingerprint_of(key): key for key in keys})

    def __bool__(self) -> bool:
        return bool(self._keys)

    def __reduce__(self) -> NoReturn:
        raise TypeError("keys are not pickled: a task reads the option transactionalKey itself")

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """The fingerprints of all keys; the first key signs."""
        return tuple(self._keys)

    @property
    def signs(self) -> str:
        """The fingerprint of the key that signs; empty without keys."""
        return next(iter(self._keys), "")

    def key_of(self, fingerprint: str) -> bytes:
        """Return the key of a fingerprint, an empty key for an empty fingerprint."""
        return self._keys[fingerprint] if fingerprint else b""

    def signing_with(self, fingerprint: str) -> LogKeys:
        """Return the same keys; the one with this fingerprint signs. Raises an OptionError without it."""
        if fingerprint == self.signs:
            return self
        if fingerprint not in self._keys:
            raise OptionError(
                f"option {_OPTION}: the driver signs the records of this write with {_shown(fingerprint)}, and this "
                f"executor has {', '.join(map(_shown, self._keys)) or _shown('')}. Give the driver and all executors "
                "the same keys, for example the same content of the file"
            )
        return LogKeys({fingerprint: self._keys[fingerprint], **self._keys})

    def sealed(self, body: bytes, log: str, queue: MessageQueue, position: int) -> bytes:
        """Return the message of a record for a queue of the log's topic."""
        if not self._keys:
            return body
        content = b"%b\n%d" % (body, position)
        return b"%b.%b" % (content, _signature(self._keys[self.signs], log, queue, content))

    def opened(self, message: Buffer, log: str, queue: MessageQueue) -> Opened | None:
        """Return the content of a message in a queue; None without a valid signature."""
        trailer = _trailer(message)
        if trailer is None:
            return None
        end = len(message) - len(trailer[0])
        content = memoryview(message)[: -len(trailer[2]) - 1]
        for fingerprint, key in self._keys.items():
            if hmac.compare_digest(_signature(key, log, queue, content), trailer[2]):
                return Opened(bytes(content[:end]), int(trailer[1]), fingerprint)
        return None


NO_KEYS: Final = LogKeys()


def keys_of(options: SinkOptions) -> LogKeys:
    """Return the keys of a write; OptionError if a referenced value is missing or not allowed."""
    return resolved_keys(options.transactional_key)


def resolved_keys(text: str | None) -> LogKeys:
    """Return the keys in the option ``transactionalKey``; raises as `keys_of`."""
    if text is None:
        return NO_KEYS
    value = resolved_secret(_OPTION, text)
    try:
        return LogKeys.of(*split_keys(value))
    except ValueError:
        pass
    # Outside the except block: no context of the error may show the value.
    shown = text if is_reference(text) else "(not shown: it is secret)"
    raise OptionError(f"option {_OPTION}={shown}: its value is not allowed: allowed is {KEYS.allowed}")


def fingerprint_of(key: bytes) -> str:
    """Return a name of a key that does not help to find it."""
    return hmac.new(key, b"rocketmq_spark fingerprint", hashlib.sha256).hexdigest()[:12]


def unsigned(message: Buffer) -> bytes | None:
    """Return the record in a message that looks as if it were signed; None if it does not."""
    trailer = _trailer(message)
    return None if trailer is None else bytes(message[: -len(trailer[0])])


def _trailer(message: Buffer) -> re.Match[bytes] | None:
    return _TRAILER.search(bytes(message[-_LONGEST_TRAILER:]))


def _signature(key: bytes, log: str, queue: MessageQueue, content: Buffer) -> bytes:
    names = [text.encode() for text in (log, queue.topic, queue.broker_name, str(queue.queue_id))]
    place = b"".join(b"%d:%b" % (len(name), name) for name in names)
    digest = hmac.digest(key, b"".join((b"rocketmq_spark record\n", place, content)), "sha256")
    return base64.urlsafe_b64encode(digest).rstrip(b"=")


def _shown(fingerprint: str) -> str:
    return f"key {fingerprint}" if fingerprint else "no key"
