"""Temporary users: credentials that change while a query runs."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from rocketmq_spark import Admin
from rocketmq_spark.cluster.probe import user_requests
from rocketmq_spark.model.credentials import Credentials
from rocketmq_spark.protocol.remoting.codes import RequestCode, ResponseCode
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from tests.support.cluster import SharedCluster
from tests.support.processes import wait_for
from tests.support.reading import read_topic
from tests.support.streams import start

pytestmark = [pytest.mark.spark, pytest.mark.integration, pytest.mark.usefixtures("metrics")]

LIFETIME = 2.0
FIXED = """
from rocketmq_spark import Credentials


class Fixed:
    def credentials(self):
        return Credentials({key!r}, {secret!r})
"""
PROVIDER = """
import json
import pathlib
import time

from rocketmq_spark import Credentials


class Renewed:
    def credentials(self):
        key, secret = json.loads(pathlib.Path({file!r}).read_text())
        return Credentials(key, secret, expires_at=time.time() + {lifetime})
"""


class Bodies(list[str]):
    """The rows of a streaming read."""

    def keep(self, batch: DataFrame, _: int) -> None:
        self.extend(row.body for row in batch.selectExpr("string(body) as body").collect())


def tell(cluster: SharedCluster, code: RequestCode, fields: dict[str, str], body: bytes = b"") -> None:
    with RemotingTransport([cluster.name_server], **cluster.transport_settings) as admin:
        for broker in cluster.brokers:
            answer = admin.client.invoke(broker.address, code, fields, body, 20.0)
            assert answer.code == ResponseCode.SUCCESS, answer


def new_user(cluster: SharedCluster, groups: Sequence[str] = ()) -> Credentials:
    topics = ["allowed-*"]
    user = Credentials(f"temporary-{uuid.uuid4().hex[:8]}", uuid.uuid4().hex)
    for code, fields, body in user_requests(user.access_key, user.secret_key, topics, topics, groups):
        tell(cluster, code, fields, body)
    return user


def remove_user(cluster: SharedCluster, user: Credentials) -> None:
    tell(cluster, RequestCode.AUTH_DELETE_USER, {"username": user.access_key})


def batches(query: StreamingQuery) -> int:
    return sum(progress.numInputRows > 0 for progress in query.recentProgress)


def test_streaming_write_continues_after_its_user_was_replaced(
    spark: SparkSession, secured: SharedCluster, tmp_path: Path
) -> None:
    topic = f"allowed-{uuid.uuid4().hex[:8]}"
    with Admin(secured.name_server, **secured.admin_settings) as admin:
        admin.create_topic(topic, 2)
    first, second = new_user(secured), new_user(secured)
    file, module = tmp_path / "user.json", tmp_path / "vault_of_a_streams_test.py"
    module.write_text(PROVIDER.format(file=str(file), lifetime=LIFETIME))
    spark.sparkContext.addPyFile(str(module))

    def becomes(user: Credentials) -> None:
        (tmp_path / "new.json").write_text(json.dumps([user.access_key, user.secret_key]))
        (tmp_path / "new.json").replace(file)

    becomes(first)
    options = {name: text for name, text in secured.options.items() if name not in ("accessKey", "secretKey")}
    query = start(spark, topic, tmp_path, **options, credentialsProvider=f"{module.stem}:Renewed")
    try:
        wait_for(lambda: batches(query) >= 2)
        becomes(second)
        # The source uses fetched credentials for this time at most.
        time.sleep(LIFETIME + 1)
        remove_user(secured, first)
        went_on = batches(query) + 3
        wait_for(lambda: batches(query) >= went_on or not query.isActive)
        assert query.exception() is None
        remove_user(secured, second)
        with pytest.raises(StreamingQueryException, match=rf"User:{second.access_key} is not found"):
            query.awaitTermination(120)
    finally:
        query.stop()
    found = read_topic(secured.name_server, topic, 1, credentials=secured.admin, tls=secured.tls)
    bodies = {int(message.body) for message in found}
    # The last micro-batch was aborted: one of its two tasks may have stored its rows.
    committed = sum(progress.numInputRows for progress in query.recentProgress)
    assert bodies >= set(range(committed)), "and no row is missing"


def test_streaming_read_uses_a_credentials_provider_shipped_with_the_job(
    spark: SparkSession, secured: SharedCluster, tmp_path: Path
) -> None:
    topic, admin = f"allowed-{uuid.uuid4().hex[:8]}", secured.admin
    assert admin is not None
    with Admin(secured.name_server, **secured.admin_settings) as client:
        client.create_topic(topic, 2)
    module = tmp_path / "vault_of_a_reads_test.py"
    module.write_text(FIXED.format(key=admin.access_key, secret=admin.secret_key))
    spark.sparkContext.addPyFile(str(module))
    options = {name: text for name, text in secured.options.items() if name not in ("accessKey", "secretKey")}
    options |= {"topic": topic, "credentialsProvider": f"{module.stem}:Fixed"}
    rows = spark.range(10).selectExpr("cast(id as string) as body")
    rows.write.format("rocketmq").options(**options).mode("append").save()
    frame = spark.readStream.format("rocketmq").options(**options, startingOffsets="earliest").load()
    read = Bodies()
    writer = frame.writeStream.foreachBatch(read.keep).option("checkpointLocation", str(tmp_path / "checkpoint"))
    query = writer.trigger(availableNow=True).start()
    try:
        assert query.awaitTermination(120)
    finally:
        query.stop()
    assert sorted(read) == sorted(map(str, range(10)))


def test_streaming_read_continues_after_its_user_was_replaced(
    spark: SparkSession, secured: SharedCluster, tmp_path: Path
) -> None:
    topic, name = f"allowed-{uuid.uuid4().hex[:8]}", "file_of_a_reads_test"
    with Admin(secured.name_server, **secured.admin_settings) as client:
        client.create_topic(topic, 2)
    groups = ["spark-rocketmq-source"]
    first, second = new_user(secured, groups), new_user(secured, groups)
    file = tmp_path / "user.json"
    module = tmp_path / f"{name}.py"
    module.write_text(PROVIDER.format(file=str(file), lifetime=3600))
    spark.sparkContext.addPyFile(str(module))
    options = {**secured.options, "topic": topic}
    others = {text: value for text, value in options.items() if text not in ("accessKey", "secretKey")}

    def write(begin: int, end: int) -> None:
        rows = spark.range(begin, end).selectExpr("cast(id as string) as body")
        rows.write.format("rocketmq").options(**options).mode("append").save()

    read = Bodies()
    file.write_text(json.dumps([first.access_key, first.secret_key]))
    source = spark.readStream.format("rocketmq").options(**others, credentialsProvider=f"{name}:Renewed")
    writer = source.option("startingOffsets", "earliest").load().writeStream.foreachBatch(read.keep)
    query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    try:
        write(0, 10)
        wait_for(lambda: len(read) == 10 or not query.isActive)
        file.write_text(json.dumps([second.access_key, second.secret_key]))
        remove_user(secured, first)
        write(10, 20)
        wait_for(lambda: len(read) == 20 or not query.isActive)
        assert query.exception() is None
    finally:
        query.stop()
    assert sorted(map(int, read)) == list(range(20))
