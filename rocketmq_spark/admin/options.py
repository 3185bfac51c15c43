"""How to reach a cluster, as keywords: each is an option of a read, under its own name in snake_case.

Rule 1: one meaning and one check for each, whether a DataFrame's option or a keyword here; a message says which.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rocketmq_spark.errors import OptionError
from rocketmq_spark.namespace import effective_namespace
from rocketmq_spark.option_parsing import parse_environment, parse_one
from rocketmq_spark.producer_options import option_text
from rocketmq_spark.reader_option_rules import contradictions
from rocketmq_spark.reader_option_table import READER_OPTIONS
from rocketmq_spark.reader_options import ReaderOptions

# Seconds. Nobody waits longer for one answer, and threads and sockets take no number that is far greater.
_LONGEST: Final = 3_600


def admin_options(given: Mapping[str, Any], timeout: float, environ: Mapping[str, str]) -> ReaderOptions:
    """Return the options of a connection.

    Parameters
    ----------
    given : mapping of str to value
        By field of `ReaderOptions`; None is as if it were not there.
    timeout : float
        Seconds, for each question; an hour at most.
    environ : mapping of str to str
        ``NAMESRV_ADDR`` stands in for the name servers.

    Raises
    ------
    OptionError
        An option is malformed or missing, or two contradict each other.
    """
    check_timeout(timeout)
    table = [spec for spec in READER_OPTIONS if spec.field in given]
    texts = [(spec, option_text(given[spec.field])) for spec in table if given[spec.field] is not None]
    values = {spec.field: parse_one(spec, text, spec.field) for spec, text in texts}
    values |= parse_environment(table, values, environ)
    if not values.get("name_server"):
        raise OptionError(
            "no name server is given: name them as host:9876;host:9876, or set the environment variable NAMESRV_ADDR"
        )
    values["namespace"] = effective_namespace(values.get("namespace"), values["name_server"])
    milliseconds = max(1, round(timeout * 1000))
    options = ReaderOptions(**values, pull_timeout_ms=milliseconds, read_timeout_ms=milliseconds)
    for contradiction in contradictions(options, str, streaming=False):
        raise OptionError(contradiction)
    return options


def check_timeout(timeout: float) -> None:
    """Refuse what nobody could wait for.

    Raises
    ------
    OptionError
    """
    if not 0 < timeout <= _LONGEST:
        raise OptionError(
            f"timeout is {timeout!r}: it is the seconds that one question may take, more than 0 and {_LONGEST} at most"
        )
