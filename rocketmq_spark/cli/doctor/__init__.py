"""``rocketmq-spark doctor`` finds faults of this machine, of a cluster, and of their connection, and advises fixes.

A check returns its finding, raises no error, and changes nothing. It is skipped if its prerequisite failed.
"""

from rocketmq_spark.cli.doctor.examine import examine
from rocketmq_spark.cli.doctor.machine import Check

__all__ = ["Check", "examine"]
