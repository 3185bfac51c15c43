"""The brokers: can each be reached where it says it is, and is it fit to take messages.

Rule 1: what an answer tells is one line per broker while all is well, and one line per problem otherwise.
Rule 2: a broker's clock is its start plus how long it has run, which it cuts to whole seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from rocketmq_spark.admin.asking import ask_all
from rocketmq_spark.admin.brokers import Told, ask_brokers, clock_of, disk_used_percent, version_of
from rocketmq_spark.doctor.check import FAILED, OK, WARNING, Check
from rocketmq_spark.doctor.listener import Listener, who_listens
from rocketmq_spark.errors import MQBrokerException, RemotingException, RocketMQError, UserRefusedException
from rocketmq_spark.route_data import PERM_WRITE, permission_text
from rocketmq_spark.transport.remoting import RemotingTransport
from rocketmq_spark.wire.codes import missing_right

OLDEST: Final = (4, 9)

# Of messageStoreConfig: from diskSpaceCleanForciblyRatio on a broker deletes before its time, from
# diskSpaceWarningLevelRatio on it takes no messages.
_DELETES_FROM: Final = 85.0
_REFUSES_FROM: Final = 90.0
_CLOCK_WITHIN: Final = 5.0


def check_brokers(transport: RemotingTransport, timeout: float) -> list[Check]:
    """Ask every broker that the name servers know for its figures; nothing, if a proxy stands in for them."""
    try:
        brokers = transport.cluster_info(timeout).brokers
    except RocketMQError:
        return []
    checks = [
        Check(
            f"broker {broker.broker_name}",
            WARNING,
            "it has no master now, only slaves: it takes no messages",
            "bring its master back",
        )
        for broker in brokers
        if broker.master is None
    ]
    answers = list(ask_brokers(transport, brokers, timeout))
    unreached = {broker.broker_addrs[number] for broker, number, told in answers if isinstance(told, RemotingException)}
    listeners = ask_all(unreached, lambda address: who_listens(address, timeout))
    for broker, number, told in answers:
        address = broker.broker_addrs[number]
        name = f"broker {broker.broker_name}" + (f", slave {number}" if number else "")
        if isinstance(told, RemotingException):
            checks.append(_unreached(name, address, listeners[address]))
        elif isinstance(told, RocketMQError):
            checks.append(_refused(name, address, told))
        else:
            checks += _examined(name, address, told, is_master=number == 0)
    return checks


def access_refused(exc: RocketMQError) -> bool | None:
    """Return whether an error says that the user's key is refused; False: the key is good, a right is missing.

    None: the error says something else.
    """
    if isinstance(exc, UserRefusedException):
        return True
    return False if isinstance(exc, MQBrokerException) and missing_right(exc.remark) else None


def key_refused(name: str, exc: RocketMQError) -> Check:
    """Return the finding for a key that is refused."""
    said = exc.remark if isinstance(exc, MQBrokerException) else str(exc)
    mend = "give the right access key and secret key (accessKey, secretKey; ROCKETMQ_ACCESS_KEY, ROCKETMQ_SECRET_KEY)"
    return Check(name, FAILED, f"the access key is refused: {said.partition(chr(10))[0]}", mend)


def _unreached(name: str, address: str, listener: Listener | RocketMQError) -> Check:
    said = listener.value if isinstance(listener, Listener) else f"it can't be told who listens: {listener}"
    found = f"it has registered itself as {address}, and from here {said}"
    mend = "if it runs, set brokerIP1 in its configuration to an address that this machine and Spark's executors reach"
    return Check(name, FAILED, found, f"{mend}, and open that port")


def _refused(name: str, address: str, exc: RocketMQError) -> Check:
    refused = access_refused(exc)
    if refused:
        return key_refused(name, exc)
    if refused is False:
        return Check(name, OK, f"reachable at {address}; this user may not see its release, disk and clock")
    return Check(name, WARNING, str(exc), "look into the broker's log (broker.log)")


def _examined(name: str, address: str, told: Told, *, is_master: bool) -> list[Check]:
    runtime, now, perm = told
    problems = list(_problems(name, told, is_master=is_master))
    disk, clock = disk_used_percent(runtime), clock_of(runtime)
    facts = [f"reachable at {address}", version_of(runtime) or "release unknown"]
    facts += [] if perm is None else [f"permission {permission_text(perm)}"]
    facts += [] if disk is None else [f"disk {disk:.0f} % full"]
    facts += ["clock not told"] if clock is None else [] if _clock_is_off(clock, now) else ["clock as ours"]
    return [Check(name, OK, ", ".join(facts)), *problems]


def _problems(name: str, told: Told, *, is_master: bool) -> Iterator[Check]:
    runtime, now, perm = told
    version, disk, clock = version_of(runtime), disk_used_percent(runtime), clock_of(runtime)
    numbers = tuple(int(part) for part in (version or "").split(".")[:2] if part.isdecimal())
    if numbers and numbers < OLDEST:
        yield Check(f"{name}: version", FAILED, f"{version}, and 4.9 is the oldest that is supported", "update it")
    if perm is not None and is_master and not perm & PERM_WRITE:
        mend = "set brokerPermission=6 if it should (it may be on its way out of service)"
        yield Check(f"{name}: permission", WARNING, f"it takes no messages (brokerPermission={perm})", mend)
    if disk is not None and disk >= _DELETES_FROM:
        full = disk >= _REFUSES_FROM
        found = f"{disk:.0f} % full: " + (
            "from 90 % on a broker refuses messages" if full else "from 85 % on a broker deletes messages early"
        )
        mend = "free some space, give it a larger disk, or keep messages for less long (fileReservedTime)"
        yield Check(f"{name}: disk", FAILED if full else WARNING, found, mend)
    if clock is not None and _clock_is_off(clock, now):
        ahead = clock - now
        found = f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} this machine's"
        mend = "set both by NTP: delays, times of messages and reads by time are off by as much"
        yield Check(f"{name}: clock", WARNING, found, mend)


def _clock_is_off(clock: float, now: float) -> bool:
    # It is cut to seconds, so up to one behind what it was when it answered.
    return not -_CLOCK_WITHIN - 1 <= clock - now <= _CLOCK_WITHIN
