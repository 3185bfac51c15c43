"""One variable of the administrator governs every option with a variable, file, class or place of the machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import pytest

from rocketmq_spark.errors import OptionError
from rocketmq_spark.options.kinds import OptionSpec, parse_one
from rocketmq_spark.options.producer import PRODUCER_OPTIONS
from rocketmq_spark.options.references import load_class
from rocketmq_spark.options.sink import SINK_OPTIONS
from rocketmq_spark.options.source import SOURCE_OPTIONS
from tests.support.markdown import ROOT

VARIABLE: Final = "ROCKETMQ_SPARK_REFERENCES"
SPECS: Final = {spec.field: spec for spec in (*SINK_OPTIONS, *SOURCE_OPTIONS, *PRODUCER_OPTIONS)}
# A value of each governed option, and the entry that allows it.
REACHING: Final = {
    **dict.fromkeys(("access_key", "secret_key", "security_token", "transactional_key"), ("env:HOME", "env:HOME")),
    **dict.fromkeys(("tls_ca_file", "tls_cert_file", "tls_key_file"), ("/etc/ssl/ca.pem", "file:/etc/ssl/*")),
    **dict.fromkeys(("credentials_provider", "queue_selector"), ("my.module:Class", "class:my.*")),
    **dict.fromkeys(("metrics_path", "recall_path"), ("/var/log/sink", "path:/var/log/*")),
}


def test_every_option_with_a_file_class_path_or_reference_is_governed() -> None:
    governed = {field for field, spec in SPECS.items() if spec.kind.reference is not None}
    assert governed == set(REACHING)
    words = ("file", "path", "folder", "module", "class", "variable", "uri")
    named = {field for field in SPECS if set(field.split("_")) & set(words)}
    accepting = {field for field, spec in SPECS.items() if {"module:Class", "://"} & set(spec.kind.allowed.split())}
    assert (named | accepting) <= governed, "an option of the machine's resources needs a kind with `reference`"


def test_security_page_names_every_governed_option() -> None:
    page = (ROOT / "docs" / "security.md").read_text("utf-8")
    (table,) = [part for part in page.split("\n\n") if part.startswith("| option | entry |")]
    names = {spec.name for spec in (*SINK_OPTIONS, *SOURCE_OPTIONS) if spec.kind.reference is not None}
    assert {name for name in names if f"`{name}`" not in table} == set()


@pytest.mark.parametrize("field", sorted(REACHING))
@pytest.mark.parametrize("allowed", ["none", "", "env:OTHER;file:/etc/other;class:other:*;path:/var/other/*"])
def test_other_values_are_refused(field: str, allowed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, allowed)
    with pytest.raises(OptionError, match="this reference is not allowed here"):
        parse_one(SPECS[field], REACHING[field][0], field)


@pytest.mark.parametrize("field", sorted(REACHING))
def test_listed_values_are_allowed(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value, entry = REACHING[field]
    monkeypatch.setenv(VARIABLE, f"env:X; {entry}")
    assert parse_one(SPECS[field], value, field) == value
    monkeypatch.delenv(VARIABLE)
    assert parse_one(SPECS[field], value, field) == value


def test_plain_values_need_no_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "none")
    assert parse_one(SPECS["secret_key"], "s3cret", "secretKey") == "s3cret"
    assert parse_one(SPECS["queue_selector"], "hash", "queueSelector") == "hash"


@pytest.mark.parametrize(
    "place",
    [
        "s3://bucket/x?endpoint_override=evil.example",
        "s3://bucket/../other/x",
        "s3://bucket/%2e%2e/other",
        "s3://bucketeer/x",
        "file:///etc/cron.d/x",
        "file:///var/log/%2e%2e/x",
        "/var/log/../x",
        "/var/log/link/x",
    ],
)
def test_path_does_not_leave_its_entry(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to("/etc")
    monkeypatch.setenv(VARIABLE, f"path:s3://bucket/*;path:{tmp_path}/*")
    spec: OptionSpec = SPECS["metrics_path"]
    with pytest.raises(OptionError, match="not allowed here") as raised:
        parse_one(spec, place.replace("/var/log", str(tmp_path)), "metricsPath")
    assert "evil" not in str(raised.value)
    assert parse_one(spec, f"{tmp_path}/x", "metricsPath")
    assert parse_one(spec, f"file://{tmp_path}/x", "metricsPath")
    assert parse_one(spec, "s3://bucket/folder", "metricsPath")


def test_class_is_not_imported_without_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "none")
    with pytest.raises(OptionError, match="not allowed here"):
        load_class("queueSelector", "antigravity:Class", "select")
    assert "antigravity" not in sys.modules
