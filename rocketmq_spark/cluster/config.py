"""The configuration of a local cluster's servers: templates of conf/, free ports, and the user's properties."""

from __future__ import annotations

import contextlib
import importlib.resources
import json
import os
import random
import re
import socket
import string
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from rocketmq_spark.errors import ClusterError

# Below outgoing ports (Linux 32768, macOS 49152). Otherwise a client of a stopped broker could connect to itself.
_PORTS: Final = range(20_000, 30_000)

# Programs with the same seed must not try the same ports.
_draw: Final = random.SystemRandom().randrange

_FIXED_BROKER_PROPERTIES: Final = {
    "brokerName": "it is broker-0, broker-1, ...",
    "brokerIP1": "it is 127.0.0.1",
    "bindAddress": "it is 127.0.0.1",
    "namesrvAddr": "it is the cluster's own name server",
    "storePathRootDir": "use directory=",
    "storePathCommitLog": "use directory=",
    "authenticationEnabled": "use auth=",
    "authorizationEnabled": "use auth=",
}

_FIXED_PROXY_PROPERTIES: Final = {
    "rocketMQClusterName": "it is that of the brokers",
    "proxyMode": "it is CLUSTER",
    "namesrvAddr": "it is the cluster's own name server",
    "localServeAddr": "it is 127.0.0.1",
    "remotingAccessAddr": "it is 127.0.0.1",
    "grpcServerPort": "it is a free port, see LocalCluster.endpoints",
    "remotingListenPort": "it is a free port, see Proxy.address",
    "authenticationEnabled": "use auth=",
    "authorizationEnabled": "use auth=",
}


@contextlib.contextmanager
def os_errors(doing: str, advice: str) -> Iterator[None]:
    """Raise an OSError of the block as a ClusterError with what failed, the cause and what to do."""
    try:
        yield
    except OSError as exc:
        raise ClusterError(f"{doing}: {exc}; {advice}") from exc


def render(template: str, **values: object) -> str:
    """Return a template of conf/ with its values."""
    try:
        file = importlib.resources.files("rocketmq_spark.conf").joinpath(template)
    except ModuleNotFoundError:
        # The package is not installed: setup.cfg makes conf/ a part of it only at the installation.
        file = Path(__file__).parents[2] / "conf" / template
    with os_errors("reading a template of rocketmq_spark.conf", "install rocketmq-spark again"):
        return string.Template(file.read_text(encoding="utf-8")).substitute(values)


def user_folder(kind: str, default: str, environ: Mapping[str, str] = os.environ) -> Path:
    """Return ``$ROCKETMQ_SPARK_kind``, else ``rocketmq-spark`` in ``$XDG_kind_HOME`` or ``~/default``."""
    chosen = environ.get(f"ROCKETMQ_SPARK_{kind}", "")
    if chosen:
        return Path(chosen).absolute()
    base = environ.get(f"XDG_{kind}_HOME", "")
    return (Path(base) if base else Path.home() / default).absolute() / "rocketmq-spark"


def properties_of(text: str) -> dict[str, str]:
    """Return the keys and values of a rendered ``.conf`` file."""
    lines = (line.strip() for line in text.splitlines())
    pairs = (line.partition("=") for line in lines if line and not line.startswith("#"))
    return {key.strip(): value.strip() for key, _, value in pairs}


def properties_text(properties: Mapping[str, str]) -> str:
    """Return a file that ``java.util.Properties.load`` reads back as `properties` (it reads Latin-1)."""
    return "".join(f"{_escaped(key, ' =:#!')}={_escaped(value, ' ')}\n" for key, value in properties.items())


def _escaped(text: str, special: str) -> str:
    def units(match: re.Match[str]) -> str:
        data = match[0].encode("utf-16-be", "surrogatepass")
        return "".join(f"\\u{unit:04x}" for (unit,) in struct.iter_unpack(">H", data))

    quoted = re.sub(rf"[\\{special}]", r"\\\g<0>", text)
    return re.sub(r"[^ -~]+", units, quoted)


