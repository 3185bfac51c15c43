"""A program of a user, which `make release-check` type-checks against the wheel, and runs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pyarrow as pa

import rocketmq_spark
from rocketmq_spark import Admin, Message, MQClientException, Producer, SendResult, SendStatus, aio
from rocketmq_spark.testing import FakeCluster


def send(producer: Producer, bodies: Iterator[bytes]) -> list[SendResult]:
    return [producer.send(Message.of("orders", body, keys=["k"], tags="new")) for body in bodies]


def refused(producer: Producer) -> int:
    try:
        producer.send(Message("orders", b""))
    except MQClientException as exc:
        return exc.response_code
    return 0


async def send_many(name_server: str, bodies: list[bytes]) -> int:
    async with aio.Producer("downstream-aio", name_server=name_server) as producer:
        results = await asyncio.gather(*[producer.send(Message.of("orders", body)) for body in bodies])
        return sum(result.status is SendStatus.SEND_OK for result in results)


def read(name_server: str) -> pa.Table:
    reader: pa.RecordBatchReader = rocketmq_spark.read_arrow("orders", nameServer=name_server, columns=["body"])
    return reader.read_all()


def main() -> None:
    with FakeCluster(brokers=2, topics={"orders": 4}) as cluster:
        with Producer("downstream", name_server=cluster.name_server) as producer:
            results = send(producer, iter([b"one", b"two"]))
            summary = producer.send_arrow(pa.table({"body": [b"three"]}), "orders")
            rows: int = sum(broker["rows"] for broker in summary.to_dict().values())
            code = refused(producer)
        stored = asyncio.run(send_many(cluster.name_server, [b"four", b"five"]))
        with Admin(cluster.name_server) as admin:
            messages = sum(queue.messages for queue in admin.offsets("orders"))
        print(len(results), rows, code, stored, messages, read(cluster.name_server).num_rows)


if __name__ == "__main__":
    main()
