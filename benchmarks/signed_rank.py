"""Estimate a median and its confidence interval from few values, by Wilcoxon's signed-rank test.

The values need a symmetric distribution, not a normal one: single outliers move neither the estimate nor the interval
far. The logarithm of a ratio of two times with the same relative noise has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations_with_replacement
from statistics import median

LEAST = 6
"""Of fewer values there is no interval of this confidence."""

_TAIL = 0.025


@dataclass(frozen=True)
class Estimate:
    """The Hodges-Lehmann estimate of a median, with the bounds of its 95 % confidence interval."""

    low: float
    middle: float
    high: float


def estimate(values: Sequence[float]) -> Estimate:
    """Estimate the median of the distribution that the values, at least six, are from.

    >>> estimate([1.0, 2.0, 3.0, 4.0, 5.0, 60.0])
    Estimate(low=1.0, middle=3.5, high=60.0)
    >>> estimate([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 80.0])
    Estimate(low=2.0, middle=4.5, high=42.5)
    """
    averages = sorted((a + b) / 2 for a, b in combinations_with_replacement(values, 2))
    outside = critical(len(values)) + 1
    if not outside:
        raise ValueError(f"an interval needs at least {LEAST} values, not {len(values)}")
    return Estimate(averages[outside - 1], median(averages), averages[-outside])


def critical(count: int) -> int:
    """Return the largest sum of ranks that so many values have or stay below with a probability of at most 2.5 %.

    The probability is exact: each of the ranks is in the sum or not, as a coin falls. It is -1 for less than six.
    """
    ways = [1]  # how many sets of ranks have each sum
    for rank in range(1, count + 1):
        without, with_rank = ways + [0] * rank, [0] * rank + ways
        ways = [a + b for a, b in zip(without, with_rank, strict=True)]
    return sum(at_most <= _TAIL * sum(ways) for at_most in accumulate(ways)) - 1
