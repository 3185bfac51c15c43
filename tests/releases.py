"""The release of PySpark that the tests run with: older ones have less."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any, Final

import pytest

PYSPARK: Final = tuple(map(int, version("pyspark").split(".")[:2]))
NEEDS_LIMITS: Final = pytest.mark.skipif(PYSPARK < (4, 2), reason="PySpark 4.2 and newer limit micro-batches")


def at_most(rows: int) -> dict[str, Any]:
    """Return what limits a micro-batch, where PySpark can."""
    return {"maxOffsetsPerTrigger": rows} if PYSPARK >= (4, 2) else {}
