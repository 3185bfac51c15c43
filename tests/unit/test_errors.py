"""The cause of Spark's exceptions, which have only the text of an error of a Python worker."""

from __future__ import annotations

import copy
import pickle

import pytest

from rocketmq_spark import cause
from rocketmq_spark.errors import (
    BrokerBusyException,
    DeliveryError,
    InvalidRowError,
    MQClientException,
    OptionError,
    RocketMQError,
    RouteNotFoundException,
)

TASK = """An exception was thrown from the Python worker. Please see the stack trace below.
Traceback (most recent call last):
  File "worker.py", line 1, in write
    raise RemotingTimeoutException(...)
rocketmq_spark.errors.RemotingTimeoutException: 127.0.0.1:10911: no answer within 3 s

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "worker.py", line 1, in main
{error}

\tat org.apache.spark.api.python.BasePythonRunner.handlePythonException(PythonRunner.scala:1)
Driver stacktrace:
"""
ANSWER = "sending 3 rows to t/a/1: 127.0.0.1:10911 answered 2 SYSTEM_BUSY: [REJECTREQUEST] (the broker is busy)"
ROW = "partition 2, row 333 (topic t, keys none): tags has an illegal character"


def of_spark(error: str) -> Exception:
    return RuntimeError(TASK.format(error=f"rocketmq_spark.{error}"))


@pytest.mark.parametrize(
    ("module", "error", "attributes"),
    [
        ("errors", InvalidRowError(ROW, 333), {"row": 333, "rule": ""}),
        ("errors", InvalidRowError("no row is named", -1), {"row": -1}),
        ("errors", DeliveryError("gave up after deliveryTimeoutMs=4000; answered by nobody"), {}),
        ("errors", OptionError("option topic: ..."), {}),
        (
            "errors",
            BrokerBusyException(ANSWER, 2, "", "127.0.0.1:10911"),
            {"response_code": 2, "broker_addr": "127.0.0.1:10911", "remark": "", "flow_control": True},
        ),
        ("errors", MQClientException(ANSWER, 2), {"response_code": 2}),
        ("errors", MQClientException("no broker"), {"response_code": -1}),
        ("errors", RouteNotFoundException("topic t has no route"), {"response_code": 10005, "unreachable": False}),
    ],
)
def test_cause_has_the_class_and_the_attributes_that_its_text_names(
    module: str, error: RocketMQError, attributes: dict[str, object]
) -> None:
    found = cause(of_spark(f"{module}.{type(error).__name__}: {error}"))
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert {name: getattr(found, name) for name in attributes} == attributes
    assert type(pickle.loads(pickle.dumps(found))) is type(error)


def test_a_flag_of_one_error_is_kept_by_copies_and_pickles() -> None:
    error = MQClientException("all attempts failed", 10002)
    error.maybe_stored = True
    for same in (copy.copy(error), copy.deepcopy(error), pickle.loads(pickle.dumps(error))):
        assert (type(same), same.args, same.maybe_stored) == (MQClientException, error.args, True)
    assert not MQClientException("all attempts failed", 10002).maybe_stored


def test_an_error_of_another_module_of_the_package_is_found() -> None:
    name = "deliveries.effectively_once.resolving_sender._UnknownOutcomeError"
    found = cause(of_spark(f"{name}: it is unknown whether the rows are stored"))
    assert (type(found), str(found)) == (RocketMQError, "it is unknown whether the rows are stored")


def test_the_exception_itself_and_its_causes_are_searched() -> None:
    direct = OptionError("x")
    assert cause(direct) is direct
    outer = RuntimeError("outer")
    outer.__cause__ = direct
    assert cause(outer) is direct
    outer.__cause__ = of_spark(f"errors.DeliveryError: {ROW}")
    assert isinstance(cause(outer), DeliveryError)
    # A chain may end in itself.
    outer.__cause__ = outer
    assert cause(outer) is None


@pytest.mark.parametrize(
    "exc", [None, ValueError("x"), RuntimeError("the user wrote rocketmq_spark.errors.OptionError: no")]
)
def test_other_exceptions_have_no_cause_of_this_package(exc: Exception | None) -> None:
    assert cause(exc) is None
