"""A schedule of transactions: half messages, local transactions, their ends, and the brokers' checks."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model.message import Message
from rocketmq_spark.model.message_ext import MessageExt
from rocketmq_spark.model.send_result import EndTransaction, LocalTransactionState, TransactionCheck
from rocketmq_spark.options.producer import ProducerOptions
from rocketmq_spark.producer.attempt import SendAttempt
from rocketmq_spark.producer.encode import MessageEncoder
from rocketmq_spark.producer.hooks import Hooks
from rocketmq_spark.producer.message_sender import MessageSender, QueueChoice
from rocketmq_spark.producer.transaction import Transactions
from rocketmq_spark.protocol.remoting.codes import RequestCode
from rocketmq_spark.protocol.remoting.command import RemotingCommand
from rocketmq_spark.routing.client_instance import ClientInstance
from rocketmq_spark.testing import Reply
from rocketmq_spark.testing.fake_broker import Call, FakeBroker
from rocketmq_spark.testing.fake_requests import HANDLERS
from rocketmq_spark.testing.fake_storage import BrokerSettings
from rocketmq_spark.testing.store import HALF_TOPIC
from rocketmq_spark.transport.base import OnEnd
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from tests.simulation.cluster import BasePlan, BaseRun, SimulatedCluster, run_to_end
from tests.simulation.network import Conditions, Network
from tests.simulation.schedule import KINDS_OF_SENDS, TOPIC, Adversary
from tests.simulation.transaction_checks import (
    Decision,
    ExecutedEnd,
    SentEnd,
    Transaction,
    TransactionHistory,
    problems_of_transactions,
)
from tests.simulation.world import SimulatedRuntime, World

GROUP = "group"

REPLIES_TO_ENDS: dict[str, Callable[[random.Random], Reply]] = {
    "end failed": lambda _: Reply.code(1, "something failed"),
    "end failed after executing": lambda _: Reply(error=Reply.code(1, "something failed").error, stored=True),
    "end silent": lambda _: Reply(silent=True),
    "end silent after executing": lambda _: Reply(silent=True, stored=True),
    "end closes": lambda _: Reply(closes=True),
    "end closes after executing": lambda _: Reply(closes=True, stored=True),
    "end slow": lambda rng: Reply(delay=rng.random() * 5),
    "end answered twice": lambda _: Reply(repeats=1),
}
_EVENTS = (
    *("pause", "restart", "power failure", "promote", "partition", "name server partition", "break links"),
    *("disk full", "slow storage", "stale routes", "name server stopped"),
)
KINDS = (*KINDS_OF_SENDS, *REPLIES_TO_ENDS, *_EVENTS, "delayed", "broken", "refused")
"""Everything that a seed can enable."""

# A broker checks a half message 15 times, every `_CHECK_INTERVAL` seconds.
_CHECK_INTERVAL = 2.0
_AFTERWARDS = 30.0

_FATES = {
    "commit": (LocalTransactionState.COMMIT_MESSAGE, LocalTransactionState.COMMIT_MESSAGE),
    "roll back": (LocalTransactionState.ROLLBACK_MESSAGE, LocalTransactionState.ROLLBACK_MESSAGE),
    "commit later": (LocalTransactionState.UNKNOW, LocalTransactionState.COMMIT_MESSAGE),
    "roll back later": (LocalTransactionState.UNKNOW, LocalTransactionState.ROLLBACK_MESSAGE),
}


@dataclass
class TransactionPlan(BasePlan):
    """Transactions: `tasks` threads send `rows` messages each."""

    tasks: int = 2
    rows: int = 5

    @classmethod
    def of_seed(cls, seed: int) -> TransactionPlan:
        """Draw a plan."""
        rng = random.Random(f"transactions {seed}")
        enabled = tuple(kind for kind in KINDS if rng.random() < rng.choice((0.05, 0.15, 0.3)))
        return cls(
            seed,
            enabled,
            brokers=rng.choice((1, 2, 2, 3)),
            slaves=rng.choice((0, 0, 1)) if "promote" not in enabled else 1,
            name_servers=rng.choice((1, 1, 2)),
            queues=rng.choice((1, 2, 4)),
            tasks=rng.choice((1, 2, 4)),
            rows=rng.choice((1, 4, 12)),
            options={
                "send_msg_timeout": rng.choice((500, 1_000, 3_000)),
                "send_msg_max_timeout_per_request": rng.choice((-1, 300)),
                "retry_times_when_send_failed": rng.choice((0, 1, 2)),
            },
        )


@dataclass
class TransactionRun(BaseRun):
    """Transactions that were run."""

    plan: TransactionPlan
    history: TransactionHistory


def run_transactions(plan: TransactionPlan) -> TransactionRun:
    """Run transactions and check what happened; problems are texts."""
    world = World(plan.seed)
    rng = world.rng
    conditions = Conditions()
    network = Network(world, conditions)
    timeout = plan.options["send_msg_timeout"] / 1000
    history = TransactionHistory(longest=2 * timeout + 8.0)

    def settings() -> BrokerSettings:
        return BrokerSettings(
            sync_flush=rng.random() < 0.3,
            flush_time=0.001,
            replication_time=rng.choice((0.0005, 0.02)),
            sync_replication=bool(plan.slaves) and rng.random() < 0.5,
            transaction_timeout=rng.choice((0.5, 1.0, 3.0)),
            transaction_check_interval=_CHECK_INTERVAL,
        )

    cluster = SimulatedCluster(
        network,
        plan.brokers,
        slaves=plan.slaves,
        name_servers=plan.name_servers,
        settings=settings,
        handlers={**HANDLERS, RequestCode.END_TRANSACTION: _recording(world, history)},
    )
    cluster.create_topic(TOPIC, plan.queues)
    client = _Client(plan, world, network, cluster, history)
    adversary = TransactionAdversary(world, cluster, network, plan, set(plan.faults))
    adversary.history = history
    adversary.start()

    def check() -> list[str]:
        _look(cluster, history)
        return problems_of_transactions(history)

    problems = run_to_end(world, client.run, "", check)
    faults = cluster.faults(adversary.counts)
    return TransactionRun(world, faults, problems, plan, history)


def _recording(world: World, history: TransactionHistory) -> Callable[[FakeBroker, Call], RemotingCommand | None]:
    """Return a handler of END_TRANSACTION that keeps what was executed."""

    def end_transaction(broker: FakeBroker, call: Call) -> RemotingCommand | None:
        fields = call.fields
        offset = int(fields["commitLogOffset"])
        half = broker.storage.store.view(offset)
        response = HANDLERS[RequestCode.END_TRANSACTION](broker, call)
        if response is not None and half is not None:
            from_check = fields.get("fromTransactionCheck") == "true"
            kind, half_id = int(fields["commitOrRollback"]), half.unique_id or ""
            end = ExecutedEnd(world.now, broker.address, fields["msgId"], half_id, kind, from_check, offset)
            history.executed.append(end)
            world.note(f"executed: {end}")
        return response

    return end_transaction


def _look(cluster: SimulatedCluster, history: TransactionHistory) -> None:
    """Keep what the brokers have at the end."""
    for broker in cluster.brokers():
        for entry in broker.storage.store.log:
            history.bodies.setdefault(entry.read.unique_id or "", entry.read.body)
    history.visible.update(message.body for message in cluster.stored(TOPIC))
    for broker in cluster.masters.values():
        halves = (entry.read.unique_id for entry in broker.storage.store.log if entry.stored_in.topic == HALF_TOPIC)
        history.halves.update(half for half in halves if half is not None)


class TransactionAdversary(Adversary):
    """Also plays faults of the answers to END_TRANSACTION."""

    events: ClassVar[tuple[str, ...]] = _EVENTS
    history: TransactionHistory

    def _play_replies(self) -> None:
        super()._play_replies()
        rng = self.world.rng
        kinds = [kind for kind in REPLIES_TO_ENDS if kind in self.enabled]
        chance = rng.choice((0.05, 0.3, 0.8))

        def choose(_: object) -> Reply | None:
            if not kinds or not self.enabled or rng.random() >= chance:
                return None
            return REPLIES_TO_ENDS[rng.choice(kinds)](rng)

        for broker in self.cluster.brokers():
            broker.play(choose, code=RequestCode.END_TRANSACTION, times=1_000)

    def _event(self, kind: str) -> None:
        before = {name: len(broker.storage.store.log) for name, broker in self.cluster.masters.items()}
        super()._event(kind)
        for name, broker in self.cluster.masters.items():
            if len(broker.storage.store.log) < before[name]:
                self.history.shortened = True


class RecordedEnds(RemotingTransport):
    """A transport that keeps all ends of transactions."""

    world: World
    history: TransactionHistory

    def end_transaction(self, address: str, request: EndTransaction, timeout: float, on_end: OnEnd) -> None:
        self._keep(address, request)
        super().end_transaction(address, request, timeout, on_end)

    def end_transaction_oneway(self, address: str, request: EndTransaction, timeout: float) -> None:
        self._keep(address, request)
        super().end_transaction_oneway(address, request, timeout)

    def _keep(self, address: str, request: EndTransaction) -> None:
        kind, offset = request.commit_or_rollback, request.commit_log_offset
        end = SentEnd(self.world.now, address, request.msg_id, kind, request.from_transaction_check, offset)
        self.history.sent.append(end)


class _Listener:
    """Decides as the fate of a message says, which a seed draws; a local transaction takes its time."""

    def __init__(self, world: World, runtime: SimulatedRuntime, history: TransactionHistory) -> None:
        self._world = world
        self._runtime = runtime
        self._history = history
        # Bodies of the messages whose call has not ended: a check may come before the local transaction.
        self.open: set[bytes] = set()
        # The final state of each message whose local transaction has run.
        self._final: dict[str, LocalTransactionState] = {}

    def execute_local_transaction(self, message: Message, arg: Any) -> LocalTransactionState | None:
        rng, msg_id = self._world.rng, message.unique_id or ""
        now, final = _FATES[arg]
        self._history.bodies[msg_id] = message.body
        self._runtime.sleep(rng.choice((0.0, 0.01, 0.3, 1.5)) * rng.random())
        # From here on, checks know the result, too.
        self._final[msg_id] = final
        self._runtime.sleep(rng.choice((0.0, 0.0, 0.1)) * rng.random())
        self._decide(msg_id, now, from_check=False)
        if now is LocalTransactionState.UNKNOW and rng.random() < 0.5:
            raise ValueError("the local transaction failed")
        return now

    def check_local_transaction(self, message: MessageExt) -> LocalTransactionState | None:
        rng, msg_id = self._world.rng, message.unique_id or ""
        self._runtime.sleep(rng.choice((0.0, 0.0, 0.1)) * rng.random())
        state = self._final.get(msg_id)
        if state is None:
            # If the call has ended, there is no local transaction: it has failed, or the message was not safe.
            is_open = message.body in self.open
            state = LocalTransactionState.UNKNOW if is_open else LocalTransactionState.ROLLBACK_MESSAGE
        self._decide(msg_id, state, from_check=True)
        return state

    def _decide(self, msg_id: str, state: LocalTransactionState, *, from_check: bool) -> None:
        self._history.decisions.append(Decision(self._world.now, msg_id, state, from_check))
        self._world.note(f"decided: {msg_id[-4:]} {state.name}{', by a check' if from_check else ''}")


class _Client:
    """The parts of a producer that transactions need, with the threads of a world."""

    def __init__(
        self,
        plan: TransactionPlan,
        world: World,
        network: Network,
        cluster: SimulatedCluster,
        history: TransactionHistory,
    ) -> None:
        self.plan = plan
        self.world = world
        self.history = history
        self.runtime = runtime = SimulatedRuntime(world, network.socket, network.socketpair)
        rng = random.Random(world.rng.random())
        options = ProducerOptions.of(
            name_server=tuple(cluster.addresses),
            client_ip="10.0.0.1",
            heartbeat_broker_interval=3_000,
            poll_name_server_interval=3_000,
            **plan.options,
        )
        transport = RecordedEnds(cluster.addresses, random=rng, clock=runtime.clock, runtime=runtime)
        transport.world, transport.history = world, history
        transport.on_check_transaction = self._on_check
        self.instance = ClientInstance(
            "10.0.0.1@producer", transport, options.connection, clock=runtime.clock, runtime=runtime
        )
        hooks = Hooks()
        self._ids = itertools.count(1)
        self._timeout = options.send_msg_timeout / 1000
        self.pool = runtime.pool(1, "checks")
        self.sender = MessageSender(
            SendAttempt(GROUP, options, self.instance, hooks, runtime=runtime),
            MessageEncoder(options, lambda: f"{next(self._ids):032X}"),
            async_executor=self.pool,
            callback_executor=self.pool,
            retry_response_codes=options.retry_response_codes,
            rng=rng,
        )
        self.listener = _Listener(world, runtime, history)
        self.transactions = Transactions(
            GROUP, self._timeout, self.instance, hooks, self._send, self.listener, self.pool, runtime
        )

    def run(self) -> None:
        """Send the messages, and wait until the brokers have checked what is open."""
        self.instance.register(GROUP)
        self.instance.start()
        threads = [self.world.start(partial(self._task, number), f"task {number}") for number in range(self.plan.tasks)]
        for thread in threads:
            thread.join()
            if thread.failure is not None:
                raise thread.failure
        self.runtime.sleep(max(0.0, self.plan.horizon - self.world.now) + _AFTERWARDS)
        self.pool.shutdown()
        self.instance.close()

    def _task(self, number: int) -> None:
        rng = self.world.rng
        for row in range(self.plan.rows):
            self.runtime.sleep(rng.random() * 0.3)
            transaction = Transaction(b"%d-%03d" % (number, row), self.world.now)
            self.history.transactions.append(transaction)
            self.listener.open.add(transaction.body)
            fate = rng.choice(list(_FATES))
            try:
                transaction.result = self.transactions.run(Message(TOPIC, transaction.body), None, fate)
            except RocketMQError as exc:
                transaction.error = exc
            transaction.ended = self.world.now
            self.listener.open.discard(transaction.body)
            ended = transaction.result is not None and transaction.result.ended
            self.world.note(f"transaction {transaction.body!r} ({fate}): ended={ended}, {transaction.error}")

    def _send(self, message: Message) -> Any:
        return self.sender.send(message, self._timeout, QueueChoice())

    def _on_check(self, check: TransactionCheck) -> None:
        self.history.checks.append((check.address, check.commit_log_offset, check.unique_id))
        self.history.bodies[check.unique_id] = check.message.body
        self.transactions.submit_check(check)
