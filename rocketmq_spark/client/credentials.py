"""Options to credentials: given as they are, by reference, or by a class of the user's own.

Rule 1: ``env:NAME`` and ``file:/path`` are read where they are used, in the process that signs: neither the plan nor
        what Spark ships to a task holds what they stand for.
Rule 2: what can change is asked for again ahead of its end, by a thread of its own: nobody who signs waits for it while
        what is held is good. Where asking fails, that goes on until it expires.
Rule 3: nobody waits for ever: a provider that does not answer is an error.
Rule 4: an error says which option, variable, file or class, never what it holds.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Final, Protocol

from rocketmq_spark.credentials import Credentials, CredentialsProvider
from rocketmq_spark.errors import CredentialsError, OptionError
from rocketmq_spark.option_values import ENV, FILE, is_printable
from rocketmq_spark.user_class import make

logger = logging.getLogger("rocketmq_spark.producer")

# How often a provider is asked that does not say until when its answer is good: a file that Kubernetes or an agent
# replaces is read within this time.
_EVERY: Final = 60.0
# Ahead of an end that is known; less for what lives shorter than four times as long.
_AHEAD: Final = 300.0
_AGAIN: Final = 10.0
_PATIENCE: Final = 30.0
# Far more than any token has: the path may name the wrong file.
_LONGEST: Final = 64 * 1024


class CredentialOptions(Protocol):
    """What decides on who signs, among the options of a write, a read or a producer."""

    @property
    def access_key(self) -> str | None:
        """Name of the user that signs."""
        ...

    @property
    def secret_key(self) -> str | None:
        """What the user signs with."""
        ...

    @property
    def security_token(self) -> str | None:
        """Token of a temporary user."""
        ...

    @property
    def credentials_provider(self) -> str | None:
        """``module:Class`` of who knows all three."""
        ...


def credentials_of(options: CredentialOptions) -> CredentialsProvider | None:
    """Return who signs; None: nobody.

    Raises
    ------
    OptionError
        A variable, a file or a class can't be had here.
    """
    if options.credentials_provider is not None:
        name = options.credentials_provider
        provider = make("credentialsProvider", name, "credentials")
        return RefreshedCredentials(provider.credentials, f"credentialsProvider={name}")
    if options.access_key is None or options.secret_key is None:
        return None
    given = (options.access_key, options.secret_key, options.security_token or "")

    def resolved() -> Credentials:
        key, secret, token = map(_resolved, ("accessKey", "secretKey", "securityToken"), given)
        return Credentials(key, secret, token)

    first = resolved()
    files = [text.removeprefix(FILE) for text in given if text.startswith(FILE)]
    return RefreshedCredentials(resolved, f"reading {', '.join(files)}", first) if files else first


def _resolved(option: str, text: str) -> str:
    if text.startswith(ENV):
        name = text.removeprefix(ENV)
        value = os.environ.get(name)
        if value is None:
            raise OptionError(
                f"option {option}={text}: the environment variable {name} is not set in this process; set it for the "
                f"driver, and for the executors' Python workers with spark.executorEnv.{name}"
            )
    elif text.startswith(FILE):
        value = _read(option, text)
    else:
        return text
    if not is_printable(value):
        raise OptionError(
            f"option {option}={text}: what it holds is not allowed: allowed is one line of text that is not blank, "
            "without control characters"
        )
    return value


def _read(option: str, text: str) -> str:
    try:
        with Path(text.removeprefix(FILE)).open("rb") as file:
            data = file.read(_LONGEST + 1)
    except OSError as exc:
        raise OptionError(
            f"option {option}={text}: reading it failed: {exc.strerror or exc}; the file must be at that path, for "
            "this process to read, on the driver and on every executor"
        ) from exc
    if len(data) > _LONGEST:
        raise OptionError(f"option {option}={text}: it has more than {_LONGEST} bytes: is it the right file?")
    try:
        # Editors end a file's last line.
        return data.decode().rstrip("\r\n")
    except UnicodeDecodeError:
        pass
    # Outside the except block: that error holds what was read.
    raise OptionError(f"option {option}={text}: what it holds is not UTF-8: give a file with one line of text")


class RefreshedCredentials:
    """Credentials that are asked for again before they expire; safe for many threads, and after a fork.

    Parameters
    ----------
    ask : callable
        Gives credentials; may block.
    what : str
        Who is asked, for the text of an error.
    first : Credentials, optional
        To begin with. Default: the first who signs waits.
    clock : callable, default time.time
        Epoch seconds.
    patience : float, default 30.0
        Seconds that someone who signs waits while nothing good is held.
    """

    def __init__(
        self,
        ask: Callable[[], Credentials],
        what: str,
        first: Credentials | None = None,
        clock: Callable[[], float] = time.time,
        patience: float = _PATIENCE,
    ) -> None:
        self._ask = ask
        self._what = what
        self._clock = clock
        self._patience = patience
        # What is held, and when to ask again: replaced as one.
        self._held = (first, -math.inf if first is None else _due(first, clock()))
        self._reset()

    def __repr__(self) -> str:
        return f"<RefreshedCredentials {self._what}>"

    def credentials(self) -> Credentials:
        """Return credentials that are good now.

        Raises
        ------
        CredentialsError
            None are held, or they have expired, and there are no others to be had.
        """
        (held, due), now = self._held, self._clock()
        if held is not None and now < due:
            return held
        answer = self._asked()
        if held is not None and now < _end(held):
            return held
        try:
            return answer.result(self._patience)
        except TimeoutError:
            why, cause = f"no answer within {self._patience:g} s", None
        except CredentialsError as exc:
            # One of its own for every thread that waits.
            why, cause = str(exc), exc.__cause__
        raise CredentialsError(f"{self._what}: {why}") from cause

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._asking: Future[Credentials] | None = None

    def _asked(self) -> Future[Credentials]:
        """Return the answer that is on its way, from a thread that is started if none is."""
        if os.getpid() != self._pid:
            # The parent's lock may be held for ever, and its thread is not here.
            self._reset()
        with self._lock:
            if self._asking is None:
                self._asking = Future()
                threading.Thread(
                    target=self._take, args=(self._asking,), name="rocketmq-spark-credentials", daemon=True
                ).start()
            return self._asking

    def _take(self, answer: Future[Credentials]) -> None:
        try:
            fresh = self._checked(self._ask())
        except Exception as exc:
            error = CredentialsError(str(exc) if isinstance(exc, (OptionError, CredentialsError)) else repr(exc))
            error.__cause__ = exc
            held = self._held[0]
            with self._lock:
                self._asking, self._held = None, (held, self._clock() + _AGAIN)
            if held is not None and self._clock() < _end(held):
                logger.warning("%s: %s (what was given before is good for now)", self._what, error)
            answer.set_exception(error)
        else:
            with self._lock:
                self._asking, self._held = None, (fresh, _due(fresh, self._clock()))
            answer.set_result(fresh)

    def _checked(self, given: object) -> Credentials:
        if not isinstance(given, Credentials):
            raise CredentialsError(
                f"it returned a {type(given).__name__}: return rocketmq_spark.Credentials(access_key, secret_key, "
                "security_token, expires_at)"
            )
        texts = {"access_key": given.access_key, "secret_key": given.secret_key}
        if given.security_token:
            texts["security_token"] = given.security_token
        for name, text in texts.items():
            if not (isinstance(text, str) and is_printable(text)):
                raise CredentialsError(
                    f"it returned Credentials whose {name} is not allowed: allowed is a text that is not blank, "
                    "without control characters"
                )
        if self._clock() >= _end(given):
            raise CredentialsError(
                f"it returned Credentials that have expired, {self._clock() - _end(given):.0f} s ago by this host's "
                "clock; expires_at is in epoch seconds"
            )
        return given


def _end(credentials: Credentials) -> float:
    return math.inf if credentials.expires_at is None else credentials.expires_at


def _due(credentials: Credentials, now: float) -> float:
    if credentials.expires_at is None:
        return now + _EVERY
    return credentials.expires_at - min(_AHEAD, (credentials.expires_at - now) / 4)
