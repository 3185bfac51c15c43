"""The doctor's checks of the right Pub on a topic (docs/internals/access-control.md#acl-2).

It asks the broker to recall a message, with an invalid handle. A broker checks the right first, and then rejects the
handle. So nothing is written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from rocketmq_spark import errors
from rocketmq_spark.cli.doctor.machine import OK, WARNING, Check
from rocketmq_spark.model.route import masters_of
from rocketmq_spark.model.send_result import RecallMessage
from rocketmq_spark.protocol.remoting.codes import missing_right
from rocketmq_spark.transport.remoting.transport import RemotingTransport


def may_publish(transport: RemotingTransport, topic: str, masters: Mapping[str, str], timeout: float) -> bool | None:
    """Return whether the user has Pub on a topic on all masters (addresses by name); None if no broker said so."""
    known = None
    for broker, address in masters.items():
        try:
            transport.recall_message(address, RecallMessage(topic, "-", "rocketmq-spark-doctor", broker), timeout)
        except (errors.RequestNotSupportedException, errors.UserRefusedException):
            continue
        except errors.MQBrokerException as exc:
            if missing_right(exc.remark):
                return False
            known = True
        except errors.RocketMQError:
            continue
    return known


def check_trace_topic(transport: RemotingTransport, topic: str, timeout: float) -> Check:
    """Check that the trace topic exists, and that the user may write to it (``enableTrace``)."""
    name = f"trace topic {topic}"
    try:
        route = transport.query_route(topic, timeout)
    except errors.TopicRouteStaleException:
        fix = "set traceTopicEnable=true on the brokers, or create it: rocketmq-spark create-topic " + topic
        return Check(name, WARNING, "it does not exist, so trace records may be lost", fix)
    except errors.RocketMQError as exc:
        return Check(name, WARNING, str(exc), "check the topic's name, and the access key")
    publishes: bool | None = None
    with contextlib.suppress(errors.RocketMQError):
        publishes = may_publish(transport, topic, masters_of(route.broker_datas), timeout)
    if publishes is False:
        finding = "the user may not write to it, so trace records are lost; writes do not fail"
        return Check(name, WARNING, finding, f"give the user the right Pub on Topic:{topic}, or set enableTrace=false")
    known = (
        "the user may write to it" if publishes else "it exists; this release does not tell whether the user may write"
    )
    return Check(name, OK, known)
