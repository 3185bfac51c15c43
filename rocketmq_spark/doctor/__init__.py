"""What is wrong between this machine and a cluster, and how to mend it: ``rocketmq-spark doctor``.

Rule 1: each check says in one line what was found, and in one how to mend it; a check never raises.
Rule 2: nothing is written to any topic, and nothing is changed.
Rule 3: what a check needs and has not is no failure of its own: the one before it has said so.
"""

from rocketmq_spark.doctor.check import Check
from rocketmq_spark.doctor.examine import examine

__all__ = ["Check", "examine"]
