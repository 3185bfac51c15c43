"""The commands about consumer groups, and the one that deletes a topic: changes are confirmed first."""

from __future__ import annotations

import sys
from datetime import datetime
from typing import Annotated, Final

import typer

from rocketmq_spark.cli.connection import Connection, exit_if_missing, print_json
from rocketmq_spark.errors import OptionError, escaped

_YES: Final = typer.Option("--yes", help="Do not ask for a confirmation.")

Group = Annotated[str, typer.Argument(metavar="GROUP", help="Name of the consumer group.")]
Topic = Annotated[str, typer.Argument(help="Name of the topic.")]
Yes = Annotated[bool, _YES]


def group(connection: Connection, group: Group) -> None:
    """Show how many messages of each queue a consumer group has not read, and its members."""
    with connection.admin() as admin:
        found = admin.group(group)
    if connection.as_json:
        print_json({"queues": found.queues.to_dicts(), "members": found.members.to_dicts()})
    else:
        found.queues.print()
        typer.echo()
        found.members.print()
    exit_if_missing(found.queues, found.members)


def reset_offsets(
    connection: Connection,
    group: Group,
    topic: Topic,
    to: Annotated[
        str,
        typer.Option(
            help="earliest, latest, a time (2026-11-28T10:00:00+01:00, or ms since 1970), or offsets as JSON, as in "
            "startingOffsets."
        ),
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the offsets.")] = False,
    yes: Yes = False,
) -> None:
    """Commit other offsets of a topic for a consumer group without members."""
    value = _time_or_text(to)
    with connection.admin() as admin:
        if not (dry_run or yes):
            admin.reset_offsets(group, topic, value, dry_run=True).print(sys.stderr)
            _confirm(f"Commit these offsets of {escaped(topic)} for the group {escaped(group)}?")
        connection.show(admin.reset_offsets(group, topic, value, dry_run=dry_run))


def delete_topic(connection: Connection, topic: Topic, yes: Yes = False) -> None:
    """Delete a topic and its messages on all its brokers."""
    with connection.admin() as admin:
        if not yes:
            admin.offsets(topic).print(sys.stderr)
            _confirm(f"Delete the topic {escaped(topic)} with its messages?")
        route = admin.delete_topic(topic)
    brokers = [data.broker_name for data in route.queue_datas]
    if connection.as_json:
        print_json({"topic": topic, "brokers": brokers})
    else:
        typer.echo(f"deleted {escaped(topic)} on {escaped(', '.join(brokers))}")


def _time_or_text(text: str) -> str | int | datetime:
    if text.strip().isdecimal():
        return int(text)
    try:
        # Python 3.10 does not know the Z of UTC.
        return datetime.fromisoformat(text.strip().replace("Z", "+00:00"))
    except ValueError:
        return text


def _confirm(question: str) -> None:
    if not sys.stdin.isatty():
        raise OptionError("this command asks for a confirmation, and there is no terminal: give --yes")
    typer.confirm(question, abort=True, err=True)
