"""Compile for a test: nothing is cached from one to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def compiled(module: nn.Module, *, dynamic: bool | None = None, **options: Any) -> Callable[..., torch.Tensor]:
    torch._dynamo.reset()
    options = {"cache_dir": "", **options}
    run: Callable[..., torch.Tensor] = torch.compile(module, backend="sardonyx", dynamic=dynamic, options=options)
    return run
