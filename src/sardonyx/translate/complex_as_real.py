"""Complex tensors as real tensors, since engines have no complex dtypes: the last axis has the real and imaginary part.

A value that represents a complex tensor is marked. Its sizes end with a 2, so that an axis counted from the front is
the same in torch and ONNX. Only translations registered here receive such values: any other would compute along the
last axis.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
import torch

from sardonyx import dtypes, sizes
from sardonyx.sizes import Dims
from sardonyx.translate.table import F, Translation

if TYPE_CHECKING:
    from sardonyx.translate.builder import Builder

_TABLE: dict[str, Translation] = {}


def aten_complex(*names: str) -> Callable[[F], F]:
    """Register a translation for ATen overloads with a complex operand or result."""

    def register(translation: F) -> F:
        for name in names:
            if f"aten::{name}" in _TABLE:
                raise ValueError(f"{name} is translated twice for complex tensors")
            _TABLE[f"aten::{name}"] = translation
        return translation

    return register


def names() -> frozenset[str]:
    """Return the qualified name of every operator that is translated for complex tensors."""
    return frozenset(_TABLE)


def find(target: Any) -> Translation | None:
    """Return the translation of an operator for complex tensors."""
    return _TABLE.get(target.name()) if hasattr(target, "name") else None


def involves_complex(node: torch.fx.Node) -> bool:
    """Whether an operand or a result of the node is complex."""
    return any(_has_complex_dtype(n.meta.get("val")) for n in (node, *node.all_input_nodes)) or any(
        isinstance(arg, complex) for arg in node.args
    )


def _has_complex_dtype(val: Any) -> bool:
    if isinstance(val, (tuple, list)):
        return any(map(_has_complex_dtype, val))
    return isinstance(val, torch.Tensor) and val.dtype.is_complex


def dims_of(val: torch.Tensor) -> Dims:
    """Return the sizes of the value that represents a tensor of FX's metadata."""
    dims = sizes.dims_of(val)
    return (*dims, 2) if val.dtype.is_complex else dims


def mark(value: ir.Value) -> ir.Value:
    """Mark a new value as representing a complex tensor."""
    value.meta["complex"] = True
    return value


def is_complex(value: ir.Value) -> bool:
    """Whether the value represents a complex tensor."""
    return bool(value.meta.get("complex"))


def split(g: Builder, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Return the real and the imaginary part, each with a last axis of size one."""
    dims = (*g.dims(x)[:-1], 1)
    real, imaginary = g.several("Split", 2, [x], axis=-1, num_outputs=2)
    return g.shaped(real, dims), g.shaped(imaginary, dims)


def join(g: Builder, real: ir.Value, imaginary: ir.Value) -> ir.Value:
    """Return a complex value from two parts with a last axis of size one."""
    return mark(g.shaped(g.Concat(real, imaginary, axis=-1), (*g.dims(real)[:-1], 2)))


def parts(g: Builder, x: ir.Value) -> list[ir.Value]:
    """Return the real and the imaginary part as real tensors of torch's sizes."""
    return [g.squeeze(part, [-1]) for part in split(g, x)]


def cast(g: Builder, x: ir.Value, dtype: torch.dtype) -> ir.Value:
    """Implement `Builder.cast` for complex `x` or `dtype`."""
    stored = dtypes.to_onnx(dtype)
    if is_complex(x) and dtype.is_complex:
        return x if x.dtype == stored else mark(g.Cast(x, dtype=stored))
    if dtype.is_complex:
        real = g.unsqueeze(g.cast(x, dtype.to_real()), [-1])
        widened = g.Pad(real, g.ints([0, 1]), None, g.ints([-1]))
        return mark(g.shaped(widened, (*g.dims(x), 2)))
    real, imaginary = parts(g, x)
    if dtype == torch.bool:
        return g.Or(g.cast(real, torch.bool), g.cast(imaginary, torch.bool))
    return g.cast(real, dtype)
