"""The values of the option ``delivery``: how often a row of a write may be stored.

This table imports nothing, so that each layer may read the names. `rocketmq_spark.deliveries.base` has the interface.
A process imports only the delivery that its write uses.
"""

from __future__ import annotations

import importlib
from typing import Any, Final, NamedTuple


class LazyDelivery(NamedTuple):
    """Where a delivery is, and what docs/options.md says about it."""

    place: str  # Module in this folder, and class
    summary: str

    def load(self) -> Any:
        """Return the class of the delivery."""
        module, _, name = self.place.partition(":")
        return getattr(importlib.import_module(f"{__name__}.{module}"), name)


DELIVERIES: Final = {
    "atLeastOnce": LazyDelivery("at_least_once:AtLeastOnce", "a retry may store a row twice"),
    "effectivelyOnce": LazyDelivery(
        "effectively_once.delivery:EffectivelyOnce",
        "after a fault, tasks read which rows are stored, and send only the others",
    ),
    "exactlyOnce": LazyDelivery(
        "exactly_once.delivery:ExactlyOnce",
        "rows become visible when the driver commits the write or the micro-batch",
    ),
}
"""By name. The first one is the default."""
