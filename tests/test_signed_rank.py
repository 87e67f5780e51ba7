"""Medians and their intervals by signed ranks."""

from __future__ import annotations

import random

import pytest
from benchmarks.signed_rank import LEAST, critical, estimate


def test_critical_values_are_those_of_published_tables() -> None:
    """For a two-sided test at 5 %."""
    published = {6: 0, 7: 2, 8: 3, 10: 8, 12: 13, 15: 25, 20: 52, 24: 81}
    assert {count: critical(count) for count in published} == published


def test_fewer_values_than_six_have_no_interval() -> None:
    assert critical(LEAST) == 0
    assert critical(LEAST - 1) == -1
    with pytest.raises(ValueError, match="at least 6 values, not 5"):
        estimate([1.0] * 5)


def test_the_interval_holds_the_median_as_often_as_it_says() -> None:
    """Of a distribution with outliers, for as many values as are measured at first, and at last."""
    numbers = random.Random(0)
    for count in (6, 24):
        found = [estimate([_with_outliers(numbers) for _ in range(count)]) for _ in range(500)]
        held = sum(one.low <= 1.0 <= one.high for one in found) / len(found)
        assert 0.94 < held < 0.98


def test_an_outlier_does_not_move_the_estimate_far() -> None:
    values = [1.0, 1.01, 1.02, 1.03, 1.04, 1.05, 1.06, 1.07]
    usual, outlier = estimate(values), estimate([*values[:-1], 100.0])
    assert outlier.low == pytest.approx(usual.low, abs=0.01)
    assert outlier.middle == pytest.approx(usual.middle, abs=0.01)


def test_estimates_follow_a_shift_of_all_values() -> None:
    values = [0.3, -0.1, 0.25, 0.7, -0.4, 0.0, 0.12]
    usual, shifted = estimate(values), estimate([value + 2 for value in values])
    for bound in ("low", "middle", "high"):
        assert getattr(shifted, bound) == pytest.approx(getattr(usual, bound) + 2)


def _with_outliers(numbers: random.Random) -> float:
    return 1.0 + numbers.gauss(0, 10 if numbers.random() < 0.1 else 1)
