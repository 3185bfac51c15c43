from collections.abc import Sequence

from rocketmq_spark.arrow.messages import Messages
from rocketmq_spark.model.message import Buffer

class CompiledMessages(Messages):
    def __init__(self, bodies: Sequence[Buffer], starts: Sequence[int], ends: Sequence[int]) -> None: ...

def crc32(data: Buffer, *, by_table: bool = False) -> int: ...
