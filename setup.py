"""Builds the compiled modules, where a C compiler is, and sdists that are equal for equal trees.

With ``ROCKETMQ_SPARK_KERNEL=0`` the modules are left out, and the wheel is for any platform. With
``ROCKETMQ_SPARK_KERNEL=1`` a build without a C compiler fails. All other settings are in setup.cfg.
"""

from __future__ import annotations

import gzip
import os
import tarfile
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.sdist import sdist

_KERNEL = os.environ.get("ROCKETMQ_SPARK_KERNEL")
_PARTS = {"_records": ("_bytes.h", "_reading.pxi", "_writing.pxi"), "_hashes": ("_bytes.h",)}
# Without debug information the files have a fifth of the size.
EXTENSIONS = [
    Extension(
        f"rocketmq_spark.arrow.{module}",
        [f"rocketmq_spark/arrow/{module}.pyx"],
        depends=[f"rocketmq_spark/arrow/{part}" for part in parts],
        extra_compile_args=["-O3", "-g0"],
        optional=_KERNEL != "1",
    )
    for module, parts in _PARTS.items()
]

# 1980, the first year of a zip archive.
_TIME = int(os.environ.get("SOURCE_DATE_EPOCH", 315_532_800))


class Sdist(sdist):
    """Gives all files one time, one owner and one order."""

    def make_archive(self, base_name: Any, *args: Any, **named: Any) -> str:  # noqa: ARG002
        """Write a tar.gz of the folder `base_dir`."""
        path = f"{base_name}.tar.gz"
        with (
            open(path, "wb") as out,
            gzip.GzipFile("", "wb", fileobj=out, mtime=_TIME) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            for file in sorted(Path(named["base_dir"]).rglob("*")):
                archive.add(file, recursive=False, filter=_plain)
        return path


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mtime = _TIME
    member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
    return member


setup(
    ext_modules=[] if _KERNEL == "0" else EXTENSIONS,
    cmdclass={"sdist": Sdist},
)
