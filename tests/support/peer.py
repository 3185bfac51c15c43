"""A TCP server for tests of the transport; a test decides what it answers, correct or not.

`Peer` runs one function per accepted connection, in a new thread. The function reads and answers by a `Session`::

    def answer_backwards(session):
        first, second = session.read(), session.read()
        session.answer(second)
        session.answer(first)

    with Peer(answer_backwards) as peer:
        transport.send(request_to(peer.address), ...)

The n-th connection runs the n-th function; later connections run the last. `BrokerPeer` plays `Reply`s like the
scripted transport, and keeps the messages that it stored.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping

from rocketmq_spark.errors import MQBrokerException, RemotingCommandException
from rocketmq_spark.model.message import EncodedBatch, Message, MessageQueue, SendRequest
from rocketmq_spark.model.route import QueueData, TopicRouteData
from rocketmq_spark.model.send_result import EndTransaction, TransactionCheck
from rocketmq_spark.protocol.remoting.codes import RequestCode, ResponseCode
from rocketmq_spark.protocol.remoting.command import FrameBuffer, RemotingCommand
from rocketmq_spark.testing.scripted import Reply
from rocketmq_spark.testing.store import HALF_TOPIC, MessageStore
from rocketmq_spark.transport.tls_probe import REMOTING_HELLO
from tests.support.frames import SerializeType, encode_command
from tests.support.processes import PATIENCE

_ABOUT_A_QUEUE = (
    RequestCode.GET_MAX_OFFSET,
    RequestCode.GET_MIN_OFFSET,
    RequestCode.SEARCH_OFFSET_BY_TIMESTAMP,
    RequestCode.GET_EARLIEST_MSG_STORETIME,
)

_ABOUT_A_BROKER = (
    RequestCode.GET_BROKER_CLUSTER_INFO,
    RequestCode.GET_BROKER_RUNTIME_INFO,
    RequestCode.GET_BROKER_CONFIG,
    RequestCode.GET_ALL_TOPIC_CONFIG,
    RequestCode.GET_TOPIC_CONFIG,
)

# In a ClientHello (RFC 7301 section 3.1): the remoting protocol's own has no such offer.
_OFFERS_H2 = b"\x00\x03\x02h2"
# A client sends at once. If no byte arrives in this time (seconds), the connection's function starts.
_FIRST_BYTES_WITHIN = 0.1


def address_of(sock: socket.socket) -> str:
    """``127.0.0.1:port`` of a listening socket."""
    return f"127.0.0.1:{sock.getsockname()[1]}"


def refused_address() -> str:
    """Return an address that refuses connections."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return address_of(listener)


