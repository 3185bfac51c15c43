"""Credentials: given, by reference, or from a provider that renews them before they expire."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rocketmq_spark import Credentials
from rocketmq_spark.errors import CredentialsError, OptionError
from rocketmq_spark.options.connection import ConnectionOptions
from rocketmq_spark.options.parsing import parse_sink_options
from rocketmq_spark.transport.credentials import RefreshedCredentials, credentials_of
from tests.support.processes import wait_for

PATIENCE = 20.0
NAME_SERVER = {"nameServer": "a:9876"}
HUSH = "hush-hush"


def of(**options: str) -> Any:
    return credentials_of(parse_sink_options({**NAME_SERVER, **options}, {}).connection)


def refusal(**options: str) -> str:
    with pytest.raises(OptionError) as raised:
        of(**options)
    assert HUSH not in str(raised.value)
    return str(raised.value)


def test_no_credentials_without_a_user() -> None:
    assert of() is None
    assert credentials_of(ConnectionOptions()) is None


def test_given_credentials_are_returned_unchanged() -> None:
    given = of(accessKey="u", secretKey=HUSH, securityToken="t").credentials()
    assert given == Credentials("u", HUSH, "t")
    assert HUSH not in repr(given)


def test_environment_variable_is_read_when_credentials_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MQ_SECRET", HUSH)
    monkeypatch.setenv("MQ_USER", "u")
    options = parse_sink_options({**NAME_SERVER, "accessKey": "env:MQ_USER", "secretKey": "env:MQ_SECRET"}, {})
    assert options.connection.secret_key == "env:MQ_SECRET"
    provider = credentials_of(options.connection)
    assert provider is not None
    assert provider.credentials() == Credentials("u", HUSH)


def test_missing_environment_variable_error_explains_how_to_set_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MQ_SECRET", raising=False)
    said = refusal(accessKey="u", secretKey="env:MQ_SECRET")
    assert said.startswith("option secretKey=env:MQ_SECRET: the environment variable MQ_SECRET is not set")
    assert "spark.executorEnv.MQ_SECRET" in said


@pytest.mark.parametrize("slashes", ["", "//"])
def test_trailing_line_end_of_a_secret_file_is_ignored(tmp_path: Path, slashes: str) -> None:
    (tmp_path / "secret").write_text(f"{HUSH}\r\n")
    given = of(accessKey="u", secretKey=f"file:{slashes}{tmp_path}/secret").credentials()
    assert given == Credentials("u", HUSH)


@pytest.mark.parametrize("prefix", ["FILE:", "File:", " file:"])
def test_prefixes_of_references_are_case_insensitive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str
) -> None:
    (tmp_path / "secret").write_text(HUSH)
    monkeypatch.setenv("MQ_USER", "u")
    given = of(accessKey="ENV:MQ_USER", secretKey=f"{prefix}{tmp_path}/secret").credentials()
    assert given == Credentials("u", HUSH)


@pytest.mark.parametrize(
    ("allowed", "reference", "works"),
    [
        (None, "env:MQ_SECRET", True),
        (None, "file:{folder}/secret", True),
        ("", "env:MQ_SECRET", False),
        ("none", "env:MQ_SECRET", False),
        ("none", "file:{folder}/secret", False),
        ("*", "file:{folder}/secret", True),
        ("env:MQ_SECRET", "env:MQ_SECRET", True),
        ("env:MQ_SECRET", "env:MQ_SECRET_2", False),
        ("env:MQ_*", "env:MQ_SECRET_2", True),
        ("env:MQ_*", "env:AWS_SECRET", False),
        ("env:*", "file:{folder}/secret", False),
        ("file:*", "env:MQ_SECRET", False),
        ("file:*", "file:{folder}/outside", True),
        ("file:/*", "file:{folder}/outside", True),
        ("env:MQ_*; file:{folder}/mounted/*", "file:{folder}/mounted/secret", True),
        ("file:{folder}/mounted/*", "file:{folder}/outside", False),
        ("file:{folder}/mounted/*", "file:{folder}/mounted/../outside", False),
        ("file:{folder}/mounted/*", "file:{folder}/mounted/link-to-outside", False),
        ("file:{folder}/mounted/*", "file:{folder}/mounted-2/secret", False),
        ("file:{folder}/link-to-mounted/*", "file:{folder}/mounted/secret", True),
        ("file:{folder}/secret", "file:{folder}/secret", True),
        ("file:{folder}/secret", "file:{folder}/secret-2", False),
    ],
)
@pytest.mark.parametrize("option", ["accessKey", "secretKey", "securityToken"])
def test_administrator_limits_references(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, allowed: str | None, reference: str, works: bool
) -> None:
    for folder in ("mounted", "mounted-2"):
        (tmp_path / folder).mkdir()
    for file in ("secret", "secret-2", "outside", "mounted/secret", "mounted-2/secret"):
        (tmp_path / file).write_text(HUSH)
    (tmp_path / "mounted/link-to-outside").symlink_to(tmp_path / "outside")
    (tmp_path / "link-to-mounted").symlink_to(tmp_path / "mounted")
    for name in ("MQ_SECRET", "MQ_SECRET_2", "AWS_SECRET"):
        monkeypatch.setenv(name, HUSH)
    monkeypatch.delenv("ROCKETMQ_SPARK_REFERENCES", raising=False)
    if allowed is not None:
        monkeypatch.setenv("ROCKETMQ_SPARK_REFERENCES", allowed.format(folder=tmp_path))
    reference = reference.format(folder=tmp_path)
    options = {"accessKey": "u", "secretKey": "s", "securityToken": "t", option: reference}
    if works:
        signer = of(**options).credentials()
        assert HUSH in (signer.access_key, signer.secret_key, signer.security_token)
        return
    with pytest.raises(OptionError, match=r"this reference is not allowed here: .*ROCKETMQ_SPARK_REFERENCES") as raised:
        of(**options).credentials()
    assert str(raised.value).startswith(f"option {option}={reference}: ")
    assert HUSH not in str(raised.value)


def test_reference_that_is_not_allowed_does_not_show_whether_it_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROCKETMQ_SPARK_REFERENCES", "none")
    monkeypatch.delenv("MQ_SECRET", raising=False)
    for reference in ("env:MQ_SECRET", "file:/no/such/file"):
        with pytest.raises(OptionError, match=r"not allowed here: .* allows none"):
            of(accessKey="u", secretKey=reference).credentials()


def test_link_that_changes_after_the_check_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "allowed").write_text("allowed-key")
    (tmp_path / "forbidden").write_text(HUSH)
    link = tmp_path / "link"
    resolve = os.path.realpath

    def resolved_before_the_change(path: str) -> str:
        if path != str(link):
            return resolve(path)
        link.unlink(missing_ok=True)
        link.symlink_to(tmp_path / "allowed")
        target = resolve(path)
        link.unlink()
        link.symlink_to(tmp_path / "forbidden")
        return target

    monkeypatch.setattr(os.path, "realpath", resolved_before_the_change)
    monkeypatch.setenv("ROCKETMQ_SPARK_REFERENCES", f"file:{tmp_path}/allowed")
    assert of(accessKey="u", secretKey=f"file:{link}").credentials().secret_key == "allowed-key"


def test_byte_order_mark_of_a_secret_file_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(f"{HUSH}\r\n", encoding="utf-8-sig")
    assert of(accessKey="u", secretKey=f"file:{tmp_path}/secret").credentials() == Credentials("u", HUSH)


def test_a_variable_with_a_blank_around_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MQ_SECRET", f"{HUSH} ")
    assert "begins or ends with a blank" in refusal(accessKey="u", secretKey="env:MQ_SECRET")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"hush-hush \n", "its value begins or ends with a blank"),
        (b" hush-hush", "Remove it, or use"),
        (None, "reading it failed: No such file or directory; the driver and every executor must be able to read"),
        (b"", "its value is not allowed"),
        (b"\n", "its value is not allowed"),
        (b"hush-hush\nsecond", "its value is not allowed"),
        (b"hush-hush\xff", "the file's content is not UTF-8"),
        (b"x" * 70_000, "the file has more than 65536 bytes: give a file with one line of text"),
    ],
)
def test_a_file_that_holds_no_secret_is_refused(tmp_path: Path, content: bytes | None, text: str) -> None:
    path = tmp_path / "secret"
    if content is not None:
        path.write_bytes(content)
    said = refusal(accessKey="u", secretKey=f"file:{path}")
    assert said.startswith(f"option secretKey=file:{path}: ")
    assert text in said


def test_path_that_is_no_regular_file_is_rejected_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        assert "this is not a regular file" in refusal(accessKey="u", secretKey=f"file:{path}")


@pytest.mark.parametrize("reference", ["env:", "env:NO SPACE", "env:1ST", "file:", "file:relative/path", "FILE:x"])
def test_a_reference_that_is_malformed_is_refused_before_it_is_read(reference: str) -> None:
    said = refusal(accessKey="u", secretKey=reference)
    assert "env:NAME or file:/absolute/path" in said
    assert "not shown: it is secret" in said


def test_replaced_secret_file_is_read_again(tmp_path: Path) -> None:
    path, now = tmp_path / "token", [0.0]
    path.write_text("first")

    def read() -> Credentials:
        return Credentials("u", path.read_text())

    held = RefreshedCredentials(read, "reading it", read(), clock=lambda: now[0])
    path.write_text("second")
    assert held.credentials().secret_key == "first"
    now[0] = 61.0
    wait_for(lambda: held.credentials().secret_key == "second", PATIENCE)


def provide(monkeypatch: pytest.MonkeyPatch, **members: Any) -> str:
    """Make a class that can be imported, and return its name."""
    module = ModuleType("vault_of_the_tests")
    module.Vault = type("Vault", (), members)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return f"{module.__name__}:Vault"


def test_provider_class_can_return_key_secret_and_token(monkeypatch: pytest.MonkeyPatch) -> None:
    name = provide(monkeypatch, credentials=lambda _: Credentials("u", HUSH, "token"))
    provider = of(credentialsProvider=name)
    assert provider.credentials() == Credentials("u", HUSH, "token")
    assert name in repr(provider)
    assert HUSH not in repr(provider)


def test_provider_class_that_cannot_be_loaded_is_an_error_of_its_option(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "importing module no_such_module failed" in refusal(credentialsProvider="no_such_module:Vault")
    assert "has no class Vault with a method credentials" in refusal(credentialsProvider=provide(monkeypatch))

    def fail(_: object) -> None:
        raise ValueError("no vault here")

    name = provide(monkeypatch, __init__=fail, credentials=lambda _: None)
    with pytest.raises(CredentialsError) as raised:
        of(credentialsProvider=name).credentials()
    assert str(raised.value) == (
        f"credentialsProvider={name}: calling the class without arguments failed: ValueError('no vault here'). "
        "Its constructor must work without arguments"
    )


def test_a_class_and_a_key_exclude_each_other() -> None:
    said = refusal(credentialsProvider="a:B", accessKey="u", secretKey=HUSH)
    assert said.startswith("credentialsProvider and accessKey are both given")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (None, "it returned a NoneType: return rocketmq_spark.Credentials"),
        (("u", HUSH), "it returned a tuple"),
        (Credentials("u", ""), "whose secret_key is not allowed"),
        (Credentials("u\n", HUSH), "whose access_key is not allowed"),
        (Credentials("u", b"hush-hush"), "whose secret_key is not allowed"),  # type: ignore[arg-type]
        (Credentials("u", HUSH, "a\tb"), "whose security_token is not allowed"),
        (Credentials("u", HUSH, expires_at=float("nan")), "whose expires_at is no time"),
        (Credentials("u", HUSH, expires_at="2026-01-01"), "whose expires_at is no time"),  # type: ignore[arg-type]
        (Credentials("u", HUSH, expires_at=90.0), "that expired 10 s ago by this host's clock"),
    ],
)
def test_invalid_result_of_a_provider_is_rejected(given: Any, text: str) -> None:
    held = RefreshedCredentials(lambda: given, "credentialsProvider=a:B", clock=lambda: 100.0)
    with pytest.raises(CredentialsError) as raised:
        held.credentials()
    assert str(raised.value).startswith("credentialsProvider=a:B: ")
    assert text in str(raised.value)
    assert HUSH not in str(raised.value)


class Source:
    """Returns numbered credentials that expire after an hour of its clock; a test can make it fail or wait."""

    def __init__(self) -> None:
        self.now = 0.0
        self.given = 0
        self.error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()

    def ask(self) -> Credentials:
        self.gate.wait(PATIENCE)
        if self.error is not None:
            raise self.error
        self.given += 1
        return Credentials(f"user-{self.given}", HUSH, expires_at=self.now + 3600.0)


@pytest.fixture
def source() -> Iterator[Source]:
    source = Source()
    yield source
    source.gate.set()


def held_of(source: Source, patience: float = PATIENCE) -> RefreshedCredentials:
    return RefreshedCredentials(source.ask, "asking the source", clock=lambda: source.now, patience=patience)


def test_credentials_are_fetched_five_minutes_before_they_expire(source: Source) -> None:
    held = held_of(source)
    for source.now in (0.0, 1.0, 3299.0):
        assert held.credentials().access_key == "user-1"
    source.now = 3300.0
    wait_for(lambda: held.credentials().access_key == "user-2", PATIENCE)
    assert source.given == 2


def test_refresh_does_not_block_while_the_old_credentials_are_valid(source: Source) -> None:
    held = held_of(source)
    held.credentials()
    source.gate.clear()
    source.now = 3599.0
    assert [held.credentials().access_key for _ in range(3)] == ["user-1"] * 3
    source.gate.set()
    wait_for(lambda: held.credentials().access_key == "user-2", PATIENCE)
    assert source.given == 2, "one thread asks, however many sign"


def test_failed_refresh_is_logged_and_retried_while_credentials_are_valid(
    source: Source, caplog: pytest.LogCaptureFixture
) -> None:
    held = held_of(source)
    held.credentials()
    source.error, source.now = OSError("the vault is sealed"), 3400.0
    assert held.credentials().access_key == "user-1"
    wait_for(lambda: "the vault is sealed" in caplog.text, PATIENCE)
    assert "asking the source" in caplog.text
    assert HUSH not in caplog.text
    source.error, source.now = None, 3411.0
    wait_for(lambda: held.credentials().access_key == "user-2", PATIENCE)


def test_failed_refresh_of_expired_credentials_is_an_error_with_its_cause(source: Source) -> None:
    held = held_of(source)
    held.credentials()
    source.error, source.now = OSError("the vault is sealed"), 3600.0
    text = r"asking the source: getting the credentials failed: OSError\('the vault is sealed'\)"
    with pytest.raises(CredentialsError, match=text) as raised:
        held.credentials()
    assert isinstance(raised.value.__cause__, OSError)
    source.error = None
    wait_for(lambda: succeeds(held.credentials), PATIENCE)


def succeeds(ask: Callable[[], object]) -> bool:
    try:
        ask()
    except CredentialsError:
        return False
    return True


def test_expired_credentials_are_never_returned_after_a_failed_refresh(source: Source) -> None:
    held = held_of(source)
    held.credentials()
    source.error, source.now = OSError("the vault is sealed"), 3599.0
    assert held.credentials().access_key == "user-1"
    wait_for(lambda: held._asking is None, PATIENCE)
    source.error, source.now = None, 3601.0
    assert held.credentials().access_key == "user-2"


def test_system_exit_of_a_provider_is_an_error(source: Source) -> None:
    source.error = SystemExit(1)  # type: ignore[assignment]
    with pytest.raises(CredentialsError, match=r"asking the source: getting the credentials failed: SystemExit\(1\)"):
        held_of(source).credentials()


def test_callers_waiting_for_one_refresh_share_its_timeout(source: Source) -> None:
    source.gate.clear()
    held = held_of(source)
    question = held._asked()
    # As if another thread had used up the whole timeout.
    held._asking = question._replace(at=question.at - PATIENCE)
    for _ in range(3):
        with pytest.raises(CredentialsError, match="no credentials within"):
            held.credentials()


def test_files_that_are_replaced_between_two_readings_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, secret = tmp_path / "key", tmp_path / "secret"
    key.write_text("old")
    secret.write_text("old secret")
    options = parse_sink_options({**NAME_SERVER, "accessKey": f"file:{key}", "secretKey": f"file:{secret}"}, {})
    opened: list[Path] = []
    plainly = Path.open

    def replaced_after_the_first(path: Path, *arguments: Any, **keywords: Any) -> Any:
        file = plainly(path, *arguments, **keywords)
        opened.append(path)
        if len(opened) == 1:
            key.unlink()
            key.write_text("new")
            secret.write_text("new secret")
        return file

    monkeypatch.setattr(Path, "open", replaced_after_the_first)
    provider = credentials_of(options.connection)
    assert provider is not None
    assert provider.credentials() == Credentials("new", "new secret")


def test_provider_that_does_not_answer_times_out(source: Source) -> None:
    source.gate.clear()
    with pytest.raises(CredentialsError, match=r"asking the source: no credentials within 0\.1 s, so no request can"):
        held_of(source, patience=0.1).credentials()


def sign(held: RefreshedCredentials, answer: Any) -> None:
    answer.put(held.credentials().access_key)


def test_forked_child_fetches_its_own_credentials(source: Source) -> None:
    held = held_of(source)
    held.credentials()
    # As if the parent were calling the provider during the fork.
    source.gate.clear()
    source.now = 3600.0
    threading.Thread(target=lambda: succeeds(held.credentials), daemon=True).start()
    wait_for(lambda: held._asking is not None, PATIENCE)
    context = multiprocessing.get_context("fork")
    answer = context.SimpleQueue()
    source.gate = threading.Event()
    source.gate.set()
    child = context.Process(target=sign, args=(held, answer))
    child.start()
    child.join(PATIENCE)
    assert child.exitcode == 0
    assert answer.get() == "user-2"


def test_rejected_credentials_are_fetched_again_at_the_next_use(source: Source) -> None:
    held = held_of(source)
    first = held.credentials()
    source.now = 1.0
    held.refused(first)
    assert held.credentials().access_key == "user-2"
    assert held.credentials().access_key == "user-2"
    assert source.given == 2


def test_rejection_of_replaced_credentials_is_ignored(source: Source) -> None:
    held = held_of(source)
    first = held.credentials()
    held.refused(first)
    second = held.credentials()
    held.refused(first)
    assert held.credentials() is second
    assert source.given == 2


def test_repeatedly_rejected_credentials_are_fetched_once_per_second(source: Source) -> None:
    held = held_of(source)
    for tenths in range(300):
        source.now = tenths / 10
        held.refused(held.credentials())
    # Calls at 0 s, at 0.1 s because the first credentials were rejected at once, and at each second from 1 to 29.
    assert source.given == 31


def test_failed_refresh_of_rejected_credentials_raises_without_a_log(
    source: Source, caplog: pytest.LogCaptureFixture
) -> None:
    held = held_of(source)
    first = held.credentials()
    held.refused(first)
    source.error = OSError("the vault is sealed")
    with pytest.raises(CredentialsError, match="the vault is sealed"):
        held.credentials()
    assert held.credentials() is first, "the provider was called again too early"
    source.error, source.now = None, 11.0
    assert held.credentials().access_key == "user-2"
    assert caplog.records == []


def test_credentials_are_fetched_again_after_the_clock_was_set_back(source: Source) -> None:
    held = held_of(source)
    source.now = 1_000_000.0
    assert held.credentials().access_key == "user-1"
    source.now = 0.0
    wait_for(lambda: held.credentials().access_key == "user-2", PATIENCE)
    source.now = 3299.0
    assert held.credentials().access_key == "user-2"


def test_rejected_credentials_are_fetched_after_the_clock_was_set_back(source: Source) -> None:
    held = held_of(source)
    source.now = 1_000_000.0
    held.refused(held.credentials())
    assert held.credentials().access_key == "user-2"
    source.now = 0.0
    wait_for(lambda: held.credentials().access_key == "user-3", PATIENCE)
    held.refused(held.credentials())
    source.now = 1.0
    assert held.credentials().access_key == "user-4"


@pytest.mark.parametrize("late", [Credentials("late", HUSH), OSError("the vault was sealed")], ids=["user", "error"])
def test_late_answer_does_not_replace_a_newer_one_and_is_not_logged(
    caplog: pytest.LogCaptureFixture, late: Credentials | Exception
) -> None:
    answers, gates = [late, Credentials("u", HUSH)], [threading.Event(), threading.Event()]
    asked: list[int] = []

    def ask() -> Credentials:
        asked.append(len(asked))
        answer = answers[asked[-1]]
        gates[asked[-1]].wait(PATIENCE)
        if isinstance(answer, Exception):
            raise answer
        return answer

    held = RefreshedCredentials(ask, "asking", clock=lambda: 0.0)
    hanging = held._asked()
    wait_for(lambda: len(asked) == 1, PATIENCE)
    # As if the provider had hung for more than a minute.
    held._asking = hanging._replace(at=hanging.at - 61.0)
    answered = held._asked()
    wait_for(lambda: len(asked) == 2, PATIENCE)
    gates[1].set()
    answered.answer.result(PATIENCE)
    gates[0].set()
    wait_for(hanging.answer.done, PATIENCE)
    assert held.credentials().access_key == "u"
    assert caplog.records == []
