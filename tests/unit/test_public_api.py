"""The public API: a change of a name or of a signature is a change of tests/unit/public_api.txt (`make api`)."""

from __future__ import annotations

import sys

import pytest

from tests.tools.public_api import LISTED, lines


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="Python releases print types differently")
def test_the_public_api_is_as_listed() -> None:
    assert "\n".join(lines()) + "\n" == LISTED.read_text("utf-8")
