"""What a process and its children take, whatever else the machine does."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from subprocess import PIPE

import pytest

from tests.clock import Clock

from . import allowance
from .allowance import MOST_IDLE_SECONDS, SECONDS_BETWEEN_LOOKS, Allowance, processor_seconds

BUSY = "import time\nwhile time.process_time() < {}: pass"


@contextmanager
def shell(*commands: str) -> Iterator[subprocess.Popen[str]]:
    """A shell in a group of its own, which is ended with its children."""
    process = subprocess.Popen(["sh", "-c", "; ".join(commands)], stdout=PIPE, text=True, start_new_session=True)
    with process:
        try:
            yield process
        finally:
            os.killpg(process.pid, 9)


def python(code: str) -> str:
    return f"{sys.executable} -c '{code}'"


def excess_in_time(allowance: Allowance) -> str:
    while not (excess := allowance.excess()):
        time.sleep(0.05)
    return excess


def test_a_child_that_works_uses_what_its_parent_may_take() -> None:
    with shell(python(BUSY.format('float("inf")')), "true") as process:
        assert excess_in_time(Allowance(process.pid, 1.0)) == "no answer within 1 seconds of processor time"


def test_what_an_ended_child_used_counts() -> None:
    with shell(python(BUSY.format(1.1)), "echo ended", "sleep 6000") as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert processor_seconds(process.pid) >= 1.0


def test_a_process_that_waits_is_given_up_after_a_long_time_only(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(allowance.time, "monotonic", clock)
    used = iter([5.0, 5.0, 5.5, 5.5, 5.5])
    monkeypatch.setattr(allowance, "processor_seconds", lambda pid: next(used))
    waiting = Allowance(1, 1.0)
    for seconds, expected in [
        (SECONDS_BETWEEN_LOOKS, ""),
        (MOST_IDLE_SECONDS - 1, ""),
        (2, ""),
        (MOST_IDLE_SECONDS - 1, ""),
        (1, f"neither an answer nor work for {MOST_IDLE_SECONDS:.0f} seconds"),
    ]:
        clock.sleep(seconds)
        assert waiting.excess() == expected


def test_a_process_that_ended_uses_nothing() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert processor_seconds(ended.pid) == 0
