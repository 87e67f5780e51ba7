"""The eager device: `torch.ones(3, device="ort")`, each ATen call executed by ONNX Runtime."""

from __future__ import annotations

from dataclasses import dataclass

from sardonyx.eager.device import enable
from sardonyx.eager.dispatch import NotMapped, State

__all__ = ["NotMapped", "Stats", "enable", "stats"]


@dataclass(frozen=True)
class Stats:
    """What happened on the device: how often each operator was called, and how often it ran on the CPU."""

    calls: dict[str, int]
    fallbacks: dict[str, int]


def stats() -> Stats:
    """What happened on the device so far."""
    return Stats(dict(State.calls), dict(State.fallbacks))
