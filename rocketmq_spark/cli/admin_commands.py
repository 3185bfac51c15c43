"""``rocketmq-spark topics | route | offsets | brokers | create-topic | send | peek | doctor``.

Each command calls the method of `Admin` with its name and prints the answer.
"""

from __future__ import annotations

import enum
import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from rocketmq_spark.cli.connection import Connection, connected
from rocketmq_spark.errors import OptionError, ReservedPropertyError, escaped

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rocketmq_spark.admin.answers import Table
    from rocketmq_spark.cli.doctor.machine import Check

app = typer.Typer()

# The least width of a finding of the doctor, in columns.
_NARROWEST = 24

Topic = Annotated[str, typer.Argument(help="Name of the topic.")]


class _MessageType(str, enum.Enum):
    NORMAL = "NORMAL"
    FIFO = "FIFO"
    DELAY = "DELAY"
    TRANSACTION = "TRANSACTION"


@app.command()
@connected
def topics(
    connection: Connection,
    everything: Annotated[bool, typer.Option("--all", help="RocketMQ's own topics, too.")] = False,
) -> None:
    """List the topics: their types, brokers, queues and permission."""
    with connection.admin() as admin:
        connection.show(admin.topics(all=everything))


@app.command()
@connected
def route(connection: Connection, topic: Topic) -> None:
    """Show where the queues of a topic are."""
    from rocketmq_spark.admin.answers import Table
    from rocketmq_spark.model.route import BrokerRoute

    with connection.admin() as admin:
        connection.show(Table(BrokerRoute, admin.route(topic).by_broker()))


@app.command()
@connected
def offsets(connection: Connection, topic: Topic) -> None:
    """Count what each queue of a topic holds."""
    with connection.admin() as admin:
        connection.show(admin.offsets(topic))


@app.command()
@connected
def brokers(connection: Connection) -> None:
    """List the brokers: their releases, disks and traffic."""
    with connection.admin() as admin:
        connection.show(admin.brokers())


@app.command()
@connected
def create_topic(
    connection: Connection,
    topic: Topic,
    queues: Annotated[int, typer.Option("-q", "--queues", help="Queues on each broker.")] = 8,
    message_type: Annotated[
        _MessageType | None,
        typer.Option("--type", case_sensitive=False, help="What proxies of RocketMQ 5 let in. Default: NORMAL."),
    ] = None,
    inner: Annotated[bool, typer.Option("--inner", help="Queues of the type BatchCQ, for batchType=inner.")] = False,
    update: Annotated[
        bool,
        typer.Option(
            "--update", help="If it exists: set its queues, its permission to rw, and its type if --type is given."
        ),
    ] = False,
    cluster: Annotated[str | None, typer.Option(help="Needed where there are several.")] = None,
) -> None:
    """Create a topic on every broker of a cluster, and wait until the name servers know it."""
    from rocketmq_spark.admin.answers import Table
    from rocketmq_spark.model.route import BrokerRoute

    with connection.admin() as admin:
        kind = None if message_type is None else message_type.value
        made = admin.create_topic(topic, queues, message_type=kind, inner=inner, update=update, cluster=cluster)
    connection.show(Table(BrokerRoute, made.by_broker()))


@app.command()
@connected
def peek(
    connection: Connection,
    topic: Topic,
    count: Annotated[int, typer.Option("-c", "--count", help="How many messages.")] = 10,
    tag: Annotated[str | None, typer.Option(help="Only messages with this tag, or with one of 'a || b'.")] = None,
    group: Annotated[str, typer.Option(help="Consumer group in whose name brokers are asked.")] = "TOOLS_CONSUMER",
) -> None:
    """Show the newest messages of a topic; no consumer group's offsets are moved."""
    with connection.admin() as admin:
        connection.show(admin.peek(topic, count, tag=tag, consumer_group=group))


