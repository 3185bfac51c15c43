"""``rocketmq-spark doctor``: faults between this machine and a cluster, and their fixes.

Each check returns one line with the finding and one with the fix, raises nothing, and changes nothing. A check whose
prerequisite failed is skipped.
"""

from rocketmq_spark.cli.doctor.examine import examine
from rocketmq_spark.cli.doctor.machine import Check

__all__ = ["Check", "examine"]
