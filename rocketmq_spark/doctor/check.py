"""One finding of the doctor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

OK: Final = "ok"
WARNING: Final = "warning"
FAILED: Final = "failed"


@dataclass(frozen=True, slots=True)
class Check:
    """What was looked at, and how it is.

    Parameters
    ----------
    check : str
    state : str
        ``ok``, ``warning`` or ``failed``.
    found : str
        One line.
    mend : str, default ""
        What to do about it, one line; empty if nothing has to be.
    """

    check: str
    state: str
    found: str
    mend: str = ""
