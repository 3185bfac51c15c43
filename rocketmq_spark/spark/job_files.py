"""The files that a job brings along (``--py-files``, ``addPyFile``), found where Spark plans a streaming read.

Rule 1: Spark tells that process of a folder which nobody fills; the files are in the folder above (tried on 4.0, 4.3).
Rule 2: only what is not there is replaced, by what is: a Spark that mends it is left alone.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Final

_NEVER_FILLED: Final = f"{os.sep}streaming_job"


def find_job_files() -> None:
    """Have this process import the modules that the job brought along."""
    for place, entry in enumerate(sys.path):
        folder, found, archive = entry.rpartition(_NEVER_FILLED)
        if found and not os.path.exists(entry) and os.path.exists(folder + archive):
            sys.path[place] = folder + archive
            importlib.invalidate_caches()