@app.command()
@connected
def send(
    connection: Connection,
    topic: Topic,
    body: Annotated[
        str,
        typer.Argument(
            help="The text to send. Without it, or for -, it is all of standard input: one message, however many lines."
        ),
    ] = "-",
    tags: Annotated[str | None, typer.Option(help="The message's one tag.")] = None,
    keys: Annotated[str | None, typer.Option(help="Keys to find it by, with a blank between them.")] = None,
    properties: Annotated[
        list[str] | None, typer.Option("--property", help="One of your own, as name=value. Repeatable.")
    ] = None,
    sharding_key: Annotated[str | None, typer.Option(help="Messages of one key go to one queue.")] = None,
    delay_ms: Annotated[int, typer.Option(help="Deliver it so many milliseconds later.")] = 0,
) -> None:
    """Send one message, and show where it was stored."""
    from rocketmq_spark.model.message import Message
    from rocketmq_spark.model.table import present, print_table
    from rocketmq_spark.options.parsing import parse_one
    from rocketmq_spark.options.sink import SINK_OPTIONS
    from rocketmq_spark.producer.producer import Producer
    from rocketmq_spark.routing.selectors import SelectMessageQueueByHash

    # The bytes of the command line need not be UTF-8.
    data = _from_stdin() if body == "-" else os.fsencode(body)
    own = _properties(properties or ())
    if tags is not None:
        # A consumer would read a tag with | as two tags; brokers accept it.
        parse_one(next(spec for spec in SINK_OPTIONS if spec.name == "tags"), tags, "--tags")
    try:
        message = Message.of(
            topic, data, tags=tags, keys=keys, sharding_key=sharding_key, delay_ms=delay_ms, properties=own
        )
    except (ValueError, ReservedPropertyError) as exc:
        raise OptionError(str(exc)) from exc
    # With a selector there is one attempt, at the one queue that is right.
    selector = None if sharding_key is None else SelectMessageQueueByHash()
    # The admin only finds out whether a name server causes a failure.
    with connection.admin(), Producer("rocketmq-spark-send", **connection.given()) as producer:
        sent = producer.send(message, selector=selector, arg=sharding_key, timeout_ms=connection.timeout * 1000)
    facts = sent.facts()
    if connection.as_json:
        connection.show_json(facts)
    else:
        print_table(*present(facts))


@app.command()
@connected
def doctor(
    connection: Connection,
    topic: Annotated[str | None, typer.Option(help="Look at this topic, too.")] = None,
    endpoints: Annotated[str | None, typer.Option(help="Look at these proxies, too: host:8081;host:8081.")] = None,
) -> None:
    """Find out what is wrong between this machine and a cluster, and how to mend it; writes nothing."""
    from rocketmq_spark.cli.doctor import examine
    from rocketmq_spark.cli.doctor.machine import FAILED

    given = connection.given(endpoints)
    if endpoints:
        # The name server of the cluster on this machine is not that of these proxies.
        given["name_server"] = connection.name_server
    found = examine(topic=topic, endpoints=endpoints, timeout=connection.timeout, **given)
    if connection.as_json:
        connection.show_json(found.to_dicts())
    else:
        _print_checks(found)
    if any(check.state == FAILED for check in found):
        raise typer.Exit(1)


def _from_stdin() -> bytes:
    if sys.stdin.isatty():
        typer.echo("rocketmq-spark: type the message; Ctrl-D on a line of its own ends it", err=True)
    return sys.stdin.buffer.read()


def _properties(texts: Iterable[str]) -> dict[str, str]:
    own: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise OptionError(f"--property {text!r} is not allowed: allowed is name=value")
        if name in own:
            raise OptionError(f"--property {name} is there twice: a message has one value of each")
        own[name] = value
    return own


def _print_checks(found: Table[Check]) -> None:
    """Print the doctor's findings, each with its advice in one unbroken line below, so that it can be copied."""
    import textwrap

    from rich.console import Console
    from rich.text import Text

    from rocketmq_spark.cli.doctor.machine import FAILED, OK, WARNING

    colours = {OK: "green", WARNING: "yellow", FAILED: "bold red"}
    console = Console(highlight=False)
    states = max(map(len, colours)) + 1
    names = max(len(escaped(check.check)) for check in found) + 2
    indent = " " * (states + names)
    for check in found:
        text = escaped(check.found)
        if console.is_terminal:
            # Breaking only at blanks keeps paths whole.
            room = max(console.width - len(indent), _NARROWEST)
            text = textwrap.fill(text, room, break_long_words=False, break_on_hyphens=False)
        line = Text(f"{check.state:<{states}}", style=colours[check.state])
        line.append(f"{escaped(check.check):<{names}}", style="default").append(
            text.replace("\n", f"\n{indent}"), style="default"
        )
        console.print(line, soft_wrap=True)
        if check.mend:
            console.print(f"{'':{states}}→ {escaped(check.mend)}", markup=False, soft_wrap=True)
    counted = [check.state for check in found]
    failed, warnings = counted.count(FAILED), counted.count(WARNING)
    if failed or warnings:
        console.print(f"{failed} failed, {warnings} to be looked at, {counted.count(OK)} ok")
    else:
        console.print("All is well.")
