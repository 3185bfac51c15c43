"""Which name server is asked for a route, and what the answers of several come to.

Rule 1: each is asked at most once, with an equal share of the time left, until one knows the topic or refuses to tell.
Rule 2: that one is asked first the next time. The first of all is drawn, so that many workers spread over the servers.
Rule 3: one that knows no such topic, or is not ready, has no last word: it may just have been restarted, and be empty
        until brokers have registered again (every 30 s). Java believes the first that answers (spec/producer.md 10.7).
"""

from __future__ import annotations

import random as random_module
from collections.abc import Callable, Sequence
from typing import Final

from rocketmq_spark.errors import (
    MQBrokerException,
    MQClientException,
    RemotingException,
    RemotingTimeoutException,
    TopicRouteStaleException,
)
from rocketmq_spark.route_data import TopicRouteData
from rocketmq_spark.transport.failures import to_tell
from rocketmq_spark.wire.codes import code_name

# ClientErrorCode.NO_NAME_SERVER_EXCEPTION.
_NO_NAME_SERVER: Final = 10004

_CHECK: Final = (
    "check nameServer: it is the addresses of name servers, with port 9876 unless set, not of brokers or proxies; and "
    "that they run, and can be reached from here"
)

AskOne = Callable[[str, float], TopicRouteData]


class NameServers:
    """The name servers of one transport.

    Parameters
    ----------
    addresses : sequence of str
        ``host:port`` each.
    random : random.Random
        Draws the one to start with.
    clock : callable
        Seconds.
    """

    def __init__(self, addresses: Sequence[str], random: random_module.Random, clock: Callable[[], float]) -> None:
        self.addresses = tuple(dict.fromkeys(addresses))
        self._clock = clock
        self._good = random.randrange(len(self.addresses)) if self.addresses else 0

    def route(self, topic: str, timeout: float, ask: AskOne) -> TopicRouteData:
        """Return a topic's route.

        Parameters
        ----------
        topic : str
        timeout : float
            Seconds for all of them together.
        ask : callable
            ``(address, seconds) -> TopicRouteData``: asks one.

        Raises
        ------
        MQClientException
            There is no name server (code 10004).
        TopicRouteStaleException
            All that answered do not know the topic; the text names them, and those that did not answer.
        MQBrokerException
            One refuses to tell; or one is not ready, and none of the others knows the topic.
        RemotingException
            None of them answered; the text names each and why.
        """
        addresses = self.addresses
        if not addresses:
            raise MQClientException(
                f"looking up the route of topic {topic}: no name server is set; set the option nameServer",
                _NO_NAME_SERVER,
            )
        deadline = self._clock() + timeout
        start, failures = self._good, []
        unknown: list[TopicRouteStaleException] = []
        last: RemotingException | None = None
        busy: MQBrokerException | None = None
        for turn in range(len(addresses)):
            index = (start + turn) % len(addresses)
            share = (deadline - self._clock()) / (len(addresses) - turn)
            if share <= 0:
                failures.append(f"{addresses[index]}: not asked, no time was left")
                continue
            try:
                route = ask(addresses[index], share)
            except TopicRouteStaleException as exc:
                if not unknown:
                    # While none knows it, one that answers is better than one that does not.
                    self._good = index
                unknown.append(exc)
            except MQBrokerException as exc:
                if not exc.retriable:
                    self._good = index
                    raise
                failures.append(f"{addresses[index]}: {exc}")
                busy = exc
            except RemotingException as exc:
                failures.append(f"{addresses[index]}: {exc}")
                last = to_tell(last, exc)
            else:
                self._good = index
                return route
        if unknown and busy is None:
            raise _unknown(topic, unknown, failures) from unknown[0]
        failures += [f"{exc.broker_addr}: {exc}" for exc in unknown]
        within = f" within {round(timeout, 3):g} s" if self._clock() >= deadline else ""
        text = f"no name server gave the route of topic {topic}{within}: {'; '.join(failures)}"
        if last is None or last.retriable:
            # What fails for good has said itself what to change.
            text += f" ({_CHECK})"
        if busy is not None:
            raise type(busy)(text, busy.response_code, busy.remark, busy.broker_addr) from busy
        kind = RemotingTimeoutException if last is None else type(last)
        raise kind(text) from last


def silence(exc: TopicRouteStaleException, name_servers: Sequence[str]) -> str:
    """Return which name servers did not answer where all that did know no such topic, "" if all answered."""
    answering = exc.broker_addr.split(", ")
    silent = ", ".join(one for one in name_servers if one not in answering)
    return f", while {silent} did not answer" if silent else ""


def _unknown(
    topic: str, unknown: Sequence[TopicRouteStaleException], failures: Sequence[str]
) -> TopicRouteStaleException:
    """Return the error of a topic that none of those that answered knows."""
    asked, code = ", ".join(exc.broker_addr for exc in unknown), unknown[0].response_code
    # Behind the first line servers tell where to read about errors.
    told = unknown[0].remark.partition("\n")[0] or "(no remark)"
    silent = f"; without an answer: {'; '.join(failures)}" if failures else ""
    text = f"looking up the route of topic {topic}: {asked} answered {code} {code_name(code)}: {told}{silent}"
    hint = "create the topic, or check its name and the nameServer option"
    return TopicRouteStaleException(f"{text} ({hint})", code, f"{asked}: {told}{silent}", asked)
