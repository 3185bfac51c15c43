"""Chooses what decodes stored messages and hashes rows: the compiled modules, or numpy with the same results.

An install builds the compiled modules `_records` and `_hashes` where a C compiler is. They are missing without one, in
the wheel for any platform, and in a zip of ``--py-files``. ``ROCKETMQ_SPARK_KERNEL=0`` in the environment of a worker
also selects numpy.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rocketmq_spark.arrow.gather import Workspace
from rocketmq_spark.arrow.messages import Messages
from rocketmq_spark.arrow.numpy_hashes import Hashes, Strings, hash_sums, nh_sums
from rocketmq_spark.model.message import Buffer
from rocketmq_spark.protocol.remoting.records import has_each_offset

logger = logging.getLogger("rocketmq_spark.arrow")

VARIABLE: Final = "ROCKETMQ_SPARK_KERNEL"
_MODULES: Final = ("rocketmq_spark.arrow._records", "rocketmq_spark.arrow._hashes")


@dataclass(frozen=True, slots=True)
class Kernel:
    """What decodes stored messages, and hashes rows."""

    name: str
    # As of `Messages`: the bodies of pulls, their first offsets, the offsets after their last ones, the most messages.
    messages: Callable[[Sequence[Buffer], Sequence[int], Sequence[int], int], Messages]
    # As of `rocketmq_spark.arrow.numpy_hashes`.
    hash_sums: Callable[[Sequence[Strings], Workspace, Sequence[int]], Hashes]
    nh_sums: Callable[[Sequence[Strings], Workspace, Hashes], Hashes]
    # As of `rocketmq_spark.protocol.remoting.records`.
    has_each_offset: Callable[[Buffer, int, int], bool]


def _numpy_messages(bodies: Sequence[Buffer], starts: Sequence[int], ends: Sequence[int], most: int) -> Messages:
    # Writes choose a kernel for their hashes, and need no decoder.
    from rocketmq_spark.arrow.numpy_messages import NumpyMessages

    return NumpyMessages(bodies, starts, ends, most)


NUMPY: Final = Kernel("numpy", _numpy_messages, hash_sums, nh_sums, has_each_offset)


@dataclass(frozen=True, slots=True)
class Chosen:
    """A kernel, why it was chosen, and how to get a faster one."""

    kernel: Kernel
    reason: str
    fix: str = ""


def compiled() -> Kernel:
    """Return the compiled kernel; raise an ImportError if it is missing or does not fit this Python."""
    import rocketmq_spark.arrow._hashes as _hashes
    import rocketmq_spark.arrow._records as _records

    return Kernel("compiled", _records.CompiledMessages, _hashes.hash_sums, _hashes.nh_sums, _records.has_each_offset)


def choose(environ: Mapping[str, str], load: Callable[[], Kernel] = compiled) -> Chosen:
    """Return the compiled kernel, unless it is switched off, missing or broken."""
    if environ.get(VARIABLE) == "0":
        return Chosen(NUMPY, f"{VARIABLE}=0 selects it")
    try:
        return Chosen(load(), "it is installed")
    except (ImportError, AttributeError) as exc:
        if isinstance(exc, ModuleNotFoundError) and exc.name in _MODULES:
            fix = "install the wheel of this platform, or install from source with a C compiler"
            return Chosen(NUMPY, "the compiled kernel is not installed, so reads and row ids take more time", fix)
        return Chosen(NUMPY, f"the import of the compiled kernel failed: {exc}", "install rocketmq-spark again")


@functools.cache
def default_kernel() -> Kernel:
    """Return the kernel of this process. The first call chooses it, and logs the choice."""
    choice = choose(os.environ)
    level = logging.WARNING if choice.fix else logging.DEBUG
    fix = f"; {choice.fix}" if choice.fix else ""
    logger.log(level, "kernel %s: %s%s", choice.kernel.name, choice.reason, fix)
    return choice.kernel
