"""The generated gRPC messages under the oldest and the newest protobuf that the grpc extra allows."""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import PATIENCE

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
SPEAK = """
import google.protobuf
from rocketmq_spark.protocol.grpc._pb import service_pb2
request = service_pb2.SendMessageRequest()
message = request.messages.add()
message.user_properties["colour"] = "green"
message.system_properties.born_timestamp.FromMilliseconds(1_700_000_000_123)
again = service_pb2.SendMessageRequest.FromString(request.SerializeToString())
assert again == request and again.messages[0].system_properties.born_timestamp.ToMilliseconds() == 1_700_000_000_123
print(google.protobuf.__version__)
"""


def allowed() -> tuple[str, str]:
    """Return the lowest version that the extra allows, and the first higher version that it excludes."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    [required] = [line for line in config["options.extras_require"]["grpc"].split() if line.startswith("protobuf")]
    lowest, beyond = required.removeprefix("protobuf>=").split(",<")
    return lowest, beyond


@pytest.mark.parametrize("newest", [False, True], ids=["oldest", "newest"])
def test_generated_code_works_with_oldest_and_newest_supported_protobuf(newest: bool, tmp_path: Path) -> None:
    lowest, beyond = allowed()
    wanted = f"protobuf<{beyond}" if newest else f"protobuf=={lowest}"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path), wanted]
    installed = subprocess.run(install, capture_output=True, text=True, timeout=PATIENCE, check=False)
    if installed.returncode and not os.environ.get("CI"):
        pytest.skip(f"installing {wanted}: {installed.stderr[-200:]}")
    assert installed.returncode == 0, installed.stderr
    run = subprocess.run(
        [sys.executable, "-c", SPEAK],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(f"{int(beyond) - 1}." if newest else lowest)
