"""Options to credentials: given as they are, by reference, or by a class of the user's own.

Rule 1: ``env:NAME`` and ``file:/path`` are read where they are used, in the process that signs: neither the plan nor
        what Spark ships to a task holds what they stand for.
Rule 2: what can change is asked for again ahead of its end, by a thread of its own: nobody who signs waits for it while
        what is held is good. Where asking fails, that goes on until it expires.
Rule 3: nobody waits for ever: a provider that does not answer is an error.
Rule 4: what a server has refused is asked for again by the next who signs, who waits; at most once a second, so that
        a user who is refused everywhere costs no storm of questions.
Rule 5: an error says which option, variable, file or class, never what it holds.
"""

from __future__ import annotations

import concurrent.futures
import logging
import math
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from rocketmq_spark.credentials import Credentials, CredentialsProvider
from rocketmq_spark.errors import CredentialsError, OptionError
from rocketmq_spark.option_values import ENV, FILE, is_padded, is_printable
from rocketmq_spark.user_class import load_class, make

logger = logging.getLogger("rocketmq_spark.producer")

_PROVIDER: Final = "credentialsProvider"
_METHOD: Final = "credentials"
# How often a provider is asked that does not say until when its answer is good: a file that Kubernetes or an agent
# replaces is read within this time.
_EVERY: Final = 60.0
# Ahead of an end that is known; less for what lives shorter than four times as long.
_AHEAD: Final = 300.0
_AGAIN: Final = 10.0
# The same where a server has refused what was given: somebody waits then, and what is new may come any moment.
_REFUSED_AGAIN: Final = 1.0
_PATIENCE: Final = 30.0
# A question that is older is given up: its thread hangs, and another one may have better luck.
_GIVEN_UP: Final = 60.0
# Far more than any token has: the path may name the wrong file.
_LONGEST: Final = 64 * 1024
_READINGS: Final = 5
# Set by the administrator of the driver and the executors: "env:NAME;env:PREFIX*;file:/path;file:/folder/*".
_ALLOWED: Final = "ROCKETMQ_SPARK_REFERENCES"


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
    """Return who signs, None for nobody; nothing is asked yet, and a class is not made.

    Raises
    ------
    OptionError
        A variable, a file or a class can't be had here.
    """
    if options.credentials_provider is not None:
        name = options.credentials_provider
        provider_class(options)
        return RefreshedCredentials(_Provided(name), f"{_PROVIDER}={name}")
    if options.access_key is None or options.secret_key is None:
        return None
    given = (options.access_key, options.secret_key, options.security_token or "")

    def resolved() -> Credentials:
        key, secret, token = map(_resolved, ("accessKey", "secretKey", "securityToken"), given)
        return Credentials(key, secret, token)

    def agreeing() -> Credentials:
        # Files that belong together are replaced one after the other, or between two readings.
        found = resolved()
        for _ in range(_READINGS):
            again = resolved()
            if again == found:
                break
            found = again
        return found

    files = [text.removeprefix(FILE) for text in given if text.startswith(FILE)]
    return RefreshedCredentials(agreeing, f"reading {', '.join(files)}", agreeing()) if files else resolved()


def provider_class(options: CredentialOptions) -> type[Any] | None:
    """Return the class that the option ``credentialsProvider`` names, None without the option.

    Raises
    ------
    OptionError
        It can't be loaded.
    """
    name = options.credentials_provider
    return None if name is None else load_class(_PROVIDER, name, _METHOD)


def with_variables(options: CredentialOptions) -> tuple[tuple[str | None, str | None], ...]:
    """Return access key, secret key and token, each with the value of the variable that it refers to, if it does.

    A transport reads variables once, when it is created. With another value it may sign as another user.
    """
    texts = (options.access_key, options.secret_key, options.security_token)
    return tuple(
        (text, os.environ.get(text.removeprefix(ENV)) if text and text.startswith(ENV) else None) for text in texts
    )


