"""Memory layout of results: the strides that torch promised, which may depend on the sizes of a call."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sardonyx.capture.regions import Result
from sardonyx.sizes import SizesOfCall, sizes_of_call


def strides_of_results(results: Sequence[Result], graph: torch.fx.GraphModule) -> list[SizesOfCall | None]:
    """How to compute the strides to restore of each result; None for those that need none.

    Where a part of a graph is not told a size that only another part sees, its result stays dense.
    """
    found: list[SizesOfCall | None] = []
    for result in results:
        try:
            found.append(None if result.strides is None else sizes_of_call(result.strides, graph))
        except KeyError:
            found.append(None)
    return found


def with_strides(value: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """The same values with these strides; memory is copied only if elements have to move."""
    if value.stride() == strides:
        return value
    if not value.numel() or all(
        size == 1 or old == new for size, old, new in zip(value.shape, value.stride(), strides, strict=True)
    ):
        return value.as_strided(value.shape, strides)
    made = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)
    if not torch._debug_has_internal_overlap(made):
        return made.copy_(value)
    # Elements that share memory, as an expanded tensor's do, are equal: write them by position.
    size = made.untyped_storage().nbytes() // made.element_size()
    memory = torch.empty(size, dtype=value.dtype, device=value.device)
    memory[torch.arange(size, device=value.device).as_strided(value.shape, strides)] = value
    return memory.as_strided(value.shape, strides)
