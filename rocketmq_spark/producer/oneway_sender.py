"""Sending without acknowledgements: ``sendMode=oneway``.

Rule 1: a row counts as sent once the socket has taken its last byte. Brokers say nothing then, not even that they
        refuse it.
Rule 2: what certainly was not sent (no route, no connection) is tried again as ever until ``deliveryTimeoutMs``, and
        then fails the write: only what nobody can know is left open.
Rule 3: no thread and no window: the caller sends, and is held up by the socket.

Follows ``NettyRemotingAbstract.invokeOnewayImpl`` (spec/producer.md section 10.5), but that Java sends once.
"""

from __future__ import annotations

import time
from typing import ClassVar

from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.message import EncodedBatch, MessageQueue, SendOutcome, SendStatus
from rocketmq_spark.producer.batch_sender import BatchSender, RowsT
from rocketmq_spark.producer.delivery import Dispatch


class OnewaySender(BatchSender[RowsT]):
    """Sends the rows of one partition task, and promises nothing; see `BatchSender`."""

    _done: ClassVar[str] = "sent without acknowledgement (perhaps stored)"

    def _start(self) -> None:
        # Nothing comes back that a thread would have to take.
        return

    def _offer(self, batch: EncodedBatch, queue: MessageQueue | None) -> None:
        batch = self._named(batch)
        self._find_route(batch.topic)
        self._pipeline.offer(batch, queue, self._clock())
        self._dispatch()
        self._raise_failure()
        while (due := self._pipeline.next_wakeup(self._clock())) is not None:
            time.sleep(max(0.0, due - self._clock()))
            self._dispatch()
            self._raise_failure()

    def _send(self, dispatch: Dispatch) -> None:
        error: RocketMQError | None = None
        try:
            self._instance.transport.send_oneway(self._request(dispatch), min(dispatch.timeout, dispatch.within))
        except RocketMQError as exc:
            error = exc
        # Not a broker's word: the pipeline counts it as sent, never as stored.
        status = SendStatus.SEND_OK if error is None else None
        self._pipeline.complete(dispatch.delivery, SendOutcome(dispatch.queue, status, error, 0.0), self._clock())
