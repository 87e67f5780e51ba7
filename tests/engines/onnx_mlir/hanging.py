"""A compiler that never ends, and a stand-in for the clock: a wait for it is cut off once it hangs."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def hanging(path: Path) -> Path:
    """A compiler that never ends, and has a child; the file beside it tells the numbers of both processes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"""#!/bin/sh
[ "$1" = --version ] && exit
echo about to hang
sleep 6000 & echo "$$ $!" > {path}.numbers
sleep 6000
""")
    path.chmod(0o755)
    return path


def cut_off(monkeypatch: pytest.MonkeyPatch, slow: Path, act: Callable[[Any, float], object]) -> None:
    """Call `act` with the process and the limit of the first wait for it, once the compiler hangs."""
    acted = []

    class Watched(subprocess.Popen[Any]):
        def wait(self, timeout: float | None = None) -> int:
            while not acted and timeout is not None and self.poll() is None:
                if numbers(slow):
                    acted.append(act(self, timeout))
                time.sleep(0.01)
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Watched)


def expire(process: Any, timeout: float) -> None:
    raise subprocess.TimeoutExpired(process.args, timeout)


def numbers(slow: Path) -> list[int]:
    """The processes of a compiler that hangs."""
    written = Path(f"{slow}.numbers")
    return [int(word) for word in written.read_text().split()] if written.exists() else []


def ended(slow: Path) -> bool:
    """Whether its processes are gone, or wait to be forgotten; a killed one takes a moment."""
    stats = [Path(f"/proc/{number}/stat") for number in numbers(slow)]
    for _ in range(60_000):
        if all(not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] in "ZX" for stat in stats):
            return bool(stats)
        time.sleep(0.01)
    return False
