"""The ``rocketmq-spark`` command, made of the typer applications of its groups of commands.

A failure is one line on stderr and exit code 1, without a traceback. Each command imports what it needs, so that
``--help`` is fast.
"""

from __future__ import annotations

import enum
import io
import os
import signal
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from rocketmq_spark._version import __version__
from rocketmq_spark.cli.admin_commands import app as admin
from rocketmq_spark.cli.cluster_commands import app as cluster
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model.table import one_line
from rocketmq_spark.options.connection import GRPC, REMOTING

app = typer.Typer(
    name="rocketmq-spark",
    help="Write and read Apache RocketMQ from Apache Spark.",
    no_args_is_help=True,
    # The commands inherit it.
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(admin)
app.add_typer(cluster, name="cluster")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rocketmq-spark {__version__}")
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None: ...


class _Transport(str, enum.Enum):
    REMOTING = REMOTING
    GRPC = GRPC


@app.command()
def demo(
    transport: Annotated[
        _Transport, typer.Option(help="Write to the brokers, or over gRPC to a proxy before them.")
    ] = _Transport.REMOTING,
) -> None:
    """Write 336,776 flights to a name server and two brokers of its own, and count what they store."""
    from rich.console import Console

    from rocketmq_spark.cli.demo import run

    # After SIGTERM it still stops its cluster.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    run(Console(), over_grpc=transport is _Transport.GRPC)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, by default that of the process, and return the exit code.

    It is 0, 1 for a failure, 2 for a wrong command line, or 130 after Ctrl-C.
    """
    # gRPC would print its own lines about a refused handshake.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    for stream in (sys.stdout, sys.stderr):
        # Characters outside the terminal's encoding are shown as their code.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        app(args=None if arguments is None else list(arguments), prog_name="rocketmq-spark")
    except RocketMQError as exc:
        print(f"rocketmq-spark: {one_line(str(exc))}", file=sys.stderr)  # noqa: T201
        return 1
    except SystemExit as exc:
        return exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    return 0
