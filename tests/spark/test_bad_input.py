"""Inputs that a write rejects, on the driver where possible; a sample of the rejections in the unit tests."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from rocketmq_spark.errors import OptionError
from rocketmq_spark.spark.register import unregister
from rocketmq_spark.spark.report import Metrics

pytestmark = [pytest.mark.spark, pytest.mark.integration]

BODY = [("b",)]


@pytest.fixture
def silent_server() -> Iterator[str]:
    """A port that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"topik": "t"}, r"topik.*topic"),
        ({"accessKey": "k", "secretKey": "hush-hush\n"}, r"secretKey has a value \(not shown"),
        ({"useTls": "true", "tlsCaFile": "nowhere.pem"}, r"tlsCaFile: reading 'nowhere.pem'.*PEM"),
        ({"nameServer": "127.0.0.1:1", "sendMsgTimeout": "500"}, r"127\.0\.0\.1:1"),
    ],
)
def test_an_option_is_refused_before_any_task(
    spark: SparkSession, save: Callable[..., None], options: dict[str, str], text: str
) -> None:
    with pytest.raises(PySparkException, match=text) as raised:
        save(spark.createDataFrame(BODY, "body string"), **options)
    assert "hush-hush" not in str(raised.value)


def test_a_missing_name_server_is_named(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NAMESRV_ADDR", raising=False)
    with pytest.raises(PySparkException, match="nameServer"):
        spark.createDataFrame(BODY, "body string").write.format("rocketmq").mode("append").save("t")


def test_a_host_that_answers_nothing_fails_within_its_deadline(
    spark: SparkSession, save: Callable[..., None], silent_server: str
) -> None:
    with pytest.raises(PySparkException, match=silent_server):
        save(spark.createDataFrame(BODY, "body string"), nameServer=silent_server, sendMsgTimeout="700")


@pytest.mark.parametrize(
    ("schema", "row", "text"),
    [
        ("payload string", ("b",), r"unknown column payload.*to_json\(struct\(...\)\) AS body"),
        ("body int", (1,), r"body.*int"),
    ],
)
def test_columns_are_refused_before_any_task(
    spark: SparkSession, save: Callable[..., None], schema: str, row: tuple[Any, ...], text: str
) -> None:
    with pytest.raises(PySparkException, match=text):
        save(spark.createDataFrame([row], schema))


@pytest.mark.parametrize(
    ("column", "text"),
    [
        ("INTERVAL '1' YEAR AS delayMs", "column delayMs is interval year.*CAST.delayMs AS STRING"),
        ("map() AS properties", "column properties is map<void,void>.*CAST.properties AS MAP<STRING,STRING>"),
    ],
)
def test_a_column_that_spark_cannot_pass_to_python_is_named(
    spark: SparkSession, save: Callable[..., None], column: str, text: str
) -> None:
    with pytest.raises(PySparkException, match=text):
        save(spark.sql(f"SELECT 'b' AS body, {column}"))


def test_a_frame_without_topic_is_refused(spark: SparkSession, cluster: Any) -> None:
    writer = spark.createDataFrame(BODY, "body string").write.format("rocketmq").mode("append")
    with pytest.raises(PySparkException, match="topic"):
        writer.option("nameServer", cluster.name_server).save()


@pytest.mark.parametrize(
    ("schema", "row", "text"),
    [
        ("body string", (None,), r"partition \d+, row 2 .*null"),
        ("body string, keys string, properties map<string,string>", ("b", "key-7", {"KEYS": "x"}), r"key-7.*KEYS"),
    ],
)
def test_an_invalid_row_fails_with_its_place_and_the_rule(
    spark: SparkSession, cluster: Any, topic: str, schema: str, row: tuple[Any, ...], text: str
) -> None:
    good = ("ok", *[None] * (len(row) - 1))
    frame = spark.createDataFrame([good, good, row], schema).coalesce(1)
    writer = frame.write.format("rocketmq").mode("append").option("nameServer", cluster.name_server)
    with pytest.raises(PySparkException, match=text):
        writer.option("topic", topic).save()


@pytest.mark.parametrize("mode", ["overwrite", "ignore"])
def test_unsupported_save_modes_are_rejected_however_they_are_given(
    spark: SparkSession, cluster: Any, topic: str, metrics: Metrics, mode: str
) -> None:
    frame = spark.createDataFrame(BODY, "body string")
    options = {"nameServer": cluster.name_server, "topic": topic}
    with pytest.raises(OptionError, match=f"{mode}.*append"):
        frame.write.format("rocketmq").mode(mode).options(**options).save()
    with pytest.raises(OptionError, match=f"{mode}.*append"):
        frame.write.mode(mode).format("rocketmq").options(**options).save()
    with pytest.raises(OptionError, match=f"{mode}.*append"):
        frame.write.options(**options).save(format="rocketmq", mode=mode)


@pytest.mark.parametrize("mode", ["overwrite", "ignore"])
def test_other_modes_are_refused_without_the_hook(
    spark: SparkSession, cluster: Any, topic: str, metrics: Metrics, mode: str
) -> None:
    unregister()
    writer = spark.createDataFrame(BODY, "body string").write.format("rocketmq").mode(mode)
    with pytest.raises(PySparkException, match=r"append|Append"):
        writer.option("nameServer", cluster.name_server).option("topic", topic).save()


def test_save_modes_of_other_sources_are_unchanged(spark: SparkSession, metrics: Metrics, tmp_path: Any) -> None:
    frame = spark.createDataFrame(BODY, "body string")
    frame.write.parquet(str(tmp_path / "out"))
    with pytest.raises(PySparkException, match="PATH_ALREADY_EXISTS"):
        frame.write.parquet(str(tmp_path / "out"))
    with pytest.raises(PySparkException, match="PATH_ALREADY_EXISTS"):
        frame.write.format("parquet").save(str(tmp_path / "out"))
