"""What a local cluster's servers are told: the templates of conf/, their ports, their properties.

Rule 1: a template names files relative to the folder its server runs in; only names and ports are filled in.
Rule 2: a port is one nobody listens on now, and none that the system gives to outgoing connections.
Rule 3: a property that the cluster itself must know is refused, not silently replaced.
"""

from __future__ import annotations

import contextlib
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
from types import UnionType
from typing import Final

from rocketmq_spark.errors import ClusterError

# Below the range of every system's outgoing connections (Linux starts at 32768, macOS at 49152). A client that keeps
# trying a port of that range while its broker is down would one day get the port as its own, and talk to itself.
_PORTS: Final = range(20_000, 30_000)

# Not the generator that programs seed: two that seed alike would want the same ports.
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
    """The ports that one broker listens on; `vip` is always ``listen - 2`` (``BrokerController.java``)."""

    listen: int
    ha: int

    @property
    def vip(self) -> int:
        """The "fast" port (spec/remoting.md 2.3)."""
        return self.listen - 2


def render(template: str, **values: object) -> str:
    """Fill in a template of conf/.

    Raises
    ------
    ClusterError
        The package was installed without its templates.
    """
    return string.Template(_read(template)).substitute(values)


def properties_of(text: str) -> dict[str, str]:
    """Return the keys and values of a rendered ``.conf`` file."""
    lines = (line.strip() for line in text.splitlines())
    pairs = (line.partition("=") for line in lines if line and not line.startswith("#"))
    return {key.strip(): value.strip() for key, _, value in pairs}


def properties_text(properties: Mapping[str, str]) -> str:
    """Return a file that ``java.util.Properties.load`` reads back as `properties` (it reads Latin-1)."""
    return "".join(f"{_escaped(key, ' =:#!')}={_escaped(value, ' ')}\n" for key, value in properties.items())


def broker_overrides(
    given: Mapping[str, object] | Sequence[Mapping[str, object]] | None, brokers: int
) -> list[dict[str, str]]:
    """Return one mapping per broker out of the `broker_properties` of a cluster.

    Parameters
    ----------
    given : mapping, sequence of mappings, or None
        For all brokers, or one for each. Booleans become ``true`` and ``false``.
    brokers : int

    Raises
    ------
    ClusterError
        `brokers` is no number of brokers; as many mappings as brokers are needed; or a property that the cluster sets
        itself.
    """
    if not _is_number(brokers, int) or brokers < 1:
        raise ClusterError(f"brokers={brokers!r}: a cluster needs at least one; allowed are integers from 1 on")
    each = [given or {}] * brokers if given is None or isinstance(given, Mapping) else given
    if not _is_list_of(Mapping, each):
        raise ClusterError("broker_properties takes a mapping for all brokers, or a list with one for each of them")
    if len(each) != brokers:
        raise ClusterError(
            f"broker_properties has {len(each)} mappings for {brokers} brokers; give one for each, or one"
        )
    overrides = []
    for properties in each:
        for name in properties:
            if name in _BROKERS_OWN:
                raise ClusterError(f"broker_properties may not set {name}: {_BROKERS_OWN[name]}")
        overrides.append({name: _property_value(value) for name, value in properties.items()})
    return overrides


def proxy_overrides(given: bool | Mapping[str, object]) -> dict[str, object] | None:
    """Return the properties that the `proxy` of a cluster gives its proxy, or None if there is to be none.

    Parameters
    ----------
    given : bool or mapping
        A mapping, even an empty one, asks for a proxy.

    Raises
    ------
    ClusterError
        Neither; a property that the cluster sets itself; or a value that JSON does not have.
    """
    if not isinstance(given, bool | Mapping):
        raise ClusterError(f"proxy takes False, True or a mapping of properties, not a {type(given).__name__}")
    if not isinstance(given, Mapping):
        return {} if given else None
    for name, value in given.items():
        if name in _PROXYS_OWN:
            raise ClusterError(f"proxy may not set {name}: {_PROXYS_OWN[name]}")
        try:
            json.dumps(value)
        except (TypeError, ValueError) as exc:
            raise ClusterError(f"proxy: {name} takes what JSON has, not a {type(value).__name__}") from exc
    return dict(given)


def checked_jvm_options(given: Sequence[str]) -> tuple[str, ...]:
    """Return the JVM options of a cluster; a ClusterError says what is allowed."""
    if not _is_list_of(str, given):
        raise ClusterError("jvm_options takes a list with a text for each option, as in ['-Xmx1g', '-Xss1m']")
    return tuple(given)


