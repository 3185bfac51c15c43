"""What a proxy's answer means to the doctor."""

from __future__ import annotations

import pytest

from rocketmq_spark.doctor.check import FAILED
from rocketmq_spark.doctor.proxies import check_proxies
from tests.peer import PATIENCE
from tests.proxy import FakeProxy, status_reply

REFUSED = "check signature failed."
NO_RIGHT = "User:shop has no permission to access Topic:orders from 127.0.0.1, no matched policies."


@pytest.mark.parametrize(
    ("said", "found", "mend"),
    [
        (REFUSED, f"the access key is refused: {REFUSED}", "give the right access key and secret key"),
        (NO_RIGHT, NO_RIGHT, "let the user's policies allow it"),
    ],
)
def test_a_wrong_key_is_told_from_a_missing_right(said: str, found: str, mend: str) -> None:
    with FakeProxy() as proxy:
        proxy.handlers["QueryRoute"] = lambda *_: status_reply(40100, said)
        *_, check = check_proxies(proxy.address, "orders", {}, PATIENCE)
    assert (check.state, check.found) == (FAILED, found)
    assert check.mend.startswith(mend)
