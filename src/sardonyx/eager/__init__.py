"""The eager device: `torch.ones(3, device="ort")`, each ATen call executed by ONNX Runtime."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from sardonyx.eager.check import check
from sardonyx.eager.declarations import declare
from sardonyx.eager.device import enable, set_device
from sardonyx.eager.dispatch import NotMapped, State
from sardonyx.translate import declared as nodes

__all__ = ["NotMapped", "Stats", "check", "declare", "enable", "nodes", "set_device", "stats"]


@dataclass(frozen=True)
class Stats:
    """Calls per operator on the device, and how many of them fell back to the CPU."""

    calls: dict[str, int]
    fallbacks: dict[str, int]


def stats() -> Stats:
    """Return the counts of calls and fallbacks so far."""
    calls = State.calls + Counter({} if State.core is None else State.core.calls())
    return Stats(dict(calls), dict(State.fallbacks))
