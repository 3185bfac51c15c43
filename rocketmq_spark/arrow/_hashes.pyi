from collections.abc import Sequence

from rocketmq_spark.arrow.gather import Workspace
from rocketmq_spark.arrow.numpy_hashes import Hashes, Strings

def hash_sums(columns: Sequence[Strings], workspace: Workspace, seeds: Sequence[int]) -> Hashes: ...
def nh_sums(columns: Sequence[Strings], workspace: Workspace, keys: Hashes) -> Hashes: ...
