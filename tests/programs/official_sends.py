"""Sends a message of each type with RocketMQ's own Python client for proxies, and ends two transactions.

usage: python official_sends.py '{"endpoints": "127.0.0.1:8081", "NORMAL": "topic", "FIFO": "topic", ...}'
"""

from __future__ import annotations

import json
import sys
import time

from rocketmq import ClientConfiguration, Credentials, Message, Producer, TransactionChecker, TransactionResolution

arguments = json.loads(sys.argv[1])
configuration = ClientConfiguration(arguments["endpoints"], Credentials())


class Unchecked(TransactionChecker):
    def check(self, message: Message) -> TransactionResolution:
        return TransactionResolution.UNSPECIFIED


def message_of(kind: str, body: bytes) -> Message:
    message = Message()
    message.topic, message.body, message.tag, message.keys = arguments[kind], body, "a", "k1"
    message.add_property("mine", "yours")
    return message


plain = Producer(configuration, tuple(arguments[kind] for kind in ("NORMAL", "FIFO", "DELAY")))
plain.startup()
for kind in ("NORMAL", "FIFO", "DELAY"):
    message = message_of(kind, kind.encode())
    if kind == "FIFO":
        message.message_group = "group-1"
    elif kind == "DELAY":
        message.delivery_timestamp = int(time.time()) + 1
    plain.send(message)
plain.shutdown()
transactional = Producer(configuration, (arguments["TRANSACTION"],), checker=Unchecked())
transactional.startup()
for body in (b"committed", b"rolled back"):
    transaction = transactional.begin_transaction()
    transactional.send(message_of("TRANSACTION", body), transaction)
    if body == b"committed":
        transaction.commit()
    else:
        transaction.rollback()
transactional.shutdown()
