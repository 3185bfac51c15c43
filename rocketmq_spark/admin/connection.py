"""The options that all commands about a cluster share, and what happens where the cluster can't be reached.

Rule 1: the name server is the one of the command line; else ``NAMESRV_ADDR``; else that of the cluster which
        ``rocketmq-spark cluster up`` left running, with the keys and the certificates that this one takes. No other
        server gets these, be it a name server or a proxy. If a server that would get a signed request has died, the
        command fails: another program may listen at its address.
Rule 2: a failure is one line. Where a name server is at fault, it is the doctor's finding, not the exception's story.
Rule 3: results go to stdout, as a table or as JSON; what is missing goes to stderr, and makes the exit code 1.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rocketmq_spark.errors import (
    MQClientException,
    OptionError,
    RemotingException,
    RequestNotSupportedException,
    RocketMQError,
    RouteNotFoundException,
)
from rocketmq_spark.table_view import one_line

if TYPE_CHECKING:
    from rocketmq_spark.admin.admin import Admin
    from rocketmq_spark.admin.table import Table

_VISIBLE = "Others on this machine can see a command line: better set the variable, or give file:/path."


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Connection:
    """How the cluster is reached, and how the answer is shown."""

    name_server: Annotated[
        str | None,
        typer.Option(
            "-n",
            "--name-server",
            envvar="NAMESRV_ADDR",
            help="host:9876;host:9876. Default: the cluster that `rocketmq-spark cluster up` left running.",
        ),
    ] = None
    access_key: Annotated[
        str | None, typer.Option(envvar="ROCKETMQ_ACCESS_KEY", show_default=False, help="Name of the user that asks.")
    ] = None
    secret_key: Annotated[
        str | None, typer.Option(envvar="ROCKETMQ_SECRET_KEY", show_default=False, help=f"Its password. {_VISIBLE}")
    ] = None
    security_token: Annotated[
        str | None,
        typer.Option(envvar="ROCKETMQ_SECURITY_TOKEN", show_default=False, help=f"Its token, if temporary. {_VISIBLE}"),
    ] = None
    credentials_provider: Annotated[
        str | None, typer.Option(help="module:Class that gives key, secret and token, in their place.")
    ] = None
    sign_name_server_requests: Annotated[
        bool, typer.Option("--sign-name-server-requests", help="Sign requests to name servers, too.")
    ] = False
    tls: Annotated[bool, typer.Option("--tls", help="Encrypt every connection.")] = False
    tls_ca_file: Annotated[
        str | None, typer.Option(help="PEM file of the authorities to trust. Default: the system's.")
    ] = None
    tls_cert_file: Annotated[str | None, typer.Option(help="PEM file of this client's certificate.")] = None
    tls_key_file: Annotated[
        str | None, typer.Option(help="PEM file of its private key. Default: that of the certificate.")
    ] = None
    tls_server_name: Annotated[
        str | None, typer.Option(help="The one name of all certificates, where it is not the addresses dialled.")
    ] = None
    tls_insecure_skip_verify: Annotated[
        bool, typer.Option("--tls-insecure-skip-verify", help="Take every certificate: for trying things only.")
    ] = False
    namespace: Annotated[str | None, typer.Option(help="Only topics of this namespace, named without it.")] = None
    timeout: Annotated[float, typer.Option(help="Seconds that one question may take.")] = 5.0
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False

    def given(self, endpoints: str | None = None) -> dict[str, Any]:
        """Return what `Admin`, a producer and the doctor take; `endpoints`: to ask these proxies."""
        given = {
            "name_server": self.name_server,
            "access_key": self.access_key,
            "secret_key": self.secret_key,
            "security_token": self.security_token,
            "credentials_provider": self.credentials_provider,
            "sign_name_server_requests": self.sign_name_server_requests,
            "use_tls": self.tls,
            "tls_ca_file": self.tls_ca_file,
            "tls_cert_file": self.tls_cert_file,
            "tls_key_file": self.tls_key_file,
            "tls_server_name": self.tls_server_name,
            "tls_insecure_skip_verify": self.tls_insecure_skip_verify,
            "namespace": self.namespace,
        }
        running = {} if self.name_server else _left_running(endpoints)
        if any(given[name] for name in ("access_key", "secret_key", "credentials_provider")):
            # Somebody in particular asks, not the administrator.
            running = {name: value for name, value in running.items() if name not in ("access_key", "secret_key")}
        if self.tls_insecure_skip_verify:
            running.pop("tls_ca_file", None)
        return given | {name: value for name, value in running.items() if not given[name]}

    @contextlib.contextmanager
    def admin(self) -> Iterator[Admin]:
        """Ask the cluster; what a name server is to blame for is said as the doctor says it.

        Raises
        ------
        OptionError
            No name server is given, or an option is not allowed.
        MQClientException
            A name server can't be reached, or is none.
        """
        from rocketmq_spark.admin import Admin

        # A failure is one line: what else there is to say is in no log of a command's.
        logging.getLogger("rocketmq_spark").addHandler(logging.NullHandler())
        given = self.given()
        if given["name_server"] is None:
            raise OptionError(
                "no name server is given: name one with -n host:9876 or in the environment variable NAMESRV_ADDR, or "
                "start a cluster on this machine: rocketmq-spark cluster up"
            )
        with Admin(**given, timeout=self.timeout) as admin:
            try:
                yield admin
            except RocketMQError as exc:
                _blame_name_server(admin, exc, self.timeout)
                raise

    def show(self, table: Table[Any]) -> None:
        """Print an answer; ends the command with 1 if it is not whole."""
        if self.as_json:
            self.show_json(table.to_dicts())
        else:
            table.print()
        for text in table.missing:
            typer.echo(f"rocketmq-spark: missing: {one_line(text)}", err=True)
        if table.missing:
            raise typer.Exit(1)

    def show_json(self, value: Any) -> None:
        """Print a value as JSON."""
        typer.echo(json.dumps(value, indent=2))


def connected(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that has the options of `Connection` beside its own, and gets one as its first argument."""
    own = [*inspect.signature(command, eval_str=True).parameters.values()][1:]
    shared = [*inspect.signature(Connection, eval_str=True).parameters.values()]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        connection = Connection(**{one.name: values.pop(one.name) for one in shared})
        if connection.tls_insecure_skip_verify:
            typer.echo("rocketmq-spark: no server's certificate is checked (--tls-insecure-skip-verify)", err=True)
        command(connection, **values)

    keywords = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in (*own, *shared)]
    # typer reads both.
    run.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in keywords}
    return run


