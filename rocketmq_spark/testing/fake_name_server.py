"""A name server in pure Python, without sockets: keeps the routes of brokers and of tests, and answers clients.

`register` replaces the routes by those of the brokers that run. Follows ``RouteInfoManager.java`` and
``ClientRequestProcessor.java``.
"""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Final

from rocketmq_spark.model.names import AUTO_CREATE_TOPIC
from rocketmq_spark.model.route import MASTER_ID, PERM_WRITE, BrokerData, QueueData, TopicRouteData
from rocketmq_spark.protocol.remoting.codes import RequestCode, ResponseCode
from rocketmq_spark.protocol.remoting.command import RemotingCommand
from rocketmq_spark.testing.fake_broker import FakeBroker, Timers
from rocketmq_spark.testing.fake_replies import KEPT_REQUESTS, Channel, Replies, ReplyOf, response_to

# Below V4_9_4 a name server writes numbers as keys without quotes, unless the client asks for standard JSON.
_STANDARD_JSON_SINCE: Final = 401


class FakeNameServer:
    """One name server. All methods may be called from any thread.

    With `frozen` it keeps the routes that it has, whatever brokers report. With `support_acting_master` it lists the
    first slave of a broker without a master as its master. `routes` has routes that replace those of the brokers, by
    topic. `play` sets the replies to the next requests, `always` those to all further ones, by request
    code (None: of any code). `requests` has the last 10,000 requests.
    """

    def __init__(self, address: str, timers: Timers) -> None:
        self.address = address
        self.timers = timers
        self.frozen = False
        self.support_acting_master = False
        self.running = True
        self.routes: dict[str, TopicRouteData] = {}
        self.requests: deque[RemotingCommand] = deque(maxlen=KEPT_REQUESTS)
        self._replies = Replies()
        self.always, self.played = self._replies.always, self._replies.played
        # What brokers said of themselves: their addresses and their topics, by broker name.
        self._brokers: dict[str, BrokerData] = {}
        self._topics: dict[str, dict[str, QueueData]] = {}
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        state = "stopped" if not self.running else "frozen" if self.frozen else "running"
        return f"<FakeNameServer {self.address} {state}, brokers {', '.join(self._brokers) or 'none'}>"

    def play(self, *replies: ReplyOf, code: int | None = None, times: int = 1) -> None:
        """Add replies to the next requests, or to those with a code, `times` times in all."""
        with self._lock:
            self._replies.add(replies, code, times)

    def register(self, brokers: Iterable[FakeBroker]) -> None:
        """Replace what the name server knows by the brokers that run; no change if it is `frozen` or stopped."""
        with self._lock:
            if self.frozen or not self.running:
                return
            self._brokers, self._topics = {}, {}
            for broker in brokers:
                if broker.running:
                    known = self._brokers.get(broker.name)
                    if broker.is_master or known is None:
                        self._topics[broker.name] = dict(_queues_of(broker))
                    addresses = {**(known.broker_addrs if known else {}), broker.broker_id: broker.address}
                    self._brokers[broker.name] = BrokerData(broker.name, addresses, broker.storage.cluster)

    def receive(self, command: RemotingCommand, channel: Channel) -> None:
        """Answer a request."""
        with self._lock:
            if not self.running:
                return
            self.requests.append(command)
            reply = self._replies.take(command, int(command.code), None)
            if reply is not None:
                self._replies.play(reply, command, channel, lambda: self._answer(command), self.timers.call_later)
            elif not command.is_oneway:
                channel.send(self._answer(command))

    def disconnected(self, channel: Channel) -> None:
        """Do nothing: a name server keeps no state of clients."""

    def route(self, topic: str) -> TopicRouteData | None:
        """Return the route of a topic, None if no registered broker has it."""
        if topic in self.routes:
            return self.routes[topic]
        with self._lock:
            names = sorted(name for name, topics in self._topics.items() if topic in topics)
            queues = tuple(self._topics[name][topic] for name in names)
            return TopicRouteData(queues, tuple(self._brokers[name] for name in names)) if names else None

    def topics(self) -> list[str]:
        """Return the names of all topics, also of the internal topics that brokers register."""
        return sorted(self.routes.keys() | itertools.chain.from_iterable(self._topics.values()))

    def _answer(self, command: RemotingCommand) -> RemotingCommand:
        if command.code == RequestCode.GET_ROUTEINFO_BY_TOPIC:
            topic = command.ext_fields.get("topic")
            if topic is None:
                return response_to(command, ResponseCode.SYSTEM_ERROR, "the custom field <topic> is null")
            route = self.route(topic)
            if route is not None and self.support_acting_master:
                route = _with_acting_masters(route)
            if route is None:
                remark = f"No topic route info in name server for the topic: {topic}"
                return response_to(command, ResponseCode.TOPIC_NOT_EXIST, remark)
            standard = command.ext_fields.get("acceptStandardJsonOnly") == "true"
            quoted = standard or command.version >= _STANDARD_JSON_SINCE
            return response_to(command, body=encode_route(route, quoted=quoted))
        if command.code == RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER:
            return response_to(command, body=json.dumps({"topicList": self.topics()}).encode())
        if command.code == RequestCode.GET_BROKER_CLUSTER_INFO:
            return response_to(command, body=self._cluster_info())
        remark = f" request type {int(command.code)} not supported"
        return response_to(command, ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark)

    def _cluster_info(self) -> bytes:
        brokers = dict(self._brokers)
        for route in self.routes.values():
            brokers |= {data.broker_name: data for data in route.broker_datas}
        clusters: dict[str, list[str]] = {}
        for name, data in brokers.items():
            clusters.setdefault(data.cluster, []).append(name)
        table = ",".join(f"{json.dumps(name)}:{_broker_json(data, quoted=False)}" for name, data in brokers.items())
        return f'{{"brokerAddrTable":{{{table}}},"clusterAddrTable":{json.dumps(clusters)}}}'.encode()


