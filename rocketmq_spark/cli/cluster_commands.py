"""``rocketmq-spark cluster up | status | down | logs``.

`up` saves the addresses and processes of its servers in a file; `down` stops only these servers. Results go to stdout,
progress to stderr.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from rocketmq_spark.cli.connection import print_json
from rocketmq_spark.errors import ClusterError, escaped

if TYPE_CHECKING:
    from rocketmq_spark.cluster.jars import Progress
    from rocketmq_spark.cluster.security import Tls
    from rocketmq_spark.cluster.state import ClusterState, StateFile

app = typer.Typer(help="A RocketMQ cluster on this machine, for tests and first tries.", no_args_is_help=True)

_USUAL_PORT: Final = 9876
_NONE: Final = "no cluster is running; start one with: rocketmq-spark cluster up"


@app.command()
def up(
    brokers: Annotated[int, typer.Option(help="Number of brokers.", min=1)] = 1,
    proxy: Annotated[bool, typer.Option("--proxy", help="Also start a proxy for gRPC.")] = False,
    directory: Annotated[
        Path | None, typer.Option(help="Folder for configuration, logs and messages. Default: a temporary folder.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port of the name server. Default: 9876, or a free one.")] = None,
    auth: Annotated[bool, typer.Option("--auth", help="Require access keys, and create an administrator.")] = False,
    tls: Annotated[bool, typer.Option("--tls", help="Require encrypted connections, and make certificates.")] = False,
    mutual: Annotated[bool, typer.Option("--mutual", help="As --tls, and require client certificates.")] = False,
) -> None:
    """Start a cluster and leave it running. The first start fetches the RocketMQ server (106 MB)."""
    from rocketmq_spark.cluster.config import is_free
    from rocketmq_spark.cluster.local import LocalCluster
    from rocketmq_spark.cluster.state import ClusterState

    file = _state_file()
    with file.locked():
        running = file.load()
        if running is not None:
            if running.is_alive():
                raise ClusterError(
                    f"a cluster is already running, its name server is {running.name_server};"
                    " stop it first: rocketmq-spark cluster down"
                )
            # Its servers died, but its folder may still exist.
            running.stop()
            file.remove()
        if port is None and is_free(_USUAL_PORT):
            port = _USUAL_PORT
        with progress_on_stderr() as tell:
            security: Tls = "mutual" if mutual else tls
            with LocalCluster(
                brokers, proxy, directory=directory, port=port, auth=auth, tls=security, progress=tell
            ) as cluster:
                state = ClusterState.of(cluster)
                file.save(state)
                cluster.detach()
    typer.echo(_how_to_use(state))


@app.command()
def status(as_json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False) -> None:
    """Show the servers of the cluster."""
    state = _state_file().load()
    if as_json:
        from rocketmq_spark.cluster.state import ClusterState

        servers = [dataclasses.asdict(server) | {"state": server.state()} for server in state.servers] if state else []
        known = {field.name: getattr(state, field.name, None) for field in dataclasses.fields(ClusterState)}
        print_json({**known, "running": bool(state and state.is_alive()), "servers": servers})
        return
    if state is None:
        typer.echo(_NONE)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("server", "state", "address", "pid", box=None)
    for server in state.servers:
        table.add_row(server.name, server.state(), server.address, str(server.pid))
    Console().print(table)
    if state.endpoints:
        typer.echo(f"gRPC endpoints {state.endpoints}")
    for name, value in state.options.items():
        typer.echo(f"option {name} {value}")
    typer.echo(f"folder {state.directory}")


@app.command()
def down() -> None:
    """Stop the cluster. Brokers with a --directory flush their messages first, which takes about 20 seconds."""
    file = _state_file()
    with file.locked():
        state = file.load()
        if state is None:
            typer.echo(_NONE)
            return
        state.stop()
        file.remove()
    typer.echo("the cluster is stopped" + ("" if state.temporary else f"; its messages are kept in {state.directory}"))


@app.command()
def logs(
    name: Annotated[str | None, typer.Argument(help="Server: namesrv, broker-0, proxy ... Default: all.")] = None,
    lines: Annotated[int, typer.Option("-n", "--lines", help="Number of last lines per server.", min=1)] = 20,
) -> None:
    """Show the last lines of the servers' logs."""
    state = _state_file().load()
    if state is None:
        raise ClusterError(_NONE)
    chosen = [server for server in state.servers if name in (None, server.name)]
    if not chosen:
        names = ", ".join(server.name for server in state.servers)
        raise ClusterError(f"the cluster has no server {name}; it has {names}")
    for server in chosen:
        if len(chosen) > 1:
            typer.echo(f"==> {escaped(server.name)} <==")
        try:
            # A log is rolled at 20 MB, so reading all of it is bounded.
            with Path(server.log).open(encoding="utf-8", errors="replace", newline="\n") as file:
                last = deque(file, maxlen=lines)
        except OSError as exc:
            raise ClusterError(f"reading the log {server.log}: {exc}") from exc
        for line in last:
            typer.echo(escaped(line.rstrip("\n").expandtabs(4)))


def _state_file() -> StateFile:
    from rocketmq_spark.cluster.state import StateFile

    return StateFile()


def _how_to_use(state: ClusterState) -> str:
    security = ".options(**security)" if state.options else ""
    options = f'.option("{{}}", "{{}}"){security}.option("topic", "orders")'
    write = f'df.write.format("rocketmq"){options}.mode("append").save()'
    lines = [
        f"name server  {state.name_server}",
        *([f"gRPC proxy   {state.endpoints}  (open on every address of this machine)"] if state.endpoints else []),
        f"folder       {state.directory}" + ("  (removed by down)" if state.temporary else ""),
        "",
        *([f"security = {json.dumps(state.options, indent=4)}", ""] if state.options else []),
        "write to it:",
        f"  {write.format('nameServer', state.name_server)}",
        *([f"  {write.format('endpoints', state.endpoints)}  # to a topic that exists"] if state.endpoints else []),
        "",
        "read it:",
        f'  spark.read.format("rocketmq").option("nameServer", "{state.name_server}"){security}.load("orders")',
        "",
        "stop it: rocketmq-spark cluster down",
    ]
    return "\n".join(lines)


@contextlib.contextmanager
def progress_on_stderr() -> Iterator[Progress]:
    """Show progress on stderr: as a bar on a terminal, otherwise as a line for each step."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        # The cache lets each step be printed once.
        print_step = functools.cache(functools.partial(typer.echo, err=True))
        yield lambda step, fraction: print_step(step)  # noqa: ARG005
        return
    percentage = TextColumn("{task.percentage:3.0f}%")
    columns = (TextColumn("{task.description}"), BarColumn(), percentage, TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task("", total=1.0)
        yield lambda what, fraction: bars.update(task, description=what, completed=fraction)
