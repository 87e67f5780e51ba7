"""Storages of the device in Python: torch would ask for an allocator, which Python cannot provide, and crash."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sardonyx.eager.memory import DEVICE

_new: Any = torch.UntypedStorage.__new__


def install() -> None:
    """Create storages of the device through tensors."""
    torch.UntypedStorage.__new__ = _new_storage  # type: ignore[method-assign]


def _new_storage(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
    if device is None or torch.device(device).type != DEVICE:
        return _new(cls, *args, **kwargs) if device is None else _new(cls, *args, device=device, **kwargs)
    size_or_values = args[0] if args else 0
    if isinstance(size_or_values, Sequence):
        host = torch.tensor(list(size_or_values), dtype=torch.uint8)
        return host.to(device).untyped_storage()
    return torch.empty(int(size_or_values), dtype=torch.uint8, device=device).untyped_storage()
