"""What only the producer for asyncio does: shared requests, cancellation, pending bytes, and its event loop."""

from __future__ import annotations

import asyncio
import itertools
import pickle
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from rocketmq_spark import aio
from rocketmq_spark.errors import MQClientException, OptionError, RemotingTooMuchRequestException
from rocketmq_spark.model.message import EncodedBatch, Message, MessageQueue
from rocketmq_spark.model.send_result import SendResult
from rocketmq_spark.producer.service import ServiceState
from rocketmq_spark.protocol.remoting.codes import ResponseCode
from rocketmq_spark.protocol.remoting.records import messages_in
from rocketmq_spark.routing.selectors import SelectMessageQueueByHash
from rocketmq_spark.testing import Reply
from tests.support.processes import PATIENCE
from tests.support.scripted import ManualClock, ScriptedTransport, route

_numbers = itertools.count()


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(main(), PATIENCE)

    asyncio.run(limited())


async def cancelled(send: Callable[[], Awaitable[object]]) -> str:
    """Return the text of a cancellation. With Python 3.10, the awaiter of a cancelled task gets an error without it."""
    with pytest.raises(asyncio.CancelledError) as raised:
        await send()
    return str(raised.value)


@pytest.fixture
def held() -> Iterator[ScriptedTransport]:
    """Brokers that reply when a test advances the clock by a millisecond."""
    with ScriptedTransport({"T": route({"a": 2, "b": 2})}, clock=ManualClock(), threaded=True) as scripted:
        scripted.always = dict.fromkeys("ab", Reply(delay=0.001))
        yield scripted


@asynccontextmanager
async def started(transport: ScriptedTransport, **properties: Any) -> AsyncIterator[aio.Producer]:
    settings = {"transport": transport, "name_server": "ns:9876", "instance_name": f"aio-{next(_numbers)}"}
    async with aio.Producer("pg", **{**settings, **properties}) as producer:
        yield producer


def message(number: int, **properties: Any) -> Message:
    return Message.of("T", b"%d" % number, **properties)


def bodies(batch: EncodedBatch) -> list[bytes]:
    return [one.body for one in messages_in(batch)]


def sent(transport: ScriptedTransport) -> list[list[bytes]]:
    """Return the bodies of each request."""
    return [bodies(request.batch) for request in transport.requests]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


async def in_flight(transport: ScriptedTransport, requests: int) -> None:
    await until(lambda: transport.in_flight == requests)


def test_messages_that_are_sent_at_the_same_time_share_a_request(transport: ScriptedTransport) -> None:
    async def main() -> None:
        async with started(transport) as producer:
            results = await asyncio.gather(*[producer.send(message(number)) for number in range(5)])
        assert sent(transport) == [[b"0", b"1", b"2", b"3", b"4"]]
        (stored,) = [request.batch for request in transport.requests]
        assert [result.msg_id for result in results] == [one.unique_id for one in messages_in(stored)]
        assert [result.queue_offset for result in results] == [0, 1, 2, 3, 4]
        assert len({result.offset_msg_id for result in results}) == 5

    run(main)


def test_the_result_of_a_shared_request_is_a_send_result(transport: ScriptedTransport) -> None:
    async def main() -> None:
        async with started(transport) as producer:
            _, result = await asyncio.gather(producer.send(message(0)), producer.send(message(1)))
        assert isinstance(result, SendResult)
        copy = pickle.loads(pickle.dumps(result))
        assert type(copy) is SendResult
        assert copy.facts() == result.facts()
        assert repr(copy) == repr(result)
        assert replace(copy, queue_offset=7).queue_offset == 7

    run(main)


def test_messages_that_come_while_a_request_is_in_flight_wait_for_its_end(held: ScriptedTransport) -> None:
    async def main() -> None:
        async with started(held) as producer:
            first = producer.send(message(0))
            await in_flight(held, 1)
            others = [producer.send(message(1))]
            await asyncio.sleep(0)
            others.append(producer.send(message(2)))
            await asyncio.sleep(0.01)
            assert held.in_flight == 1
            held.advance(0.001)
            await first
            await in_flight(held, 1)
            held.advance(0.001)
            await asyncio.gather(*others)
        assert sent(held) == [[b"0"], [b"1", b"2"]]

    run(main)


