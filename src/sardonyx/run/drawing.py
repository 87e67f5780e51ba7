"""Drawing the random numbers of a call from torch's generator, so that `torch.manual_seed` governs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from sardonyx.sizes import sizes_of_call
from sardonyx.translate.random_inputs import RandomInput

Drawer: TypeAlias = Callable[[Sequence[Any]], torch.Tensor]
"""Draws what one input of a graph needs, given the arguments of the call."""

_GENERATORS: dict[str, Callable[..., torch.Tensor]] = {"uniform": torch.rand, "normal": torch.randn}


def drawer(draw: RandomInput, graph: torch.fx.GraphModule, device: torch.device) -> Drawer:
    """How to draw for a call of `graph` on `device`; symbolic sizes are read off the arguments."""
    generate = _GENERATORS[draw.distribution]
    if all(isinstance(dim, int) for dim in draw.dims):
        return lambda args: generate(draw.dims, dtype=draw.dtype, device=device)
    sizes = sizes_of_call(draw.dims, graph)

    def with_sizes(args: Sequence[Any]) -> torch.Tensor:
        return generate(sizes(args), dtype=draw.dtype, device=device)

    return with_sizes
