"""How long a process may take, whatever else the machine does: a limit of processor time, not of the clock."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from pathlib import Path

MOST_IDLE_SECONDS = 1200.0
"""A process that has not used the processor for so long hangs."""
SECONDS_BETWEEN_LOOKS = 0.5


class Allowance:
    """The processor time that a process and its descendants, such as a compiler, may use from now on."""

    def __init__(self, pid: int, seconds: float) -> None:
        self._pid, self._seconds = pid, seconds
        self._looked = self._progressed = time.monotonic()
        self._began = self._used = -1.0

    def excess(self) -> str:
        """How the process exceeds what it may take; empty where it does not, or was looked at a moment ago."""
        now = time.monotonic()
        if now - self._looked < SECONDS_BETWEEN_LOOKS:
            return ""
        self._looked, used = now, processor_seconds(self._pid)
        if self._began < 0:  # not before: most processes answer at once, and a look takes milliseconds
            self._began = used
        if used - self._began >= self._seconds:
            return f"no answer within {self._seconds:.0f} seconds of processor time"
        if used != self._used:
            self._used, self._progressed = used, now
        idle = now - self._progressed
        return f"neither an answer nor work for {idle:.0f} seconds" if idle >= MOST_IDLE_SECONDS else ""


def processor_seconds(pid: int) -> float:
    """The processor time of a process, of its descendants, and of those that ended."""
    used: dict[int, int] = {}
    children: dict[int, list[int]] = defaultdict(list)
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it ended
            continue
        used[int(path.parent.name)] = sum(map(int, fields[11:15]))  # utime, stime, cutime, cstime
        children[int(fields[1])].append(int(path.parent.name))

    def total(process: int) -> int:
        return used.get(process, 0) + sum(map(total, children[process]))

    return total(pid) / os.sysconf("SC_CLK_TCK")
