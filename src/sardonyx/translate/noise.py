"""Random numbers. A compiled graph receives them from torch's generator; an exported file makes its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import onnx_ir as ir
import torch

from sardonyx import dtypes
from sardonyx.errors import Unsupported
from sardonyx.sizes import Dims
from sardonyx.translate import inference

if TYPE_CHECKING:
    from sardonyx.translate.builder import Builder

Kind: TypeAlias = Literal["uniform", "normal"]
Source: TypeAlias = Literal["inputs", "nodes"]
"""Whether noise enters a graph as inputs drawn by torch, or is made by ONNX's own random nodes."""


@dataclass(frozen=True)
class Draw:
    """An input of the graph that torch draws anew at each call, as `torch.rand` or `torch.randn` do."""

    kind: Kind
    dims: Dims
    dtype: torch.dtype


class Noise:
    """The random numbers of one graph under construction."""

    def __init__(self, g: Builder, source: Source) -> None:
        self._g, self._source = g, source
        self.draws: list[tuple[ir.Value, Draw]] = []
        """The inputs to be drawn, in the order in which torch would draw them."""

    def __call__(self, kind: Kind, dims: Dims, dtype: torch.dtype) -> ir.Value:
        """Fresh random numbers."""
        if self._source == "nodes":
            return self._g.cast(self._node(kind, dims, _made_in(dtype)), dtype)
        return self._input(Draw(kind, dims, dtype))

    def _input(self, draw: Draw) -> ir.Value:
        for dim in draw.dims:
            if not isinstance(dim, int) and not self._g.sizes.is_given(dim):
                raise Unsupported(f"random numbers whose count, {dim}, is known only inside the graph")
        value = ir.Value(name=self._g.fresh("noise"), type=ir.TensorType(dtypes.to_onnx(draw.dtype)))
        inference.set_dims(value, draw.dims)
        self.draws.append((value, draw))
        return value

    def _node(self, kind: Kind, dims: Dims, dtype: torch.dtype) -> ir.Value:
        g, name = self._g, f"Random{kind.title()}"
        static = [dim for dim in dims if isinstance(dim, int)]
        if dtype == torch.float32 and static and len(static) == len(dims):
            made = g.node(name, [], shape=static, dtype=dtypes.to_onnx(dtype))
        else:
            made = g.node(f"{name}Like", [g.expand(g.scalar(0, dtype), dims)])
        made = g.shaped(made, dims)
        # Rounding may give the end of the interval, which torch never does.
        return g.Min(made, g.scalar(_below_one(dtype), dtype)) if kind == "uniform" else made


def _made_in(dtype: torch.dtype) -> torch.dtype:
    """What ONNX's random nodes make: half precision is rounded from single."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _below_one(dtype: torch.dtype) -> float:
    return 1 - torch.finfo(dtype).eps / 2
