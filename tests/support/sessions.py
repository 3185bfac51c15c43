"""Sessions, contexts and DataFrames without a JVM, as far as the driver's code uses them."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
from pyspark import TaskContext, cloudpickle
from pyspark.sql import Row
from pyspark.sql.types import StructType

_TYPES = {"string": pa.string(), "int": pa.int32(), "boolean": pa.bool_(), "binary": pa.binary()}


class Context:
    """A context of two cores in this process, whose workers run `python`."""

    defaultParallelism = 2  # noqa: N815 - Spark's name
    pythonExec = sys.executable  # noqa: N815 - Spark's name

    def addJobTag(self, tag: str) -> None:  # noqa: N802 - Spark's name
        """Tag nothing."""

    removeJobTag = addJobTag  # noqa: N815 - Spark's name

    def __init__(self) -> None:
        self.master = "local[2]"
        self.environment: dict[str, str] = {}
        self._python_includes: list[str] = []
        self.properties: dict[str, str] = {}
        self.accumulators: list[Any] = []

    def getLocalProperty(self, name: str) -> str | None:  # noqa: N802 - Spark's name
        return self.properties.get(name)

    def accumulator(self, value: Any, param: Any) -> Any:
        self.accumulators.append((value, param))
        return self.accumulators[-1]


class Triggers:
    """A JVM that makes triggers: every name of it is itself, and every call returns None."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *_: Any) -> None:
        return None


class Session:
    """A classic session; `dataSource` is itself, and keeps what is registered."""

    def __init__(self, **conf: str) -> None:
        self.conf: Mapping[str, str] = {name.replace("_", "."): text for name, text in conf.items()}
        self.sparkContext = Context()
        self.dataSource = self
        self.registered: list[Any] = []
        self.is_active = False
        java = SimpleNamespace(setActiveSession=self._activate)
        packages = SimpleNamespace(
            apache=SimpleNamespace(spark=SimpleNamespace(sql=SimpleNamespace(SparkSession=java)))
        )
        self._jsparkSession = object()
        self._jvm = SimpleNamespace(org=packages)
        self._sc = SimpleNamespace(_jvm=Triggers())

    def register(self, source: Any) -> None:
        self.registered.append(source)

    def _activate(self, session: Any) -> None:
        self.is_active = session is self._jsparkSession


class ConnectSession(Session):
    """A session of Spark Connect, which has no context."""

    # By its module the package knows such a session.
    __module__ = "pyspark.sql.connect.session"

    def __init__(self, **conf: str) -> None:
        super().__init__(**conf)
        del self.sparkContext
        self.session_id = "session-1"


class Frame:
    """A DataFrame whose partitions are lists of record batches; `mapInArrow` runs tasks as Spark does."""

    def __init__(self, session: Session, schema: StructType, partitions: Sequence[Iterable[pa.RecordBatch]]) -> None:
        self.sparkSession = session
        self.schema = schema
        self._partitions = partitions
        self._task: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]] | None = None
        self._expected = pa.schema([])

    def isEmpty(self) -> bool:  # noqa: N802 - Spark's name
        return not any(batch.num_rows for partition in self._partitions for batch in partition)

    def mapInArrow(self, function: Any, schema: str) -> Frame:  # noqa: N802 - Spark's name
        mapped = Frame(self.sparkSession, self.schema, self._partitions)
        mapped._task = cloudpickle.loads(cloudpickle.dumps(function))
        columns = dict(re.fullmatch(r"(\w+) (\w+)", column, re.ASCII).groups() for column in schema.split(", "))  # type: ignore[union-attr, misc]
        mapped._expected = pa.schema([(name, _TYPES[kind]) for name, kind in columns.items()])
        return mapped

    def collect(self) -> list[Row]:
        return list(self._rows())

    def _rows(self) -> Iterator[Row]:
        assert self._task is not None
        for partition_id, partition in enumerate(self._partitions):
            with task_of(partition_id):
                batches = list(self._task(iter(partition)))
            for batch in batches:
                # Spark rejects other columns than the declared ones.
                assert batch.schema == self._expected
                for values in batch.to_pylist():
                    # Classic Spark returns a binary value as a bytearray.
                    yield Row(**{k: bytearray(v) if isinstance(v, bytes) else v for k, v in values.items()})


@contextlib.contextmanager
def task_of(partition_id: int, **local_properties: str) -> Iterator[None]:
    """Run the block as the task of a partition, with the context that Spark's worker would set."""
    context = TaskContext._getOrCreate()
    context._partitionId = partition_id
    context._localProperties = local_properties
    try:
        yield
    finally:
        TaskContext._setTaskContext(None)


class JavaWriter:
    """The JVM's `DataFrameWriter` and `DataStreamWriter`; `ended` has the calls of `save` and `start`."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._source, self._mode = "parquet", "ErrorIfExists"
        self.ended: list[dict[str, Any]] = []

    def format(self, source: str) -> JavaWriter:
        self._source = source
        return self

    def mode(self, mode: str) -> JavaWriter:
        self._mode = mode
        return self

    def option(self, name: str, value: Any) -> JavaWriter:
        return self

    def trigger(self, trigger: Any) -> JavaWriter:
        return self

    def source(self) -> str:
        return self._source

    def curmode(self) -> Any:
        return SimpleNamespace(name=lambda: self._mode)

    def save(self, *path: str) -> None:
        self._end(path)

    def start(self, *path: str) -> Any:
        self._end(path)
        return SimpleNamespace(id=lambda: "query-1")

    def _end(self, path: tuple[str, ...]) -> None:
        call = {"format": self._source, "mode": self._mode, "path": path, "active": self._session.is_active}
        self.ended.append(call)
