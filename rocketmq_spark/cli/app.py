"""The ``rocketmq-spark`` command.

It has the commands topics, route, offsets, brokers, create-topic, delete-topic, group, reset-offsets, send, peek,
transactions, doctor, demo and cluster.
Most commands call the `Admin` method of the same name and print its result. A `RocketMQError` is printed as one line on
stderr, without a traceback, and the exit code is 1. Each command imports what it needs, so that ``--help`` is fast.
"""

from __future__ import annotations

import enum
import io
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from rocketmq_spark._version import __version__
from rocketmq_spark.cli import group_commands
from rocketmq_spark.cli.cluster_commands import app as cluster_app
from rocketmq_spark.cli.connection import TRANSACTIONAL_KEY, Connection, connected, print_json
from rocketmq_spark.display.tables import one_line
from rocketmq_spark.errors import OptionError, ReservedPropertyError, RocketMQError, escaped
from rocketmq_spark.options.connection import GRPC, REMOTING

if TYPE_CHECKING:
    from rocketmq_spark.cli.doctor.machine import Check
    from rocketmq_spark.display.row_table import Table
    from rocketmq_spark.model.route import TopicRouteData

app = typer.Typer(
    name="rocketmq-spark",
    help="Write and read Apache RocketMQ from Apache Spark.",
    no_args_is_help=True,
    # All commands inherit this.
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(cluster_app, name="cluster")

_NARROWEST = 24  # Minimum columns of a finding of the doctor

Topic = Annotated[str, typer.Argument(help="Name of the topic.")]


class _MessageType(str, enum.Enum):
    NORMAL = "NORMAL"
    FIFO = "FIFO"
    DELAY = "DELAY"
    TRANSACTION = "TRANSACTION"
    MIXED = "MIXED"
    PRIORITY = "PRIORITY"
    LITE = "LITE"


class _Transport(str, enum.Enum):
    REMOTING = REMOTING
    GRPC = GRPC


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


@app.command()
@connected
def topics(
    connection: Connection,
    everything: Annotated[bool, typer.Option("--all", help="Include RocketMQ's own topics.")] = False,
) -> None:
    """List the topics with their types, brokers, queues and permissions."""
    with connection.admin() as admin:
        connection.show(admin.topics(all=everything))


@app.command()
@connected
def route(connection: Connection, topic: Topic) -> None:
    """Show the brokers and queues of a topic."""
    with connection.admin() as admin:
        _show_route(connection, admin.route(topic))


@app.command()
@connected
def offsets(connection: Connection, topic: Topic) -> None:
    """Show the offsets and the number of messages of each queue of a topic."""
    with connection.admin() as admin:
        connection.show(admin.offsets(topic))


@app.command()
@connected
def brokers(connection: Connection) -> None:
    """List the brokers with their releases, disks and traffic."""
    with connection.admin() as admin:
        connection.show(admin.brokers())


@app.command()
@connected
def create_topic(
    connection: Connection,
    topic: Topic,
    queues: Annotated[int, typer.Option("-q", "--queues", help="Queues on each broker.")] = 8,
    message_type: Annotated[
        _MessageType | None, typer.Option("--type", case_sensitive=False, help="Type of its messages. Default: NORMAL.")
    ] = None,
    inner: Annotated[bool, typer.Option("--inner", help="Queues of the type BatchCQ, for batchType=inner.")] = False,
    compaction: Annotated[bool, typer.Option("--compaction", help="Keep the newest message of each key.")] = False,
    update: Annotated[
        bool, typer.Option("--update", help="Change a topic: its queues, its permission to rw, and any --type.")
    ] = False,
    cluster: Annotated[str | None, typer.Option(help="Name of the cluster. Required if there are several.")] = None,
) -> None:
    """Create a topic on every broker of a cluster, and wait until the name servers know it."""
    with connection.admin() as admin:
        kind = None if message_type is None else message_type.value
        made = admin.create_topic(
            topic, queues, message_type=kind, inner=inner, compaction=compaction, update=update, cluster=cluster
        )
    _show_route(connection, made)


for _command in (group_commands.delete_topic, group_commands.group, group_commands.reset_offsets):
    app.command()(connected(_command))


@app.command()
@connected
def peek(
    connection: Connection,
    topic: Topic,
    count: Annotated[int, typer.Option("-c", "--count", help="Number of messages.")] = 10,
    tag: Annotated[str | None, typer.Option(help="Only messages with this tag, or one of several: 'a || b'.")] = None,
    group: Annotated[
        str, typer.Option(help="Consumer group that the requests name. Access control may require another one.")
    ] = "TOOLS_CONSUMER",
) -> None:
    """Show the newest messages of a topic. No offsets of consumer groups change."""
    with connection.admin() as admin:
        connection.show(admin.peek(topic, count, tag=tag, consumer_group=group))


@app.command()
@connected
def send(
    connection: Connection,
    topic: Topic,
    body: Annotated[str, typer.Argument(help="Text of the message. Default, or -: all of standard input.")] = "-",
    tags: Annotated[str | None, typer.Option(help="Tag of the message.")] = None,
    keys: Annotated[str | None, typer.Option(help="Keys of the message, separated by blanks.")] = None,
    properties: Annotated[list[str] | None, typer.Option("--property", help="name=value. Repeatable.")] = None,
    sharding_key: Annotated[str | None, typer.Option(help="Messages with the same key go to the same queue.")] = None,
    delay_ms: Annotated[int, typer.Option(help="Delay of the delivery in milliseconds.")] = 0,
) -> None:
    """Send one message, and show where it is stored."""
    from rocketmq_spark.display.tables import present, print_table
    from rocketmq_spark.model.message import Message
    from rocketmq_spark.options.kinds import parse_one
    from rocketmq_spark.options.sink import SINK_OPTIONS
    from rocketmq_spark.producer.producer import Producer
    from rocketmq_spark.routing.selectors import SelectMessageQueueByHash

    if body == "-" and sys.stdin.isatty():
        typer.echo("rocketmq-spark: type the message, then press Ctrl-D on an empty line", err=True)
    # The bytes of the command line need not be UTF-8.
    data = sys.stdin.buffer.read() if body == "-" else os.fsencode(body)
    if tags is not None:
        # Brokers accept a tag with |, but consumers interpret it as two tags.
        parse_one(next(spec for spec in SINK_OPTIONS if spec.name == "tags"), tags, "--tags")
    try:
        own = _properties(properties or ())
        message = Message.of(
            topic, data, tags=tags, keys=keys, sharding_key=sharding_key, delay_ms=delay_ms, properties=own
        )
    except (ValueError, ReservedPropertyError) as exc:
        raise OptionError(str(exc)) from exc
    # With a selector there is a single attempt, because only one queue is right.
    selector = None if sharding_key is None else SelectMessageQueueByHash()
    # The admin only checks whether a name server causes a failure.
    with connection.admin(), Producer("rocketmq-spark-send", **connection.connection_options()) as producer:
        sent = producer.send(message, selector=selector, arg=sharding_key, timeout_ms=connection.timeout * 1000)
    facts = sent.facts()
    if connection.as_json:
        print_json(facts)
    else:
        print_table(*present(facts))


@app.command()
@connected
def transactions(
    connection: Connection,
    transactional_id: Annotated[str, typer.Argument(metavar="ID", help="The option transactionalId of the job.")],
    finish: Annotated[
        bool, typer.Option("--finish", help="Commit the missing rows. May first wait for 1.1 * transactionTimeoutMs.")
    ] = False,
    transaction_topic: Annotated[
        str, typer.Option(help="The option transactionTopic of the job.")
    ] = "rocketmq-spark-decisions",
    transactional_key: Annotated[str | None, TRANSACTIONAL_KEY] = None,
) -> None:
    """List the exactly-once writes whose commit has begun and is not complete, and complete them with --finish."""
    from rocketmq_spark.cli.transactions import finish_transactions

    # The admin only checks whether a name server causes a failure.
    with connection.admin():
        table = finish_transactions(
            transactional_id,
            transaction_topic=transaction_topic,
            transactional_key=transactional_key,
            list_only=not finish,
            timeout=connection.timeout,
            **connection.connection_options(),
        )
    connection.show(table)


@app.command()
@connected
def doctor(
    connection: Connection,
    topic: Annotated[str | None, typer.Option(help="Also check this topic.")] = None,
    endpoints: Annotated[str | None, typer.Option(help="Also check these proxies: proxy-1:8081;proxy-2:8081.")] = None,
    transaction_topic: Annotated[
        str, typer.Option(help="Check the decision log in this topic, if it exists.")
    ] = "rocketmq-spark-decisions",
    transactional_key: Annotated[str | None, TRANSACTIONAL_KEY] = None,
    trace_topic: Annotated[
        str | None, typer.Option(help="For enableTrace: check that the user may write to it (RMQ_SYS_TRACE_TOPIC).")
    ] = None,
) -> None:
    """Find faults between this machine and a cluster, and advise how to fix them. Writes nothing."""
    from rocketmq_spark.cli.doctor import examine
    from rocketmq_spark.cli.doctor.machine import FAILED

    options = connection.connection_options(endpoints)
    if endpoints:
        # The name server of the local cluster does not belong to these proxies.
        options["name_server"] = connection.options["name_server"]
    options |= {"transaction_topic": transaction_topic, "transactional_key": transactional_key}
    options |= {"trace_topic": trace_topic}
    checks = examine(topic=topic, endpoints=endpoints, timeout=connection.timeout, **options)
    if connection.as_json:
        print_json(checks.to_dicts())
    else:
        _print_checks(checks)
    if any(check.state == FAILED for check in checks):
        raise typer.Exit(1)


@app.command()
def demo(
    transport: Annotated[
        _Transport, typer.Option(help="To the brokers, or over gRPC to a proxy.")
    ] = _Transport.REMOTING,
) -> None:
    """Start a cluster, write 336,776 flights to it, and compare with the number of stored messages."""
    from rich.console import Console

    from rocketmq_spark.cli.demo import run

    # SIGTERM must also stop the cluster.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    run(Console(), over_grpc=transport is _Transport.GRPC)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, by default the process's. Exit codes: 0, 1 (failure), 2 (wrong usage), 130 (Ctrl-C)."""
    # Otherwise gRPC prints its own lines about a failed handshake.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    for stream in (sys.stdout, sys.stderr):
        # Characters that the terminal's encoding lacks are shown as their codes.
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


def _show_route(connection: Connection, route: TopicRouteData) -> None:
    from rocketmq_spark.display.row_table import Table
    from rocketmq_spark.model.route import BrokerRoute

    connection.show(Table(BrokerRoute, route.by_broker()))


def _properties(texts: Iterable[str]) -> dict[str, str]:
    own: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise OptionError(f"--property {text!r} is not allowed: allowed is name=value")
        if name in own:
            raise OptionError(f"--property {name} is given twice: a property has one value")
        own[name] = value
    return own


def _print_checks(checks: Table[Check]) -> None:
    """Print the doctor's findings. The advice is one unbroken line below its finding, so that it can be copied."""
    import textwrap

    from rich.console import Console
    from rich.text import Text

    from rocketmq_spark.cli.doctor.machine import FAILED, OK, WARNING

    colours = {OK: "green", WARNING: "yellow", FAILED: "bold red"}
    console = Console(highlight=False)
    states = max(map(len, colours)) + 1
    names = max(len(escaped(check.check)) for check in checks) + 2
    indent = " " * (states + names)
    for check in checks:
        text = escaped(check.finding)
        if console.is_terminal:
            # Lines break only at blanks, so that paths stay whole.
            room = max(console.width - len(indent), _NARROWEST)
            text = textwrap.fill(text, room, break_long_words=False, break_on_hyphens=False)
        line = Text(f"{check.state:<{states}}", style=colours[check.state])
        line.append(f"{escaped(check.check):<{names}}", style="default")
        line.append(text.replace("\n", f"\n{indent}"), style="default")
        console.print(line, soft_wrap=True)
        if check.fix:
            console.print(f"{'':{states}}→ {escaped(check.fix)}", markup=False, soft_wrap=True)
    counts = Counter(check.state for check in checks)
    found = f"{counts[FAILED]} failed, {counts[WARNING]} with a warning, {counts[OK]} ok"
    console.print(found if counts[FAILED] or counts[WARNING] else "All is well.")
