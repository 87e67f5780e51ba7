"""Torch's threads rest while an engine computes, where that is worth it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sardonyx import threads
from tests.clock import Clock


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    threads._pause.cache_clear()
    yield
    torch.set_num_threads(1)
    threads._pause.cache_clear()


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    seen: list[int] = []
    monkeypatch.setattr(threads, "_pause", lambda: seen.append)
    return seen


def test_long_calls_are_quiet_and_short_ones_are_left_alone(pauses: list[int], clock: Clock) -> None:
    long, short = threads.ThreadPauser(), threads.ThreadPauser()
    for _ in range(6):
        assert long(lambda x: clock.sleep(2 * threads._LONG) or x, 3) == 3
    assert len(pauses) == 6
    for _ in range(6):
        assert short(lambda x: x, 4) == 4
    assert len(pauses) == 6 + threads._TIMED_CALLS


def test_a_failure_passes_through(pauses: list[int]) -> None:
    with pytest.raises(ZeroDivisionError):
        threads.ThreadPauser()(lambda: 1 / 0)


def test_torch_goes_on_after_a_pause(two_threads: None) -> None:
    x = torch.arange(1 << 20, dtype=torch.float32)
    quiet = threads.ThreadPauser()
    for _ in range(10):
        assert quiet(lambda: 7) == 7
        assert x.mul(2).sum() == x.sum() * 2


def test_one_thread_needs_no_pause() -> None:
    threads._pause.cache_clear()
    assert threads._pause() is None
