"""Credentials from options: given as text, by reference, or by a user's class.

Rule 1: ``env:NAME`` and ``file:/path`` are read in the process that signs. Neither the plan nor what Spark ships to a
        task holds their values.
Rule 2: a thread refreshes credentials before they expire, and requests are signed with the held ones meanwhile. If the
        refresh fails, it is repeated until they expire.
Rule 3: a provider that does not answer in time is an error.
Rule 4: if a server rejects the credentials, the next request waits for fresh ones, at most once per second.
Rule 5: an error names the option, variable, file or class, never its content.
"""

from __future__ import annotations

import concurrent.futures
import functools
import logging
import math
import os
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from rocketmq_spark.errors import CredentialsError, OptionError
from rocketmq_spark.model.credentials import Credentials, CredentialsProvider
from rocketmq_spark.options.connection import ConnectionOptions
from rocketmq_spark.options.kinds import ENV, FILE, is_padded, is_printable, load_class, make

logger = logging.getLogger("rocketmq_spark.producer")

_PROVIDER: Final = "credentialsProvider"
_METHOD: Final = "credentials"
# Seconds between refreshes of credentials without an expiry, such as a file that Kubernetes or an agent replaces.
_EVERY: Final = 60.0
# Seconds before the expiry; less for credentials that live shorter than four times as long.
_AHEAD: Final = 300.0
_AGAIN: Final = 10.0
# The same after a rejection: requests wait then.
_REFUSED_AGAIN: Final = 1.0
_PATIENCE: Final = 30.0
# Seconds after which a provider's call counts as hung, and another thread calls it.
_GIVEN_UP: Final = 60.0
# Bytes of a referenced file; far more than any token has.
_LONGEST: Final = 64 * 1024
_READINGS: Final = 5
# Set by the administrator of the driver and the executors: "env:NAME;env:PREFIX*;file:/path;file:/folder/*".
_ALLOWED: Final = "ROCKETMQ_SPARK_REFERENCES"


def credentials_of(options: ConnectionOptions) -> CredentialsProvider | None:
    """Return the provider of these options, None without credentials. It does not call or create the user's class."""
    if options.credentials_provider is not None:
        name = options.credentials_provider
        provider_class(options)
        # The first call creates it, because that may take as long as a call.
        made = functools.cache(functools.partial(_made, name))
        return RefreshedCredentials(lambda: made().credentials(), f"{_PROVIDER}={name}")
    if options.access_key is None or options.secret_key is None:
        return None
    given = (options.access_key, options.secret_key, options.security_token or "")

    def resolved() -> Credentials:
        key, secret, token = map(_resolved, ("accessKey", "secretKey", "securityToken"), given)
        return Credentials(key, secret, token)

    def agreeing() -> Credentials:
        # Read until two readings agree: files that belong together may be replaced one after the other.
        found = resolved()
        for _ in range(_READINGS):
            again = resolved()
            if again == found:
                break
            found = again
        return found

    files = [text.removeprefix(FILE) for text in given if text.startswith(FILE)]
    return RefreshedCredentials(agreeing, f"reading {', '.join(files)}", agreeing()) if files else resolved()


def provider_class(options: ConnectionOptions) -> type[Any] | None:
    """Return the class of the option ``credentialsProvider``, None without the option; OptionError if unusable."""
    name = options.credentials_provider
    return None if name is None else load_class(_PROVIDER, name, _METHOD)


def with_variables(options: ConnectionOptions) -> ConnectionOptions:
    """Return the options with each reference to a variable followed by the variable's value.

    A transport reads variables once, when it is created. With another value it may sign as another user.
    """
    return replace(
        options,
        access_key=_with_variable(options.access_key),
        secret_key=_with_variable(options.secret_key),
        security_token=_with_variable(options.security_token),
    )


def _with_variable(text: str | None) -> str | None:
    if text is None or not text.startswith(ENV):
        return text
    value = os.environ.get(text.removeprefix(ENV))
    return text if value is None else f"{text}={value}"


