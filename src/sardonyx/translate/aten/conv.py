"""Convolution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from sardonyx.translate.builder import Builder
from sardonyx.translate.errors import Unsupported
from sardonyx.translate.table import aten

Value = ir.Value


def each(values: Any, count: int) -> list[int]:
    """A torch size argument for every spatial axis: one number stands for all."""
    given: list[int] = [values] if isinstance(values, int) else list(values)
    return given * count if len(given) == 1 else given


@aten("convolution", "convolution_overrideable")
def convolution(
    g: Builder,
    x: Value,
    weight: Value,
    bias: Value | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Value:
    spatial = g.rank(weight) - 2
    if not all(isinstance(p, int) for p in padding):
        raise Unsupported("symbolic padding")
    common = {
        "strides": each(stride, spatial),
        "pads": each(padding, spatial) * 2,
        "dilations": each(dilation, spatial),
        "group": groups,
    }
    batched = g.rank(x) == spatial + 2
    source = x if batched else g.unsqueeze(x, [0])
    if transposed:
        extra = each(output_padding, spatial)
        y = g.ConvTranspose(source, weight, bias, output_padding=extra if any(extra) else None, **common)
    else:
        y = g.Conv(source, weight, bias, **common)
    if batched:
        return y
    return g.squeeze(g.shaped(y, [1, *g.like(g.out)]), [0])


@aten("conv1d", "conv2d", "conv3d")
def conv(
    g: Builder,
    x: Value,
    weight: Value,
    bias: Value | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Value:
    return convolution(g, x, weight, bias, each(stride, 1), each(padding, 1), each(dilation, 1), False, [0], groups)
