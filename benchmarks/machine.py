"""Where and with what a measurement was made."""

from __future__ import annotations

import datetime
import os
import platform
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.tables import say

_BUSY = 0.2
_CORES = sorted(os.sched_getaffinity(0))
_PACKAGES = ("torch", "onnxruntime", "onnxruntime-gpu", "onnx", "onnxscript", "transformers", "openvino")


def describe() -> dict[str, Any]:
    """Date, versions, processor and threads, for the head of a result."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), **versions()},
        "cpu": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def versions(packages: Sequence[str] = _PACKAGES) -> dict[str, str | None]:
    """What is installed; None for what is not."""
    return {name: _version(name) for name in packages}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor()


def busy_cores(seconds: float = 0.3) -> float | None:
    """How many cores are at work while we wait; None where the system does not tell."""
    before = _ticks()
    time.sleep(seconds)
    after = _ticks()
    if before is None or after is None or after[1] == before[1]:
        return None
    return (os.cpu_count() or 1) * (1 - (after[0] - before[0]) / (after[1] - before[1]))


def _ticks() -> tuple[int, int] | None:
    """Idle and all ticks of the processor so far."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    ticks = [int(number) for number in stat.read_text().split("\n", 1)[0].split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)


def run_on_cores(options: Any, threads: int) -> None:
    """Let a session of ONNX Runtime have so many threads, this one and others, each on a core of its own.

    The system may keep a thread that calls and the one it wakes on one core for as long as a measurement takes.
    """
    options.intra_op_num_threads = threads
    first, *others = _CORES[:threads]
    os.sched_setaffinity(0, {first})
    if others:
        options.add_session_config_entry("session.intra_op_thread_affinities", ";".join(f"{i + 1}" for i in others))


def resident_megabytes() -> float:
    """What this process holds in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def note_if_busy() -> float | None:
    """Warn that times will mislead when others use the machine: a pool of threads waits for its slowest."""
    busy = busy_cores()
    if busy is not None and busy > _BUSY:
        say(f"note: other programs keep {busy:.1f} of {os.cpu_count()} cores busy; times taken now mislead")
    return busy
