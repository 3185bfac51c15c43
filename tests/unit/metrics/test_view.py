"""Tables of a summary."""

from __future__ import annotations

import io

import pytest

from rocketmq_spark.display.optional import require
from rocketmq_spark.metrics import WriteSummary
from tests.support.pipelines import recorder, success, summary_of

NOTE = "Latencies cover successful attempts only; numbers appear as tasks end."


def shown() -> WriteSummary:
    recording = recorder()
    success(recording, "broker-a", rows=1_234_567, latency_ms=2, nbytes=3 * 1024**2)
    recording.record_retry("<b> [red]", "busy", 1.0)
    return summary_of([recording.snapshot()])


def test_show_prints_a_line_per_broker_and_the_notes() -> None:
    out = io.StringIO()
    shown().show(file=out)
    head, _, *rows = [line.split() for line in out.getvalue().strip().splitlines()]
    assert " ".join(head) == ("broker rows requests MiB retries failures isolated p50 ms p90 ms p99 ms max ms")
    assert rows[0] == ["<b>", "[red]", "0", "0", "0.0", "1", "0", "0", "-", "-", "-", "-"]
    assert rows[1] == ["broker-a", "1,234,567", "1", "3.0", "0", "0", "0", "2.0", "2.0", "2.0", "2.0"]
    assert " ".join(rows[-1]) == NOTE


def test_show_goes_to_stdout_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    shown().show()
    assert "broker-a" in capsys.readouterr().out


def test_show_before_the_end_of_any_task_reports_no_ended_task() -> None:
    out = io.StringIO()
    WriteSummary().show(file=out)
    assert out.getvalue() == f"No task has ended yet.\n{NOTE}\n"


def test_html_is_a_table_with_escaped_names() -> None:
    page = shown()._repr_html_()
    assert page.startswith("<table>")
    assert "<td>&lt;b&gt; [red]</td><td>0</td>" in page
    assert page.endswith(f"</table>\n<p>{NOTE}</p>")
    assert "No task has ended yet." in WriteSummary()._repr_html_()


def test_repr_shows_the_counts() -> None:
    assert repr(shown()) == "<WriteSummary writes=1 reports=1 <Measures brokers=2 rows=1234567 requests=1>>"


def test_pandas_has_a_row_of_numbers_per_broker() -> None:
    pytest.importorskip("pandas")
    frame = shown().to_pandas()
    assert frame.index.tolist() == ["<b> [red]", "broker-a"]
    assert frame.loc["broker-a", "rows"] == 1_234_567
    assert frame["p99_ms"].isna().tolist() == [True, False]
    assert {name: str(kind) for name, kind in frame.dtypes.items()} == {
        **dict.fromkeys(("rows", "sent_rows", "requests", "bytes", "retries", "failures", "isolated_times"), "int64"),
        **dict.fromkeys(("p50_ms", "p90_ms", "p99_ms", "max_ms", "isolated_ms"), "float64"),
    }


def test_pandas_of_nothing_has_the_same_columns() -> None:
    pytest.importorskip("pandas")
    assert WriteSummary().to_pandas().columns.tolist() == shown().to_pandas().columns.tolist()


def test_missing_optional_module_error_names_the_package_to_install() -> None:
    with pytest.raises(ImportError, match=r"^drawing needs no_such_module: pip install 'rocketmq-spark\[notebook\]'$"):
        require("no_such_module.part", "drawing")
