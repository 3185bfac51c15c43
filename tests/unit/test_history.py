"""The checker of histories: each rule, files, and a comparison with a slow checker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.history import GAP, NO_ACCOUNT, NONE, History, Outcome, id_of
from tests.support.history_oracle import violations_of
from tests.support.history_rules import Kind, check

ACKNOWLEDGED, MAYBE_STORED, NOT_STORED = Outcome
Record = Callable[[History], object]
NO_FIGURES = (NO_ACCOUNT, NO_ACCOUNT, NO_ACCOUNT)


def write(
    finished: bool = True,
    *,
    account: tuple[int, int, int] | None = None,
    counted: tuple[int, ...] = (),
    key: int = NONE,
    timeout: float = np.inf,
) -> Record:
    """Record a write of the rows 1 and 2."""

    def record(history: History) -> None:
        history.offer(0, [1, 2], key)
        history.count(0, counted)
        history.finish(0, finished, *(account or NO_FIGURES), timeout)

    return record


def read(*rows: int, queue: int = 0, consumer: int = 0, start: int = 0, mark: int | list[int] = NONE) -> Record:
    """Record that a consumer reads rows at consecutive offsets."""
    return lambda history: history.read(consumer, queue, np.arange(len(rows)) + start, rows, mark)


def attempt(
    number: int,
    at: float = 0,
    ended: float | None = 1,
    outcome: Outcome = ACKNOWLEDGED,
    deadline: float = np.inf,
    rows: tuple[int, ...] = (1, 2),
) -> Record:
    """Record an attempt; the first one also records the batch's rows."""

    def record(history: History) -> None:
        if number == 0:
            history.batch(0, rows)
        history.send(number, 0, 0, at, deadline)
        if ended is not None:
            history.end(number, outcome, ended)

    return record


def history_of(*records: Record) -> History:
    history = History()
    for record in records:
        record(history)
    return history


FAILED = write(False)
STORED_TWICE = (attempt(0, outcome=MAYBE_STORED), attempt(1, 1, 2))

