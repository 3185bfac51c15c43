"""The ``rocketmq-spark`` command. Each group of commands is a typer application of its own, mounted here.

Rule 1: a failure is one line on stderr and exit code 1; no traceback.
Rule 2: what is heavy is imported by the command that needs it: ``--help`` starts nothing.
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

from rocketmq_spark import __version__
from rocketmq_spark.admin.commands import app as admin
from rocketmq_spark.cluster.commands import app as cluster
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.option_transport import GRPC, REMOTING
from rocketmq_spark.table_view import one_line

app = typer.Typer(
    name="rocketmq-spark",
    help="Write and read Apache RocketMQ from Apache Spark.",
    no_args_is_help=True,
    # Those of its commands have it from here.
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

    from rocketmq_spark.demo import run

    # Ended from outside, it still stops what it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    run(Console(), over_grpc=transport is _Transport.GRPC)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    arguments : sequence of str, optional
        Default: those of the process.

    Returns
    -------
    int
        The exit code: 0, 1 for a failure, 2 for a wrong command line, 130 after Ctrl-C.
    """
    # gRPC's own lines about a refused handshake, before the one that says what to do.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    for stream in (sys.stdout, sys.stderr):
        # What the terminal's encoding lacks is shown as its code.
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
