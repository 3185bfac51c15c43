"""`maybe_stored` of the error of a send: whether a broker may have stored the message in any of the attempts."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from rocketmq_spark import aio
from rocketmq_spark.errors import (
    CredentialsError,
    MessageRefusedException,
    MQClientException,
    RemotingConnectException,
    RemotingSendRequestException,
    RemotingTimeoutException,
    RocketMQError,
)
from rocketmq_spark.model.message import Message, MessageQueue, SendRequest
from rocketmq_spark.producer.producer import Producer
from rocketmq_spark.testing import Reply
from tests.support.processes import PATIENCE
from tests.support.scripted import ScriptedTransport

ReplyOf = Callable[[SendRequest], Reply]
MESSAGE = Message.of("T", b"x", keys="k")


def lost(_: SendRequest) -> Reply:
    return Reply(error=RemotingSendRequestException("the server closed the connection"), stored=True)


def late(_: SendRequest) -> Reply:
    return Reply(error=RemotingTimeoutException("no answer"), stored=True)


def down(_: SendRequest) -> Reply:
    return Reply(error=RemotingConnectException("not connected"))


def unsigned(_: SendRequest) -> Reply:
    return Reply(error=CredentialsError("the vault is sealed"))


def code(number: int) -> ReplyOf:
    return lambda _: Reply.code(number, "no")


# The replies to the attempts; further attempts get the last one.
CASES: dict[str, tuple[Sequence[ReplyOf], bool]] = {
    "late": ([late], True),
    "lost": ([lost], True),
    "lost, then busy": ([lost, code(2)], True),
    "lost, then rejected": ([lost, code(13)], True),
    "lost, then down": ([lost, down], True),
    "lost, then unsigned": ([lost, unsigned], True),
    "down, then lost": ([down, lost], True),
    "system error": ([code(1)], True),
    "down": ([down], False),
    "down, then busy": ([down, code(2)], False),
    "rejected": ([code(13)], False),
    "unsigned": ([unsigned], False),
}
every_case = pytest.mark.parametrize(("replies", "stored"), CASES.values(), ids=CASES)


def play(transport: ScriptedTransport, replies: Sequence[ReplyOf]) -> None:
    """Give the replies to the next attempts, whichever broker gets them."""
    following = itertools.chain(replies, itertools.repeat(replies[-1]))
    for broker in "ab":
        transport.play(broker, *[lambda request: next(following)(request)] * 5)


@every_case
def test_error_of_send_says_whether_an_attempt_may_have_stored(
    producer: Producer, transport: ScriptedTransport, replies: Sequence[ReplyOf], stored: bool
) -> None:
    play(transport, replies)
    with pytest.raises(RocketMQError) as caught:
        producer.send(MESSAGE)
    assert caught.value.maybe_stored is stored


@every_case
def test_error_of_async_send_says_whether_an_attempt_may_have_stored(
    start_any: Callable[..., Any], transport: ScriptedTransport, replies: Sequence[ReplyOf], stored: bool
) -> None:
    play(transport, replies)
    error = start_any().send_async(MESSAGE).exception(PATIENCE)
    assert isinstance(error, RocketMQError)
    assert error.maybe_stored is stored


def test_each_error_of_a_send_has_its_own_flag(producer: Producer, transport: ScriptedTransport) -> None:
    play(transport, [lost, down])
    error = producer.send_async(MESSAGE, MessageQueue("T", "a", 0)).exception(PATIENCE)
    assert isinstance(error, MQClientException)
    assert isinstance(error.__cause__, RemotingConnectException)
    assert (error.maybe_stored, error.__cause__.maybe_stored) == (True, False)
    play(transport, [down])
    again = producer.send_async(MESSAGE, MessageQueue("T", "b", 0)).exception(PATIENCE)
    assert isinstance(again, MQClientException)
    assert not again.maybe_stored


def test_a_message_that_is_sent_again_alone_may_have_been_stored_before(transport: ScriptedTransport) -> None:
    def rejected(request: SendRequest) -> Reply:
        error = MessageRefusedException("not this message", 40004, "no", request.address)
        return Reply(error=error) if request.batch.rows > 1 else Reply.code(13, "no")

    play(transport, [lost, rejected])

    async def errors() -> list[Any]:
        async with aio.Producer("pg", transport=transport, name_server="ns:9876") as producer:
            return await asyncio.gather(*[producer.send(MESSAGE) for _ in range(2)], return_exceptions=True)

    assert [error.maybe_stored for error in asyncio.run(errors())] == [True, True]


def test_a_half_message_may_have_been_stored(
    make_producer: Callable[..., Producer], transport: ScriptedTransport
) -> None:
    class Listener:
        def execute_local_transaction(self, message: Message, arg: Any) -> None:
            return None

        def check_local_transaction(self, message: Message) -> None:
            return None

    producer = make_producer(transaction_listener=Listener())
    producer.start()
    play(transport, [lost, code(13)])
    with pytest.raises(MQClientException, match="sending a half message") as caught:
        producer.send_in_transaction(MESSAGE)
    assert caught.value.maybe_stored
