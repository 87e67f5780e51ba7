"""The memory that work leaves behind, told apart from what else a process does meanwhile."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable
from pathlib import Path


def resident() -> int:
    """Bytes of this process in memory, without garbage and without what the allocator holds in reserve."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc alone has it
    if trim is not None:
        trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def growth(work: Callable[[], object], rounds: int = 3) -> int:
    """Bytes that remain after `work`: the least of several rounds, after one that warms up.

    A leak adds in every round; other threads, caches that fill and pages that are touched for the first time do not.
    """
    work()
    grown = []
    for _ in range(rounds):
        before = resident()
        work()
        grown.append(resident() - before)
    return min(grown)
