"""The proto files and their generated code agree with the official descriptors."""

from __future__ import annotations

import ast
import configparser
import functools
import re
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto

from rocketmq_spark.protocol.grpc._pb import definition_pb2, service_pb2

ROOT = Path(__file__).parents[3]
GENERATED = Path("rocketmq_spark/protocol/grpc/_pb")
OURS, OFFICIAL = "rocketmq_spark.v2", "apache.rocketmq.v2"
OUR_FILES = [
    FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb) for module in (definition_pb2, service_pb2)
]


@functools.cache
def official_files() -> list[FileDescriptorProto]:
    """Return the descriptors that the official Python client ships.

    Read and not imported: importing that package makes log files in the home folder.
    """
    client = metadata.distribution("rocketmq-python-client")
    sources = [client.locate_file(f"rocketmq/grpc_protocol/{name}_pb2.py") for name in ("definition", "service")]
    return [FileDescriptorProto.FromString(serialized_in(Path(str(source)))) for source in sources]


def serialized_in(generated: Path) -> bytes:
    """Return the argument of AddSerializedFile in a generated module."""
    [found] = [
        ast.literal_eval(node.args[0])
        for node in ast.walk(ast.parse(generated.read_text("utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "AddSerializedFile"
    ]
    assert isinstance(found, bytes)
    return found


def messages(files: Iterable[FileDescriptorProto]) -> dict[str, DescriptorProto]:
    tops = [message for file in files for message in file.message_type]
    nested = {f"{top.name}.{inner.name}": inner for top in tops for inner in top.nested_type}
    return {top.name: top for top in tops} | nested


def enums(files: Iterable[FileDescriptorProto]) -> dict[str, dict[str, int]]:
    return {enum.name: {value.name: value.number for value in enum.value} for file in files for enum in file.enum_type}


def fields(message: DescriptorProto) -> dict[str, tuple[str, str]]:
    """Return the declaration of every field, with types of this package and the name of its oneof.

    Members of a oneof may be missing in ours, so its index says nothing.
    """
    found = {}
    for declared in message.field:
        field = FieldDescriptorProto.FromString(declared.SerializeToString())
        oneof = message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else ""
        field.ClearField("oneof_index")
        found[field.name] = (str(field).replace(f".{OFFICIAL}.", f".{OURS}."), oneof)
    return found


@pytest.mark.parametrize("name", messages(OUR_FILES))
def test_every_field_equals_the_official_one(name: str) -> None:
    ours, official = messages(OUR_FILES)[name], messages(official_files())[name]
    assert fields(ours).items() <= fields(official).items()
    assert ours.options == official.options


def test_our_and_official_proto_files_use_proto3() -> None:
    assert {file.syntax for file in OUR_FILES + official_files()} == {"proto3"}


@pytest.mark.parametrize("name", enums(OUR_FILES))
def test_every_enum_value_equals_the_official_one(name: str) -> None:
    assert enums(OUR_FILES)[name].items() <= enums(official_files())[name].items()


def test_our_codes_equal_the_official_codes() -> None:
    assert enums(OUR_FILES)["Code"] == enums(official_files())["Code"]


def test_generated_code_is_up_to_date(tmp_path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    found = re.search(r"^proto:.*\n\t@\$\(BIN\)/python (-m grpc_tools.protoc .*)$", makefile, re.MULTILINE)
    assert found is not None
    command = found[1].replace("_out=.", f"_out={tmp_path}")
    run = subprocess.run(
        f"{sys.executable} {command}", shell=True, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    now = {path.name: path.read_text("utf-8") for path in (tmp_path / GENERATED).iterdir()}
    checked_in = {path.name: path.read_text("utf-8") for path in (ROOT / GENERATED).glob("*_pb2.py*")}
    assert checked_in == now


def test_required_protobuf_equals_the_version_of_the_generated_code() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    [required] = [line for line in config["options.extras_require"]["grpc"].split() if line.startswith("protobuf")]
    for generated in sorted((ROOT / GENERATED).glob("*_pb2.py")):
        stamp = re.search(r"^# Protobuf Python Version: (\d+)\.(\d+)\.(\d+)$", generated.read_text("utf-8"), re.M)
        assert stamp is not None
        # The runtime of the next major version loads it too, by protobuf's guarantee.
        assert required == f"protobuf>={'.'.join(stamp.groups())},<{int(stamp[1]) + 2}"


IMPORT_OURS = "from rocketmq_spark.protocol.grpc._pb import service_pb2 as ours\n"
IMPORT_OFFICIAL = "from rocketmq.grpc_protocol import service_pb2 as official\n"
SPEAK = """
request = ours.SendMessageRequest()
message = request.messages.add()
message.topic.name = "orders"
message.user_properties["colour"] = "gr\\u00fcn"
message.system_properties.born_timestamp.FromMilliseconds(1_700_000_000_123)
message.body = b"body"
again = official.SendMessageRequest.FromString(request.SerializeToString())
assert again.messages[0].user_properties["colour"] == "gr\\u00fcn"
assert ours.SendMessageRequest.FromString(again.SerializeToString()) == request
print("understood")
"""


@pytest.mark.parametrize("imports", [IMPORT_OURS + IMPORT_OFFICIAL, IMPORT_OFFICIAL + IMPORT_OURS])
def test_works_beside_the_official_client_in_any_import_order(
    imports: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The official client writes its logs to the home folder.
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    run = subprocess.run(
        [sys.executable, "-c", imports + SPEAK], capture_output=True, text=True, timeout=120, check=False
    )
    assert (run.returncode, run.stdout) == (0, "understood\n"), run.stderr