def test_a_full_batch_is_sent_while_others_are_in_flight(held: ScriptedTransport) -> None:
    async def main() -> None:
        async with started(held, batch_bytes=300) as producer:
            futures = [producer.send(message(number)) for number in range(12)]
            # Two messages fill a batch, and four requests of a topic may be in flight.
            await in_flight(held, 4)
            while not all(future.done() for future in futures):
                held.advance(0.001)
                await asyncio.sleep(0.002)
        assert sorted(itertools.chain(*sent(held))) == sorted(b"%d" % number for number in range(12))
        assert {len(batch) for batch in sent(held)} == {2}

    run(main)


@pytest.mark.parametrize(
    ("alone", "options"),
    [
        (message(9, delay_ms=5), {}),
        (message(9, sharding_key="k"), {}),
        (Message.of("T", bytes(4096)), {}),
        (message(9), {"queue": MessageQueue("T", "a", 1)}),
        (message(9), {"selector": SelectMessageQueueByHash(), "arg": "k"}),
        (message(9), {"timeout_ms": 2000}),
        (message(9, wait_store_msg_ok=False), {}),
    ],
    ids=["delay", "sharding_key", "compressed", "queue", "selector", "timeout", "no_wait"],
)
def test_messages_that_cannot_share_a_request_are_sent_alone(
    transport: ScriptedTransport, alone: Message, options: dict[str, Any]
) -> None:
    async def main() -> None:
        async with started(transport) as producer:
            usual = [producer.send(message(number, tags="t", properties={"own": "x"})) for number in range(2)]
            await producer.send(alone, **options)
            await asyncio.gather(*usual)
        assert sorted(len(batch) for batch in sent(transport)) == [1, 2]

    run(main)


def test_an_invalid_message_fails_alone(transport: ScriptedTransport) -> None:
    async def main() -> None:
        async with started(transport) as producer:
            futures = [
                producer.send(message(0)),
                producer.send(Message("T", b"1", 2**40)),
                producer.send(Message("T", b"")),
                producer.send(message(3)),
                producer.send(Message(None, b"4", 0, {"WAIT": "true"})),  # type: ignore[arg-type]
            ]
            results = await asyncio.gather(*futures, return_exceptions=True)
        stored, flag, empty, also_stored, nameless = results
        assert isinstance(stored, SendResult)
        assert isinstance(also_stored, SendResult)
        assert "must fit 32 bits" in str(flag)
        assert "its body is empty" in str(empty)
        assert "topic None is blank" in str(nameless)
        assert sorted(itertools.chain(*sent(transport))) == [b"0", b"3"]

    run(main)


def test_a_message_with_values_of_wrong_types_fails_alone(transport: ScriptedTransport) -> None:
    broken: list[Any] = [
        Message("T", b"1", 0, {"number": 1, "text": "one"}),  # type: ignore[dict-item]
        Message("T", b"2", 0, {"KEYS": 2}),  # type: ignore[dict-item]
        Message("T", b"3", 0, None),  # type: ignore[arg-type]
        Message("T", 4),  # type: ignore[arg-type]
        "five",
    ]

    async def main() -> None:
        async with started(transport) as producer:
            futures = [producer.send(one) for one in (message(0), *broken, message(6))]
            batch = producer.send_batch([message(7), broken[0]])
            first, *failed, last = await asyncio.gather(*futures, return_exceptions=True)
            with pytest.raises(MQClientException, match="making a batch of messages"):
                await batch
            assert producer._batches.pending_bytes == 0
        assert isinstance(first, SendResult)
        assert isinstance(last, SendResult)
        assert len(failed) == 5
        assert all(isinstance(error, Exception) for error in failed)
        assert sorted(itertools.chain(*sent(transport))) == [b"0", b"6"]

    run(main)


