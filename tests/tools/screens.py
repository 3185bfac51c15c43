"""Make the pictures of the command line in docs/images from commands on a real cluster.

Run it with ``python -m tests.tools.screens``. A picture shows what the command printed, without the path of the local
Python. It loads nothing from other hosts: rich's links to web fonts are removed.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.text import Text

from rocketmq_spark import Admin, LocalCluster, Message, Producer
from tests.support.markdown import ROOT

IMAGES: Final = ROOT / "docs" / "images"
WIDTH: Final = 124
NAME_SERVER: Final = 9876
BROKERS: Final = ({"listenPort": 10911, "haListenPort": 10912}, {"listenPort": 10921, "haListenPort": 10922})

# By picture, the commands in it; all but the doctor's may fail, as a new user's do.
SCREENS: Final[Mapping[str, Sequence[str]]] = {
    "cli-topics": ("rocketmq-spark topics", "rocketmq-spark route orders"),
    "cli-peek": ("rocketmq-spark offsets orders", "rocketmq-spark peek orders --count 5"),
    "cli-send": (
        "rocketmq-spark create-topic payments --queues 2 --type fifo",
        "rocketmq-spark send orders 'one espresso' --tags new --keys order-1 --json",
    ),
    "cli-doctor": ("rocketmq-spark doctor --topic orders --endpoints {endpoints}",),
    "cli-mistakes": (
        "rocketmq-spark topics -n 127.0.0.1:9875",
        "rocketmq-spark topics -n {endpoints}",
        "rocketmq-spark peek ordres",
        "PYSPARK_PYTHON=/usr/bin/python2 rocketmq-spark doctor --topic ordres",
    ),
}

_LINKS: Final = re.compile(r"@font-face \{.*?\}\s*|<!--.*?-->\s*", re.DOTALL)


def fill() -> None:
    """Make the topics of the pictures, and send a few messages."""
    with Admin(f"127.0.0.1:{NAME_SERVER}") as admin:
        admin.create_topic("orders", 2)
        admin.create_topic("clicks", 4, inner=True)
        with Producer("screens", name_server=f"127.0.0.1:{NAME_SERVER}") as producer:
            for number, drink in enumerate(("espresso", "flat white", "tea", "cortado", "filter", "lungo"), 1):
                body = f'{{"id": {number}, "item": "{drink}"}}'.encode()
                tag = "new" if number % 3 else "paid"
                producer.send(Message.of("orders", body, tags=tag, keys=f"order-{number}", properties={"shop": "7"}))
        while sum(row.messages for row in admin.offsets("orders")) < number:
            time.sleep(0.1)


def printed(command: str, environ: Mapping[str, str]) -> str:
    """Run a command as a shell would on a terminal, and return what it printed, colours and all."""
    done = subprocess.run(
        command,
        shell=True,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    return done.stdout.replace(str(Path(sys.executable).parent), "/opt/env/bin").strip("\n")


def picture(commands: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return an SVG of some commands and what they print."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for number, command in enumerate(commands):
        console.print(Text("\n" if number else "", end="").append(f"$ {command}", style="bold"))
        console.print(Text.from_ansi(printed(command, environ)))
    svg = _LINKS.sub("", console.export_svg(title="rocketmq-spark", unique_id="cli"))
    return svg.replace("Fira Code, monospace", "Menlo, Consolas, DejaVu Sans Mono, monospace")


def main() -> None:
    """Make all pictures."""
    IMAGES.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as state,
        LocalCluster(2, proxy=True, broker_properties=BROKERS, port=NAME_SERVER) as cluster,
    ):
        fill()
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environ = {
            **os.environ,
            "PATH": path,
            "PYSPARK_PYTHON": sys.executable,
            "NAMESRV_ADDR": f"127.0.0.1:{NAME_SERVER}",
            "ROCKETMQ_SPARK_STATE": state,
            "FORCE_COLOR": "1",
            "COLUMNS": str(WIDTH),
        }
        for name, commands in SCREENS.items():
            svg = picture([command.format(endpoints=cluster.endpoints) for command in commands], environ)
            assert "http" not in svg.replace("http://www.w3.org/", ""), f"{name} loads something"
            (IMAGES / f"{name}.svg").write_text(svg + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
