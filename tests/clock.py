"""A clock that only the test moves."""

from __future__ import annotations


class Clock:
    """Stands in for `time.perf_counter` and `time.monotonic`; `sleep` moves it and returns at once."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds
