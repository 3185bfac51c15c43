"""A slave of a local cluster's first broker."""

from __future__ import annotations

import contextlib
import shutil

from rocketmq_spark.cluster import Broker, LocalCluster
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.message import MessageQueue
from rocketmq_spark.transport.remoting import RemotingTransport
from tests.conftest import QUICK_READS
from tests.waiting import wait_for
from tests.writes import set_config


class Slave:
    """A slave that follows its master once it is started.

    Parameters
    ----------
    cluster : LocalCluster
    topic : str
        The topic that it is to have; its master has it.
    properties : str or int
        Properties in which it must equal its master, such as ``mappedFileSizeCommitLog``.
    """

    def __init__(self, cluster: LocalCluster, topic: str, **properties: str | int) -> None:
        self._master = cluster.brokers[0]
        self._topic = topic
        self._transport = RemotingTransport([cluster.name_server])
        role = {"brokerRole": "SLAVE", "brokerId": 1, "slaveReadEnable": "true"}
        given = {"brokerName": self._master.name, **QUICK_READS, **role, **properties}
        assert cluster._site is not None
        self.broker = Broker(cluster._site, "slave", {name: str(value) for name, value in given.items()})
        # A slave asks its master for topics a minute after its start.
        shutil.copytree(self._master.folder / "store" / "config", self.broker.folder / "store" / "config")

    def launch(self) -> None:
        """Return when the name server knows it. It begins with the file that its master is at."""
        self.broker.launch()
        wait_for(self._is_known)

    def start(self) -> None:
        """Return when it follows its master: it will have all messages from now on."""
        self.launch()
        wait_for(lambda: self._has(self._master.name, 1))

    def catch_up(self) -> None:
        """Return when it has all of the topic."""
        wait_for(lambda: self._has(self._topic, 2))

    def end(self) -> None:
        """Leave nothing of it."""
        self._transport.close()
        self.broker.kill()
        self.broker.remove_all_but_logs()

    def _has(self, topic: str, queues: int) -> bool:
        def ends(address: str) -> list[int]:
            of_it = [MessageQueue(topic, self._master.name, number) for number in range(queues)]
            return [self._transport.max_offset(queue, address, 5.0) for queue in of_it]

        return ends(self.broker.address) == ends(self._master.address)

    def _is_known(self) -> bool:
        with contextlib.suppress(RocketMQError):
            # That makes it register at once.
            set_config(self.broker, brokerPermission=6)
            route = self._transport.query_route(self._topic, 5.0)
            return any(self.broker.address in data.broker_addrs.values() for data in route.broker_datas)
        return False
