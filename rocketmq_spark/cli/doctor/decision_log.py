"""The doctor's check of a decision log: who shares its topic, and which keys sign its records."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable

from rocketmq_spark import errors
from rocketmq_spark.admin.admin import Admin
from rocketmq_spark.admin.answers import PeekedMessage
from rocketmq_spark.cli.doctor.machine import FAILED, OK, WARNING, Check
from rocketmq_spark.deliveries.log.keys import LogKeys, resolved_keys, unsigned
from rocketmq_spark.model.message import MessageQueue
from rocketmq_spark.options.kinds import parse_one
from rocketmq_spark.options.sink import SINK_OPTIONS
from rocketmq_spark.protocol.remoting.command import loads

# Of each queue the newest messages.
_MOST_MESSAGES = 1000
_MOST_NAMES = 5


def check_decision_log(admin: Admin, topic: str, key: str | None) -> list[Check]:
    """Check the newest records of a decision log. Without the topic nothing is reported: no job has a log there."""
    name = f"decision log {topic}"
    try:
        (spec,) = [spec for spec in SINK_OPTIONS if spec.field == "transactional_key"]
        keys = resolved_keys(None if key is None else parse_one(spec, key, spec.name))
    except errors.OptionError as exc:
        return [Check(name, FAILED, str(exc), "correct the option transactionalKey")]
    try:
        messages = admin.peek(topic, _MOST_MESSAGES)
    except errors.TopicRouteStaleException:
        return []
    except errors.RocketMQError as exc:
        return [Check(name, OK, f"not checked: {exc}")]
    return list(_findings(name, keys, _signers(topic, keys, messages)))


def _signers(topic: str, keys: LogKeys, messages: Iterable[PeekedMessage]) -> Counter[tuple[str, str | None]]:
    """Return the number of records by ``transactionalId`` and fingerprint of the key.

    An unknown key has the fingerprint None, a missing signature an empty one.
    """
    found: Counter[tuple[str, str | None]] = Counter()
    for message in messages:
        text = unsigned(message.body)
        with contextlib.suppress(ValueError):
            fields = loads(message.body if text is None else text)
            log = fields.get("id") if isinstance(fields, dict) else None
            if isinstance(log, str):
                signer: str | None = ""
                if text is not None:
                    queue = MessageQueue(topic, message.broker_name, message.queue_id)
                    opened = keys.opened(message.body, log, queue)
                    signer = None if opened is None else opened.key_id
                # An effectively-once log also has the topic of its rows in its name.
                found[log.partition("#")[0], signer] += 1
    return found


def _findings(name: str, keys: LogKeys, signers: Counter[tuple[str, str | None]]) -> Iterable[Check]:
    open_ids = sorted({job for job, signer in signers if signer == ""})
    if len(open_ids) > 1:
        shown = ", ".join(map(errors.escaped, open_ids[:_MOST_NAMES])) + (
            ", ..." if len(open_ids) > _MOST_NAMES else ""
        )
        yield Check(
            name,
            WARNING,
            f"it has records of {len(open_ids)} transactionalIds without a signature ({shown}): each user with Pub on "
            "this topic can make their writes lose or repeat rows",
            "give each group of trusted jobs its own transactionTopic, or each job a "
            "transactionalKey: see docs/security.md#the-decision-log",
        )
    elif open_ids:
        yield Check(name, OK, f"its newest records are of transactionalId {errors.escaped(open_ids[0])}, not signed")
    by_key: Counter[str | None] = Counter()
    for (_, signer), count in signers.items():
        by_key[signer] += count
    if keys:
        of_keys = [f"key {key}: {by_key[key]} of the newest records" for key in keys.fingerprints]
        other = f"; another key: {by_key[None]}" if by_key[None] else ""
        yield Check(name, OK, f"key {keys.signs} signs; {', '.join(of_keys)}{other}")
    elif by_key[None]:
        yield Check(name, OK, f"{by_key[None]} of the newest records are signed (give transactionalKey to check them)")
