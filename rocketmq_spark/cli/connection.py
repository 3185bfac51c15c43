"""The connection options of commands that send requests to a cluster, and the diagnosis of unreachable name servers.

The name server is that of the command line, else ``NAMESRV_ADDR``, else that of the cluster started with
``rocketmq-spark cluster up``. Only in the last case does a command use the keys and certificates of that cluster; with
``--endpoints``, only if they are its proxy. It then requires that the proxy has not died, or else the name server and,
with access control, the brokers. Otherwise another program may listen at the address.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from rocketmq_spark import errors
from rocketmq_spark.display.tables import one_line
from rocketmq_spark.options.connection import ConnectionOptions
from rocketmq_spark.options.kinds import READ, SECRET, OptionSpec, specs_of

if TYPE_CHECKING:
    from rocketmq_spark.admin.admin import Admin
    from rocketmq_spark.display.row_table import Table

_VISIBLE: Final = "Other users can see command lines, so prefer the environment variable, or give file:/path."
_PANEL: Final = "Connection"
_SPECS: Final = [spec for spec in specs_of(ConnectionOptions, READ) if spec.section in ("servers", "access", "tls")]
TRANSACTIONAL_KEY: Final = typer.Option(
    envvar="ROCKETMQ_TRANSACTIONAL_KEY", show_default=False, help=f"The option transactionalKey of the job. {_VISIBLE}"
)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Connection:
    """The connection to the cluster, and the format of the answer."""

    options: Mapping[str, Any]  # By field of `ConnectionOptions`; None or False if not given
    timeout: float
    as_json: bool

    def connection_options(self, endpoints: str | None = None) -> dict[str, Any]:
        """Return the arguments of `Admin`, a producer and the doctor; `endpoints` are the proxies that get requests."""
        options = dict(self.options)
        running = {} if options["name_server"] else _options_of_local_cluster(endpoints)
        if any(options[name] for name in ("access_key", "secret_key", "credentials_provider")):
            # The user gives other credentials than those of the cluster's administrator.
            running = {name: value for name, value in running.items() if name not in ("access_key", "secret_key")}
        if options["tls_insecure_skip_verify"]:
            running.pop("tls_ca_file", None)
        return options | {name: value for name, value in running.items() if not options[name]}

    @contextlib.contextmanager
    def admin(self) -> Iterator[Admin]:
        """Yield an `Admin`. If the name servers cause an error, the doctor's finding is raised instead."""
        from rocketmq_spark.admin import Admin

        # A failure is one line without log messages.
        logging.getLogger("rocketmq_spark").addHandler(logging.NullHandler())
        options = self.connection_options()
        if options["name_server"] is None:
            raise errors.OptionError(
                "no name server is given: use -n host:9876 or the environment variable NAMESRV_ADDR, or start a "
                "cluster on this machine with rocketmq-spark cluster up"
            )
        with Admin(**options, timeout=self.timeout) as admin:
            try:
                yield admin
            except errors.RocketMQError as exc:
                _blame_name_server(admin, exc, self.timeout)
                raise

    def show(self, table: Table[Any]) -> None:
        """Print an answer to stdout, and its missing parts to stderr; with missing parts the exit code is 1."""
        if self.as_json:
            print_json(table.to_dicts())
        else:
            table.print()
        exit_if_missing(table)


def exit_if_missing(*tables: Table[Any]) -> None:
    """Print the missing parts of answers to stderr; with missing parts the exit code is 1."""
    missing = [text for table in tables for text in table.missing]
    for text in missing:
        typer.echo(f"rocketmq-spark: missing: {one_line(text)}", err=True)
    if missing:
        raise typer.Exit(1)


def print_json(value: Any) -> None:
    """Print a value as JSON, to stdout."""
    typer.echo(json.dumps(value, indent=2))


def _answer(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    timeout: Annotated[float, typer.Option(help="Timeout of one request in seconds.", rich_help_panel=_PANEL)] = 5.0,
) -> None:
    """Declare the options that all commands have besides those of the connection."""


def _flag(spec: OptionSpec) -> inspect.Parameter:
    """Return the command parameter for an option of the connection."""
    names = [f"--{spec.field.removeprefix('use_').replace('_', '-')}"]
    if spec.field == "name_server":
        names.insert(0, "-n")
    text = spec.flag_help or spec.doc.partition(". ")[0].replace("`", "").removesuffix(".") + "."
    option = typer.Option(
        *names,
        envvar=spec.env or (f"ROCKETMQ_{spec.field.upper()}" if spec.kind is SECRET else None),
        show_default=False,
        help=f"{text} {_VISIBLE}" if spec.secret else text,
        rich_help_panel=_PANEL,
    )
    default, kind = (False, bool) if spec.default is False else (None, str | None)
    return inspect.Parameter(
        spec.field, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


def connected(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command with its own options and those of `Connection`, its first argument."""
    own = [*inspect.signature(command, eval_str=True).parameters.values()][1:]
    shared = [*map(_flag, _SPECS), *inspect.signature(_answer, eval_str=True).parameters.values()]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        options = {spec.field: values.pop(spec.field) for spec in _SPECS}
        if "count" in values and str(options["name_server"]).isdecimal():
            raise errors.OptionError(
                f"-n {options['name_server']} is no address: -n names the name servers. The number of messages is -c"
            )
        connection = Connection(options=options, timeout=values.pop("timeout"), as_json=values.pop("as_json"))
        if options["tls_insecure_skip_verify"]:
            typer.echo("rocketmq-spark: certificates are not verified (--tls-insecure-skip-verify)", err=True)
        command(connection, **values)

    keywords = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in (*own, *shared)]
    run.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in keywords}  # typer reads both
    return run


def _options_of_local_cluster(endpoints: str | None) -> dict[str, Any]:
    """Return the options of the cluster started with ``cluster up``; none if it has ended or has other `endpoints`."""
    from rocketmq_spark.cluster.security import client_options
    from rocketmq_spark.cluster.state import StateFile

    state = StateFile().load()
    if state is None or not state.is_alive() or (endpoints and endpoints != state.endpoints):
        return {}
    if endpoints:
        state.require_running("Proxy")
    else:
        # With access control, the brokers that the name server lists get signed requests, too.
        state.require_running("NameServer", *(["Broker"] if "accessKey" in state.options else []))
    return client_options({"nameServer": state.name_server, **state.options})


def _blame_name_server(admin: Admin, exc: errors.RocketMQError, timeout: float) -> None:
    """Raise the doctor's finding if all name servers cause an error."""
    about_servers = isinstance(
        exc, errors.RemotingException | errors.RequestNotSupportedException | errors.RouteNotFoundException
    )
    if not about_servers and not isinstance(exc.__cause__, errors.RequestNotSupportedException):
        return
    from rocketmq_spark.cli.doctor.examine import check_name_servers
    from rocketmq_spark.cli.doctor.machine import FAILED, WARNING

    checks = check_name_servers(admin, timeout)
    # A proxy instead of a name server does not support all requests, which is a warning.
    states = {FAILED} if isinstance(exc, errors.RemotingException) else {FAILED, WARNING}
    blamed = [check for check in checks if check.state in states]
    # One name server that answers is enough.
    if blamed and len(blamed) == len(checks):
        raise errors.MQClientException(f"{blamed[0].check}: {blamed[0].finding}; {blamed[0].fix}") from exc
