"""Supplies the credentials that sign requests, from options: as text, by reference, or from the user's provider class.

Rule 1: ``env:NAME`` and ``file:/path`` are read in the process that signs. Spark's plans and tasks never contain the
        referenced values.
Rule 2: text and variables alone are read once. A request lets a thread read files and providers again,
        before the credentials expire or, without an expiry, after a minute. After a failure: again after 10 s.
Rule 3: the old credentials sign meanwhile, until they expire. Without valid ones, a request waits for the running call,
        until 30 s after the call's start, and fails if the call fails.
Rule 4: after a server has rejected credentials of a file or provider, the next request waits for new ones. This happens
        at most once per second; meanwhile, and for 10 s after a failure, the rejected ones sign.
Rule 5: an error names the option, variable, file or class, never its content. It may have the text of a provider's
        exception.
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
from rocketmq_spark.options.kinds import is_padded, is_printable
from rocketmq_spark.options.references import ENV, FILE, allowed, load_class, new_instance

logger = logging.getLogger("rocketmq_spark.producer")

_PROVIDER: Final = "credentialsProvider"
_METHOD: Final = "credentials"
# Seconds between refreshes of credentials without an expiry, such as a file that Kubernetes or an agent replaces.
_EVERY: Final = 60.0
# Seconds before the expiry; less for credentials that live shorter than four times as long.
_AHEAD: Final = 300.0
# Seconds before a failed refresh is repeated, and between refreshes after rejections, for which requests wait.
_AGAIN: Final = 10.0
_REFUSED_AGAIN: Final = 1.0
_PATIENCE: Final = 30.0
# Seconds after which a provider's call counts as hung, and another thread calls it.
_GIVEN_UP: Final = 60.0
# Bytes of a referenced file; tokens are much shorter.
_LONGEST: Final = 64 * 1024
_READINGS: Final = 5
_TEXT: Final = "one line of text that is not blank, without control characters"


def credentials_of(options: ConnectionOptions) -> CredentialsProvider | None:
    """Return the provider of these options, None without credentials. It does not call or create the user's class."""
    if options.credentials_provider is not None:
        name = options.credentials_provider
        provider_class(options)
        # The first call creates it, because that may take as long as a call.
        provider = functools.cache(functools.partial(new_instance, _PROVIDER, name, _METHOD))
        return RefreshedCredentials(lambda: provider().credentials(), f"{_PROVIDER}={name}")
    if options.access_key is None or options.secret_key is None:
        return None
    texts = (options.access_key, options.secret_key, options.security_token or "")

    def resolved() -> Credentials:
        key, secret, token = map(resolved_secret, ("accessKey", "secretKey", "securityToken"), texts)
        return Credentials(key, secret, token)

    def read() -> Credentials:
        # Until two readings agree: files that belong together may be replaced one after the other.
        last = resolved()
        for _ in range(_READINGS):
            previous, last = last, resolved()
            if last == previous:
                break
        return last

    files = [text.removeprefix(FILE) for text in texts if text.startswith(FILE)]
    return RefreshedCredentials(read, f"reading {', '.join(files)}", read()) if files else resolved()


def provider_class(options: ConnectionOptions) -> type[Any] | None:
    """Return the class of the option ``credentialsProvider``, None without the option; OptionError if unusable."""
    name = options.credentials_provider
    return None if name is None else load_class(_PROVIDER, name, _METHOD)


def with_variables(options: ConnectionOptions) -> ConnectionOptions:
    """Return the options with each reference to a variable followed by its value, which a transport reads only once."""
    key, secret, token = map(_with_variable, (options.access_key, options.secret_key, options.security_token))
    return replace(options, access_key=key, secret_key=secret, security_token=token)


def _with_variable(text: str | None) -> str | None:
    value = None if text is None or not text.startswith(ENV) else os.environ.get(text.removeprefix(ENV))
    return text if value is None else f"{text}={value}"