class _Provided:
    """Asks a class of the user's own; it is made by whoever asks first, for that may take as long as asking."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._provider: CredentialsProvider | None = None

    def __call__(self) -> Credentials:
        if self._provider is None:
            try:
                self._provider = make(_PROVIDER, self._name, _METHOD)
            except OptionError as exc:
                # Who is asked is said by the one who asks.
                raise CredentialsError(str(exc).removeprefix(f"{_PROVIDER}={self._name}: ")) from exc.__cause__
        return self._provider.credentials()


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
    target = _allowed(option, text) if text.startswith((ENV, FILE)) else text
    if text.startswith(ENV):
        name = text.removeprefix(ENV)
        value = os.environ.get(name)
        if value is None:
            raise OptionError(
                f"option {option}={text}: the environment variable {name} is not set in this process; set it for the "
                f"driver, and for the executors' Python workers with spark.executorEnv.{name}"
            )
    elif text.startswith(FILE):
        value = _read(option, text, Path(target.removeprefix(FILE)))
    else:
        return text
    if not is_printable(value):
        raise OptionError(
            f"option {option}={text}: what it holds is not allowed: allowed is one line of text that is not blank, "
            "without control characters"
        )
    if is_padded(value):
        # A password may have one, and then it is not to be found by guessing.
        raise OptionError(
            f"option {option}={text}: what it holds begins or ends with a blank, which is hardly part of it: take the "
            f"blank away; if it is, give it by a class ({_PROVIDER})"
        )
    return value


def _read(option: str, text: str, path: Path) -> str:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            # A pipe, say, would be waited for without end.
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
        # Editors end a file's last line, and some mark its beginning (BOM).
        return data.decode("utf-8-sig").rstrip("\r\n")
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
        Seconds that may go by since a question was asked, while nothing good is held, before it is an error.
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
        # When the question was asked whose answer is held, `time.monotonic`.
        self._answered = -math.inf
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
        (held, due, refused), now = self._held, self._clock()
        if held is not None and now < min(due, _end(held)):
            return held
        asked = self._asked()
        if held is not None and now < _end(held) and not refused:
            return held
        try:
            # Counted from the question: many who wait one after the other wait no longer than one.
            return asked.answer.result(max(0.0, asked.at + self._patience - time.monotonic()))
        except concurrent.futures.TimeoutError:
            # Not the built-in one on Python 3.10.
            why, cause = f"no answer within {self._patience:g} s", None
        except CredentialsError as exc:
            # One of its own for every thread that waits.
            why, cause = str(exc), exc.__cause__
        raise CredentialsError(f"{self._what}: {why}") from cause

    def refused(self, credentials: Credentials) -> None:
        """Have others asked for, as a server does not take these; nothing, if they are not held any more."""
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
        """Return the question that is on its way, asked by a thread that is started if none is."""
        if os.getpid() != self._pid:
            # The parent's lock may be held for ever, and its thread is not here.
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
                    # No thread is to be had just now.
                    self._asking = None
                    question.answer.set_exception(_error(exc))
            return question

    def _take(self, question: _Question) -> None:
        try:
            fresh = self._checked(self._ask())
        except BaseException as exc:
            # What calls sys.exit must not leave them waiting either.
            error = _error(exc)
            if self._failed(question):
                logger.warning("%s: %s (what was given before is good for now)", self._what, error)
            question.answer.set_exception(error)
        else:
            self._take_over(question, fresh)
            question.answer.set_result(fresh)

    def _failed(self, question: _Question) -> bool:
        """Note that a question is to be asked again; return whether nobody is told by an error."""
        now = self._clock()
        with self._lock:
            if self._asking is not question:
                # Given up: it is the one that has been asked since that counts.
                return False
            self._asking = None
            self._held = self._held._replace(due=now + _AGAIN)
            held, _, refused = self._held
        return held is not None and now < _end(held) and not refused

    def _take_over(self, question: _Question, fresh: Credentials) -> None:
        now = self._clock()
        with self._lock:
            if self._asking is question:
                self._asking = None
            # An answer that was given up may come after that to a later question.
            if question.at >= self._answered:
                self._answered = question.at
                self._held = _Held(fresh, _due(fresh, now))

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
    """What is held, when to ask again, and whether a server has refused it: replaced as one."""

    credentials: Credentials | None
    due: float
    refused: bool = False


class _Question(NamedTuple):
    """When a provider was asked (`time.monotonic`), and what will come of it."""

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
