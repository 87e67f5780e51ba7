"""Complex tensors, which ONNX engines do not have: real tensors whose last axis is a pair, real part and imaginary.

A value that stands for a complex tensor is marked as one. Its sizes end with the pair's 2, so that an axis counted from
the front is the same for torch and ONNX. Only translations registered here are ever given such values: any other would
compute along the pair.
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


def on_pairs(*names: str) -> Callable[[F], F]:
    """Register a translation for ATen overloads where an operand or the result is complex."""

    def register(translation: F) -> F:
        for name in names:
            if f"aten::{name}" in _TABLE:
                raise ValueError(f"{name} is translated twice for complex tensors")
            _TABLE[f"aten::{name}"] = translation
        return translation

    return register


def names() -> frozenset[str]:
    """The qualified name of every operator that is translated for complex tensors."""
    return frozenset(_TABLE)


def find(target: Any) -> Translation | None:
    """The translation of an operator for complex tensors."""
    return _TABLE.get(target.name()) if hasattr(target, "name") else None


def concern(node: torch.fx.Node) -> bool:
    """Whether an operand or a result of the node is complex."""
    return any(_is_complex(n.meta.get("val")) for n in (node, *node.all_input_nodes)) or any(
        isinstance(arg, complex) for arg in node.args
    )


def _is_complex(val: Any) -> bool:
    if isinstance(val, (tuple, list)):
        return any(map(_is_complex, val))
    return isinstance(val, torch.Tensor) and val.dtype.is_complex


def dims_of(val: torch.Tensor) -> Dims:
    """The sizes of the value that stands for a tensor that FX describes."""
    dims = sizes.dims_of(val)
    return (*dims, 2) if val.dtype.is_complex else dims


def mark(value: ir.Value) -> ir.Value:
    """State that a value that was just made stands for a complex tensor."""
    value.meta["complex"] = True
    return value


def are_pairs(value: ir.Value) -> bool:
    """Whether the value stands for a complex tensor."""
    return bool(value.meta.get("complex"))


def split(g: Builder, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The real and the imaginary part, each with a last axis of one."""
    dims = (*g.dims(x)[:-1], 1)
    real, imaginary = g.several("Split", 2, [x], axis=-1, num_outputs=2)
    return g.shaped(real, dims), g.shaped(imaginary, dims)


def join(g: Builder, real: ir.Value, imaginary: ir.Value) -> ir.Value:
    """A complex value of two parts with a last axis of one."""
    return mark(g.shaped(g.Concat(real, imaginary, axis=-1), (*g.dims(real)[:-1], 2)))


def parts(g: Builder, x: ir.Value) -> list[ir.Value]:
    """The real and the imaginary part as real tensors of torch's sizes."""
    return [g.squeeze(part, [-1]) for part in split(g, x)]


def cast(g: Builder, x: ir.Value, dtype: torch.dtype) -> ir.Value:
    """What `Builder.cast` does where `x` or `dtype` is complex."""
    stored = dtypes.to_onnx(dtype)
    if are_pairs(x) and dtype.is_complex:
        return x if x.dtype == stored else mark(g.Cast(x, dtype=stored))
    if dtype.is_complex:
        real = g.unsqueeze(g.cast(x, dtype.to_real()), [-1])
        widened = g.Pad(real, g.ints([0, 1]), None, g.ints([-1]))
        return mark(g.shaped(widened, (*g.dims(x), 2)))
    real, imaginary = parts(g, x)
    if dtype == torch.bool:
        return g.Or(g.cast(real, torch.bool), g.cast(imaginary, torch.bool))
    return g.cast(real, dtype)