def resolved_secret(option: str, text: str) -> str:
    """Return the value of a secret option, whose text may be a reference; OptionError if it cannot be read."""
    if not text.startswith((ENV, FILE)):
        return text
    target = allowed(option, text)
    if text.startswith(ENV):
        name = text.removeprefix(ENV)
        value = os.environ.get(name)
        if value is None:
            reason = f"option {option}={text}: the environment variable {name} is not set in this process"
            remedy = f"set it for the driver, and for the executors' Python workers with spark.executorEnv.{name}"
            raise OptionError(f"{reason}; {remedy}")
    else:
        value = _read(option, text, Path(target.removeprefix(FILE)))
    if not is_printable(value):
        raise OptionError(f"option {option}={text}: its value is not allowed: allowed is {_TEXT}")
    if is_padded(value):
        # Not removed here, because it may belong to a password.
        reason = f"option {option}={text}: its value begins or ends with a blank"
        raise OptionError(f"{reason}. Remove it, or use {_PROVIDER} if the blank belongs to the value")
    return value


def _read(option: str, text: str, path: Path) -> str:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            # Reading a pipe could block forever.
            raise OptionError(f"option {option}={text}: this is not a regular file: give a file with one line of text")
        with path.open("rb") as file:
            data = file.read(_LONGEST + 1)
    except OSError as exc:
        reason = f"option {option}={text}: reading it failed: {exc.strerror or exc}"
        raise OptionError(f"{reason}; the driver and every executor must be able to read this file") from exc
    if len(data) > _LONGEST:
        reason = f"option {option}={text}: the file has more than {_LONGEST} bytes"
        raise OptionError(f"{reason}: give a file with one line of text")
    try:
        # Editors end the last line, and some write a BOM.
        return data.decode("utf-8-sig").rstrip("\r\n")
    except UnicodeDecodeError:
        pass
    # Outside the except block: the UnicodeDecodeError contains the secret.
    raise OptionError(f"option {option}={text}: the file's content is not UTF-8: give a file with one line of text")


