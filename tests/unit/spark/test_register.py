"""`register` without a JVM: what it makes known, and what it changes in Spark's writers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrameWriter
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from rocketmq_spark.errors import MetricsUnavailableError, OptionError
from rocketmq_spark.spark.register import register, unregister
from rocketmq_spark.spark.spark_api import SessionFacts
from tests.support.sessions import ConnectSession, JavaWriter, Session


@pytest.fixture(autouse=True)
def no_hooks_stay() -> Iterator[None]:
    unregister()
    yield
    unregister()


def registered(session: Session) -> Any:
    return register(session)  # type: ignore[arg-type]


def facts_of(session: Session) -> SessionFacts:
    (source,) = session.registered
    facts: SessionFacts = source._session
    return facts


class Written:
    """A DataFrame of a classic session; `java` records what reaches the JVM."""

    def __init__(self, session: Session | None = None) -> None:
        self.sparkSession = session or Session()
        self.java = JavaWriter(self.sparkSession)
        self._jdf = SimpleNamespace(write=lambda: self.java, writeStream=lambda: self.java)

    @property
    def write(self) -> DataFrameWriter:
        return DataFrameWriter(self)  # type: ignore[arg-type]

    @property
    def write_stream(self) -> DataStreamWriter:
        return DataStreamWriter(self)  # type: ignore[arg-type]


def test_registered_source_knows_its_sessions_accumulator_and_settings() -> None:
    session = Session(spark_speculation="True")
    metrics = registered(session)
    (accumulator,) = session.sparkContext.accumulators
    assert accumulator[0] is metrics
    assert facts_of(session) == SessionFacts(accumulator, speculation=True, parallelism=2)


def test_session_of_spark_connect_has_no_metrics() -> None:
    session = ConnectSession()
    metrics = registered(session)
    assert facts_of(session) == SessionFacts(metrics_id=facts_of(session).metrics_id)
    with pytest.raises(MetricsUnavailableError, match="Spark Connect has no accumulators"):
        metrics.show()


def test_unregister_restores_the_methods_that_register_replaced_once() -> None:
    methods = ((DataFrameWriter, "save"), (DataStreamWriter, "start"), (StreamingQuery, "awaitTermination"))

    def present() -> list[Any]:
        return [getattr(owner, name) for owner, name in methods]

    before = present()
    registered(Session())
    once = present()
    assert all(new is not old for new, old in zip(once, before, strict=True))
    registered(Session())
    assert present() == once
    unregister()
    assert present() == before


@pytest.mark.parametrize("mode", [None, "append", "Error", "errorifexists", "default"])
def test_save_appends_to_a_topic_in_the_active_session(mode: str | None) -> None:
    frame = Written()
    registered(frame.sparkSession)
    frame.write.format("RocketMQ").mode(mode).save("orders")
    assert frame.java.ended == [{"format": "RocketMQ", "mode": "append", "path": ("orders",), "active": True}]


def test_format_given_to_save_counts() -> None:
    frame = Written()
    registered(frame.sparkSession)
    frame.write.save(format="rocketmq")
    assert [(call["format"], call["mode"]) for call in frame.java.ended] == [("rocketmq", "append")]


def test_save_in_another_format_is_unchanged() -> None:
    frame = Written()
    registered(frame.sparkSession)
    frame.write.mode("overwrite").save("/data")
    frame.write.format("rocketmq").save("/data", format="json", mode="ignore")
    assert frame.java.ended == [
        {"format": "parquet", "mode": "overwrite", "path": ("/data",), "active": False},
        {"format": "json", "mode": "ignore", "path": ("/data",), "active": False},
    ]


@pytest.mark.parametrize("given", [{"mode": "Overwrite"}, {"mode": "ignore"}])
def test_other_modes_are_rejected_before_spark_writes(given: dict[str, str]) -> None:
    frame = Written()
    registered(frame.sparkSession)
    for write in (
        lambda: frame.write.format("rocketmq").save(**given),
        lambda: frame.write.format("rocketmq").mode(given["mode"]).save(),
    ):
        with pytest.raises(OptionError, match=r'a RocketMQ topic can only be appended to; .* use \.mode\("append"\)'):
            write()
    assert frame.java.ended == []


def test_save_of_spark_connect_appends() -> None:
    from pyspark.sql.connect.plan import Range
    from pyspark.sql.connect.readwriter import DataFrameWriter as ConnectWriter

    class Client:
        """Keeps commands instead of sending them."""

        def __init__(self) -> None:
            self.commands: list[Any] = []

        def execute_command(self, command: Any, *_: Any) -> tuple[None, None, None]:
            self.commands.append(command.write_operation)
            return None, None, None

    session: Any = ConnectSession()
    session.client = Client()
    registered(session)
    rows = Range(0, 1, 1)
    ConnectWriter(rows, session).format("rocketmq").save()
    with pytest.raises(OptionError, match="can only be appended to"):
        ConnectWriter(rows, session).format("rocketmq").mode("overwrite").save()
    (command,) = session.client.commands
    assert (command.source, command.mode) == ("rocketmq", command.SAVE_MODE_APPEND)


@pytest.mark.parametrize("in_start", [False, True])
def test_continuous_trigger_is_rejected_for_a_topic(in_start: bool) -> None:
    frame = Written()
    registered(frame.sparkSession)
    writer = frame.write_stream.trigger(continuous="1 second")
    with pytest.raises(OptionError, match=r'trigger\(continuous="1 second"\): .* all rows would be lost'):
        writer.start(format="rocketmq") if in_start else writer.format("rocketmq").start()
    assert frame.java.ended == []
    writer.start(format="console")
    writer.trigger(processingTime="1 second").format("rocketmq").start()
    assert [(call["format"], call["active"]) for call in frame.java.ended] == [("console", True), ("rocketmq", True)]


OF_A_TASK = "rocketmq_spark.errors.DeliveryError: broker-0 does not answer"


@pytest.mark.parametrize("method", ["awaitTermination", "processAllAvailable"])
def test_cause_of_a_failed_query_is_logged_in_one_line(method: str, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise PySparkException(f"Job aborted\n{OF_A_TASK}\n\tat org.apache.spark")

    java = SimpleNamespace(id=lambda: SimpleNamespace(toString=lambda: "query-1"))
    setattr(java, method, fail)
    registered(Session())
    with pytest.raises(PySparkException, match="Job aborted"):
        getattr(StreamingQuery(java), method)()
    assert caplog.messages == ["query query-1 failed: DeliveryError: broker-0 does not answer"]


def test_cause_of_a_failed_save_is_logged_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(JavaWriter):
        def save(self, *path: str) -> None:
            raise PySparkException(f"Job aborted\n{OF_A_TASK}\n")

    frame = Written()
    frame.java = Failing(frame.sparkSession)
    registered(frame.sparkSession)
    with pytest.raises(PySparkException, match="Job aborted"):
        frame.write.format("rocketmq").save()
    assert caplog.messages == ["the write failed: DeliveryError: broker-0 does not answer"]


# In a new folder, because an interpreter also imports from its current folder, which is that of the tests.
WITHOUT_PACKAGES = f'#!/bin/sh\ncd /; exec {sys.executable} -S -E "$@"\n'


# The question is what follows -c.
OTHER_RELEASE = f"""#!/bin/sh
exec {sys.executable} -c 'import sys; sys.version_info = (2, 7); exec(sys.argv[1])' "$2"
"""


@pytest.fixture
def session_with(tmp_path: Path) -> Any:
    """Return a function that makes a session, whose workers run a script."""

    def make(script: str | None) -> Session:
        python = tmp_path / "python"
        if script is not None:
            python.write_text(script)
            python.chmod(0o755)
        session = Session()
        session.sparkContext.pythonExec = str(python)
        return session

    return make


@pytest.mark.parametrize(
    ("script", "fault"),
    [
        (WITHOUT_PACKAGES, "which Spark's workers run, does not find rocketmq_spark"),
        (OTHER_RELEASE, f"which Spark's workers run, is not Python 3.{sys.version_info[1]}, as the driver is"),
        (None, "which Spark's workers should run, does not exist"),
    ],
)
def test_an_interpreter_of_local_workers_that_can_not_work_is_named(
    script: str | None, fault: str, session_with: Any, caplog: pytest.LogCaptureFixture
) -> None:
    registered(Session())
    assert caplog.messages == []
    session = session_with(script)
    registered(session)
    (said,) = caplog.messages
    assert said.startswith(f"{session.sparkContext.pythonExec}, {fault}: ")
    assert said.endswith(f"set PYSPARK_PYTHON={sys.executable} before the session is made")


@pytest.mark.parametrize("lines", ["exit 1", f'exec {sys.executable} "$@"'])
def test_failing_interpreter_check_logs_no_warning(
    lines: str, session_with: Any, caplog: pytest.LogCaptureFixture
) -> None:
    registered(session_with(f"#!/bin/sh\n{lines}\n"))
    assert caplog.messages == []


def test_interpreter_that_cannot_start_logs_no_warning(session_with: Any, caplog: pytest.LogCaptureFixture) -> None:
    registered(session_with("#!/no/such/interpreter\n"))
    assert caplog.messages == []


def test_package_shipped_with_the_job_is_not_reported_missing(
    session_with: Any, caplog: pytest.LogCaptureFixture
) -> None:
    session = session_with(WITHOUT_PACKAGES)
    session.sparkContext._python_includes = ["rocketmq_spark.zip"]
    registered(session)
    assert caplog.messages == []


@pytest.mark.parametrize(("master", "path"), [("spark://host:7077", None), ("local[2]", "/packages")])
def test_interpreter_of_a_cluster_or_with_its_own_path_is_not_checked(
    master: str, path: str | None, session_with: Any, caplog: pytest.LogCaptureFixture
) -> None:
    session = session_with(None)
    session.sparkContext.master = master
    if path is not None:
        session.sparkContext.environment["PYTHONPATH"] = path
    registered(session)
    assert caplog.messages == []
