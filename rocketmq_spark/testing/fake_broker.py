"""A broker in pure Python: requests in, answers out, without sockets; its time and timers come from `Timers`.

`FakeCluster` puts it behind real sockets. A simulator can drive it with virtual time. The module queues and answers
sends itself, and has the other requests executed by handlers. Follows ``BrokerController.java`` and
``BrokerFastFailure.java``.
"""

from __future__ import annotations

import functools
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, TypeAlias

import rocketmq_spark.model.properties as const
from rocketmq_spark.model.route import MASTER_ID
from rocketmq_spark.model.send_result import TransactionCheck
from rocketmq_spark.protocol.remoting.codes import RequestCode, ResponseCode
from rocketmq_spark.protocol.remoting.command import FLAG_ONEWAY, RemotingCommand
from rocketmq_spark.protocol.remoting.records import encode_record
from rocketmq_spark.testing import fake_sends
from rocketmq_spark.testing.fake_replies import KEPT_REQUESTS, VERSION, Channel, Replies, Reply, ReplyOf, response_to
from rocketmq_spark.testing.fake_sends import Refusal, Send
from rocketmq_spark.testing.fake_storage import BrokerSettings, BrokerStorage
from rocketmq_spark.testing.store import HALF_TOPIC

SENDS: Final = frozenset({RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE})


class Timers(Protocol):
    """The time, and calls at a later time."""

    def time(self) -> float:
        """Return the seconds since the epoch."""

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        """Call a function once, after a time."""


class Call(NamedTuple):
    """A request, and the connection that it came from."""

    command: RemotingCommand
    channel: Channel

    @property
    def fields(self) -> Mapping[str, str]:
        """The ext fields of the request."""
        return self.command.ext_fields

    @property
    def body(self) -> bytes:
        """The body of the request."""
        return bytes(self.command.body)


Handler: TypeAlias = "Callable[[FakeBroker, Call], RemotingCommand | None]"


@dataclass(slots=True, eq=False)
class _Waiting:
    """A send in the broker's queue."""

    call: Call
    reply: Reply | None
    arrived: float
    taken: bool = False


