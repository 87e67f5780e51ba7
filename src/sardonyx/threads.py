"""Pause torch's OpenMP threads, which spin for milliseconds after an operator and slow an engine on the same cores."""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch

T = TypeVar("T")

_SOFT = 1
"""OpenMP's constant for a pause that keeps settings."""
_LONG = 1e-3
"""Seconds that a call must take for a pause to pay off: recreating threads costs torch's next operator 0.08 ms.

A training step of a perceptron (2,048 wide) on two cores took 18 ms with torch's threads spinning after the optimizer,
13 with a pause, 14 in eager.
"""
_TIMED_CALLS = 3


def end_openmp_threads() -> None:
    """End this thread's OpenMP threads; torch creates them again when needed.

    A forked child has none of them, and would deadlock waiting for them.
    """
    pause = _pause_resources()
    if pause is not None:
        pause(_SOFT)


@cache
def _pause() -> Callable[[int], int] | None:
    """Return OpenMP's pause function; None if torch has one thread or another kind of threads."""
    return None if torch.get_num_threads() == 1 else _pause_resources()


@cache
def _pause_resources() -> Callable[[int], int] | None:
    try:
        function: Any = ctypes.CDLL(None).omp_pause_resource_all
    except (AttributeError, OSError, TypeError):  # another OpenMP or none; Windows
        return None
    return function  # type: ignore[no-any-return]  # ctypes does not say


class ThreadPauser:
    """Calls functions with torch's threads paused, unless the first timed calls show that they are too short."""

    def __init__(self) -> None:
        self._pause = _pause()
        self._left = _TIMED_CALLS if self._pause else 0
        self._shortest = math.inf

    def __call__(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function and return its result."""
        if self._pause is None:
            return function(*args)
        self._pause(_SOFT)
        if not self._left:
            return function(*args)
        started = time.perf_counter()
        result = function(*args)
        self._left -= 1
        self._shortest = min(self._shortest, time.perf_counter() - started)
        if not self._left and self._shortest < _LONG:
            self._pause = None
        return result
