"""``rocketmq-spark doctor``: faults between this machine and a cluster, and their fixes.

Each check returns one line with the finding and one with the fix, never raises, and changes nothing. A check whose
prerequisite is missing is left out.
"""

from rocketmq_spark.cli.doctor.examine import examine
from rocketmq_spark.cli.doctor.machine import Check

__all__ = ["Check", "examine"]