# Of each kind, a history that has it, and one that just does not.
CASES: list[tuple[Kind, tuple[Record, ...], tuple[Record, ...]]] = [
    (Kind.MISSING, (write(), read(2)), (FAILED, read(2))),
    (Kind.MISSING, (write(), read(2)), (write(), read(2), lambda history: history.lose(1))),
    (Kind.COUNTED_MISSING, (write(False, counted=(1,)), read(2)), (write(False, counted=(1,)), read(1))),
    (Kind.COUNTED_TWICE, (write(counted=(1, 2, 1)), read(1, 2)), (write(counted=(1, 2)), read(1, 2))),
    # The figures do not add up.
    (Kind.WRONG_ACCOUNT, (write(False, account=(1, 0, 0)), read(1)), (write(False, account=(1, 1, 0)), read(1))),
    # A row that is "not sent" is stored.
    (Kind.WRONG_ACCOUNT, (write(False, account=(1, 1, 0)), read(1, 2)), (write(False, account=(1, 0, 1)), read(1, 2))),
    (Kind.WRONG_ACCOUNT, (write(False, account=(1, 1, 0)),), (write(False, account=(0, 1, 1)),)),
    (Kind.WRONG_ACCOUNT, (write(account=(1, 0, 1)), read(1, 2)), (write(account=(2, 0, 0)), read(1, 2))),
    (
        Kind.WRONG_ACCOUNT,
        (write(False, account=(1, 0, 1), counted=(1, 2)), read(1, 2)),
        (write(False, account=(1, 0, 1), counted=(1,)), read(1, 2)),
    ),
    # A row that an attempt may have stored is not "not sent".
    (
        Kind.WRONG_ACCOUNT,
        (write(False, account=(0, 2, 0)), attempt(0, outcome=MAYBE_STORED)),
        (write(False, account=(0, 2, 0)), attempt(0, outcome=NOT_STORED)),
    ),
    # The outcome of a row that was not sent is known.
    (
        Kind.WRONG_ACCOUNT,
        (write(False, account=(0, 0, 2)), attempt(0, rows=(1,), outcome=MAYBE_STORED)),
        (write(False, account=(0, 1, 1)), attempt(0, rows=(1,), outcome=MAYBE_STORED)),
    ),
    (
        Kind.NO_END_OF_WRITE,
        (FAILED, lambda history: history.offer(1, 3)),
        (FAILED, lambda history: history.offer(1, 3), lambda history: history.finish(1, False)),
    ),
    (
        Kind.TOO_MANY_COPIES,
        (FAILED, attempt(0, outcome=NOT_STORED), attempt(1, 1, 2), read(1, 2, 1)),
        (FAILED, *STORED_TWICE, read(1, 2, 1)),
    ),
    (Kind.NEVER_SENT, (FAILED, read(1, 3)), (FAILED, read(1, 2))),
    (Kind.NEVER_SENT, (FAILED, attempt(0, rows=(1,)), read(1, 2)), (FAILED, attempt(0), read(1, 2))),
    (Kind.NEVER_OFFERED, (FAILED, attempt(0, rows=(1, 3))), (FAILED, attempt(0, rows=(1, 2)))),
    (Kind.ORDER, (write(key=5), read(2, 1)), (write(key=5), read(1, 2, 1))),
    (Kind.ORDER, (write(key=5), read(2, 1)), (write(), read(2, 1))),
    # The first copy of a lost row was in order.
    (Kind.ORDER, (write(key=5), read(2, 1)), (write(key=5), read(2, 1), lambda history: history.lose(1))),
    (Kind.KEY_IN_QUEUES, (write(key=5), read(1), read(2, queue=1)), (write(), read(1), read(2, queue=1))),
    (Kind.NO_END, (FAILED, attempt(0, ended=None)), (FAILED, attempt(0))),
    (Kind.TWO_ENDS, (FAILED, attempt(0), lambda history: history.end(0, ACKNOWLEDGED, 1)), (FAILED, attempt(0))),
    (Kind.LATE_END, (FAILED, attempt(0, ended=3.1, deadline=3)), (FAILED, attempt(0, ended=3, deadline=3))),
    (
        Kind.LATE_START,
        (write(False, timeout=4), attempt(0, outcome=NOT_STORED), attempt(1, 4.1, 5)),
        (write(False, timeout=4), attempt(0, outcome=NOT_STORED), attempt(1, 4, 5)),
    ),
    (
        Kind.OVERLAP,
        (FAILED, attempt(0, ended=1, outcome=NOT_STORED), attempt(1, 0.9, 2)),
        (FAILED, attempt(0, ended=1, outcome=NOT_STORED), attempt(1, 1, 2)),
    ),
    (Kind.SENT_AGAIN, (FAILED, attempt(0), attempt(1, 1, 2)), (FAILED, *STORED_TWICE)),
    (Kind.OFFSET_TWICE, (write(), read(1, 2), read(1)), (write(), read(1, 2), read(1, consumer=1))),
    (Kind.HOLE, (write(), read(1), read(2, start=2)), (write(), read(1), read(2, start=1))),
    (Kind.HOLE, (write(), read(1), read(2, start=2)), (write(), read(1, GAP, 2))),
    (
        Kind.HOLE,
        (write(), read(1, 2), lambda history: history.expect(0, 0, 0, 3)),
        (write(), read(1, 2), lambda history: history.expect(0, 0, 0, 2)),
    ),
    (
        Kind.HOLE,
        (FAILED, lambda history: history.expect(0, 0, 4, 5)),
        (FAILED, lambda history: history.expect(0, 0, 4, 4)),
    ),
    (Kind.TWO_ROWS, (FAILED, read(1), read(2, consumer=1)), (FAILED, read(1), read(GAP, consumer=1))),
    (Kind.MARKS_DIFFER, (write(), read(1, 2, 1, mark=[7, 8, 9])), (write(), read(1, 2, 1, mark=[7, 8, 7]))),
    (Kind.MARK_SHARED, (write(), read(1, 2, mark=7)), (write(), read(1, 2, mark=NONE))),
]


@pytest.mark.parametrize(
    ("kind", "broken", "sound"), CASES, ids=[f"{kind.name}-{n}" for n, (kind, *_) in enumerate(CASES)]
)
def test_each_violation_is_found_where_it_is_and_only_there(
    kind: Kind, broken: tuple[Record, ...], sound: tuple[Record, ...]
) -> None:
    found = check(history_of(*broken))
    assert [violation.kind for violation in found] == [kind]
    assert check(history_of(*sound)) == []


def test_every_kind_of_violation_has_a_case() -> None:
    assert {kind for kind, _, _ in CASES} == set(Kind)


def test_violation_names_its_count_its_first_rows_and_a_sentence() -> None:
    history = History()
    history.offer(0, np.arange(100, 110))
    history.finish(0)
    (missing,) = check(history)
    assert (missing.count, missing.rows) == (10, (100, 101, 102, 103, 104))
    assert str(missing) == "10 rows of finished writes are not stored: 100, 101, 102, 103, 104"


def test_account_violation_names_the_write_and_every_reason() -> None:
    (wrong,) = check(history_of(write(account=(1, 0, 2)), read(1, 2)))
    assert str(wrong) == "write 0 reports 1 stored, 0 not sent, 2 unknown, and its rows are 2, it has finished"


