"""``rocketmq-spark doctor``: faults between this machine and a cluster, and their fixes.

A check raises and changes nothing. It is skipped if its prerequisite failed.
"""

from rocketmq_spark.cli.doctor.examine import examine
from rocketmq_spark.cli.doctor.machine import Check

__all__ = ["Check", "examine"]