def _made(name: str) -> CredentialsProvider:
    try:
        provider: CredentialsProvider = make(_PROVIDER, name, _METHOD)
    except OptionError as exc:
        # The caller adds the name of the provider.
        raise CredentialsError(str(exc).removeprefix(f"{_PROVIDER}={name}: ")) from exc.__cause__
    return provider


def _allowed(option: str, reference: str) -> str:
    """Return the reference to read; the administrator of this process can forbid it (``ROCKETMQ_SPARK_REFERENCES``).

    Where references are limited, links and ``..`` are followed here, so that the checked file is the one that is read.
    """
    allowed = os.environ.get(_ALLOWED)
    if allowed is None:
        return reference
    target = FILE + os.path.realpath(reference.removeprefix(FILE)) if reference.startswith(FILE) else reference
    if any(_allows(entry.strip(), target) for entry in allowed.split(";")):
        return target
    raise OptionError(
        f"option {option}={reference}: this reference is not allowed here: the environment variable {_ALLOWED} of this "
        f"process allows {allowed or 'none'}. Use an allowed reference, or ask the administrator to add this one"
    )


def _allows(entry: str, target: str) -> bool:
    prefix, star = entry.removesuffix("*"), entry.endswith("*")
    if prefix.startswith(f"{FILE}/"):
        path = prefix.removeprefix(FILE)
        prefix = FILE + os.path.realpath(path) + ("/" if path.endswith("/") and path.strip("/") else "")
    return target.startswith(prefix) if star else target == prefix


def _resolved(option: str, text: str) -> str:
    if not text.startswith((ENV, FILE)):
        return text
    target = _allowed(option, text)
    if text.startswith(ENV):
        name = text.removeprefix(ENV)
        value = os.environ.get(name)
        if value is None:
            raise OptionError(
                f"option {option}={text}: the environment variable {name} is not set in this process; set it for the "
                f"driver, and for the executors' Python workers with spark.executorEnv.{name}"
            )
    else:
        value = _read(option, text, Path(target.removeprefix(FILE)))
    if not is_printable(value):
        raise OptionError(
            f"option {option}={text}: what it holds is not allowed: allowed is one line of text that is not blank, "
            "without control characters"
        )
    if is_padded(value):
        # A password may have one, so this is no guess of ours to make.
        raise OptionError(
            f"option {option}={text}: what it holds begins or ends with a blank, which is hardly part of it: take the "
            f"blank away; if it is, give it by a class ({_PROVIDER})"
        )
    return value


def _read(option: str, text: str, path: Path) -> str:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            # Reading a pipe could block forever.
            raise OptionError(f"option {option}={text}: it is no file: give a file with one line of text")
        with path.open("rb") as file:
            data = file.read(_LONGEST + 1)
    except OSError as exc:
        raise OptionError(
            f"option {option}={text}: reading it failed: {exc.strerror or exc}; the file must be at that path, for "
            "this process to read, on the driver and on every executor"
        ) from exc
    if len(data) > _LONGEST:
        raise OptionError(f"option {option}={text}: it has more than {_LONGEST} bytes: is it the right file?")
    try:
        # Editors end the last line, and some write a BOM.
        return data.decode("utf-8-sig").rstrip("\r\n")
    except UnicodeDecodeError:
        pass
    # Outside the except block: the UnicodeDecodeError holds the content.
    raise OptionError(f"option {option}={text}: what it holds is not UTF-8: give a file with one line of text")


