"""Texts that a peer or a row supplied, made safe to show in errors, log records, terminals and HTML."""

from __future__ import annotations

import logging
import re
import traceback
from typing import Final

# Characters of a whole error, log record, or cell of a table. The error of a write that counts the rows of 1,000
# brokers fits. Single texts of servers are shorter: see `wire.command.shortened`.
LONGEST: Final = 100_000

# C0, DEL, C1 and the separators of lines and paragraphs. Also bidirectional controls, tags and other invisible format
# characters, which reorder or hide text, and surrogates, which UTF-8 cannot encode. U+200C and U+200D stay, because
# Persian, Indic scripts and emoji need them.
_UNSAFE: Final = re.compile(
    "[\x00-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e0fff]"
)


def escaped(text: str, limit: int = LONGEST) -> str:
    r"""Return `text` as at most `limit` characters of one line, with control characters as ``\n`` or ``\x1b``.

    Backslashes stay as they are, so a text that was escaped before does not change.
    """
    shown = _UNSAFE.sub(_code, text[: limit + 1])
    if len(shown) <= limit:
        return shown
    end = f"… ({len(text)} characters)"
    return shown[: max(limit - len(end), 0)] + end


def escape_record(record: logging.LogRecord) -> bool:
    """Escape the message and the traceback of a log record: the filter of every logger of this package.

    The lines of a traceback are indented, so that no line of a foreign exception's text looks like a record.
    """
    try:
        message = record.getMessage()
        trace = "".join(traceback.format_exception(*record.exc_info)) if record.exc_info else ""
    except Exception:
        # An argument cannot be shown as a text. The handler of the record reports that, as for any other logger.
        return True
    shown = escaped(message)
    if shown != message:
        record.msg, record.args = shown, ()
    if trace:
        record.exc_text = "\n".join(f"    {escaped(line)}" for line in trace.rstrip("\n").split("\n"))
    return True


def _code(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape", "surrogatepass").decode()