def _left_running(endpoints: str | None) -> dict[str, Any]:
    from rocketmq_spark.cluster.security import client_options
    from rocketmq_spark.cluster.state import StateFile, state_folder

    state = StateFile(state_folder(os.environ)).load()
    if state is None or not state.is_alive() or (endpoints and endpoints != state.endpoints):
        return {}
    if endpoints:
        state.require_running("Proxy")
    elif "accessKey" in state.options:
        # The name server sends clients to the brokers, which get signed requests too.
        state.require_running("NameServer", "Broker")
    else:
        state.require_running("NameServer")
    return client_options({"nameServer": state.name_server, **state.options})


def _blame_name_server(admin: Admin, exc: RocketMQError, timeout: float) -> None:
    """Raise what is wrong with a name server, if an error may come from that."""
    about_servers = isinstance(exc, RemotingException | RequestNotSupportedException | RouteNotFoundException)
    if not about_servers and not isinstance(exc.__cause__, RequestNotSupportedException):
        return
    from rocketmq_spark.doctor.check import FAILED, OK
    from rocketmq_spark.doctor.examine import check_name_servers

    checks = check_name_servers(admin, timeout)
    # One that answers is enough; a proxy answers, but not to everything.
    blamed = [
        one for one in checks if one.state == FAILED or (one.state != OK and not isinstance(exc, RemotingException))
    ]
    if blamed and len(blamed) == len(checks):
        raise MQClientException(f"{blamed[0].check}: {blamed[0].found}; {blamed[0].mend}") from exc
