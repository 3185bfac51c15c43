"""Which options of a write contradict each other, and what to do about it.

Rule 1: each value is allowed by itself; here is only what two of them together would mean.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from rocketmq_spark.option_transport import Spelling

if TYPE_CHECKING:
    from rocketmq_spark.options import SinkOptions

# Steps of the ladders of every faultPreset.
_PRESET_STEPS: Final = 7

# (option, another one without which it means nothing).
_NEEDS: Final = (
    ("access_key", "secret_key"),
    ("secret_key", "access_key"),
    ("security_token", "access_key"),
    ("tls_ca_file", "use_tls"),
    ("tls_cert_file", "use_tls"),
    ("tls_key_file", "tls_cert_file"),
    ("tls_server_name", "use_tls"),
    ("tls_insecure_skip_verify", "use_tls"),
)
_SIGNERS: Final = ("access_key", "credentials_provider")
# (option, another one that would not count beside it, why).
_EXCLUDES: Final = (
    ("credentials_provider", "access_key", "a provider gives these itself"),
    ("tls_insecure_skip_verify", "tls_ca_file", "nobody's certificate is checked then"),
    ("tls_insecure_skip_verify", "tls_server_name", "nobody's certificate is checked then"),
)
_NOT_ABOVE: Final = (
    ("retry_backoff_ms", "retryBackoffMs", "retry_backoff_max_ms", "retryBackoffMaxMs"),
    ("batch_bytes", "batchBytes", "max_in_flight_bytes", "maxInFlightBytes"),
    ("send_msg_timeout", "sendMsgTimeout", "delivery_timeout_ms", "deliveryTimeoutMs"),
)
# Character.isISOControl, by which a proxy judges.
_CONTROL: Final = "[\x00-\x1f\x7f-\x9f]"
_LEVELS: Final = {"ZLIB": (0, 9), "ZSTD": (1, 22)}


def contradictions(options: SinkOptions, spelt: Spelling) -> Iterator[str]:
    """Yield a text for each contradiction."""
    yield from of_security(options, spelt)
    yield from against_bounds(options, _NOT_ABOVE)
    yield from _of_faults(options)
    yield from _of_dead_letters(options)
    if bool(options.machine_room) != (options.queue_selector == "machineRoom"):
        yield (
            f"queueSelector is {options.queue_selector or 'not set'} and machineRoom is "
            f"{','.join(options.machine_room) or 'not set'}: queueSelector=machineRoom and the option machineRoom need "
            "each other"
        )
    lowest, highest = _LEVELS.get(options.compress_type, (0, 22))
    if not lowest <= options.compress_level <= highest:
        yield (
            f"compressLevel={options.compress_level} is no level of compressType={options.compress_type}: allowed is "
            f"{lowest} to {highest}"
        )
    if options.send_msg_max_timeout_per_request == 0:
        yield "sendMsgMaxTimeoutPerRequest=0 leaves no time for an attempt: allowed is -1 (no cap) or 1 and more (ms)"
    if options.max_rate_tasks is not None and options.max_rate_per_second is None:
        yield "maxRateTasks says how many tasks share maxRatePerSecond, which is missing: give both or neither"
    if options.send_mode == "oneway" and options.enable_trace:
        yield "sendMode=oneway leaves nothing to trace, as nothing is acknowledged: set enableTrace=false"
    if options.keep_row_id and options.row_id:
        yield "keepRowId=true keeps the ids of rows, and rowId gives them new ones: set one of the two"
    if options.ordered:
        yield from _against_order(options)
    if options.over_grpc and re.search(_CONTROL, options.tags or ""):
        yield (
            f"tags={options.tags!r} holds a control character, and a proxy takes none: remove it, or give nameServer "
            "in place of endpoints"
        )


def of_security(options: object, spelt: Spelling) -> Iterator[str]:
    """Yield a text for each contradiction between who signs, and how connections are encrypted.

    Parameters
    ----------
    options : SinkOptions, ReaderOptions or ProducerOptions
    spelt : callable
        How the user spells a field.
    """
    for field, needed in _NEEDS:
        if getattr(options, field) and not getattr(options, needed):
            both = f"set {spelt(needed)}=true, or leave it out" if needed == "use_tls" else "give both, or neither"
            yield f"{spelt(field)} is given without {spelt(needed)}: {both}"
    for field in ("sign_name_server_requests",):
        if getattr(options, field) and not any(getattr(options, signer) for signer in _SIGNERS):
            signers = " or ".join(map(spelt, _SIGNERS))
            yield f"{spelt(field)} is given without credentials: give {signers}, or leave it out"
    for field, other, why in _EXCLUDES:
        if getattr(options, field) and getattr(options, other):
            yield f"{spelt(field)} and {spelt(other)} are both given, and {why}: leave one of them out"


def against_bounds(options: object, not_above: Sequence[tuple[str, str, str, str]]) -> Iterator[str]:
    """Yield a text for each number that is above the one that bounds it; one that is None bounds nothing.

    Parameters
    ----------
    options : SinkOptions or ReaderOptions
    not_above : sequence of (field, option, field of its bound, option that bounds it)
    """
    for low_field, smaller, high_field, larger in not_above:
        low, high = getattr(options, low_field), getattr(options, high_field)
        if low is not None and high is not None and low > high:
            yield f"{smaller}={low} is more than {larger}={high}: lower the one or raise the other"


def _of_faults(options: SinkOptions) -> Iterator[str]:
    latency_steps, duration_steps = (
        _PRESET_STEPS if steps is None else len(steps)
        for steps in (options.latency_max, options.not_available_duration)
    )
    if latency_steps != duration_steps:
        yield (
            f"latencyMax has {latency_steps} steps and notAvailableDuration has {duration_steps} (a faultPreset's own "
            f"have {_PRESET_STEPS}): every step of the one needs its own in the other"
        )
    if options.start_detector_enable and options.fault_preset == "legacy":
        yield (
            "startDetectorEnable=true and faultPreset=legacy contradict each other: the rules of 4.x do not tell "
            "brokers that can't be reached from slow ones; choose v4 or v5, or leave the detector off"
        )


def _of_dead_letters(options: SinkOptions) -> Iterator[str]:
    topic = options.dead_letter_topic
    if options.on_error == "deadLetter" and topic is None:
        yield "onError=deadLetter needs the option deadLetterTopic: the topic that invalid rows go to"
    if options.on_error != "deadLetter" and topic is not None:
        yield (
            f"deadLetterTopic={topic!r} is used with onError=deadLetter only, and onError is {options.on_error}: "
            "set onError=deadLetter, or leave deadLetterTopic out"
        )
    if topic is not None and topic == options.topic:
        yield f"deadLetterTopic={topic!r} is the option topic, too: invalid rows need a topic of their own"
    if options.on_error == "deadLetter" and options.send_mode == "oneway":
        yield (
            "onError=deadLetter and sendMode=oneway exclude each other: a dead letter is acknowledged before the task "
            "ends; use sendMode=async or sync"
        )


def _against_order(options: SinkOptions) -> Iterator[str]:
    if options.send_mode == "oneway":
        yield (
            "ordered=true and sendMode=oneway exclude each other: without acknowledgements nobody knows when the next "
            "batch may go; use sendMode=async or sync"
        )
    if options.queue_selector not in (None, "hash"):
        yield (
            f"ordered=true and queueSelector={options.queue_selector} exclude each other: the hash of a shardingKey "
            "finds the one queue of its rows; leave queueSelector out, or set it to hash"
        )
    if options.send_latency_fault_enable:
        yield (
            "ordered=true and sendLatencyFaultEnable=true exclude each other: rows of one shardingKey wait for their "
            "broker and never go round it; set one of the two to false"
        )
    if options.topic is None:
        yield (
            "ordered=true needs the option topic: the driver finds the queues of one topic for the whole write (over "
            "gRPC, its type); where topics come from a column, write each of them by itself"
        )