def test_an_error_of_the_broker_fails_all_messages_of_the_request(transport: ScriptedTransport) -> None:
    async def main() -> None:
        transport.always = dict.fromkeys("ab", Reply.code(ResponseCode.NO_PERMISSION, "no"))
        async with started(transport) as producer:
            futures = [producer.send(message(number)) for number in range(3)]
            errors = await asyncio.gather(*futures, return_exceptions=True)
        assert {getattr(error, "response_code", None) for error in errors} == {ResponseCode.NO_PERMISSION}
        assert len(transport.requests) == 1

    run(main)


def test_a_message_that_is_cancelled_before_the_request_is_not_sent(held: ScriptedTransport) -> None:
    async def main() -> None:
        async with started(held) as producer:
            first = producer.send(message(0))
            await in_flight(held, 1)
            kept, dropped = producer.send(message(1)), producer.send(message(2))
            dropped.cancel()
            with pytest.raises(asyncio.CancelledError, match="cancelled before the request; the message is not sent"):
                await dropped
            held.advance(0.001)
            await first
            await in_flight(held, 1)
            held.advance(0.001)
            await kept
        assert sent(held) == [[b"0"], [b"1"]]

    run(main)


@pytest.mark.parametrize("options", [{}, {"timeout_ms": 2000}], ids=["shared", "alone"])
def test_cancellation_in_flight_says_that_the_message_may_be_stored(
    held: ScriptedTransport, options: dict[str, Any]
) -> None:
    async def main() -> None:
        async with started(held) as producer:
            task = asyncio.create_task(cancelled(lambda: producer.send(message(0), **options)))
            await in_flight(held, 1)
            task.cancel()
            error = await task
            held.advance(0.001)
        assert "in flight; the message may be stored" in error
        assert sent(held) == [[b"0"]]

    run(main)


def test_sends_beyond_the_pending_bytes_fail_until_there_is_room(held: ScriptedTransport) -> None:
    async def main() -> None:
        async with started(held, max_pending_bytes=1000) as producer:
            futures = [producer.send(message(number)) for number in range(8)]
            with pytest.raises(RemotingTooMuchRequestException, match=r"max_pending_bytes=1000 .* nothing was sent"):
                await futures[7]
            drained = asyncio.create_task(producer.drain())
            await in_flight(held, 1)
            assert not drained.done()
            held.advance(0.001)
            await drained
            await asyncio.gather(*futures[:7])
            last = producer.send(message(8))
            await in_flight(held, 1)
            held.advance(0.001)
            await last
        assert list(itertools.chain(*sent(held))) == [b"%d" % number for number in (0, 1, 2, 3, 4, 5, 6, 8)]

    run(main)


def test_a_message_larger_than_the_pending_bytes_is_sent_alone(transport: ScriptedTransport) -> None:
    async def main() -> None:
        async with started(transport, max_pending_bytes=1000) as producer:
            await producer.send(Message.of("T", bytes(3000)))
            await producer.send_batch([Message.of("T", bytes(3000))] * 2)

    run(main)
    assert len(transport.requests) == 2


def test_a_batch_that_waits_for_longer_than_its_timeout_fails(held: ScriptedTransport) -> None:
    async def main() -> None:
        async with started(held, batch_bytes=1, send_msg_timeout=500) as producer:
            futures = [producer.send(message(number)) for number in range(5)]
            await in_flight(held, 4)
            await asyncio.sleep(0.6)
            held.advance(0.001)
            with pytest.raises(RemotingTooMuchRequestException, match="send_msg_timeout=500 ms; nothing was sent"):
                await futures[4]
            await asyncio.gather(*futures[:4], return_exceptions=True)
        assert len(held.requests) == 4

    run(main)


def test_shutdown_waits_for_pending_messages(transport: ScriptedTransport) -> None:
    async def main() -> None:
        async with started(transport, batch_bytes=1) as producer:
            futures = [producer.send(message(number)) for number in range(20)]
        assert all(future.done() for future in futures)
        assert len(transport.requests) == 20
        await producer.shutdown()

    run(main)