def broker_overrides(
    given: Mapping[str, object] | Sequence[Mapping[str, object]] | None, brokers: int
) -> list[dict[str, str]]:
    """Return the checked properties of each broker. `given` is one mapping for all brokers, or a list with one each."""
    checked_count(brokers, "brokers")
    each = [given or {}] * brokers if given is None or isinstance(given, Mapping) else given
    if not is_list_of(Mapping, each):
        raise ClusterError("broker_properties takes a mapping for all brokers, or a list with one for each of them")
    if len(each) != brokers:
        raise ClusterError(f"broker_properties has {len(each)} mappings for {brokers} brokers: give one, or one each")
    for properties in each:
        refuse_properties(properties, _FIXED_BROKER_PROPERTIES, "broker_properties")
    return [
        {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in properties.items()}
        for properties in each
    ]


def proxy_overrides(given: bool | Mapping[str, object]) -> dict[str, object] | None:
    """Return the checked properties of the proxy, or None without a proxy; an empty mapping means a proxy."""
    if isinstance(given, bool):
        return {} if given else None
    if not isinstance(given, Mapping):
        raise ClusterError(f"proxy takes False, True or a mapping of properties, not a {type(given).__name__}")
    refuse_properties(given, _FIXED_PROXY_PROPERTIES, "proxy")
    for name, value in given.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as exc:
            kind = type(value).__name__
            raise ClusterError(f"proxy: the property {name} must be a JSON value, not a {kind}") from exc
    return dict(given)


def refuse_properties(given: Iterable[str], fixed: Mapping[str, str], parameter: str) -> None:
    """Raise a ClusterError for a property that the cluster sets itself; `fixed` has the advice by name."""
    for name in given:
        if name in fixed:
            raise ClusterError(f"{parameter} may not set {name}: {fixed[name]}")


def is_list_of(kind: type, given: object) -> bool:
    """Return whether a parameter is a sequence of `kind`; a string, which is a sequence of strings, is not."""
    return isinstance(given, Sequence) and not isinstance(given, str) and all(isinstance(item, kind) for item in given)


def checked_count(value: int, name: str) -> int:
    """Return a user's number of servers, or raise a ClusterError."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ClusterError(f"{name}={value!r} is not allowed: allowed is an integer of at least 1")
    return value


def checked_port(value: object, name: str) -> int:
    """Return a user's port as a number, or raise a ClusterError."""
    text = str(value)
    if not re.fullmatch(r"[0-9]{1,5}", text) or not 1024 <= int(text) <= 65_535:
        raise ClusterError(f"{name}={text} is not a valid port: allowed are 1024 to 65535")
    return int(text)


def is_free(port: int) -> bool:
    """Return whether a server could listen on `port` now, on loopback and on every address."""
    # Java's server sockets also set SO_REUSEADDR. On macOS it allows one address while the other is in use.
    for host in ("127.0.0.1", "0.0.0.0"):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                return False
    return True


def pick_port(taken: Iterable[int], *, below: int = 0, draw: Callable[[int, int], int] = _draw) -> int:
    """Return a free port outside `taken` with `below` free ports before it. `draw` is ``randrange``."""
    avoid = set(taken)
    for _ in range(200):
        port = draw(_PORTS.start + below, _PORTS.stop)
        candidates = range(port - below, port + 1)
        if avoid.isdisjoint(candidates) and all(map(is_free, candidates)):
            return port
    raise ClusterError(f"no free port on 127.0.0.1 from {_PORTS[0]} to {_PORTS[-1]}: stop a program that uses one")


def pick_broker_ports(taken: Iterable[int], properties: Mapping[str, str]) -> tuple[int, int]:
    """Return listenPort and haListenPort: the given ones, or free ones (VIP: docs/internals/producer.md#vip-port)."""
    named = {}
    for name in ("listenPort", "haListenPort"):
        if name in properties:
            named[name] = checked_port(properties[name], name)
            require_free(named[name], f"{name}={named[name]}")
    listen, ha = named.get("listenPort"), named.get("haListenPort")
    if listen is None:
        listen = pick_port({*taken, *named.values()}, below=2)
    else:
        require_free(listen - 2, f"listenPort={listen} (the broker's VIP port is listenPort - 2)")
    return listen, ha or pick_port({*taken, listen, listen - 2})


def require_free(port: int, name: str) -> None:
    """Raise a ClusterError with `name` if something listens on the port."""
    if not is_free(port):
        raise ClusterError(f"{name}: port {port} of 127.0.0.1 is in use: stop its program, or choose another port")
