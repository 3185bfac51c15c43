"""The configuration of a local cluster's servers: the templates of conf/, ports and properties.

A port is free now, and not one that the system gives to outgoing connections. A property that the cluster sets itself
is refused, not replaced.
"""

from __future__ import annotations

import importlib.resources
import json
import random
import re
import socket
import string
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rocketmq_spark.errors import ClusterError

# Below the range of every system's outgoing connections (Linux starts at 32768, macOS at 49152). Otherwise a client
# that keeps trying the port while its broker is down could get it as its own port, and talk to itself.
_PORTS: Final = range(20_000, 30_000)

# Two programs with the same seed must not try the same ports.
_draw: Final = random.SystemRandom().randrange

_BY_AUTH: Final = {"authenticationEnabled": "use auth=", "authorizationEnabled": "use auth="}

_BROKERS_OWN: Final = {
    "brokerName": "it is broker-0, broker-1, ...",
    "brokerIP1": "it is 127.0.0.1",
    "bindAddress": "it is 127.0.0.1",
    "namesrvAddr": "it is the cluster's own name server",
    "storePathRootDir": "use directory=",
    "storePathCommitLog": "use directory=",
    **_BY_AUTH,
}

_PROXYS_OWN: Final = {
    "rocketMQClusterName": "it is the brokers'",
    "proxyMode": "it is CLUSTER",
    "namesrvAddr": "it is the cluster's own name server",
    "localServeAddr": "it is 127.0.0.1",
    "remotingAccessAddr": "it is 127.0.0.1",
    "grpcServerPort": "it is a free port, see LocalCluster.endpoints",
    "remotingListenPort": "it is a free port, see Proxy.address",
    **_BY_AUTH,
}


@dataclass(frozen=True, slots=True)
class BrokerPorts:
    """The ports that one broker listens on."""

    listen: int
    ha: int

    @property
    def vip(self) -> int:
        """The VIP port, always ``listen - 2`` (``BrokerController.java``)."""
        return self.listen - 2


def render(template: str, **values: object) -> str:
    """Return a template of conf/ with its values; a ClusterError if the package was installed without templates."""
    try:
        file = importlib.resources.files("rocketmq_spark.conf").joinpath(template)
    except ModuleNotFoundError:
        # A source tree that is not installed: setup.cfg maps conf/ into the package only then.
        file = Path(__file__).parents[2] / "conf" / template
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as exc:
        raise ClusterError(f"the package rocketmq_spark.conf is missing ({exc}); install rocketmq-spark again") from exc
    return string.Template(text).substitute(values)


def user_folder(kind: str, default: str, environ: Mapping[str, str]) -> Path:
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
    """Return the checked properties of each broker; `given` is for all brokers, or has one mapping for each."""
    if not isinstance(brokers, int) or isinstance(brokers, bool) or brokers < 1:
        raise ClusterError(f"brokers={brokers!r}: a cluster needs at least one; allowed are integers from 1 on")
    each = [given or {}] * brokers if given is None or isinstance(given, Mapping) else given
    if not is_list_of(Mapping, each):
        raise ClusterError("broker_properties takes a mapping for all brokers, or a list with one for each of them")
    if len(each) != brokers:
        raise ClusterError(f"broker_properties has {len(each)} mappings for {brokers} brokers; give one, or one each")
    for properties in each:
        _refuse_own(properties, _BROKERS_OWN, "broker_properties")
    return [
        {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in properties.items()}
        for properties in each
    ]


def proxy_overrides(given: bool | Mapping[str, object]) -> dict[str, object] | None:
    """Return the checked properties of the proxy, or None without a proxy; even an empty mapping asks for one."""
    if isinstance(given, bool):
        return {} if given else None
    if not isinstance(given, Mapping):
        raise ClusterError(f"proxy takes False, True or a mapping of properties, not a {type(given).__name__}")
    _refuse_own(given, _PROXYS_OWN, "proxy")
    for name, value in given.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as exc:
            raise ClusterError(f"proxy: {name} takes what JSON has, not a {type(value).__name__}") from exc
    return dict(given)


def _refuse_own(given: Mapping[str, object], own: Mapping[str, str], parameter: str) -> None:
    for name in given:
        if name in own:
            raise ClusterError(f"{parameter} may not set {name}: {own[name]}")


def is_list_of(kind: type, given: object) -> bool:
    """Return whether a parameter is a sequence of `kind`, and not a text, which is a sequence of texts."""
    return isinstance(given, Sequence) and not isinstance(given, str) and all(isinstance(one, kind) for one in given)


def checked_port(value: object, name: str) -> int:
    """Return a user's port as a number, or raise a ClusterError."""
    text = str(value)
    if not re.fullmatch(r"[0-9]{1,5}", text) or not 1024 <= int(text) <= 65_535:
        raise ClusterError(f"{name}={text} is no port a server can have; allowed are 1024 to 65535")
    return int(text)


def is_free(port: int) -> bool:
    """Return whether a server could listen on `port` now, on loopback and on every address."""
    # Java's server sockets set SO_REUSEADDR too. With it macOS allows one address while someone listens on the other.
    for host in ("127.0.0.1", "0.0.0.0"):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                return False
    return True


def pick_port(taken: Iterable[int], *, below: int = 0, draw: Callable[[int, int], int] = _draw) -> int:
    """Return a free port that is not in `taken`; the `below` ports before it are free too. `draw` is ``randrange``."""
    avoid = set(taken)
    for _ in range(200):
        port = draw(_PORTS.start + below, _PORTS.stop)
        wanted = range(port - below, port + 1)
        if avoid.isdisjoint(wanted) and all(is_free(each) for each in wanted):
            return port
    raise ClusterError(f"found no free port on 127.0.0.1 from {_PORTS.start} to {_PORTS.stop}; stop what listens there")


def pick_broker_ports(taken: Iterable[int], properties: Mapping[str, str]) -> BrokerPorts:
    """Return the ports of one broker: the ports that its properties name, if they are free, or free ones."""
    named = {
        name: checked_port(properties[name], name) for name in ("listenPort", "haListenPort") if name in properties
    }
    listen, ha = named.get("listenPort"), named.get("haListenPort")
    for name, port in named.items():
        require_free(port, f"{name}={port}")
    if listen is None:
        listen = pick_port({*taken, *named.values()}, below=2)
    else:
        require_free(listen - 2, f"listenPort={listen} (the broker's VIP port is two below)")
    return BrokerPorts(listen, ha or pick_port({*taken, listen, listen - 2}))


def require_free(port: int, name: str) -> None:
    """Raise a ClusterError with `name` if something listens on the port."""
    if not is_free(port):
        raise ClusterError(f"{name}: something listens on 127.0.0.1:{port} already; stop it or name another port")
