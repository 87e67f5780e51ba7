"""Whether two sources of random numbers have the same distribution, judged by many calls of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

CALLS = 200
_ELEMENTS = 64
_CHANCE = 1e-7
"""How seldom equal distributions would be called different, were the seeds not fixed."""
_LARGEST = 1e300


def distributions_differ(
    one: Callable[[], Any], other: Callable[[], Any], tolerance: tuple[float, float] = (0.0, 0.0), calls: int = CALLS
) -> str:
    """How the results of two functions differ over many calls, in a line; empty where they do not.

    Compared are single elements and, of each call, the mean, the spread, the least and the greatest element; each by
    the test of Kolmogorov and Smirnov, in which numbers within the relative and absolute tolerance count as equal.
    """
    for index, pair in enumerate(zip(_drawn(one, calls, 1), _drawn(other, calls, 2), strict=True)):
        distance = max((_distance(a, b, tolerance) for a, b in zip(*map(_aspects, pair), strict=True)), default=0.0)
        if distance > _critical(calls):
            return f"result {index}: distributions differ by {distance:.2f}, chance gives {_critical(calls):.2f}"
    return ""


def _drawn(function: Callable[[], Any], calls: int, seed: int) -> list[torch.Tensor]:
    """Every result of each call, as a row of doubles."""
    torch.manual_seed(seed)
    rows = [[_row(leaf) for leaf in tree_leaves(function()) if isinstance(leaf, torch.Tensor)] for _ in range(calls)]
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def _row(result: torch.Tensor) -> torch.Tensor:
    result = torch.view_as_real(result) if result.is_complex() else result
    return result.detach().cpu().double().flatten().nan_to_num(_LARGEST, _LARGEST / 10, -_LARGEST / 10)


def _aspects(rows: torch.Tensor) -> Sequence[torch.Tensor]:
    """What is compared: some elements, and what sums up each call."""
    count = rows.shape[1]
    if not count:
        return []
    chosen = rows[:, :: math.ceil(count / _ELEMENTS)]
    middle = rows.clamp(-1e30, 1e30)
    return [*chosen.unbind(1), middle.mean(1), middle.square().mean(1), rows.amin(1), rows.amax(1)]


def _distance(one: torch.Tensor, other: torch.Tensor, tolerance: tuple[float, float]) -> float:
    return max(_ahead(one, other, tolerance), _ahead(other, one, tolerance))


def _ahead(one: torch.Tensor, other: torch.Tensor, tolerance: tuple[float, float]) -> float:
    """By how much the share of `one` up to some number exceeds that of `other` up to a little more."""
    relative, absolute = tolerance
    one, other = one.sort().values, other.sort().values
    shares = torch.arange(1, len(one) + 1) / len(one)
    # Where terms cancel, small numbers are no more exact than large ones.
    size = torch.maximum(one.abs(), one.abs().quantile(0.9))
    theirs = torch.searchsorted(other, one + absolute + relative * size, right=True) / len(other)
    return float((shares - theirs).max())


def _critical(calls: int) -> float:
    return math.sqrt(-math.log(_CHANCE / 2) / calls)