def encode_route(route: TopicRouteData, *, quoted: bool = True) -> bytes:
    """Return the body of a route's answer; without `quoted`, numbers are keys without quotes, as fastjson writes."""
    brokers = ",".join(_broker_json(broker, quoted=quoted) for broker in route.broker_datas)
    queues = [
        {
            "brokerName": data.broker_name,
            "perm": data.perm,
            "readQueueNums": data.read_queue_nums,
            "topicSysFlag": data.topic_sys_flag,
            "writeQueueNums": data.write_queue_nums,
        }
        for data in route.queue_datas
    ]
    others: dict[str, Any] = {"filterServerTable": {}, "queueDatas": queues}
    if route.order_topic_conf is not None:
        others["orderTopicConf"] = route.order_topic_conf
    if route.static_topic:
        others["topicQueueMappingByBroker"] = {data.broker_name: {"scope": "__global__"} for data in route.queue_datas}
    return f'{{"brokerDatas":[{brokers}],{json.dumps(others)[1:]}'.encode()


def _broker_json(broker: BrokerData, *, quoted: bool) -> str:
    addresses = json.dumps(dict(broker.broker_addrs))
    if not quoted:
        addresses = re.sub(r'"(\d+)":', r"\1:", addresses)
    named = f'"brokerName":{json.dumps(broker.broker_name)},"cluster":{json.dumps(broker.cluster)}'
    return f'{{"brokerAddrs":{addresses},{named},"enableActingMaster":{json.dumps(broker.slave_may_act)}}}'


def _with_acting_masters(route: TopicRouteData) -> TopicRouteData:
    """Return what a name server answers while masters are down (``RouteInfoManager.pickupTopicRouteData``)."""
    brokers, closed = [], set()
    for broker in route.broker_datas:
        addresses = dict(broker.broker_addrs)
        if MASTER_ID not in addresses:
            addresses[MASTER_ID] = addresses.pop(min(addresses))
            closed.add(broker.broker_name)
        brokers.append(replace(broker, broker_addrs=addresses, slave_may_act=True))
    # Slaves register their topics without the permission to write.
    queues = [
        replace(data, perm=data.perm & ~PERM_WRITE) if data.broker_name in closed else data
        for data in route.queue_datas
    ]
    return replace(route, broker_datas=tuple(brokers), queue_datas=tuple(queues))


def _queues_of(broker: FakeBroker) -> Iterator[tuple[str, QueueData]]:
    # A copy: another thread may create a topic.
    for topic, settings in list(broker.storage.topics.items()):
        if topic == AUTO_CREATE_TOPIC and not broker.settings.auto_create_topic:
            continue
        nums = settings.read_queue_nums, settings.write_queue_nums
        # A broker without write permission registers its topics without it.
        perm = settings.perm & broker.settings.permission if broker.settings.permission != 6 else settings.perm
        yield topic, QueueData(broker.name, *nums, perm, settings.topic_sys_flag)
