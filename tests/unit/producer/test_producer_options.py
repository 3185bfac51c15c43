"""The properties of a producer."""

from __future__ import annotations

import re

import pytest

from rocketmq_spark.errors import OptionError
from rocketmq_spark.options.producer import PRODUCER_OPTIONS, ProducerOptions, producer_options
from tests.tools import option_docs
from tests.tools.option_docs import shown_default


def test_defaults_equal_those_of_java_4_x() -> None:
    options = producer_options({}, {})
    assert (options.send_msg_timeout, options.connection.default_topic_queue_nums) == (3000, 4)
    assert options.compress_msg_body_over_howmuch == 4096
    assert (options.retry_times_when_send_failed, options.retry_times_when_send_async_failed) == (2, 2)
    assert options.retry_another_broker_when_not_store_ok is False
    assert options.max_message_size == 4 * 1024 * 1024
    assert options.connection.create_topic_key == "TBW102"


def test_defaults_added_in_java_5_x() -> None:
    options = producer_options({}, {})
    assert set(options.retry_response_codes) == {17, 14, 1, 2, 16, 204, 205, 1500}
    assert (options.send_msg_max_timeout_per_request, options.compress_level, options.compress_type) == (-1, 5, "ZLIB")


def test_native_python_values_are_accepted() -> None:
    options = producer_options(
        {
            "name_server": ["a:1", "b:2"],
            "retry_response_codes": {2, 1},
            "send_latency_fault_enable": True,
            "latency_max": (1, 2, 3),
            "topics": "T",
            "client_ip": None,
        },
        {"NAMESRV_ADDR": "elsewhere:9876"},
    )
    assert options == ProducerOptions.of(
        name_server=("a:1", "b:2"),
        retry_response_codes=(1, 2),
        send_latency_fault_enable=True,
        latency_max=(1, 2, 3),
        topics=("T",),
    )


def test_environment_variable_is_the_default_name_server() -> None:
    assert producer_options({}, {"NAMESRV_ADDR": "a:9876;b:9876"}).connection.name_server == ("a:9876", "b:9876")
    assert producer_options({}, {"NAMESRV_ADDR": " "}).connection.name_server == ()


@pytest.mark.parametrize("value", ["x", -5, 2**31, 1.5, [1, 2]])
def test_invalid_value_error_names_property_and_allowed_values(value: object) -> None:
    with pytest.raises(OptionError, match=r"property send_msg_timeout is .*, which is not allowed: allowed is an int"):
        producer_options({"send_msg_timeout": value}, {})


def test_a_secret_of_the_wrong_kind_is_not_shown() -> None:
    with pytest.raises(OptionError, match="secret_key has a value \\(not shown: it is secret\\)") as caught:
        producer_options({"access_key": "a", "secret_key": "hush\nhush"}, {})
    assert "hush" not in str(caught.value)


def test_every_property_is_documented_by_its_name_in_python() -> None:
    assert [spec.name for spec in PRODUCER_OPTIONS] == list(ProducerOptions().values())
    assert [spec.name for spec in PRODUCER_OPTIONS if not (spec.doc and spec.kind.allowed)] == []
    assert {spec.name for spec in PRODUCER_OPTIONS} <= set(re.findall(r"`(\w+)`", option_docs.PATH.read_text("utf-8")))


def test_every_shown_default_parses_to_the_default() -> None:
    shown = {spec.name: shown_default(spec) for spec in PRODUCER_OPTIONS if shown_default(spec) != "none"}
    assert producer_options(shown, {}) == ProducerOptions()
