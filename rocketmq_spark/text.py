"""Texts that a peer or a row supplied, made safe to show in errors, log records, terminals and HTML."""

from __future__ import annotations

import re
from typing import Final

# Longer than any remark of a broker without a stack trace, and short enough that the advice behind it is still read.
SHOWN: Final = 1000

# C0, DEL, C1 and the separators of lines and paragraphs. Also bidirectional controls, tags and other invisible format
# characters, which reorder or hide text, and surrogates, which UTF-8 cannot encode. U+200C and U+200D stay, because
# Persian, Indic scripts and emoji need them.
_UNSAFE: Final = re.compile(
    "[\x00-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e0fff]"
)


def escaped(text: str, limit: int = SHOWN) -> str:
    r"""Return `text` as at most `limit` characters of one line, with control characters as ``\n`` or ``\x1b``.

    Backslashes stay as they are, so a text that was escaped before does not change.
    """
    shown = _UNSAFE.sub(_code, text[: limit + 1])
    if len(shown) <= limit:
        return shown
    end = f"… ({len(text)} characters)"
    return shown[: max(limit - len(end), 0)] + end


def _code(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape", "surrogatepass").decode()
