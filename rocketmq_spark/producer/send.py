"""The attempts of one send: where each goes, how long it may take, and what the caller is told in the end.

Rule 1: one budget for all of it, route look-up and retries included; no pause between attempts.
Rule 2: an attempt leaves out the broker that failed just before it, and no other.
Rule 3: an answer that says "stored, but not safe" is a result; with ``retryAnotherBrokerWhenNotStoreOK`` another
        broker is tried, and the last such result wins over a later failure.
Rule 4: no transport here: `attempt` is handed in, and makes one attempt or raises.
Rule 5: a broker that refuses the user, or with which TLS is not agreed on, is not tried twice. Java does try it again.

Follows ``DefaultMQProducerImpl.sendDefaultImpl`` (spec/producer.md section 6).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

from rocketmq_spark.errors import (
    MQBrokerException,
    MQClientException,
    RemotingConnectException,
    RemotingException,
    RemotingTimeoutException,
    RemotingTooMuchRequestException,
)
from rocketmq_spark.message import MessageQueue, SendStatus
from rocketmq_spark.producer.budget import Budget
from rocketmq_spark.send_result import SendResult
from rocketmq_spark.wire.codes import ResponseCode

# ClientErrorCode.java
_CONNECT_BROKER: Final = 10001
_ACCESS_BROKER_TIMEOUT: Final = 10002
_BROKER_NOT_EXIST: Final = 10003

# (queue, seconds) -> result; None where nobody answers (oneway, asynchronous).
Attempt = Callable[[MessageQueue, float], "SendResult | None"]
# (broker that failed last, is a retry) -> queue
Select = Callable[["str | None", bool], "MessageQueue | None"]


@dataclass(frozen=True, slots=True)
class SendLoop:
    """The rules by which one producer tries again.

    Parameters
    ----------
    retry_times : int
        Attempts after the first; 0 for asynchronous and oneway sends, whose retries are elsewhere or nowhere.
    retry_response_codes : collection of int
        Broker codes after which another broker is tried.
    retry_another_broker_when_not_store_ok : bool
    max_timeout_per_request : float
        Seconds that an attempt may take while another one may follow; negative for no such limit.
    """

    retry_times: int
    retry_response_codes: Collection[int]
    retry_another_broker_when_not_store_ok: bool
    max_timeout_per_request: float

    def run(self, topic: str, budget: Budget, select: Select, attempt: Attempt) -> SendResult | None:
        """Try until there is a result, or nothing is left to try with.

        Parameters
        ----------
        topic : str
            For texts.
        budget : Budget
            Of the whole call.
        select : callable
        attempt : callable
            Raises what happened to an attempt.

        Raises
        ------
        MQBrokerException
            A broker refused it with a code that is not retried.
        RemotingTooMuchRequestException
            The budget was used up before any attempt had a result.
        MQClientException
            All attempts failed; the code says how the last one did, the cause is its exception.
        """
        result: SendResult | None = None
        last: RemotingException | MQClientException | MQBrokerException | None = None
        brokers: list[str] = []
        # Who said that this client may not: asking again changes nothing, and may lock a user out.
        refusing: set[str] = set()
        for times in range(1 + self.retry_times):
            queue = select(brokers[-1] if brokers else None, times > 0)
            if queue is None or queue.broker_name in refusing:
                break
            left = budget.left
            if left < 0:
                if result is None:
                    raise _out_of_time(topic, budget, brokers) from last
                break
            brokers.append(queue.broker_name)
            if 0 <= self.max_timeout_per_request < left and times < self.retry_times:
                left = self.max_timeout_per_request
            try:
                result = attempt(queue, left)
            except (RemotingException, MQClientException) as exc:
                last = exc
                if isinstance(exc, RemotingException) and not exc.retriable:
                    refusing.add(queue.broker_name)
            except MQBrokerException as exc:
                if exc.response_code not in self.retry_response_codes:
                    if result is not None:
                        return result
                    raise
                last = exc
                if not exc.retriable or exc.response_code == ResponseCode.NO_PERMISSION:
                    refusing.add(queue.broker_name)
            else:
                if result is None or result.status is SendStatus.SEND_OK:
                    return result
                if not self.retry_another_broker_when_not_store_ok:
                    return result
        if result is not None:
            return result
        raise _failed(topic, budget, brokers, last) from last


def _out_of_time(topic: str, budget: Budget, brokers: list[str]) -> RemotingTooMuchRequestException:
    tried = f"; tried {', '.join(brokers)}" if brokers else ""
    return RemotingTooMuchRequestException(
        f"sending to topic {topic}: {budget.seconds * 1000:.0f} ms were given, {budget.spent * 1000:.0f} ms are over"
        f"{tried}; raise sendMsgTimeout, or set sendMsgMaxTimeoutPerRequest so that a retry fits into it"
    )


def _failed(topic: str, budget: Budget, brokers: list[str], last: Exception | None) -> MQClientException:
    reason = f"; last: {type(last).__name__}: {last}" if last else "; no queue could be selected"
    return MQClientException(
        f"sending to topic {topic} failed {len(brokers)} times in {budget.spent * 1000:.0f} ms, "
        f"brokers [{', '.join(brokers)}]{reason}",
        final_code(last),
    )


def final_code(error: Exception | None) -> int:
    """Return the code of a failure whose last attempt ended so (spec/producer.md section 6, step 7)."""
    if isinstance(error, MQBrokerException):
        return error.response_code
    if isinstance(error, RemotingConnectException):
        return _CONNECT_BROKER
    if isinstance(error, RemotingTimeoutException):
        return _ACCESS_BROKER_TIMEOUT
    if isinstance(error, MQClientException):
        return _BROKER_NOT_EXIST
    return -1
