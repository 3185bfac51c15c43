"""What the soak calls flat."""

from __future__ import annotations

import pytest

from tests.soak import judge


@pytest.mark.parametrize(
    ("values", "flat"),
    [
        # What the first third warms up does not count, nor does a single peak.
        ([1.0] * 10 + [100.0] * 20, True),
        ([100.0] * 20 + [100.0] * 9 + [500.0], True),
        ([100.0] * 20 + [113.0] * 10, True),
        ([100.0] * 20 + [115.0] * 10, False),
        ([100.0] * 20 + [20.0] * 10, True),
        ([10.0 * number for number in range(30)], False),
    ],
)
def test_a_figure_is_flat_if_its_last_third_is_hardly_above_the_one_before(values: list[float], flat: bool) -> None:
    [line] = judge([{"worker MB": value} for value in values])
    assert (line.name, line.flat) == ("worker MB", flat)


def test_small_numbers_may_jump_a_little() -> None:
    samples = [{"worker threads": 5.0, "worker descriptors": 10.0}] * 20
    samples += [{"worker threads": 7.0, "worker descriptors": 16.0}] * 10
    assert [(line.name, line.flat) for line in judge(samples)] == [
        ("worker threads", True),
        ("worker descriptors", False),
    ]
