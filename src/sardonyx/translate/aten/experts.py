"""Grouped matrix products, as in mixtures of experts."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import torch

from sardonyx.errors import Unsupported
from sardonyx.sizes import Dim
from sardonyx.translate.builder import Builder
from sardonyx.translate.table import operator

Value = ir.Value


@operator("transformers::grouped_mm_fallback", "aten::_grouped_mm")
def grouped_mm(
    g: Builder, x: Value, weight: Value, offs: Value | None = None, bias: Value | None = None, out_dtype: object = None
) -> Value:
    """Multiply the rows up to each offset by that group's matrix: one product per group."""
    if offs is None or bias is not None or g.rank(x) != 2 or g.rank(weight) != 3:
        raise Unsupported("a grouped product other than rows by a batch of matrices")
    groups, inner, width = g.dims(weight)
    if not isinstance(groups, int):
        raise Unsupported("a symbolic number of groups")
    ends = g.cast(offs, torch.int64)
    starts = g.Concat(g.ints([0]), g.slice(ends, 0, 0, groups - 1), axis=0) if groups > 1 else g.ints([0])
    counts = g.Sub(ends, g.shaped(starts, [groups]))
    rows = g.several("Split", groups, [x, counts], axis=0) if groups > 1 else (x,)
    products = [g.MatMul(part, _matrix(g, weight, index, [inner, width])) for index, part in enumerate(rows)]
    return products[0] if groups == 1 else g.Concat(*products, axis=0)


def _matrix(g: Builder, stack: Value, index: int, dims: Sequence[Dim]) -> Value:
    return g.shaped(g.Gather(stack, g.scalar(index, torch.int64), axis=0), dims)
