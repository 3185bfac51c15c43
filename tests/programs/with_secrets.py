"""Jobs of users with secrets that succeed, and jobs that fail at every stage; all their output is printed.

usage: python with_secrets.py '{"folder": "...", "nameServer": "...", "endpoints": "...", "tlsCaFile": "...",
                                "user": "...", "secret": "...", "wrong": "...", "writable": "...", "forbidden": "..."}'

Prints a line ``JOB name: as expected`` for each job that succeeds, or fails with the expected text. Prints each
exception.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Spark's workers run this interpreter, unless the tests have set another one.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

import rocketmq_spark
from rocketmq_spark import Admin, Message, Producer

given = json.loads(sys.argv[1])
folder = Path(given["folder"])

SERVERS = {"nameServer": given["nameServer"], "useTls": "true", "tlsCaFile": given["tlsCaFile"]}
USER = {"accessKey": given["user"], "secretKey": given["secret"], "securityToken": given["token"]}
WRONG = {**USER, "secretKey": given["wrong"]}

spark = (
    SparkSession.builder.master("local[2]")
    .config("spark.eventLog.enabled", "true")
    .config("spark.eventLog.dir", (folder / "events").as_uri())
    .config("spark.eventLog.compress", "false")
    .config("spark.sql.ui.explainMode", "extended")
    .config("spark.ui.port", "0")
    .getOrCreate()
)
spark.sparkContext.setLogLevel("INFO")
metrics = rocketmq_spark.register(spark)
frame = spark.range(0, 200, 1, 2).selectExpr("concat('row ', id) AS body")


def write(rows: DataFrame = frame, **options: str) -> None:
    every = {**SERVERS, "topic": given["writable"], "deliveryTimeoutMs": "20000", **options}
    rows.write.format("rocketmq").options(**{name: text for name, text in every.items() if text}).save()


def read(**options: str) -> DataFrame:
    every = {**SERVERS, "readTimeoutMs": "20000", **options}
    return spark.read.format("rocketmq").options(**every).load()


def write_and_show_metrics(**options: Any) -> None:
    write(metricsPath=str(folder / "metrics.jsonl"), **options)
    print(metrics, repr(metrics), metrics.to_dict())


def read_and_explain() -> None:
    rows = read(**USER, subscribe=given["readable"])
    rows.explain(True)
    print(rows, rows.count())


def stream(name: str, topic: str, **user: str) -> None:
    source = spark.readStream.format("rocketmq").options(**SERVERS, **USER, subscribe=given["readable"])
    rows = source.option("startingOffsets", "earliest").load().selectExpr("body")
    sink = rows.writeStream.format("rocketmq").options(**SERVERS, **user, topic=topic)
    query = sink.option("checkpointLocation", str(folder / "checkpoints" / name)).trigger(availableNow=True).start()
    try:
        query.awaitTermination(100)
    finally:
        query.explain(True)
        print(query.exception(), query.lastProgress)


def a_worker_dies() -> None:
    def die(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        os._exit(3)

    write(frame.mapInArrow(die, frame.schema), **USER)


def no_row_can_be_stored() -> None:
    write(spark.range(1).selectExpr("'' AS body"), **USER)


def plain_python(**user: str) -> None:
    connection: dict[str, Any] = {
        "name_server": given["nameServer"],
        "use_tls": True,
        "tls_ca_file": given["tlsCaFile"],
        "access_key": user["accessKey"],
        "secret_key": user["secretKey"],
        "security_token": user["securityToken"],
    }
    with Admin(**connection) as admin:
        print(admin, admin.options, admin.route(given["writable"]))
    with Producer("pg-secrets", **connection) as producer:
        print(producer, producer.options, producer.send(Message.of(given["writable"], b"one")))


OVER_GRPC = {"nameServer": "", "endpoints": given["endpoints"]}
REFERENCES: dict[str, Any] = {
    "accessKey": "env:MQ_USER",
    "secretKey": "env:MQ_SECRET",
    "securityToken": "env:MQ_TOKEN",
}

# By name: what the job does, and the words of its error; none of one that succeeds.
JOBS: dict[str, tuple[Callable[[], Any], str]] = {
    "write": (lambda: write_and_show_metrics(**USER), ""),
    "write by variables": (lambda: write(**REFERENCES), ""),
    "write by a file": (lambda: write(**{**USER, "secretKey": f"file:{given['secretFile']}"}), ""),
    "write by a provider": (lambda: write(credentialsProvider="vault:Vault"), ""),
    "write over gRPC": (lambda: write(**OVER_GRPC, **USER), ""),
    "figures that can't be left": (lambda: write(metricsPath=f"{given['secretFile']}/no/such/folder", **USER), ""),
    "read": (read_and_explain, ""),
    "stream": (lambda: stream("good", given["writable"], **USER), ""),
    "plain Python": (lambda: plain_python(**USER), ""),
    "option misspelt": (lambda: write(**USER, secretKeyy=given["secret"]), "did you mean secretKey?"),
    "option malformed": (lambda: write(**{**USER, "secretKey": f"{given['secret']}\n"}), "not shown: it is secret"),
    "option alone": (lambda: write(**{**USER, "accessKey": ""}), "secretKey is given without accessKey"),
    "nobody there": (lambda: write(**{**USER, "nameServer": "127.0.0.1:1"}), "Connection refused"),
    "not trusted": (lambda: write(**USER, tlsCaFile=""), "is not trusted; set tlsCaFile"),
    "wrong key": (lambda: write(**WRONG), "check signature failed"),
    "wrong key over gRPC": (lambda: write(**OVER_GRPC, **WRONG), "check signature failed"),
    "no right": (lambda: write(**USER, topic=given["forbidden"]), "has no permission to access"),
    "no variable": (lambda: write(**{**USER, "secretKey": "env:MQ_NO_SUCH"}), "variable MQ_NO_SUCH is not set"),
    "no provider": (lambda: write(credentialsProvider="vault:Sealed"), "the vault is sealed"),
    "a provider of nonsense": (lambda: write(credentialsProvider="vault:Nonsense"), "it returned a tuple"),
    "a selector": (lambda: write(**USER, queueSelector="vault:Selector"), "no queue is good enough"),
    "an empty row": (no_row_can_be_stored, "InvalidRowError"),
    "a worker dies": (a_worker_dies, "Python worker exited unexpectedly"),
    "read, wrong key": (lambda: read(**WRONG, subscribe=given["readable"]).count(), "check signature failed"),
    "read, no right": (lambda: read(**USER, subscribe=given["forbidden"]).count(), "has no permission to access"),
    "stream, wrong key": (lambda: stream("wrong", given["writable"], **WRONG), "check signature failed"),
    "stream, no right": (lambda: stream("forbidden", given["forbidden"], **USER), "has no permission to access"),
    "plain Python, wrong key": (lambda: plain_python(**WRONG), "check signature failed"),
}

for name, (job, words) in JOBS.items():
    said = ""
    try:
        job()
    except Exception:
        said = traceback.format_exc()
        print(said, file=sys.stderr)
    print(f"JOB {name}: {'as expected' if bool(words) is bool(said) and words in said else 'otherwise'}", flush=True)

# What the web pages show.
address = f"{spark.sparkContext.uiWebUrl}/api/v1/applications/{spark.sparkContext.applicationId}"
for page in ("environment", "jobs", "stages?details=true", "sql?details=true&length=1000"):
    with urllib.request.urlopen(f"{address}/{page}", timeout=60) as answer:
        print(answer.read().decode())
spark.stop()
