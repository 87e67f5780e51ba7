"""Storages of the device. torch would ask an allocator for them, which no Python program can provide, and crash."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sardonyx.eager.memory import DEVICE

_new: Any = torch.UntypedStorage.__new__


def install() -> None:
    """Let storages of the device be those of tensors."""
    torch.UntypedStorage.__new__ = _made  # type: ignore[method-assign]


def _made(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
    if device is None or torch.device(device).type != DEVICE:
        return _new(cls, *args, **kwargs) if device is None else _new(cls, *args, device=device, **kwargs)
    given = args[0] if args else 0
    if isinstance(given, Sequence):
        host = torch.tensor(list(given), dtype=torch.uint8)
        return host.to(device).untyped_storage()
    return torch.empty(int(given), dtype=torch.uint8, device=device).untyped_storage()
