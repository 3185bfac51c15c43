"""The client instances of this process: the producers and partition tasks that may share one get the same one.

- Tasks share by connection options: tasks with other options get another instance. An instance without a task stays
  open for `IDLE_SECONDS`, so that the next task of a reused Python worker finds open connections.
- Producers share by client id and namespace. A producer cannot start if its client id is in use with other connection
  options. (Java shares by client id alone: the second producer then sends through the first one's connections.) The
  last producer that leaves closes the instance.
- A group has one producer in an instance: a second one would take the place of the first at the brokers.
- A forked process never uses its parent's instances.

Follows ``MQClientManager.java`` and ``MQClientInstance.registerProducer``; the idle time is the connector's own.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from rocketmq_spark.errors import MQClientException, OptionError
from rocketmq_spark.model.send_result import TransactionCheck
from rocketmq_spark.routing.client_instance import ClientInstance
from rocketmq_spark.routing.connect import SharedConnection

logger = logging.getLogger("rocketmq_spark.producer")

OnCheck: TypeAlias = Callable[[TransactionCheck], None]


class GroupTakenError(MQClientException):
    """A producer of that group is in the client instance already."""


@dataclass(slots=True)
class _Member:
    instance: ClientInstance
    connection: SharedConnection | None = None
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
    """The client instances of one process."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._members: dict[Hashable, _Member] = {}

    def acquire(self, key: Hashable, producer_group: str, make: Callable[[], ClientInstance]) -> ClientInstance:
        """Return the instance of a key for one more task; `make` makes it if there is none.

        The caller gives it back with `ClientInstance.unregister`.
        """
        with self._locked():
            member = self._members.get(key)
            if member is None or member.instance.closed:
                member = self._added(key, _Member(make()))
            self._start(key, member.instance)
            member.instance.register(producer_group)
            return member.instance

    def join(
        self,
        client_id: str,
        connection: SharedConnection,
        producer_group: str,
        on_check: OnCheck | None,
        make: Callable[[], ClientInstance],
    ) -> ClientInstance:
        """Return the instance of a client id and a namespace for a producer; `make` makes it if there is none.

        Raises
        ------
        OptionError
            The instance has other connection options.
        GroupTakenError
            The instance has a producer of that group.
        """
        with self._locked():
            key = client_id, connection.namespace
            member = self._members.get(key)
            if member is None or member.instance.closed:
                member = self._added(key, _Member(make(), connection))
                member.instance.transport.on_check_transaction = member.on_check_transaction
            if member.connection is not None and (differences := member.connection.differences(connection)):
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
            self._start(key, member.instance)
            member.groups[producer_group] = on_check
            member.instance.register(producer_group)
            return member.instance

    def leave(self, instance: ClientInstance, producer_group: str) -> None:
        """Remove a producer: its group is unregistered at the brokers, and an instance without users is closed."""
        with self._lock:
            for key, member in list(self._members.items()):
                if member.instance is instance:
                    member.groups.pop(producer_group, None)
                    if not member.groups:
                        del self._members[key]
        instance.forget(producer_group)
        if not instance.users:
            instance.close()

    def close_all(self) -> None:
        """Close every instance now, used or not (tests; the end of a driver)."""
        with self._lock:
            members, self._members = list(self._members.values()), {}
        for member in members:
            member.instance.close()

    def _locked(self) -> threading.Lock:
        if os.getpid() != self._pid:
            # Forked: the parent may hold the lock for ever, and its threads and sockets are not ours.
            self.__init__()  # type: ignore[misc]
        return self._lock

    def _added(self, key: Hashable, member: _Member) -> _Member:
        self._members[key] = member
        member.instance.on_idle = lambda: self._close_idle(key, member.instance)
        return member

    def _start(self, key: Hashable, instance: ClientInstance) -> None:
        try:
            instance.start()
        except BaseException:
            # For example, no thread could be started. An instance without users must not stay.
            if not instance.users:
                del self._members[key]
                instance.close()
            raise

    def _close_idle(self, key: Hashable, instance: ClientInstance) -> None:
        with self._lock:
            # A task may have acquired it meanwhile.
            if instance.users:
                return
            known = self._members.get(key)
            if known is not None and known.instance is instance:
                del self._members[key]
        instance.close()


registry: Final = Registry()
