"""Memory layout of results: restore the strides that eager gives, which may depend on the sizes of a call."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sardonyx.capture.regions import Result
from sardonyx.sizes import SizesOfCall, sizes_of_call


def strides_of_results(results: Sequence[Result], graph: torch.fx.GraphModule) -> list[SizesOfCall | None]:
    """Return for each result a function that computes the strides to restore; None where none are needed.

    If strides depend on a size that no argument of this part of the graph has, the result stays dense.
    """
    strides: list[SizesOfCall | None] = []
    for result in results:
        try:
            strides.append(None if result.strides is None else sizes_of_call(result.strides, graph))
        except KeyError:
            strides.append(None)
    return strides


def with_strides(value: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return the values with these strides; copies memory only if elements have to move."""
    if value.stride() == strides:
        return value
    if not value.numel() or all(
        size == 1 or old == new for size, old, new in zip(value.shape, value.stride(), strides, strict=True)
    ):
        return over_memory(value, value.shape, strides)
    strided = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)
    if not torch._debug_has_internal_overlap(strided):
        return strided.copy_(value)
    # Overlapping elements, as of an expanded tensor, are equal: write them by memory position.
    size = strided.untyped_storage().nbytes() // strided.element_size()
    memory = torch.empty(size, dtype=value.dtype, device=value.device)
    memory[torch.arange(size, device=value.device).as_strided(value.shape, strides)] = value
    return over_memory(memory, value.shape, strides)


def over_memory(x: torch.Tensor, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """Return a tensor over the memory of another one from its first element on.

    It is not a view: autograd forbids to modify views in place that a compiled function returns.
    """
    made = torch.empty(0, dtype=x.dtype, device=x.device)
    return made.set_(x.untyped_storage(), x.storage_offset(), shape, strides)
