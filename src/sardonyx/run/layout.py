"""Memory layout of results: the strides that torch promised, which may depend on the sizes of a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from sardonyx.capture.regions import Result
from sardonyx.translate.sizes import Dim, Dims, dim_of, dims_of

SizesOfCall: TypeAlias = Callable[[Sequence[Any]], tuple[int, ...]]
"""Numbers that depend on sizes, for the arguments of a call."""


def sizes_of_call(dims: Dims, graph: torch.fx.GraphModule) -> SizesOfCall:
    """How to compute symbolic sizes for a call of the graph; raises KeyError if its arguments do not tell them."""
    if all(isinstance(dim, int) for dim in dims):
        known = tuple(int(dim) for dim in dims)
        return lambda args: known
    places = _places(graph)
    needed = {symbol: places[symbol] for dim in dims if not isinstance(dim, int) for symbol in dim.free_symbols}

    def read(args: Sequence[Any]) -> tuple[int, ...]:
        values = {symbol: _read(args, *place) for symbol, place in needed.items()}
        return tuple(_size(dim, values) for dim in dims)

    return read


def _places(graph: torch.fx.GraphModule) -> dict[Dim, tuple[int, int | None]]:
    """Where each symbol stands: the index of an argument and, of a tensor, the axis."""
    found: dict[Dim, tuple[int, int | None]] = {}
    for index, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        val = node.meta.get("val")
        if isinstance(val, torch.SymInt):
            found.setdefault(dim_of(val), (index, None))
        elif isinstance(val, torch.Tensor):
            for axis, dim in enumerate(dims_of(val)):
                found.setdefault(dim, (index, axis))
    return found


def _size(dim: Dim, values: dict[Dim, int]) -> int:
    if isinstance(dim, int):
        return dim
    known = values.get(dim)
    return known if known is not None else int(sympy_interp(PythonReferenceAnalysis, values, dim))


def _read(args: Sequence[Any], index: int, axis: int | None) -> int:
    return int(args[index] if axis is None else args[index].shape[axis])


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