class RefreshedCredentials:
    """Credentials that are refreshed before they expire; safe for many threads, and after a fork.

    `ask` may block. Without `first` credentials the first request waits. `patience` are seconds from the start of a
    provider's call after which waiting requests fail.
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
        self._held = _Held(first, -math.inf if first is None else _due(first, clock()))
        self._refused_at = -math.inf
        # When the call started that returned the held credentials, `time.monotonic`.
        self._answered = -math.inf
        self._reset()

    def __repr__(self) -> str:
        return f"<RefreshedCredentials {self._what}>"

    def credentials(self) -> Credentials:
        """Return valid credentials; CredentialsError if none are held and the provider returns none."""
        held, now = self._held, self._clock()
        if held.credentials is not None and now < min(held.due, _end(held.credentials)):
            return held.credentials
        asked = self._asked()
        if held.credentials is not None and held.signs(now):
            return held.credentials
        try:
            # Counted from the start of the call, so that all requests fail at the same time.
            return asked.answer.result(max(0.0, asked.at + self._patience - time.monotonic()))
        except concurrent.futures.TimeoutError:
            # Not the built-in one on Python 3.10.
            why, cause = f"no answer within {self._patience:g} s", None
        except CredentialsError as exc:
            # Each waiting thread raises its own exception.
            why, cause = str(exc), exc.__cause__
        raise CredentialsError(f"{self._what}: {why}") from cause

    def refused(self, credentials: Credentials) -> None:
        """Refresh these credentials, because a server rejected them; does nothing if others are held already."""
        if os.getpid() != self._pid:
            self._reset()
        with self._lock:
            held = self._held
            if held.credentials is credentials and not held.refused:
                self._refused_at = max(self._clock(), self._refused_at + _REFUSED_AGAIN)
                self._held = held._replace(due=min(held.due, self._refused_at), refused=True)

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._asking: _Question | None = None

    def _asked(self) -> _Question:
        """Return the provider's call in progress, starting one in a thread if there is none."""
        if os.getpid() != self._pid:
            # After a fork the lock may be held forever, and the parent's thread does not exist.
            self._reset()
        with self._lock:
            question = self._asking
            if question is None or time.monotonic() > question.at + _GIVEN_UP:
                question = self._asking = _Question(time.monotonic(), concurrent.futures.Future())
                thread = threading.Thread(
                    target=self._take, args=(question,), name="rocketmq-spark-credentials", daemon=True
                )
                try:
                    thread.start()
                except RuntimeError as exc:
                    # The system has no thread at the moment.
                    self._asking = None
                    question.answer.set_exception(_error(exc))
            return question

    def _take(self, question: _Question) -> None:
        fresh, error = None, None
        try:
            fresh = self._checked(self._ask())
        except BaseException as exc:
            # Also SystemExit must not leave requests waiting.
            error = _error(exc)
        now = self._clock()
        with self._lock:
            # Otherwise this call counted as hung, and a newer one replaced it.
            newest = self._asking is question
            if newest:
                self._asking = None
            if fresh is None:
                if newest:
                    self._held = self._held._replace(due=now + _AGAIN)
            elif question.at >= self._answered:
                # The answer of a hung call may come after that of a newer call.
                self._answered = question.at
                self._held = _Held(fresh, _due(fresh, now))
            held = self._held
        if fresh is not None:
            question.answer.set_result(fresh)
            return
        if newest and held.signs(now):
            logger.warning("%s: %s (what was given before is good for now)", self._what, error)
        question.answer.set_exception(error)

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
        if not (given.expires_at is None or (isinstance(given.expires_at, (int, float)) and given.expires_at >= 0)):
            raise CredentialsError("it returned Credentials whose expires_at is no time: give epoch seconds, or None")
        if self._clock() >= _end(given):
            raise CredentialsError(
                f"it returned Credentials that have expired, {self._clock() - _end(given):.0f} s ago by this host's "
                "clock; expires_at is in epoch seconds"
            )
        return given


class _Held(NamedTuple):
    """The held credentials, when to refresh them, and whether a server rejected them; replaced as one."""

    credentials: Credentials | None
    due: float
    refused: bool = False

    def signs(self, now: float) -> bool:
        return self.credentials is not None and not self.refused and now < _end(self.credentials)


class _Question(NamedTuple):
    """A provider's call: its start (`time.monotonic`) and its result."""

    at: float
    answer: concurrent.futures.Future[Credentials]


def _error(why: BaseException) -> CredentialsError:
    error = CredentialsError(str(why) if isinstance(why, (OptionError, CredentialsError)) else repr(why))
    error.__cause__ = why
    return error


def _end(credentials: Credentials) -> float:
    return math.inf if credentials.expires_at is None else credentials.expires_at


def _due(credentials: Credentials, now: float) -> float:
    if credentials.expires_at is None:
        return now + _EVERY
    return credentials.expires_at - min(_AHEAD, (credentials.expires_at - now) / 4)
