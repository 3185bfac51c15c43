"""One topic: is it there, and may it be written to and read from.

Rule 1: brokers are asked for what they were told of the topic and for the end of a queue, and never sent a message:
        whether a user may publish shows only when one does.
"""

from __future__ import annotations

from rocketmq_spark.admin.admin import Admin
from rocketmq_spark.admin.asking import ask_all
from rocketmq_spark.consumer.topic_routes import refuse_static
from rocketmq_spark.doctor.brokers import access_refused, key_refused
from rocketmq_spark.doctor.check import FAILED, OK, WARNING, Check
from rocketmq_spark.errors import (
    MQBrokerException,
    OptionError,
    RemotingException,
    RequestNotSupportedException,
    RocketMQError,
    TopicRouteStaleException,
)
from rocketmq_spark.message import MessageQueue
from rocketmq_spark.names import AUTO_CREATE_TOPIC
from rocketmq_spark.namespace import wrap
from rocketmq_spark.route_data import TopicRouteData, masters_of


def check_topic(admin: Admin, topic: str, timeout: float) -> list[Check]:
    """Look at a topic."""
    name = f"topic {topic}"
    try:
        route = admin.route(topic)
    except TopicRouteStaleException as exc:
        return [_unknown(admin, name, topic, exc, timeout)]
    except RocketMQError as exc:
        return [Check(name, FAILED, str(exc), "check the topic's name, and the access key")]
    try:
        refuse_static(topic, route)
    except OptionError as exc:
        found, _, mend = str(exc).partition("; ")
        return [Check(name, FAILED, found, mend)]
    return [*_open_for(name, route), *_told_by_brokers(admin, name, topic, route, timeout)]


def _remark(exc: RocketMQError) -> str:
    return exc.remark if isinstance(exc, MQBrokerException) else str(exc)


def _unknown(admin: Admin, name: str, topic: str, exc: TopicRouteStaleException, timeout: float) -> Check:
    create = f"create it: rocketmq-spark create-topic {topic}"
    try:
        template = admin.transport.query_route(AUTO_CREATE_TOPIC, timeout)
    except RocketMQError:
        return Check(name, FAILED, str(exc), create)
    makers = [data.broker_name for data in template.queue_datas if data.writable]
    if not makers:
        return Check(name, FAILED, str(exc), create)
    found = (
        f"it does not exist; the first write creates it on {', '.join(makers)} (autoCreateTopicEnable), a read fails"
    )
    near = str(exc).partition("did you mean ")[2]
    return Check(name, WARNING, found + (f"; did you mean {near}" if near else ""), create)


def _open_for(name: str, route: TopicRouteData) -> list[Check]:
    closed = []
    for doing, of in (("write to", "writable"), ("read from", "readable")):
        barred = [data.broker_name for data in route.queue_datas if not getattr(data, of)]
        if barred:
            everywhere = len(barred) == len(route.queue_datas)
            found = f"not allowed to {doing} on {', '.join(barred)}" + (", which is everywhere" if everywhere else "")
            mend = f"rocketmq-spark create-topic {name.removeprefix('topic ')} --update sets its permission to rw"
            closed.append(Check(name, FAILED if everywhere else WARNING, found, mend))
    if not route.queue_datas:
        closed.append(Check(name, FAILED, "no broker has it now", "bring its brokers back"))
    return closed


def _told_by_brokers(admin: Admin, name: str, topic: str, route: TopicRouteData, timeout: float) -> list[Check]:
    wired = wrap(admin.options.wrapped_namespace, topic)
    masters = masters_of(route.broker_datas)

    def ask(broker: str) -> tuple[str, str]:
        # The end of a queue takes the right to look at the topic, as a read does before anything else.
        admin.transport.max_offset(MessageQueue(wired, broker, 0), masters[broker], timeout)
        config = admin.transport.topic_config(masters[broker], wired, timeout)
        return config.message_type, config.queue_type

    types = set()
    checks = []
    for broker, answer in ask_all(masters, ask).items():
        if not isinstance(answer, RocketMQError):
            types.add(answer)
        elif access_refused(answer):
            checks.append(key_refused(f"{name} on {broker}", answer))
        elif access_refused(answer) is False:
            mend = "have the user allowed to publish (PUB), to subscribe (SUB) and to look at it (GET), as it needs"
            checks.append(
                Check(f"{name} on {broker}", WARNING, f"the user may not look at it: {_remark(answer)}", mend)
            )
        elif not isinstance(answer, RemotingException | RequestNotSupportedException):
            # A broker that can't be reached has a line of its own; a proxy in its place knows no types.
            checks.append(Check(f"{name} on {broker}", WARNING, str(answer), "look into the broker's log (broker.log)"))
    queues = sum(data.write_queue_nums for data in route.queue_datas)
    on = ", ".join(data.broker_name for data in route.queue_datas)
    kinds = " and ".join(f"{message} messages, queues {queue}" for message, queue in sorted(types))
    if len(types) > 1:
        mend = "make it anew under another name: types of queues can't be changed"
        checks.append(Check(name, WARNING, f"its brokers differ: {kinds}", mend))
    if route.queue_datas and (types or not checks):
        found = f"{queues} queues on {on}" + (f"; {kinds}" if len(types) == 1 else "")
        checks.insert(0, Check(name, OK, found))
    return checks