class FakeBroker:
    """One broker. All methods may be called from any thread.

    `play` sets the replies to the next requests, `always` those to all further ones, by request code (None: sends).
    `requests` has the last 10,000 requests. Tests may change `storage` and `settings`. `on_change` is called after a
    change of topics and after `start`, so that name servers get it. `handlers` execute the requests other than
    sends, by code.
    """

    def __init__(
        self,
        name: str,
        timers: Timers,
        handlers: Mapping[int, Handler],
        *,
        address: str,
        cluster: str = "DefaultCluster",
        broker_id: int = MASTER_ID,
        settings: BrokerSettings | None = None,
    ) -> None:
        self.name = name
        self.address = address
        self.broker_id = broker_id
        self.settings = settings or BrokerSettings()
        self.storage = BrokerStorage(name, address, cluster, self.settings, timers.time, self.later)
        self.storage.on_topic = self._topic_changed
        self.storage.on_stored = self.replicate
        self.storage.on_check = self.check_transaction
        self.slaves: list[FakeBroker] = []
        self.requests: deque[RemotingCommand] = deque(maxlen=KEPT_REQUESTS)
        # Connections by group and client id.
        self.producers: defaultdict[str, dict[str, Channel]] = defaultdict(dict)
        self.consumers: defaultdict[str, dict[str, Channel]] = defaultdict(dict)
        self.timers = timers
        self.lock = threading.RLock()
        self.paused = False
        self.running = True
        self.on_change: Callable[[], None] = lambda: None
        self.started_at = timers.time()
        # Figures (GET_BROKER_RUNTIME_INFO) and settings (GET_BROKER_CONFIG) besides the broker's own; None hides one.
        self.figures: dict[str, str | None] = {}
        self.config: dict[str, str | None] = {}
        self._handlers = handlers
        self._replies = Replies()
        self.always, self.played = self._replies.always, self._replies.played
        self._sends: deque[_Waiting] = deque()
        self._busy = 0
        # Timers of an earlier process do nothing.
        self._process = 0
        self._deferred: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        state = "stopped" if not self.running else "paused" if self.paused else "running"
        return f"<FakeBroker {self.name} {self.address} {state}, {len(self.storage.store.log)} messages>"

    @property
    def is_master(self) -> bool:
        """Whether the broker accepts messages."""
        return self.broker_id == MASTER_ID

    def play(self, *replies: ReplyOf, code: int | None = None, times: int = 1) -> None:
        """Add replies to the next requests with a code, or to the next sends (None), `times` times in all.

        A function returns the reply to its request, or None if the broker itself answers.
        """
        with self.lock:
            self._replies.add(replies, code, times)

    def receive(self, command: RemotingCommand, channel: Channel) -> None:
        """Take a request from a connection; answers go to the same connection, now or later."""
        with self.lock:
            if not self.running:
                return
            if self.paused:
                self._deferred.append(functools.partial(self.receive, command, channel))
                return
            self.requests.append(command)
            call = Call(command, channel)
            reply = self._replies.take(command, None if command.code in SENDS else int(command.code))
            if not self.running:
                return  # The function that chose the reply has killed the broker.
            if command.code in SENDS:
                self._queue_send(_Waiting(call, reply, self.timers.time()))
            elif reply is not None:
                self._replies.play(reply, command, channel, lambda: self.execute(call), self._after)
            elif (response := self.execute(call)) is not None:
                self.respond(call, response)

    def respond(self, call: Call, response: RemotingCommand) -> None:
        """Send an answer, unless the request is one-way."""
        if not call.command.is_oneway:
            call.channel.send(response)

    def disconnected(self, channel: Channel) -> None:
        """Forget the clients of a connection that has ended."""
        with self.lock:
            if self.paused:
                self._deferred.append(functools.partial(self.disconnected, channel))
                return
            for members in (*self.producers.values(), *self.consumers.values()):
                for client_id in [name for name, held in members.items() if held is channel]:
                    del members[client_id]

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        """Call a function after a time, unless the broker stops before; while it is paused, the call waits."""
        process = self._process

        def run() -> None:
            with self.lock:
                if self.paused and process == self._process:
                    self._deferred.append(call)
                elif process == self._process:
                    call()

        self.timers.call_later(seconds, run)

    def pause(self) -> None:
        """Stop executing, as after SIGSTOP: connections stay open, and requests wait."""
        with self.lock:
            self.paused = True

    def resume(self) -> None:
        """Continue after `pause`."""
        with self.lock:
            self.paused = False
            deferred, self._deferred = self._deferred, []
            for call in deferred:
                call()

    def stop(self, *, lose_unflushed: bool = False) -> None:
        """End the process. Requests in its queue are lost; with `lose_unflushed`, unflushed messages, too."""
        with self.lock:
            self.running = self.paused = False
            self._process += 1
            self._busy = 0
            for held in (self._sends, self._deferred, self.producers, self.consumers):
                held.clear()
            if lose_unflushed:
                self.storage.lose_unflushed()

    def start(self) -> None:
        """Start again after `stop`."""
        with self.lock:
            self.running = True
            self.started_at = self.timers.time()
            self.storage.restart()
        self.on_change()

    def check_transaction(self, physical_offset: int) -> TransactionCheck | None:
        """Check a half message at a connection whose heartbeats named its producer group; else return None."""
        with self.lock:
            half = self.storage.store.log[physical_offset].read
            channel = next(iter(self.producers[half.properties.get(const.PGROUP, "")].values()), None)
            if channel is None:
                return None
            check = self.storage.store.check(self.address, physical_offset, self.timers.time())
            self.storage.written_again(physical_offset, check.commit_log_offset)
            channel.send(check_request(check))
            return check

    def promote(self, slaves: list[FakeBroker]) -> None:
        """Become the master of other slaves, and continue deliveries and checks."""
        with self.lock:
            self.broker_id, self.slaves = MASTER_ID, slaves
            self.storage.schedule()

    def replicate(self) -> None:
        """Copy everything to the slaves that run, after the replication time."""
        for slave in self.slaves:
            self._after(self.settings.replication_time, functools.partial(slave.copy_from, self))

    def copy_from(self, master: FakeBroker) -> None:
        """Take over what a running master has stored: at once, after `resume`, or never if this slave does not run."""
        with self.lock:
            if self.paused:
                self._deferred.append(functools.partial(self.copy_from, master))
            elif self.running and not self.is_master and master.running:
                self.storage.copy_from(master.storage)

    def execute(self, call: Call) -> RemotingCommand | None:
        """Execute a request other than a send; return its answer, or None if it has none now."""
        handler = self._handlers.get(call.command.code)
        if handler is None:
            remark = f" request type {int(call.command.code)} not supported"
            return response_to(call.command, ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark)
        try:
            return handler(self, call)
        except Refusal as refusal:
            return response_to(call.command, refusal.code, refusal.remark)
        except (KeyError, ValueError) as exc:
            # A required field is missing, or is no number.
            return response_to(call.command, ResponseCode.SYSTEM_ERROR, f"java.lang.NullPointerException: {exc}")

    def _topic_changed(self) -> None:
        self.on_change()
        self.replicate()

    def _after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call a function after a time, without a timer if that is now."""
        if seconds > 0:
            self.later(seconds, call)
        else:
            call()

    def _queue_send(self, send: _Waiting) -> None:
        if len(self._sends) >= self.settings.send_queue_capacity:
            self._refuse_busy(send, "[OVERLOAD]system busy, start flow control for a while")
            return
        self._sends.append(send)
        self._start_sends()
        if not send.taken:
            self.later(self.settings.wait_time_in_send_queue, lambda: self._expire(send))

    def _expire(self, send: _Waiting) -> None:
        if not send.taken:
            self._sends.remove(send)
            self._refuse_late(send)

    def _refuse_late(self, send: _Waiting) -> None:
        waited = (self.timers.time() - send.arrived) * 1000
        text = "[TIMEOUT_CLEAN_QUEUE]broker busy, start flow control for a while, period in queue: "
        self._refuse_busy(send, f"{text}{waited:.0f}ms, size of queue: {len(self._sends)}")

    def _refuse_busy(self, send: _Waiting, remark: str) -> None:
        send.taken = True
        self.respond(send.call, response_to(send.call.command, ResponseCode.SYSTEM_BUSY, remark))

    def _start_sends(self) -> None:
        """Give queued sends to threads that are free."""
        settings = self.settings
        while self._sends and self._busy < settings.send_threads:
            send = self._sends.popleft()
            if self.timers.time() - send.arrived > settings.wait_time_in_send_queue:
                self._refuse_late(send)
                continue
            send.taken = True
            self._busy += 1
            try:
                decoded: Send | Refusal = fake_sends.decode_send(send.call.command, settings.max_message_size)
            except Refusal as refusal:
                decoded = refusal
            except ValueError as exc:
                decoded = Refusal(ResponseCode.SYSTEM_ERROR, f"java.lang.NumberFormatException: {exc}")
            rows = len(decoded.messages) if isinstance(decoded, Send) else 0
            seconds = settings.service_time(rows, len(send.call.command.body))
            if seconds > 0:
                self.later(seconds, functools.partial(self._finish_send, send, decoded))
            else:
                self._finish_send(send, decoded)

    def _finish_send(self, send: _Waiting, decoded: Send | Refusal) -> None:
        self._busy -= 1
        call = send.call
        if send.reply is not None:
            self._replies.play(send.reply, *call, lambda: self._store(call, decoded)[0], self._after)
        else:
            response, wait = self._store(call, decoded)
            self._after(wait, functools.partial(self.respond, call, response))
        self._start_sends()

    def _store(self, call: Call, decoded: Send | Refusal) -> tuple[RemotingCommand, float]:
        """Store a send's messages; return the answer, and the seconds until the broker sends it."""
        try:
            if isinstance(decoded, Refusal):
                raise decoded
            if not self.is_master:
                raise Refusal(ResponseCode.SERVICE_NOT_AVAILABLE, "service not available now: this is a slave")
            fields = self.storage.store_send(decoded, call.body)
        except Refusal as refusal:
            return response_to(call.command, refusal.code, refusal.remark), 0.0
        code, wait = self.storage.safety(decoded, [not slave.paused for slave in self.slaves if slave.running])
        return response_to(call.command, code, "", fields), wait


def check_request(check: TransactionCheck) -> RemotingCommand:
    """Return a broker's CHECK_TRANSACTION_STATE (docs/internals/messages.md#checks)."""
    fields = {
        "bname": check.broker_name,
        "topic": HALF_TOPIC,
        "msgId": check.msg_id,
        "transactionId": check.transaction_id,
        "offsetMsgId": check.offset_msg_id,
        "commitLogOffset": str(check.commit_log_offset),
        "tranStateTableOffset": str(check.tran_state_table_offset),
    }
    code, body = RequestCode.CHECK_TRANSACTION_STATE, encode_record(check.message)
    return RemotingCommand(code, 0, fields, body, FLAG_ONEWAY, language="JAVA", version=VERSION)