def checked_timeout(given: float) -> float:
    """Return the `start_timeout` of a cluster; a ClusterError says what is allowed."""
    if not _is_number(given, int | float) or not given > 0:
        raise ClusterError(f"start_timeout={given!r}: allowed are seconds above 0")
    return given


def named_port(properties: Mapping[str, str], name: str) -> int | None:
    """Return the port that a user's properties name, or None.

    Raises
    ------
    ClusterError
        It is no port.
    """
    if name not in properties:
        return None
    return checked_port(properties[name], name)


def checked_port(value: object, name: str) -> int:
    """Return a user's port as a number; a ClusterError says what `name` allows."""
    text = str(value)
    if not re.fullmatch(r"[0-9]{1,5}", text) or not 1024 <= int(text) <= 65_535:
        raise ClusterError(f"{name}={text} is no port a server can have; allowed are 1024 to 65535")
    return int(text)


def is_free(port: int) -> bool:
    """Tell whether a server could listen on `port` now, on loopback and on every address."""
    # Java's server sockets set SO_REUSEADDR too: a closed connection's leftovers don't count. Both addresses, because
    # with it macOS allows the one while someone listens on the other.
    for host in ("127.0.0.1", "0.0.0.0"):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                return False
    return True


def pick_port(taken: Iterable[int], *, below: int = 0, draw: Callable[[int, int], int] = _draw) -> int:
    """Return a free port that is not in `taken`, with the `below` ports under it free too.

    `draw` is ``randrange``.

    Raises
    ------
    ClusterError
        None of 200 tries was free.
    """
    avoid = set(taken)
    for _ in range(200):
        port = draw(_PORTS.start + below, _PORTS.stop)
        wanted = range(port - below, port + 1)
        if avoid.isdisjoint(wanted) and all(is_free(each) for each in wanted):
            return port
    raise ClusterError(
        f"found no free port on 127.0.0.1 between {_PORTS.start} and {_PORTS.stop}; stop what listens there"
    )


def pick_broker_ports(taken: Iterable[int], properties: Mapping[str, str]) -> BrokerPorts:
    """Return the ports of one broker: the ones its properties name, else free ones.

    Raises
    ------
    ClusterError
        A named port, or the VIP port two below ``listenPort``, is taken.
    """
    avoid = set(taken)
    listen = named_port(properties, "listenPort")
    if listen is not None:
        require_free(listen, f"listenPort={listen}")
        require_free(listen - 2, f"listenPort={listen} (the broker's VIP port is two below)")
    ha = named_port(properties, "haListenPort")
    if ha is not None:
        require_free(ha, f"haListenPort={ha}")
        avoid.add(ha)
    if listen is None:
        listen = pick_port(avoid, below=2)
    if ha is None:
        ha = pick_port(avoid | {listen, listen - 2})
    return BrokerPorts(listen, ha)


def require_free(port: int, name: str) -> None:
    """Raise a ClusterError if something listens on a port that the user named, saying `name`."""
    if not is_free(port):
        raise ClusterError(f"{name}: something listens on 127.0.0.1:{port} already; stop it or name another port")


def _read(template: str) -> str:
    with contextlib.suppress(ModuleNotFoundError):
        return importlib.resources.files("rocketmq_spark.conf").joinpath(template).read_text(encoding="utf-8")
    # A source tree that is not installed: setup.cfg maps conf/ into the package only then.
    file = Path(__file__).parents[2] / "conf" / template
    try:
        return file.read_text(encoding="utf-8")
    except OSError as exc:
        raise ClusterError(f"the package rocketmq_spark.conf is missing ({exc}); install rocketmq-spark again") from exc


def _is_number(value: object, kind: type | UnionType) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _is_list_of(kind: type, given: object) -> bool:
    # A text is a sequence too, of texts.
    return isinstance(given, Sequence) and not isinstance(given, str) and all(isinstance(one, kind) for one in given)


def _property_value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _escaped(text: str, special: str) -> str:
    escapes = {"\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    out = []
    for (unit,) in struct.iter_unpack(">H", text.encode("utf-16-be", "surrogatepass")):
        char = chr(unit)
        if char in escapes:
            out.append(escapes[char])
        elif char in special:
            out.append("\\" + char)
        else:
            out.append(char if 0x20 <= unit < 0x7F else f"\\u{unit:04x}")
    return "".join(out)
