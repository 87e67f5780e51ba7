"""Processes that use one cache at the same time."""

from __future__ import annotations

import os
import select
from collections.abc import Callable


def children(count: int, work: Callable[[int], None]) -> list[int]:
    """Processes that do some work each, as forks: a new one would import torch first."""
    started = []
    for index in range(count):
        child = os.fork()
        if not child:
            code = 1
            try:
                work(index)
                code = 0
            finally:
                os._exit(code)
        started.append(child)
    return started


def exit_codes(started: list[int]) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in started]


class Arrivals:
    """Lets the process that makes something wait until all the others have begun to ask for it."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._read, self._write = os.pipe()

    def arrive(self) -> None:
        """Say that this process is about to ask."""
        os.write(self._write, b".")

    def wait(self) -> None:
        """Return when all have arrived; a second maker finds nobody left to wait for and goes on after a minute."""
        for _ in range(self._count):
            if not select.select([self._read], [], [], 60)[0]:
                return
            os.read(self._read, 1)
