"""Jobs that write exactly or effectively once in own processes, their faults, and the account of what they wrote."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
import pyarrow as pa

from rocketmq_spark import Producer
from rocketmq_spark.cluster import LocalCluster
from rocketmq_spark.cluster.process import Watchdog
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.routing.route_cache import publish_info_of
from rocketmq_spark.transport.remoting.transport import RemotingTransport
from tests.support.auditor import Found, Row, audit
from tests.support.drivers import Driver, connect_server, pause, resume, send
from tests.support.java import Java
from tests.support.processes import PATIENCE, PROGRAMS, at_most, wait_for
from tests.support.reading import read_topic
from tests.support.writes import await_messages, messages_in

LOG: Final = "rocketmq-spark-decisions"
# The shortest timeout, because a recovery waits for its end.
TIMEOUT_MS: Final = 10_000
# Seconds that a commit waits for a fault, in chaos.
_HELD: Final = 2.0
_MOST_WRITES: Final = 1_000
# Digits of a line.
_DIGITS: Final = 8
# Bytes of a message of a source.
_WIDTH: Final = 200


@dataclass
class Account:
    """What consumers see, and what the decision log says, after all drivers have ended."""

    found: Found
    decisions: int = 0
    recoveries: int = 0
    lost_decisions: int = 0
    # The largest number of partitions of a write with `delivery=effectivelyOnce`.
    partitions: int = 0

    def __str__(self) -> str:
        return (
            f"{self.found.rows} rows, {self.found.messages} visible, findings {self.found.counts}; "
            f"{self.decisions} decisions, {self.recoveries} recoveries, {self.lost_decisions} decisions did not count"
        )


class Job:
    """The rows of one transactional id, and the drivers that write them. Call `close` at the end.

    A write has `rows` rows. It is a micro-batch, or with `batch` a batch write with a ``writeId``. With `source`, the
    rows are messages of that topic. With `connect`, the drivers are clients of a server of Spark Connect.
    """

    def __init__(
        self,
        cluster: LocalCluster,
        topic: str,
        folder: Path,
        *,
        rows: int,
        batch: bool = False,
        source: str | None = None,
        connect: bool = False,
        restarts: int = 20,
        **options: str,
    ) -> None:
        self.cluster = cluster
        self.topic = topic
        self.writes = 0
        self._folder = folder
        self.rows = rows
        self._batch = batch
        self._source = source
        self._connect = connect
        self._restarts = restarts
        self._id = f"job-{topic}"
        self._options = {
            "nameServer": cluster.name_server,
            "topic": topic,
            "delivery": "exactlyOnce",
            "transactionalId": self._id,
            **options,
        }
        self._watchdog = Watchdog()
        self.drivers: list[Driver] = []
        self._servers: list[Driver] = []
        self._remote: str | None = None
        for name in ("in", "written"):
            (folder / name).mkdir()

    def feed(self, writes: int) -> None:
        """Add the rows of some writes."""
        for write in range(self.writes, self.writes + writes):
            lines = [f"{number:0{_DIGITS}}" for number in range(write * self.rows, (write + 1) * self.rows)]
            if self._source is None:
                draft = self._folder / "draft"
                draft.write_text("".join(f"{line}\n" for line in lines))
                draft.rename(self._folder / "in" / f"{write:05}.txt")
            else:
                self._send(lines, self._source)
        self.writes += writes

    def _send(self, lines: list[str], topic: str) -> None:
        """Send each line once: no request is repeated."""
        timeout = int(PATIENCE * 1000)
        once: dict[str, Any] = {"send_msg_timeout": timeout, "retry_times_when_send_failed": 0}
        with Producer("source", name_server=self.cluster.name_server, **once) as producer:
            # The size of usual rows, so that a write takes a while.
            table = pa.table({"body": [line.ljust(_WIDTH) for line in lines], "keys": lines})
            producer.send_arrow(table, topic, requireStoreOk=False, deliveryTimeoutMs=timeout)
        fed = int(lines[-1]) + 1
        await_messages(self.cluster.name_server, topic, fed)
        held = messages_in(self.cluster.name_server, topic)
        assert held == fed, f"the source has {held} messages of {fed} rows"

    def complete(self) -> None:
        """Let the drivers end after the last write."""
        (self._folder / "complete").touch()

    @property
    def written(self) -> int:
        """The number of writes that Spark has noted as complete."""
        folder = self._folder / ("written" if self._batch else "checkpoint/commits")
        return sum(1 for _ in folder.glob("[0-9]*"))

    def start(
        self,
        *,
        hold: Mapping[int, int] | None = None,
        seconds: float = PATIENCE,
        fence: bool = True,
        restarts: int | None = None,
    ) -> Driver:
        """Start a driver.

        `hold` maps writes to numbers of requests. Their first commit waits before that request for `go`, or `seconds`.
        """
        arguments = {
            "folder": str(self._folder),
            "batch": self._batch,
            "restarts": self._restarts if restarts is None else restarts,
            "options": self._options,
            "conf": self._conf,
            "source": self._source_options,
        }
        environ = dict(os.environ)
        if hold or not fence:
            held = {self._name(write): requests for write, requests in (hold or {}).items()}
            settings = {"folder": str(self._folder), "hold": held, "seconds": seconds, "fence": fence}
            environ["HELD_COMMITS"] = json.dumps(settings)
            paths = [str(PROGRAMS / "held_commits"), environ.get("PYTHONPATH", "")]
            environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        server = self._running_server() if self._connect else None
        output = self._folder / f"driver-{len(self.drivers)}.out"
        command = [sys.executable, str(PROGRAMS / "exactly_once.py"), json.dumps({**arguments, "remote": self._remote})]
        self.drivers.append(Driver(command, environ, output, self._watchdog, server))
        return self.drivers[-1]

    @property
    def _conf(self) -> dict[str, str]:
        """The configuration of Spark: two tasks at once, and two for a file."""
        return {
            "spark.master": "local[2,2]",
            "spark.ui.enabled": "false",
            "spark.driver.memory": "512m",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
            "spark.log.level": "ERROR",
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.files.openCostInBytes": "0",
            "spark.sql.files.maxPartitionBytes": str(self.rows * (_DIGITS + 1) // 2 + 1),
            "spark.sql.streaming.pollingDelay": "100ms",
        }

    @property
    def _source_options(self) -> dict[str, Any] | None:
        if self._source is None:
            return None
        return {
            "nameServer": self.cluster.name_server,
            "topic": self._source,
            "startingOffsets": "earliest",
            **at_most(self.rows),
        }

    def _running_server(self) -> Driver:
        if not self._servers or not self._servers[-1].is_alive:
            output = self._folder / f"server-{len(self._servers)}.out"
            server, self._remote = connect_server(self._conf, output, self._watchdog)
            self._servers.append(server)
        return self._servers[-1]

    def await_held(self, write: int, driver: Driver) -> None:
        """Wait until a commit is held."""
        assert self._is_held(write, driver), driver.tail()

    def start_held(self, write: int, requests: int, *, fence: bool = True) -> Driver:
        """Start a driver that tries its writes once, and return it when it holds a commit."""
        while True:
            driver = self.start(hold={write: requests}, restarts=0, fence=fence)
            if self._is_held(write, driver):
                return driver
            # On a slow machine the deadline is over before the commit.
            assert "leaves no time for the commit" in driver.tail(), driver.tail()
            self._options["transactionTimeoutMs"] = str(2 * self.timeout_ms)

    @property
    def timeout_ms(self) -> int:
        """The present `transactionTimeoutMs`."""
        return int(self._options["transactionTimeoutMs"])

    def _is_held(self, write: int, driver: Driver) -> bool:
        """Wait until a commit is held, and return whether it is; false if the driver ends before."""
        marker = self._folder / f"held-{self._name(write)}"
        wait_for(lambda: marker.exists() or not driver.is_alive)
        return marker.exists()

    def go(self, write: int) -> None:
        """Let a held commit continue."""
        (self._folder / f"go-{self._name(write)}").touch()

    def finish(self, driver: Driver) -> None:
        """Wait until a driver has written the last row, and restart it if it fails."""
        self.complete()
        while driver.wait(lambda: self.written) != 0:
            driver.check()
            driver = self.start()

    def account(self, java: Java) -> Account:
        """Compare the topic with the rows of all writes, and count what the log says."""
        # With `delivery=exactlyOnce` each attempt has other bodies, which end with its id.
        settings = {"variant": rf":\d{{{_DIGITS}}} (\w+)"} if self._options["delivery"] == "exactlyOnce" else {}
        identity = [rf":(\d{{{_DIGITS}}}) \w+" if settings else r":(\d+).*"]
        account = Account(audit(java, self.cluster.name_server, self._given(), identity=identity, **settings))
        decided: set[tuple[str, int]] = set()
        for record in self.records():
            if record["kind"] == "decision":
                key = record["write"], record["round"]
                account.lost_decisions += key in decided
                decided.add(key)
        account.decisions = len(decided)
        account.recoveries = sum(round_ > 1 for _, round_ in decided)
        begun = Counter(
            (record["write"], record["partition"]) for record in self.records() if record["kind"] == "begun"
        )
        account.recoveries += sum(times - 1 for times in begun.values())
        account.partitions = max((partition + 1 for _, partition in begun), default=0)
        return account

    def _given(self) -> Iterator[Row]:
        for number in range(self.writes * self.rows):
            line, unit = f"{number:0{_DIGITS}}", str(number // self.rows)
            body = None if self._options["delivery"] == "exactlyOnce" else f"{line} any".encode()
            if self._source is None:
                yield Row(self.topic, line, body, unit=unit)
            else:
                yield Row(self.topic, line, line.ljust(_WIDTH).encode(), keys=line)

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the records of the decision log."""
        messages = read_topic(self.cluster.name_server, LOG)
        for message in messages:
            if message.tags != "manifest" and message.body.startswith(b"{"):
                record = json.loads(message.body)
                # Effectively-once writes have a log for each topic.
                if record["id"].partition("#")[0] == self._id:
                    yield {**record, "stored": message.store_timestamp}

    def phases(self, times: Iterable[float]) -> Counter[str]:
        """Count times (epoch seconds) by what an effectively-once write was doing then, as its log says."""
        steps, attempts, step = [(0.0, "plan")], Counter[tuple[str, int]](), "plan"
        for record in sorted(self.records(), key=lambda record: int(record["stored"])):
            if record["kind"] == "begun":
                key = record["write"], record["partition"]
                attempts[key] += 1
                step = "rows" if attempts[key] == 1 else "fence"
            elif record["kind"] == "home":
                # Both an attempt that has to read rows, and the end of a write, store these records.
                step = {"fence": "recovery", "rows": "end"}.get(step, step)
            elif record["kind"] == "done":
                step = "commit and plan"
            steps.append((record["stored"] / 1000, step))
        return Counter([step for at, step in steps if at <= time_][-1] for time_ in times)

    def close(self) -> None:
        """End all drivers."""
        for driver in (*self.drivers, *self._servers):
            driver.end()
        self._watchdog.release()

    def _name(self, write: int) -> str:
        return f"{write:05}" if self._batch else str(write)