class RefreshedCredentials:
    """Credentials that requests refresh before they expire; safe for many threads, and after a fork.

    `ask` may block. Without `first` credentials the first request waits for it. Requests that wait fail `patience`
    seconds after the start of the call.
    """

    def __init__(
        self,
        ask: Callable[[], Credentials],
        source: str,
        first: Credentials | None = None,
        clock: Callable[[], float] = time.time,
        patience: float = _PATIENCE,
    ) -> None:
        self._ask = ask
        self._source = source
        self._clock = clock
        self._patience = patience
        self._held = _Held(first, -math.inf if first is None else _due(first, clock()), clock())
        self._refused_at = -math.inf
        # The start of the call that returned the held credentials, `time.monotonic`.
        self._answered = -math.inf
        self._reset()

    def __repr__(self) -> str:
        return f"<RefreshedCredentials {self._source}>"

    def credentials(self) -> Credentials:
        """Return valid credentials; CredentialsError if none are held and the provider returns none."""
        held, now = self._held, self._clock()
        # After the clock was set back, `due` may be years away.
        if held.credentials is not None and held.since <= now < min(held.due, _end(held.credentials)):
            return held.credentials
        query = self._asked()
        if held.credentials is not None and held.signs(now):
            return held.credentials
        try:
            return query.answer.result(max(0.0, query.at + self._patience - time.monotonic()))
        except concurrent.futures.TimeoutError:
            # On Python 3.10 it is not the built-in TimeoutError.
            why, cause = f"no credentials within {self._patience:g} s, so no request can be signed", None
        except CredentialsError as exc:
            # Each waiting thread raises its own exception. An OptionError of `make` names the provider already.
            why, cause = str(exc).removeprefix(f"{self._source}: "), exc.__cause__
        raise CredentialsError(f"{self._source}: {why}") from cause

    def refused(self, credentials: Credentials) -> None:
        """Refresh these credentials, because a server rejected them; does nothing if others are held already."""
        if os.getpid() != self._pid:
            self._reset()
        with self._lock:
            held, now = self._held, self._clock()
            if held.credentials is credentials and not held.refused:
                self._refused_at = max(now, min(self._refused_at, now) + _REFUSED_AGAIN)
                self._held = held._replace(due=min(held.due, self._refused_at), refused=True)

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._asking: _Question | None = None

    def _asked(self) -> _Question:
        """Return the provider's call in progress; a thread starts a new call if necessary."""
        if os.getpid() != self._pid:
            # After a fork the parent's thread does not exist, and the lock may be held forever.
            self._reset()
        with self._lock:
            question = self._asking
            if question is None or time.monotonic() > question.at + _GIVEN_UP:
                question = self._asking = _Question(time.monotonic(), concurrent.futures.Future())
                name = "rocketmq-spark-credentials"
                try:
                    threading.Thread(target=self._call_provider, args=(question,), name=name, daemon=True).start()
                except RuntimeError as exc:
                    # The system cannot start a thread at the moment.
                    self._asking = None
                    question.answer.set_exception(_error(exc))
            return question

    def _call_provider(self, question: _Question) -> None:
        fresh, error = None, None
        try:
            fresh = self._checked(self._ask())
        except BaseException as exc:
            # Also after a SystemExit no request may wait forever.
            error = _error(exc)
        now = self._clock()
        with self._lock:
            # False if this call counted as hung, and a newer call replaced it.
            newest = self._asking is question
            if newest:
                self._asking = None
            if fresh is None:
                if newest:
                    self._held = self._held._replace(due=now + _AGAIN, since=now)
            elif question.at >= self._answered:
                # The result of a hung call may arrive after that of a newer call.
                self._answered = question.at
                self._held = _Held(fresh, _due(fresh, now), now)
            held = self._held
        if fresh is not None:
            question.answer.set_result(fresh)
            return
        if newest and held.signs(now):
            text = (
                "%s: refreshing the credentials failed: %s. The next attempt is in %g s; the old ones are still valid"
            )
            logger.warning(text, self._source, error, _AGAIN)
        question.answer.set_exception(error)

    def _checked(self, fresh: object) -> Credentials:
        if not isinstance(fresh, Credentials):
            arguments = "access_key, secret_key, security_token, expires_at"
            raise CredentialsError(
                f"it returned a {type(fresh).__name__}: return rocketmq_spark.Credentials({arguments})"
            )
        texts = {"access_key": fresh.access_key, "secret_key": fresh.secret_key}
        if fresh.security_token:
            texts["security_token"] = fresh.security_token
        for name, text in texts.items():
            if not (isinstance(text, str) and is_printable(text)):
                raise CredentialsError(f"it returned Credentials whose {name} is not allowed: allowed is {_TEXT}")
        expires_at, now = fresh.expires_at, self._clock()
        if not (expires_at is None or (isinstance(expires_at, (int, float)) and expires_at >= 0)):
            raise CredentialsError("it returned Credentials whose expires_at is no time: give epoch seconds, or None")
        if expires_at is not None and now >= expires_at:
            reason = f"it returned Credentials that expired {now - expires_at:.0f} s ago by this host's clock"
            raise CredentialsError(
                f"{reason}: return newer ones, with expires_at in epoch seconds, or correct the clock"
            )
        return fresh


class _Held(NamedTuple):
    """The held credentials, when to refresh them, and whether a server rejected them; replaced as a whole.

    `since` is the time of the clock that set `due`.
    """

    credentials: Credentials | None
    due: float
    since: float
    refused: bool = False

    def signs(self, now: float) -> bool:
        return self.credentials is not None and not self.refused and now < _end(self.credentials)


class _Question(NamedTuple):
    """A call of a provider: its start (`time.monotonic`) and its result."""

    at: float
    answer: concurrent.futures.Future[Credentials]


def _error(why: BaseException) -> CredentialsError:
    known = isinstance(why, (OptionError, CredentialsError))
    error = CredentialsError(str(why) if known else f"getting the credentials failed: {why!r}")
    error.__cause__ = why
    return error


def _end(credentials: Credentials) -> float:
    return math.inf if credentials.expires_at is None else credentials.expires_at


def _due(credentials: Credentials, now: float) -> float:
    if credentials.expires_at is None:
        return now + _EVERY
    return credentials.expires_at - min(_AHEAD, (credentials.expires_at - now) / 4)
