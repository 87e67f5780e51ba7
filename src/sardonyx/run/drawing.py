"""Drawing the random numbers of a call from torch's generator, so that `torch.manual_seed` governs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from sardonyx.translate.noise import Draw
from sardonyx.translate.sizes import Dim, dim_of, dims_of

Drawer: TypeAlias = Callable[[Sequence[Any]], torch.Tensor]
"""Draws what one input of a graph needs, given the arguments of the call."""

_GENERATORS: dict[str, Callable[..., torch.Tensor]] = {"uniform": torch.rand, "normal": torch.randn}


def drawer(draw: Draw, graph: torch.fx.GraphModule, device: torch.device) -> Drawer:
    """How to draw for a call of `graph` on `device`; symbolic sizes are read off the arguments."""
    generate = _GENERATORS[draw.kind]
    if all(isinstance(dim, int) for dim in draw.dims):
        return lambda args: generate(draw.dims, dtype=draw.dtype, device=device)
    places = _places(graph)

    def with_sizes(args: Sequence[Any]) -> torch.Tensor:
        sizes = [_size(dim, places, args) for dim in draw.dims]
        return generate(sizes, dtype=draw.dtype, device=device)

    return with_sizes


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


def _size(dim: Dim, places: dict[Dim, tuple[int, int | None]], args: Sequence[Any]) -> int:
    if isinstance(dim, int):
        return dim
    values = {symbol: _read(args, *places[symbol]) for symbol in dim.free_symbols}
    return int(sympy_interp(PythonReferenceAnalysis, values, dim))


def _read(args: Sequence[Any], index: int, axis: int | None) -> int:
    return int(args[index] if axis is None else args[index].shape[axis])
