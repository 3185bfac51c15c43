"""The options of a read: parsed once, on the driver, into one frozen value.

Rule 1: every value is checked here, before any task; a message says the option, the value and what is allowed.
Rule 2: reads go over remoting only, as the gRPC protocol can't replay (design.md section 8).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from rocketmq_spark.errors import OptionError
from rocketmq_spark.message import MessageQueue
from rocketmq_spark.namespace import effective_namespace
from rocketmq_spark.offset_json import OffsetSpec
from rocketmq_spark.option_parsing import parse_environment, parse_one, parse_values, redacted_repr
from rocketmq_spark.option_table import SINK_OPTIONS
from rocketmq_spark.options import OptionRow, rows_of
from rocketmq_spark.reader_option_rules import against_given, contradictions
from rocketmq_spark.reader_option_table import ENDING_OFFSETS_SPEC, READER_OPTIONS, SUBSCRIBE_SPEC

_SPELLING: Final = {spec.field: spec.name for spec in READER_OPTIONS}
_EARLIEST: Final = OffsetSpec("earliest")
_LATEST: Final = OffsetSpec("latest")
_PULL_TIMEOUT_MS: Final = 10_000


@dataclass(frozen=True, slots=True, repr=False)
class ReaderOptions:
    """The options of one read, parsed. Times are milliseconds; see `READER_OPTIONS` for each one's meaning.

    Hashable and picklable. Building one directly checks nothing.
    """

    name_server: tuple[str, ...] = ()
    subscribe: tuple[str, ...] = ()
    subscribe_pattern: str | None = None
    assign: frozenset[MessageQueue] = frozenset()
    starting_offsets: OffsetSpec = _EARLIEST
    ending_offsets: OffsetSpec = _LATEST
    starting_timestamp: int | None = None
    ending_timestamp: int | None = None
    starting_offsets_by_timestamp: tuple[tuple[MessageQueue, int], ...] = ()
    ending_offsets_by_timestamp: tuple[tuple[MessageQueue, int], ...] = ()
    starting_offsets_by_timestamp_strategy: str = "error"
    min_partitions: int | None = None
    max_records_per_partition: int | None = None
    fail_on_data_loss: bool = True
    on_unreadable: str = "fail"
    sub_expression: str = "*"
    filter_type: str = "TAG"
    include_properties: bool = True
    consumer_group: str = "spark-rocketmq-source"
    commit_offsets: bool = False
    max_offsets_per_trigger: int | None = None
    min_offsets_per_trigger: int | None = None
    max_trigger_delay: int = 15 * 60 * 1000
    pull_batch_size: int = 32
    pull_timeout_ms: int = _PULL_TIMEOUT_MS
    read_timeout_ms: int = 120_000
    instance_name: str | None = None
    client_ip: str | None = None
    unit_name: str | None = None
    namespace: str | None = None
    access_key: str | None = None
    secret_key: str | None = None
    security_token: str | None = None
    credentials_provider: str | None = None
    sign_name_server_requests: bool = False
    use_tls: bool = False
    tls_ca_file: str | None = None
    tls_cert_file: str | None = None
    tls_key_file: str | None = None
    tls_server_name: str | None = None
    tls_insecure_skip_verify: bool = False

    @property
    def over_grpc(self) -> bool:
        """False: a proxy can't replay."""
        return False

    @property
    def endpoints(self) -> tuple[str, ...]:
        """No proxies."""
        return ()

    @property
    def route_servers(self) -> tuple[str, ...]:
        """Whom routes are asked of: the name servers."""
        return self.name_server

    @property
    def wrapped_namespace(self) -> str:
        """The namespace that names of topics and groups begin with."""
        return self.namespace or ""

    @property
    def client_async_semaphore_value(self) -> int:
        """Most requests under way that are answered: the client's default."""
        return 65535

    @property
    def client_oneway_semaphore_value(self) -> int:
        """Most requests under way that are not: the client's default."""
        return 65535

    def reads(self, queue: MessageQueue) -> bool:
        """Return whether a queue is among what is asked for; its topic is the one without the namespace."""
        if self.assign:
            asked = queue in self.assign
        elif self.subscribe_pattern is not None:
            asked = re.fullmatch(self.subscribe_pattern, queue.topic) is not None
        else:
            asked = queue.topic in self.subscribe or not self.subscribe
        receipts = [spec for spec in (self.starting_offsets, self.ending_offsets) if spec.receipt]
        return asked and all(spec.offset_of(queue) is not None for spec in receipts)

    def __repr__(self) -> str:
        return redacted_repr(self, READER_OPTIONS)


def parse_reader_options(options: Mapping[str, str], environ: Mapping[str, str], *, streaming: bool) -> ReaderOptions:
    """Return the options of a read.

    Parameters
    ----------
    options : mapping of str to str
        As Spark hands them over; keys in any case.
    environ : mapping of str to str
        Environment of the driver: ``NAMESRV_ADDR`` stands in for ``nameServer``, as in the Java client.
    streaming : bool
        Whether it is a stream, which has other defaults and options than a batch.

    Raises
    ------
    OptionError
        An option is unknown, malformed or missing, or two contradict each other.
    """
    by_key = {key.lower(): text for key, text in options.items()}
    for name in ("transport", "endpoints"):
        if name in by_key:
            raise OptionError(
                f"{name} is an option of a write: reads go over the remoting protocol only, as a proxy can't replay "
                "what is stored (gRPC). Leave it out, and give nameServer"
            )
    values = parse_values(READER_OPTIONS, options, "read", {"write": SINK_OPTIONS})
    if "path" in by_key:
        for field, name in (("subscribe_pattern", "subscribePattern"), ("assign", "assign")):
            if field in values:
                raise OptionError(f"{name} and .load({by_key['path']!r}) both say what is read: give one of them")
        named = parse_one(SUBSCRIBE_SPEC, by_key["path"], 'path (.load("topic"))')
        if values.setdefault("subscribe", named) != named:
            raise OptionError(
                f"subscribe={','.join(values['subscribe'])!r} and .load({by_key['path']!r}) name different topics: "
                "give one of them"
            )
    for refused in against_given(values, streaming=streaming):
        raise OptionError(refused)
    starting = values.setdefault("starting_offsets", _LATEST if streaming else _EARLIEST)
    if starting.receipt and not streaming and "ending_offsets" not in values:
        values["ending_offsets"] = parse_one(ENDING_OFFSETS_SPEC, by_key["startingoffsets"], "startingOffsets")
    values |= parse_environment(READER_OPTIONS, values, environ)
    if "read_timeout_ms" in values:
        # Who waits less for a queue does not wait longer for one request.
        values.setdefault("pull_timeout_ms", min(_PULL_TIMEOUT_MS, values["read_timeout_ms"]))
    values["namespace"] = effective_namespace(values.get("namespace"), values.get("name_server", ()))
    parsed = ReaderOptions(**values)
    if not parsed.name_server:
        raise OptionError(
            'option nameServer is missing: give .option("nameServer", "host:9876;host:9876"), or set the environment '
            "variable NAMESRV_ADDR on the driver"
        )
    for contradiction in contradictions(parsed, _SPELLING.__getitem__, streaming=streaming):
        raise OptionError(contradiction)
    return parsed


def reader_options_table() -> list[OptionRow]:
    """Return the options of a read in the order of the documentation, with their defaults as one would type them."""
    return rows_of(READER_OPTIONS, ReaderOptions)
