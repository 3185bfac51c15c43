"""The client instances that the producers of this process share, by client id.

Rule 1: producers with one client id and equal connection options share one instance. The first producer creates it, the
        last one closes it. A producer of the same client id whose connection options differ can't start. (Java shares
        by client id alone: the second producer then sends through the first one's connections.)
Rule 2: a group has one producer in an instance: a second one would take the first one's place at the brokers.
Rule 3: nothing is inherited over a fork.

Follows ``MQClientManager.java`` and ``MQClientInstance.registerProducer`` (spec/producer.md sections 1.2, 1.3, 1.6).
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from rocketmq_spark.client.connect import ConnectionOptions
from rocketmq_spark.errors import MQClientException, OptionError
from rocketmq_spark.producer.client_instance import ClientInstance
from rocketmq_spark.transaction import TransactionCheck

logger = logging.getLogger("rocketmq_spark.producer")

OnCheck: TypeAlias = Callable[[TransactionCheck], None]


class GroupTakenError(MQClientException):
    """A producer of that group is in the client instance already."""


@dataclass(slots=True)
class _Member:
    instance: ClientInstance
    options: ConnectionOptions
    # By producer group: who answers a broker's question about its half messages.
    groups: dict[str, OnCheck | None] = field(default_factory=dict)

    def on_check_transaction(self, check: TransactionCheck) -> None:
        on_check = self.groups.get(check.producer_group)
        if on_check is None:
            logger.warning("%s asks about message %s of group %r, which no producer here answers for; it asks again",
                           check.address, check.unique_id, check.producer_group)  # fmt: skip
            return
        on_check(check)


class Registry:
    """The instances of one process."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._members: dict[str, _Member] = {}

    def join(
        self,
        client_id: str,
        options: ConnectionOptions,
        producer_group: str,
        on_check: OnCheck | None,
        make: Callable[[], ClientInstance],
    ) -> ClientInstance:
        """Return the instance of a client id, created by `make` if there is none, with the group in it.

        Raises
        ------
        OptionError
            The instance has other connection options.
        GroupTakenError
            The group has a producer there.
        """
        if os.getpid() != self._pid:
            # Forked: the parent's lock may be held for ever, its sockets are not ours.
            self.__init__()  # type: ignore[misc]
        with self._lock:
            member = self._members.get(client_id)
            if member is None or member.instance.closed:
                member = self._members[client_id] = _Member(make(), options)
                member.instance.transport.on_check_transaction = member.on_check_transaction
            if differences := member.options.differences(options):
                raise OptionError(
                    f"starting a producer of group {producer_group}: client {client_id} is in use by a producer whose "
                    f"{', '.join(differences)} {'differ' if len(differences) > 1 else 'differs'}. Give this producer "
                    "an instance_name of its own, or the same values"
                )
            if producer_group in member.groups:
                raise GroupTakenError(
                    f"starting a producer of group {producer_group}: client {client_id} has one already; use another "
                    "group, or give this one an instance_name of its own"
                )
            try:
                member.instance.start()
            except BaseException:
                # No thread could be started, say: an instance that nobody is in must not stay.
                if not member.groups:
                    del self._members[client_id]
                    member.instance.close()
                raise
            member.groups[producer_group] = on_check
            member.instance.register(producer_group)
            return member.instance

    def leave(self, instance: ClientInstance, producer_group: str) -> None:
        """Take a group out: the brokers are told, and an instance that is empty now is closed."""
        with self._lock:
            found = ((key, member) for key, member in self._members.items() if member.instance is instance)
            client_id, member = next(found, (None, None))
            if member is not None:
                member.groups.pop(producer_group, None)
                if client_id is not None and not member.groups:
                    del self._members[client_id]
        instance.forget(producer_group)
        if not instance.users:
            instance.close()


registry = Registry()
