"""Time calls that take turns, so that whatever slows the machine for a while slows all of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

Call: TypeAlias = Callable[[], Any]

_MOST_REPEATS = 1000


def seconds(call: Call, repeats: int = 1) -> float:
    """What a call takes, by the mean of some in a row."""
    started = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - started) / repeats


def in_turns(
    calls: Sequence[Call],
    *,
    rounds: int,
    least: int | None = None,
    limit: float = math.inf,
    round_seconds: float = 0.0,
    hopeless: float | None = None,
) -> list[list[float]]:
    """For each call, which ran before, what it takes in each round.

    A short call is repeated until its turn takes `round_seconds`. Once there are `least` rounds, those after them are
    left out when `limit` seconds are over, and in them the turns of a call that takes `hopeless` times as long as the
    fastest.
    """
    least = rounds if least is None else least
    repeats = [_repeats(call, round_seconds) if round_seconds else 1 for call in calls]
    ends = time.perf_counter() + limit
    taken: list[list[float]] = [[] for _ in calls]
    for number in range(max(rounds, least)):
        if number >= least and time.perf_counter() > ends:
            break
        slowest = hopeless * min(map(min, taken)) if hopeless is not None and number >= least else math.inf
        for call, count, times in zip(calls, repeats, taken, strict=True):
            if min(times, default=0.0) < slowest:
                times.append(seconds(call, count))
    return taken


def _repeats(call: Call, round_seconds: float) -> int:
    """How many calls make a turn long enough to be timed."""
    return max(1, min(_MOST_REPEATS, round(round_seconds / max(seconds(call), 1e-6))))
