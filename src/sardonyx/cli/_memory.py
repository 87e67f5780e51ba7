"""The peak of this process's memory, as the system counts it."""

from __future__ import annotations

import re
from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


def reset_peak() -> bool:
    """Let the peak begin anew; returns whether the system can do that."""
    try:
        _CLEAR.write_text(_RESET_PEAK, encoding="utf-8")
    except OSError:
        return False
    return True


def peak_bytes() -> int | None:
    """Return the largest resident memory since `reset_peak`; None where the system does not tell.

    >>> peak_bytes() is None or peak_bytes() > 1_000_000
    True
    """
    if not _STATUS.exists():
        return None
    found = re.search(r"^VmHWM:\s+(\d+) kB$", _STATUS.read_text(encoding="utf-8"), re.MULTILINE)
    return int(found[1]) * 1024 if found else None
