"""Builds the compiled modules, where a C compiler is. All other settings are in setup.cfg.

With ``ROCKETMQ_SPARK_KERNEL=0`` they are left out, and the wheel is for any platform.
"""

import os

from setuptools import Extension, setup

# Without debug information the files have a fifth of the size.
EXTENSIONS = [
    Extension(
        f"rocketmq_spark.arrow.{module}",
        [f"rocketmq_spark/arrow/{module}.pyx"],
        depends=[f"rocketmq_spark/arrow/{name}" for name in ("_bytes.h", "_reading.pxi", "_writing.pxi")],
        extra_compile_args=["-O3", "-g0"],
        optional=True,
    )
    for module in ("_records", "_hashes")
]

setup(ext_modules=[] if os.environ.get("ROCKETMQ_SPARK_KERNEL") == "0" else EXTENSIONS)