class Session:
    """One accepted connection."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.frames = FrameBuffer()

    def read(self) -> RemotingCommand:
        """Return the client's next command; EOFError when it hangs up."""
        while (command := self.frames.take()) is None:
            data = self.sock.recv(1 << 16)
            if not data:
                raise EOFError
            self.frames.feed(data)
        return command

    def read_bytes(self, count: int) -> None:
        """Receive and drop `count` bytes."""
        while count:
            count -= len(self.sock.recv(min(count, 1 << 16)))

    def encoded(
        self,
        request: RemotingCommand,
        code: int = 0,
        ext_fields: Mapping[str, str] | None = None,
        body: bytes = b"",
        remark: str = "",
        serialize_type: SerializeType = SerializeType.JSON,
    ) -> bytes:
        """Return the frame that answers a request."""
        answer = RemotingCommand(code, request.opaque, ext_fields or {}, body, 1, remark, "JAVA", 513)
        return encode_command(answer, serialize_type)

    def answer(self, request: RemotingCommand, *args: object, **kwargs: object) -> None:
        """Answer a request; arguments as for `encoded`."""
        self.sock.sendall(self.encoded(request, *args, **kwargs))  # type: ignore[arg-type]

    def answer_send(self, request: RemotingCommand, code: int = 0, offset: int = 0) -> None:
        """Acknowledge a send."""
        self.answer(request, code, stored_fields(request, offset))

    def serve(self) -> None:
        """Acknowledge every send until the client hangs up."""
        while True:
            self.answer_send(self.read())

    def wait_for_hangup(self) -> None:
        """Return when the client has closed the connection."""
        while self.sock.recv(1 << 16):
            pass

    def reset(self) -> None:
        """Close with a RST instead of a FIN."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.sock.close()


def stored_fields(request: RemotingCommand, offset: int) -> dict[str, str]:
    """The ext fields of an acknowledgement."""
    return {"msgId": f"{offset:032X}", "queueId": request.ext_fields.get("e", "0"), "queueOffset": str(offset)}


class Peer:
    """A listening socket and the functions that its connections play."""

    def __init__(
        self,
        *scripts: Callable[[Session], object],
        host: str = "127.0.0.1",
        port: int = 0,
        backlog: int = 16,
        tls: ssl.SSLContext | None = None,
        answers_greetings: bool = False,
    ) -> None:
        self.scripts = scripts
        self.tls = tls
        self.answers_greetings = answers_greetings
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.listener = socket.create_server((host, port), family=family, backlog=backlog)
        self.port = self.listener.getsockname()[1]
        self.address = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"
        self.sessions: list[Session] = []
        self.failures: list[BaseException] = []
        self._threads: list[threading.Thread] = []
        self._stopped = False

    def __enter__(self) -> Peer:
        self._spawn(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        # Closing the listener would not wake accept(); a connection does.
        with contextlib.suppress(OSError), socket.create_connection(self.listener.getsockname()[:2], PATIENCE):
            pass
        for session in self.sessions:
            with contextlib.suppress(OSError):
                session.sock.shutdown(socket.SHUT_RDWR)
        for thread in list(self._threads):
            thread.join(PATIENCE)
        self.listener.close()
        if self.failures:
            raise self.failures[0]

    def _spawn(self, target: Callable[..., object], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            sock, _ = self.listener.accept()
            if self._stopped:
                sock.close()
                return
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not self.answers_greetings and self._is_greeting(sock):
                sock.close()
                continue
            session = Session(sock)
            script = self.scripts[min(len(self.sessions), len(self.scripts) - 1)]
            self.sessions.append(session)
            self._spawn(self._play, script, session)

    def _is_greeting(self, sock: socket.socket) -> bool:
        """Return whether a connection only probes this server for TLS; no function runs for it."""
        sock.settimeout(_FIRST_BYTES_WITHIN)
        try:
            first = sock.recv(2048, socket.MSG_PEEK)
        except OSError:
            first = b""
        sock.settimeout(None)
        return first == REMOTING_HELLO or (self.tls is None and _OFFERS_H2 in first)

    def _play(self, script: Callable[[Session], object], session: Session) -> None:
        try:
            with session.sock:
                if self.tls is not None:
                    session.sock = self.tls.wrap_socket(session.sock, server_side=True)
                with session.sock:
                    script(session)
        except (EOFError, OSError):
            pass  # the client hung up, as it may
        except BaseException as exc:
            self.failures.append(exc)


class BrokerPeer(Peer):
    """A name server and broker in one that plays `Reply`s; errors must be a broker's."""

    def __init__(
        self,
        routes: Mapping[str, TopicRouteData] | None = None,
        *replies: Reply,
        port: int = 0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(self._serve, port=port, tls=tls)
        self.routes = dict(routes or {})
        self.replies = deque(replies)
        self.requests: list[RemotingCommand] = []
        self.store = MessageStore()
        self.attributes: dict[str, dict[str, str]] = {}
        # The first offset that is left of a queue.
        self.expired: dict[MessageQueue, int] = {}
        self.figures: dict[str, str] = {}
        self.settings: dict[str, str] = {}
        self._asking: deque[bytes] = deque()
        self.stored: dict[MessageQueue, list[Message]] = self.store.queues

    def __enter__(self) -> BrokerPeer:
        super().__enter__()
        return self

    def _serve(self, session: Session) -> None:
        while True:
            try:
                request = session.read()
            except RemotingCommandException:
                return  # Another protocol, or TLS: a server hangs up.
            self.requests.append(request)
            while self._asking:
                session.sock.sendall(self._asking.popleft())
            frame = self._answer(session, request)
            if frame and not request.is_oneway:
                session.sock.sendall(frame)

    def _answer(self, session: Session, request: RemotingCommand) -> bytes:
        fields = request.ext_fields
        if request.code in (RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE):
            return self._answer_send(session, request)
        if request.code == RequestCode.GET_ROUTEINFO_BY_TOPIC:
            route = self.routes.get(fields["topic"])
            if route is None:
                return session.encoded(request, ResponseCode.TOPIC_NOT_EXIST, remark="No topic route info")
            return session.encoded(request, body=route_body(route))
        if request.code == RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER:
            return session.encoded(request, body=json.dumps({"topicList": sorted(self.routes)}).encode())
        if request.code == RequestCode.GET_CONSUMER_LIST_BY_GROUP:
            return self._answer_members(session, request)
        if request.code == RequestCode.PULL_MESSAGE:
            return self._answer_pull(session, request)
        if request.code in _ABOUT_A_QUEUE:
            return session.encoded(request, ext_fields=self._of_queue(request))
        if request.code == RequestCode.VIEW_MESSAGE_BY_ID:
            return self._answer_view(session, request)
        if request.code == RequestCode.END_TRANSACTION:
            self.store.end_transaction(end_of(request), time.time())
        if request.code in _ABOUT_A_BROKER:
            return session.encoded(request, body=self._of_broker(request))
        if request.code == RequestCode.UPDATE_AND_CREATE_TOPIC:
            self._create(fields)
            # A real broker reports it with code 0.
            return session.encoded(request, remark="not set any response code")
        return session.encoded(request)

    def _answer_send(self, session: Session, request: RemotingCommand) -> bytes:
        reply = self.replies.popleft() if self.replies else Reply()
        fields = request.ext_fields
        queue = MessageQueue(fields["b"], fields["n"], int(fields["e"]))
        offset, ids = 0, ""
        if reply.stored or (reply.stored is None and reply.error is None and not reply.silent):
            body, properties = bytes(request.body), fields.get("i", "")
            batch = EncodedBatch(
                *(queue.topic, (body,), 1, len(body)),
                fields["m"] == "true",
                properties,
                int(fields["h"]),
                int(fields["f"]),
            )
            sent = SendRequest(batch, queue, self.address, fields["a"], fields["c"], int(fields["d"]), int(fields["g"]))
            offset, ids = self.store.keep(sent, time.time())
        if reply.silent:
            return b""
        if reply.error is not None:
            assert isinstance(reply.error, MQBrokerException)
            return session.encoded(request, reply.error.response_code, remark=reply.error.remark)
        return session.encoded(request, reply.status.value, stored_fields(request, offset) | {"msgId": ids})

    def _of_broker(self, request: RemotingCommand) -> bytes:
        if request.code == RequestCode.GET_BROKER_CONFIG:
            return "\n".join(f"{name}={text}" for name, text in self.settings.items()).encode()
        if request.code == RequestCode.GET_BROKER_RUNTIME_INFO:
            return json.dumps({"table": self.figures}).encode()
        if request.code == RequestCode.GET_ALL_TOPIC_CONFIG:
            configs = {topic: {"attributes": self.attributes.get(topic, {})} for topic in self.routes}
            return json.dumps({"topicConfigTable": configs}).encode()
        if request.code == RequestCode.GET_TOPIC_CONFIG:
            return json.dumps({"attributes": self.attributes.get(request.ext_fields["topic"], {})}).encode()
        brokers = {data.broker_name: data for route in self.routes.values() for data in route.broker_datas}
        # As a name server writes it: numbers are keys without quotes.
        addresses = {
            name: ",".join(f"{number}:{json.dumps(address)}" for number, address in data.broker_addrs.items())
            for name, data in brokers.items()
        }
        addresses = {
            name: ",".join(f"{number}:{json.dumps(address)}" for number, address in data.broker_addrs.items())
            for name, data in brokers.items()
        }
        table = ",".join(
            f'"{name}":{{"brokerAddrs":{{{addresses[name]}}},"brokerName":"{name}","cluster":"{data.cluster}"}}'
            for name, data in brokers.items()
        )
        clusters: dict[str, list[str]] = {}
        for name, data in brokers.items():
            clusters.setdefault(data.cluster, []).append(name)
        return f'{{"brokerAddrTable":{{{table}}},"clusterAddrTable":{json.dumps(clusters)}}}'.encode()

    def _create(self, fields: Mapping[str, str]) -> None:
        """Have the topic on the brokers of any other."""
        brokers = next((route.broker_datas for route in self.routes.values()), ())
        reads, writes = int(fields["readQueueNums"]), int(fields["writeQueueNums"])
        queues = [QueueData(broker.broker_name, reads, writes, int(fields["perm"])) for broker in brokers]
        self.routes[fields["topic"]] = TopicRouteData(tuple(queues), brokers)
        told = fields.get("attributes", "").split(",")
        self.attributes[fields["topic"]] = dict(item.lstrip("+").split("=") for item in told if item)

    def _of_queue(self, request: RemotingCommand) -> dict[str, str]:
        fields = request.ext_fields
        queue = MessageQueue(fields["topic"], fields["bname"], int(fields["queueId"]))
        if request.code == RequestCode.GET_EARLIEST_MSG_STORETIME:
            return {"timestamp": str(self.store.earliest(queue))}
        if request.code == RequestCode.SEARCH_OFFSET_BY_TIMESTAMP:
            return {"offset": str(self.store.search(queue, int(fields["timestamp"])))}
        if request.code == RequestCode.GET_MIN_OFFSET:
            return {"offset": str(self.expired.get(queue, 0))}
        return {"offset": str(len(self.stored.get(queue, ())))}

    def _answer_pull(self, session: Session, request: RemotingCommand) -> bytes:
        from tests.support.strategies import encode_stored_record

        fields = request.ext_fields
        queue = MessageQueue(fields["topic"], fields["bname"], int(fields["queueId"]))
        start, end = int(fields["queueOffset"]), len(self.stored.get(queue, ()))
        found = self.store.messages(queue, start, start + int(fields["maxMsgNums"]))
        code = ResponseCode.SUCCESS
        if not found:
            code = ResponseCode.PULL_NOT_FOUND if start == end else ResponseCode.PULL_OFFSET_MOVED
        after = start + len(found) if start <= end else end
        answer = {"nextBeginOffset": str(after), "minOffset": "0", "maxOffset": str(end)}
        return session.encoded(request, code, answer, b"".join(map(encode_stored_record, found)))

    def _answer_members(self, session: Session, request: RemotingCommand) -> bytes:
        group = request.ext_fields["consumerGroup"]
        beats = [json.loads(bytes(one.body)) for one in self.requests if one.code == RequestCode.HEART_BEAT]
        ids = [beat["clientID"] for beat in beats if group in [data["groupName"] for data in beat["consumerDataSet"]]]
        if not ids:
            return session.encoded(request, ResponseCode.SYSTEM_ERROR, remark=f"no consumer for this group, {group}")
        return session.encoded(request, body=json.dumps({"consumerIdList": ids}).encode())

    def _answer_view(self, session: Session, request: RemotingCommand) -> bytes:
        from tests.support.strategies import encode_stored_record

        message = self.store.view(int(request.ext_fields["offset"]))
        if message is None:
            return session.encoded(request, ResponseCode.SYSTEM_ERROR, remark="can not find message by the offset")
        return session.encoded(request, body=encode_stored_record(message))

    def check_transaction(self, physical_offset: int) -> TransactionCheck:
        """Ask the producer to check the half message at a commit-log offset; return the check.

        The serving thread sends it before its next answer, because OpenSSL allows one thread at a time on a TLS socket.
        """
        from tests.support.strategies import encode_stored_record

        check = self.store.check(self.address, physical_offset, time.time())
        self._asking.append(encode_command(check_request(check, encode_stored_record(check.message))))
        return check


def check_request(check: TransactionCheck, body: bytes) -> RemotingCommand:
    """CHECK_TRANSACTION_STATE as a broker sends it; the header's topic is the half topic."""
    fields = {
        "bname": check.broker_name,
        "topic": HALF_TOPIC,
        "msgId": check.msg_id,
        "transactionId": check.transaction_id,
        "offsetMsgId": check.offset_msg_id,
        "commitLogOffset": str(check.commit_log_offset),
        "tranStateTableOffset": str(check.tran_state_table_offset),
    }
    return RemotingCommand(RequestCode.CHECK_TRANSACTION_STATE, 0, fields, body, 2, "", "JAVA", 513)


def end_of(request: RemotingCommand) -> EndTransaction:
    """What an END_TRANSACTION says."""
    fields = request.ext_fields
    return EndTransaction(
        topic=fields["topic"],
        producer_group=fields["producerGroup"],
        tran_state_table_offset=int(fields["tranStateTableOffset"]),
        commit_log_offset=int(fields["commitLogOffset"]),
        commit_or_rollback=int(fields["commitOrRollback"]),
        msg_id=fields["msgId"],
        transaction_id=fields.get("transactionId", ""),
        broker_name=fields["bname"],
        from_transaction_check=fields["fromTransactionCheck"] == "true",
        remark=request.remark,
    )


def route_body(route: TopicRouteData) -> bytes:
    """The JSON of a name server."""
    body: dict[str, object] = {
        "brokerDatas": [
            {
                "brokerAddrs": {str(number): address for number, address in broker.broker_addrs.items()},
                "brokerName": broker.broker_name,
                "cluster": broker.cluster,
            }
            for broker in route.broker_datas
        ],
        "queueDatas": [
            {
                "brokerName": queue.broker_name,
                "perm": queue.perm,
                "readQueueNums": queue.read_queue_nums,
                "topicSysFlag": queue.topic_sys_flag,
                "writeQueueNums": queue.write_queue_nums,
            }
            for queue in route.queue_datas
        ],
    }
    if route.order_topic_conf is not None:
        body["orderTopicConf"] = route.order_topic_conf
    if route.static_topic:
        body["topicQueueMappingByBroker"] = {data.broker_name: {"scope": "__global__"} for data in route.queue_datas}
    return json.dumps(body).encode()


@contextlib.contextmanager
def full_listener() -> Iterator[socket.socket]:
    """A listening socket whose queue is full: it leaves further connects without an answer."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        while True:
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(listener.getsockname())
            if not select.select([], [sock], [], 0.3)[1]:
                break
        yield listener
