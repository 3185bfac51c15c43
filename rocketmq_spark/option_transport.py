"""Which of the two protocols a set of options asks for, and which options mean nothing over gRPC.

Rule 1: `endpoints` alone ask for gRPC, anything else for the remoting protocol; the two kinds of address exclude each
        other.
Rule 2: name servers of the environment are a default: they never contradict what asks for gRPC.
Rule 3: what a proxy could not do is refused, never ignored; the default of such an option is no wish.
Rule 4: a scheme before an endpoint decides nothing; one that contradicts the option for encryption is refused.

A write and a producer ask alike, each under its own spelling of the options. Follows spec/grpc.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeAlias

from rocketmq_spark.errors import OptionError

REMOTING: Final = "remoting"
GRPC: Final = "grpc"

# field -> what the user calls it
Spelling: TypeAlias = Callable[[str], str]

# Defaults that differ from the remoting protocol's. Some clients of proxies take any compressed body for gzip, which no
# consumer over remoting unpacks (spec/grpc.md section 5.1), so nothing is compressed that nobody asked for.
GRPC_DEFAULTS: Final[Mapping[str, Any]] = {"transport": GRPC, "compress_type": "NONE"}

# A proxy is fastest with few requests at once: with 3 of 1,000 rows it took 1.5 times as many rows as with 8.
GRPC_MAX_IN_FLIGHT: Final = 3

_CREATE_FIRST: Final = (
    "a proxy creates no topics: create them first (rocketmq-spark create-topic NAME, or mqadmin updateTopic -t NAME "
    "-a +message.type=NORMAL)"
)

# (field, its values that mean something over gRPC, why no other does)
_REFUSED: Final[tuple[tuple[str, tuple[Any, ...], str], ...]] = (
    ("unit_mode", (False,), "its requests carry no mark of a unit"),
    ("vip_channel_enabled", (False,), "a proxy has no second port"),
    ("sign_name_server_requests", (False,), "no name server is asked, and every request to a proxy is signed"),
    ("create_topic_key", ("TBW102",), _CREATE_FIRST),
    ("default_topic_queue_nums", (4,), _CREATE_FIRST),
    ("send_mode", ("async", "sync"), "a proxy answers every request; async and sync are allowed"),
    (
        "compress_type",
        ("NONE", "ZLIB"),
        "a message can say only that it is compressed, and readers over remoting take that for ZLIB; ZLIB and NONE go",
    ),
    (
        "queue_selector",
        (None, "roundRobin", "random"),
        "the proxy chooses the queue; rows of one shardingKey keep their order in a topic of the type FIFO",
    ),
    ("batch_type", ("plain",), "a proxy makes no inner batches"),
    ("enable_trace", (False,), "a proxy refuses messages to the trace topic"),
)


def transport_of(values: Mapping[str, Any], spelt: Spelling) -> str:
    """Return the transport that the options given ask for.

    Parameters
    ----------
    values : mapping of str to value
        By field, those that were given; without the environment's.
    spelt : callable

    Returns
    -------
    {"remoting", "grpc"}

    Raises
    ------
    OptionError
        Addresses of both kinds, or of the wrong one; gRPC without endpoints.
    """
    name_server, endpoints, transport = spelt("name_server"), spelt("endpoints"), spelt("transport")
    chosen: str | None = values.get("transport")
    if chosen is None and "endpoints" in values and "name_server" in values:
        raise OptionError(
            f"{name_server} and {endpoints} are both given: give {name_server} alone to write to brokers by the "
            f"remoting protocol, or {endpoints} alone to write to RocketMQ 5 proxies by gRPC"
        )
    if chosen == REMOTING and "endpoints" in values:
        raise OptionError(
            f"{endpoints} are the proxies of {transport}={GRPC}, and {transport} is {REMOTING}: give {name_server} in "
            f"their place, or leave {transport} out"
        )
    if chosen == GRPC and "name_server" in values:
        raise OptionError(
            f"{transport}={GRPC} asks no name server, and {name_server} is given: give {endpoints} in its place (the "
            f"proxies, as in 10.0.0.1:8081;10.0.0.2:8081), or leave {transport} out"
        )
    if chosen == GRPC and "endpoints" not in values:
        raise OptionError(
            f"option {endpoints} is missing, which {transport}={GRPC} needs: the addresses of the RocketMQ 5 proxies, "
            "as in 10.0.0.1:8081;10.0.0.2:8081"
        )
    return chosen or (GRPC if "endpoints" in values else REMOTING)


def against_schemes(endpoints: str, use_tls: bool, spelt: Spelling) -> Iterator[str]:
    """Yield a text if addresses of proxies begin with a scheme that says the opposite of `use_tls`.

    Whoever writes ``https://`` believes that passwords and rows are encrypted: that is refused where they are not.

    Parameters
    ----------
    endpoints : str
        As the user gave them: a scheme is no part of an address, and parsed ones have none.
    use_tls : bool
    spelt : callable
    """
    given = {scheme.lower() for scheme in re.findall("(https?)://", endpoints, re.IGNORECASE)}
    for scheme, encrypted in (("https", True), ("http", False)):
        if scheme in given and use_tls is not encrypted:
            yield (
                f"{spelt('endpoints')} begin with {scheme}://, and {spelt('use_tls')} is {str(use_tls).lower()}: set "
                f"{spelt('use_tls')}={str(encrypted).lower()}, or leave {scheme}:// out"
            )


def refused_over_grpc(options: object, spelt: Spelling) -> Iterator[str]:
    """Yield a text for each option that a proxy could not honour.

    Parameters
    ----------
    options : SinkOptions or ProducerOptions
        With ``transport`` ``grpc``. Fields that one of the two does not have are passed over.
    spelt : callable
    """
    for field, allowed, why in _REFUSED:
        value = getattr(options, field, allowed[0])
        if value not in allowed:
            shown = str(value).lower() if isinstance(value, bool) else value
            yield (
                f"{spelt(field)}={shown} is not possible over gRPC: {why}. Leave {spelt(field)} out, or give "
                f"{spelt('name_server')} in place of {spelt('endpoints')}"
            )
