"""Puts the names of requests into a namespace, and takes those of answers out of it.

Servers know topic ``orders`` of namespace ``ns`` as ``ns%orders``, and groups likewise. The other layers use the names
without it. Follows ``ClientConfig.withNamespace`` and ``withoutNamespace``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

from rocketmq_spark.model.names import bare_name, check_namespace, is_none, unwrap, wrap
from rocketmq_spark.model.properties import PGROUP
from rocketmq_spark.model.send_result import TRANSACTION_PREPARED_TYPE, TransactionCheck

# The group of RocketMQ's own tools, which exists on every broker (``MixAll.TOOLS_CONSUMER_GROUP``).
TOOLS_CONSUMER: Final = "TOOLS_CONSUMER"

# The ext fields that are names of topics and groups. SendMessageRequestHeaderV2 calls the group ``a``, the topic ``b``.
_NAMES: Final = ("topic", "producerGroup", "consumerGroup", "a", "b")
# SendMessageRequestHeaderV2's letters of the system flag and the properties.
_SYS_FLAG: Final = "f"
_PROPERTIES: Final = "i"
_GROUP_OF_HALF: Final = re.compile(rf"(?<![^\x02])({PGROUP}\x01)([^\x02]+)")


class Namespace:
    """A namespace of topics and groups; "" changes nothing.

    RocketMQ's own topics and groups are in no namespace, and neither is `create_topic_key`, the template of new topics.
    """

    def __init__(self, name: str, create_topic_key: str) -> None:
        check_namespace(name)
        self.name = "" if is_none(name) else name
        self._outside = frozenset((TOOLS_CONSUMER, create_topic_key))

    def wrap(self, name: str) -> str:
        """Return the servers' name of a topic or group."""
        return name if name in self._outside else wrap(self.name, name)

    def unwrap(self, name: str) -> str:
        """Return the user's name of a topic or group; a name outside of the namespace is returned unchanged."""
        return unwrap(name, self.name)

    def members(self, names: Iterable[str]) -> dict[str, str]:
        """Return the names that are in the namespace, as servers know them, by the users' names."""
        return {bare: name for name in names if (bare := bare_name(name, self.name)) is not None}

    def wrap_fields(self, ext_fields: Mapping[str, str]) -> Mapping[str, str]:
        """Return a request's ext fields with the servers' names."""
        if not self.name:
            return ext_fields
        fields = {**ext_fields, **{key: self.wrap(ext_fields[key]) for key in _NAMES if key in ext_fields}}
        if _PROPERTIES in fields and int(fields[_SYS_FLAG]) & TRANSACTION_PREPARED_TYPE:
            # The broker sends its checks of a half message to this group.
            wrapped = _GROUP_OF_HALF.sub(lambda match: match[1] + self.wrap(match[2]), fields[_PROPERTIES])
            fields[_PROPERTIES] = wrapped
        return fields

    def unwrap_check(self, check: TransactionCheck) -> TransactionCheck:
        """Return a broker's check of a transaction with the users' names."""
        if not self.name:
            return check
        message = check.message
        properties = message.properties
        if PGROUP in properties:
            properties = {**properties, PGROUP: self.unwrap(properties[PGROUP])}
        return replace(check, message=replace(message, topic=self.unwrap(message.topic), properties=properties))