class Growth:
    """Watches how many messages topics have.

    `over` is asked all the time, and ends a wait. `why` says more if the messages do not come.
    """

    def __init__(self, cluster: LocalCluster, over: Callable[[], bool], why: Callable[[], str] = str) -> None:
        self._transport = RemotingTransport([cluster.name_server])
        self._over = over
        self._why = why

    def wait(self, topic: str) -> None:
        """Return as soon as a topic has more messages, or it is over."""
        deadline, before = time.monotonic() + PATIENCE, None
        while not self._over():
            assert time.monotonic() < deadline, f"no message in {topic} after {PATIENCE:g} s: {self._why()}"
            with contextlib.suppress(RocketMQError):
                info = publish_info_of(topic, self._transport.query_route(topic, 1.0))
                while time.monotonic() < deadline and not self._over():
                    now = sum(
                        self._transport.max_offset(queue, info.addresses[queue.broker_name], 0.5)
                        for queue in info.queues
                    )
                    if before is not None and now > before:
                        return
                    before = now
                    time.sleep(0.01)
            time.sleep(0.05)

    def close(self) -> None:
        self._transport.close()


def _parent(process: psutil.Process) -> int:
    """Return the id of a process's parent; 0 if the process has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return int(process.ppid())
    return 0


class Chaos:
    """Injects faults at random times into the drivers of a job and into its brokers, until `faults` are done.

    With `kills`, the faults are SIGKILLs of the driver, its JVM, a Python worker and a broker in turn, and no commit is
    held. Equal seeds give equal faults, at equal delays after the events that they wait for.
    """

    def __init__(self, job: Job, seed: int, *, kills: bool = False) -> None:
        self.job = job
        self.faults: Counter[str] = Counter()
        # When faults began, epoch seconds.
        self.times: list[float] = []
        self.restarts = 0
        self._seed = seed
        self._kills = kills
        self._rng = random.Random(seed)
        # A commit takes milliseconds, so it waits at a random row for a fault.
        self._hold = {} if kills else {write: self._rng.randint(1, job.rows) for write in range(_MOST_WRITES)}
        self._driver = self._start()
        self._growth = Growth(job.cluster, self._feed, lambda: self._driver.tail())
        # A fault returns False if no process ran that it could hit.
        self._faults: dict[str, tuple[int, Callable[[], bool | None]]] = {
            "driver killed": (3, lambda: self._driver.kill()),
            "driver killed, workers left": (3, lambda: self._driver.kill(workers=False)),
            "driver paused, second driver takes over": (3, self._take_over),
            "JVM paused": (2, lambda: self._pause(self._driver.jvms)),
            "Python worker killed": (4, self._kill_worker),
            "Python workers paused": (3, lambda: self._pause(self._driver.workers)),
            "broker paused": (3, self._pause_broker),
            "broker killed": (2, self._kill_broker),
        }
        self._killed: dict[str, Callable[[], bool | None]] = {
            "driver": self._kill_driver,
            "JVM": lambda: self._driver.kill_jvm(),
            "Python worker": self._kill_worker,
            "broker": self._kill_broker,
        }

    def run(self, faults: int, writes: int) -> None:
        """Inject at least `faults` faults while at least `writes` writes are done."""
        self.job.feed(3)
        while self.faults.total() < faults or (self.job.writes < writes and not self._kills):
            if not self._driver.is_alive:
                self._restart()
            self._fault()
        self._growth.close()
        self.job.feed(max(0, writes - self.job.writes))
        if not self._driver.is_alive:
            self._restart()
        self.job.finish(self._driver)

    def _feed(self) -> bool:
        """Have some writes wait for the driver, and return whether it has ended."""
        if self.job.writes < self.job.written + 3:
            self.job.feed(1)
        return not self._driver.is_alive

    def _fault(self) -> None:
        number = self.faults.total()
        # What is drawn must not depend on what was drawn before, because that depends on the speed of the processes.
        self._rng = random.Random(f"{self._seed}/{number}")
        # A record of the log: attempts, recoveries, ends of writes, decisions. Commits make rows visible.
        kinds = ["record", "record", "row", "row", "any"] if self._kills else ["record", "row", "row", "row", "any"]
        moment = self._rng.choice(kinds)
        name, fault = self._next_kill(number) if self._kills else self._next_fault()
        short, long = self._rng.uniform(0, 0.1), self._rng.uniform(0, _HELD)
        if self._kills and moment != "any" and self._rng.random() < 0.5:
            # Other kills hit a write that has met one before.
            self._await_write()
        if moment == "any":
            # A driver takes about 10 s to start, and a recovery waits as long for the fence.
            time.sleep(self._rng.uniform(0, 20 if self._kills else 5))
        else:
            self._growth.wait(LOG if moment == "record" else self.job.topic)
            time.sleep(self._rng.choice([0, 0, short, long] if self._kills else [0, short, long]))
        # A broker that dies without a driver proves nothing.
        if not self._driver.is_alive:
            return
        began = time.time()
        if fault() is False:
            return
        self.times.append(began)
        self.faults[name] += 1
        print(f"{self.faults.total()}: {name} ({moment}), {self.job.written} writes done", flush=True)

    def _await_write(self) -> None:
        """Wait until a write is done."""
        done, deadline = self.job.written, time.monotonic() + PATIENCE
        while not self._feed() and self.job.written == done:
            assert time.monotonic() < deadline, f"no write done after {PATIENCE:g} s: {self._driver.tail()}"
            time.sleep(0.05)

    def _next_fault(self) -> tuple[str, Callable[[], bool | None]]:
        names = list(self._faults)
        name = self._rng.choices(names, [self._faults[one][0] for one in names])[0]
        return name, self._faults[name][1]

    def _next_kill(self, number: int) -> tuple[str, Callable[[], bool | None]]:
        """Return one of the four kinds in turn, in an order of the seed."""
        turn, place = divmod(number, len(self._killed))
        name = random.Random(f"{self._seed}/{turn}").sample(list(self._killed), len(self._killed))[place]
        return name, self._killed[name]

    def _start(self) -> Driver:
        return self.job.start(hold=self._hold, seconds=_HELD)

    def _restart(self) -> None:
        self._driver.check()
        self.restarts += 1
        self._driver = self._start()

    def _seconds(self) -> float:
        """Return a length of a pause: most are short, some exceed the timeout."""
        late = TIMEOUT_MS / 1000
        return self._rng.choice([self._rng.uniform(0, 3), self._rng.uniform(0, 3), self._rng.uniform(late, late + 3)])

    def _pause(self, find: Callable[[], list[psutil.Process]]) -> None:
        paused = pause(find)
        time.sleep(self._seconds())
        resume(paused)

    def _kill_driver(self) -> bool:
        """Kill the program. Its JVM may end at the same time, or go on beside the next driver for a moment."""
        return self._driver.kill() if self._rng.random() < 0.5 else self._driver.kill_program()

    def _kill_worker(self) -> bool:
        wait_for(lambda: bool(self._driver.workers()) or not self._driver.is_alive)
        if not (workers := self._driver.workers()):
            return False
        # Children of other workers run tasks, or wait for the next one.
        tasks = [worker for worker in workers if _parent(worker) in {one.pid for one in workers}]
        killed = tasks if tasks and self._rng.random() < 0.7 else [self._rng.choice(workers)]
        return True in [send(worker, signal.SIGKILL) for worker in killed]

    def _take_over(self) -> None:
        old = self._driver
        paused = old.pause()
        self._driver = self._start()
        self.restarts += 1
        self._growth.wait(self._rng.choice([LOG, self.job.topic]))
        time.sleep(self._rng.uniform(0, 3))
        resume(paused)
        # Both drivers write the same micro-batches now.
        time.sleep(self._rng.uniform(0, 5))
        old.kill(workers=self._rng.random() < 0.5)

    def _pause_broker(self) -> None:
        broker = self._rng.choice(self.job.cluster.brokers)
        broker.pause()
        time.sleep(self._seconds())
        broker.resume()

    def _kill_broker(self) -> None:
        broker = self._rng.choice(self.job.cluster.brokers)
        broker.kill()
        if self._rng.random() < 0.3:
            time.sleep(self._seconds())
        broker.restart()
