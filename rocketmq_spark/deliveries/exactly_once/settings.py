"""The broker settings that exactly-once writes depend on, for ``rocketmq-spark doctor``.

The names, units and defaults of the settings are those of ``BrokerConfig`` and ``MessageStoreConfig`` in RocketMQ
5.5.0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from rocketmq_spark.deliveries.base import Finding
from rocketmq_spark.protocol.remoting.responses import integer_of

_TRUE: Final = "true"
# The default of the option transactionTimeoutMs. A half message expires after the larger of it and transactionTimeOut.
_TIMEOUT_MS: Final = 60_000
# Bytes of transactionOpMsgMaxSize (default 4096): a queue offset and its comma take up to 20.
_ONE_OFFSET: Final = 20
# Milliseconds of transactionOpBatchInterval (default 3000).
_LONGEST_INTERVAL: Final = 60_000


def findings(settings: Mapping[str, str], version: str | None) -> Iterator[Finding]:
    """Yield the settings of a master with which exactly-once writes are slow, unsafe or not possible."""

    def shown(*names: str) -> str:
        return ", ".join(f"{name}={settings.get(name, 'unknown')}" for name in names)

    if "transRocksDBEnable" not in settings:
        reason = "they need brokers that reject the end of a half message after its deadline"
        fix = "use brokers of release 5.5.0, which is tested"
        yield Finding("may not be possible", f"release {version or 'unknown'}", reason, fix)
    elif settings["transRocksDBEnable"] != _TRUE or settings.get("transWriteOriginTransHalfEnable") != "false":
        cause = shown("transRocksDBEnable", "transWriteOriginTransHalfEnable")
        reason = (
            "the default transaction store keeps one core busy after the first END_TRANSACTION, and at each check "
            "copies every open half message, up to 15 times"
        )
        fix = "set transRocksDBEnable=true and transWriteOriginTransHalfEnable=false, and restart the broker"
        yield Finding("slow", cause, reason, fix)
        size, interval = (integer_of(settings, f"transactionOp{name}") for name in ("MsgMaxSize", "BatchInterval"))
        if (size is not None and size < _ONE_OFFSET) or (interval is not None and interval > _LONGEST_INTERVAL):
            # With 1 and 2000000000 a 5.5.0 broker ended 338 half messages a second, after the first 20,000.
            cause = shown("transactionOpMsgMaxSize", "transactionOpBatchInterval")
            reason = "with such values the default transaction store can nearly stop"
            fix = "set transactionOpMsgMaxSize=4096 and transactionOpBatchInterval=3000"
            yield Finding("slow", cause, reason, fix)
    if settings.get("enableBuildConsumeQueueConcurrently") == _TRUE:
        cause = shown("enableBuildConsumeQueueConcurrently")
        reason = "after a crash the restarted job could miss committed rows, and would write them again"
        fix = "set enableBuildConsumeQueueConcurrently=false, and restart the broker"
        yield Finding("unsafe", cause, reason, fix)
    if settings.get("rejectTransactionMessage") == _TRUE:
        fix = "set rejectTransactionMessage=false, or write to topics on other brokers"
        yield Finding("not possible", shown("rejectTransactionMessage"), "half messages are rejected", fix)
    timeout = integer_of(settings, "transactionTimeOut")
    if timeout is not None and timeout > _TIMEOUT_MS:
        reason = f"a job that crashed during a commit waits {timeout / 1000:,.0f} s after its restart"
        fix = f"set transactionTimeOut to at most {_TIMEOUT_MS} (ms; the default is 6000)"
        yield Finding("slow after a crash", shown("transactionTimeOut"), reason, fix)