def test_an_interrupted_shutdown_fails_messages_that_are_not_sent(held: ScriptedTransport) -> None:
    async def main() -> None:
        producer = aio.Producer("pg", transport=held, name_server="ns:9876", batch_bytes=1)
        await producer.start()
        futures = [producer.send(message(number)) for number in range(6)]
        await in_flight(held, 4)
        ending = asyncio.create_task(producer.shutdown())
        await asyncio.sleep(0.01)
        ending.cancel()
        held.advance(0.001)
        with pytest.raises(asyncio.CancelledError):
            await ending
        results = await asyncio.gather(*futures, return_exceptions=True)
        assert ["shut down" in str(result) for result in results[4:]] == [True, True]
        assert len(held.requests) == 4

    run(main)


def test_a_cancelled_start_leaves_no_running_producer() -> None:
    opening, opened = threading.Event(), threading.Event()

    class Slow(ScriptedTransport):
        def open(self) -> None:
            opening.set()
            assert opened.wait(PATIENCE)
            super().open()

    async def main() -> None:
        with Slow({"T": route({"a": 2})}) as transport:
            producer = aio.Producer("pg", transport=transport, name_server="ns:9876", instance_name="cancelled-start")
            start = asyncio.create_task(producer.start())
            await until(opening.is_set)
            start.cancel()
            with pytest.raises(asyncio.CancelledError):
                await start
            opened.set()
            await until(lambda: producer._blocking.state is ServiceState.SHUTDOWN_ALREADY)
            with pytest.raises(MQClientException, match="does not run"):
                producer.send(message(0))

    run(main)


def test_a_producer_belongs_to_the_event_loop_that_started_it(transport: ScriptedTransport) -> None:
    producer = aio.Producer("pg", transport=transport, name_server="ns:9876")
    assert "CREATE_JUST" in repr(producer)

    async def use() -> None:
        await producer.send(message(0))

    with pytest.raises(MQClientException, match=r"does not run: await its start\(\)"):
        asyncio.run(use())
    loop = asyncio.new_event_loop()
    loop.run_until_complete(producer.start())
    with pytest.raises(MQClientException, match="was started in another event loop"):
        asyncio.run(use())
    loop.run_until_complete(use())
    loop.run_until_complete(producer.shutdown())
    loop.close()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"enable_backpressure_for_async_mode": True}, "would block the event loop"),
        ({"batch_bytes": 0}, "batch_bytes=0: give 1 to 4194304 bytes"),
        ({"batch_bytes": 4194305}, "batch_bytes=4194305"),
        ({"max_pending_bytes": 0}, "max_pending_bytes=0: give at least 1 byte"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(OptionError, match=reason):
        aio.Producer("pg", name_server="ns:9876", **options)


def test_arrow_rows_are_sent_without_blocking_the_event_loop(transport: ScriptedTransport) -> None:
    async def main() -> None:
        async with started(transport) as producer:
            summary = await producer.send_arrow(pa.table({"body": [b"one", b"two"]}), "T")
        assert sum(broker["rows"] for broker in summary.to_dict().values()) == 2

    run(main)


def test_cancelled_arrow_rows_end_after_the_present_record_batch(transport: ScriptedTransport) -> None:
    async def main() -> None:
        read = []
        reached, go = threading.Event(), threading.Event()

        def batches() -> Iterator[pa.RecordBatch]:
            for number in range(1000):
                read.append(number)
                yield pa.record_batch({"body": [b"row"]})
                reached.set()
                go.wait(PATIENCE)

        async with started(transport) as producer:
            task = asyncio.create_task(cancelled(lambda: producer.send_arrow(batches(), "T")))
            await until(reached.is_set)
            task.cancel()
            await asyncio.sleep(0)
            go.set()
            error = await task
        assert "rows that were read before may be stored" in error
        assert len(read) < 5

    run(main)