@pytest.mark.parametrize(
    ("records", "text"),
    [
        ((FAILED, lambda history: history.offer(1, 2)), "row 2 is there twice"),
        ((FAILED, FAILED), "row 1 is there twice"),
        ((FAILED, lambda history: history.finish(0)), "end of write 0 is there twice"),
        ((attempt(0), attempt(0)), "attempt 0 is there twice"),
        ((lambda history: history.end(4, ACKNOWLEDGED, 1),), "attempt 4 has an end and no start"),
        ([lambda history: history.expect(1, 2, 0, 1)] * 2, "consumer 1 has two ranges of queue 2"),
    ],
    ids=["row", "rows", "write", "attempt", "end", "range"],
)
def test_history_that_contradicts_itself_is_rejected(records: tuple[Record, ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        check(history_of(*records))


def test_file_returns_the_operations_of_all_additions(tmp_path: Path) -> None:
    path = tmp_path / "history.npz"
    whole = history_of(FAILED, *STORED_TWICE, read(1, 2, 1, mark=[7, 8, 9]))
    for part in ((FAILED,), STORED_TWICE, (read(1, 2, 1, mark=[7, 8, 9]),)):
        history_of(*part).add_to(path)
    found = History.of(path)
    assert len(found) == len(whole) == 12
    for name in ("offer", "batch", "send", "end", "finish", "read"):
        for column, values in whole.table(name).items():
            assert found.table(name)[column].dtype == values.dtype
            assert found.table(name)[column].tolist() == values.tolist()
    assert check(found) == check(whole) != []


def test_writers_that_add_at_the_same_time_lose_no_operation(tmp_path: Path) -> None:
    path = tmp_path / "history.npz"
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda write: history_of(lambda history: history.offer(write, write)).add_to(path), range(20)))
    assert sorted(History.of(path).table("offer")["row"].tolist()) == list(range(20))


def test_operations_of_several_files_make_one_history(tmp_path: Path) -> None:
    history_of(write()).add_to(tmp_path / "writer.npz")
    history_of(read(1)).add_to(tmp_path / "reader.npz")
    (missing,) = check(History.of(tmp_path / "writer.npz", tmp_path / "reader.npz"))
    assert missing.rows == (2,)


def test_id_of_a_text_is_stable_and_fits_the_columns() -> None:
    assert id_of("a row id") == id_of(b"a row id") == 402839228630622193
    assert 0 <= id_of("another") < 1 << 63


_ROWS = st.sampled_from([-3, 0, 1, 2, 1 << 40, 9])
_FEW = st.integers(0, 2)
_TIMES = st.integers(0, 4).map(float)


@st.composite
def histories(draw: st.DrawFn) -> History:
    """Draw small histories: most break several rules."""
    history = History()
    # Rows of one write, key and queue have an order that can be broken.
    one = draw(st.booleans())
    numbers, keys = (st.just(0), st.just(5)) if one else (_FEW, st.sampled_from([NONE, NONE, 5, 6]))
    for row in draw(st.lists(_ROWS, unique=True)):
        history.offer(draw(numbers), row, draw(keys))
    for batch, row in draw(st.lists(st.tuples(_FEW, _ROWS), max_size=6)):
        history.batch(batch, row)
    attempts = draw(st.lists(st.integers(0, 6), unique=True))
    for number in attempts:
        history.send(number, draw(_FEW), 0, draw(_TIMES), draw(_TIMES))
    for number in draw(st.lists(st.sampled_from(attempts))) if attempts else ():
        history.end(number, draw(st.sampled_from(Outcome)), draw(_TIMES))
    for row in draw(st.lists(_ROWS, max_size=3)):
        history.count(draw(_FEW), row)
    for number in draw(st.lists(_FEW, unique=True)):
        account = draw(st.just(NO_FIGURES) | st.tuples(_FEW, _FEW, _FEW))
        history.finish(number, draw(st.booleans()), *account, draw(_TIMES))
    history.lose(draw(st.lists(_ROWS, max_size=1)))
    for consumer, queue in draw(st.lists(st.tuples(_FEW, _FEW), unique=True, max_size=2)):
        start = draw(st.integers(0, 5))
        history.expect(consumer, queue, start, start + draw(_FEW))
    for row in draw(st.lists(_ROWS | st.just(GAP), max_size=8)):
        mark = draw(st.sampled_from([NONE, 1, 2]))
        history.read(draw(_FEW), draw(numbers), draw(st.integers(0, 5)), row, mark)
    return history


@settings(max_examples=200)
@given(histories())
@example(History())
def test_check_finds_what_a_slow_checker_finds(history: History) -> None:
    assert Counter({violation.kind: violation.count for violation in check(history)}) == violations_of(history)
