"""Convolution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from sardonyx.translate.builder import Builder
from sardonyx.translate.errors import Unsupported
from sardonyx.translate.sizes import Dim, Dims
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
    common: dict[str, Any] = {
        "strides": each(stride, spatial),
        "pads": each(padding, spatial) * 2,
        "dilations": each(dilation, spatial),
        "group": groups,
    }
    batched = g.rank(x) == spatial + 2
    source = x if batched else g.unsqueeze(x, [0])
    if transposed:
        y = g.ConvTranspose(source, weight, bias, **{**common, **_extended(common, each(output_padding, spatial))})
    else:
        y = g.Conv(source, weight, bias, **common)
    if batched:
        return y
    return g.squeeze(g.shaped(y, [1, *g.like(g.out)]), [0])


def _extended(common: Mapping[str, Any], extra: list[int]) -> dict[str, Any]:
    """torch's output padding. Engines take only what is less than the stride; else the padding at the end gives way."""
    if all(e < s for e, s in zip(extra, common["strides"], strict=True)):
        return {"output_padding": extra} if any(extra) else {}
    begins = common["pads"][: len(extra)]
    ends = [p - e for p, e in zip(begins, extra, strict=True)]
    if any(end < 0 for end in ends):
        raise Unsupported("output padding beyond what a transposed convolution reaches")
    return {"pads": begins + ends}


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


@aten("convolution_backward")
def convolution_backward(
    g: Builder,
    grad: Value,
    x: Value,
    weight: Value,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Value | None, Value | None, Value | None]:
    spatial = g.rank(weight) - 2
    if g.rank(x) != spatial + 2:
        raise Unsupported("the gradient of a convolution without a batch")
    steps = _Steps(each(stride, spatial), each(padding, spatial), each(dilation, spatial), groups)
    back = steps.conv if transposed else steps.transposed_conv
    of_x = back(g, grad, weight, g.dims(x)) if output_mask[0] else None
    # A transposed convolution is the gradient of a plain one: the roles of input and result are swapped.
    small, large = (x, grad) if transposed else (grad, x)
    of_weight = steps.weight_gradient(g, small, large, g.dims(weight)) if output_mask[1] else None
    axes = g.ints([axis for axis in range(g.rank(grad)) if axis != 1])
    return of_x, of_weight, g.ReduceSum(grad, axes, keepdims=0) if output_mask[2] else None


@dataclass(frozen=True)
class _Steps:
    """How a convolution walks, and the products that its gradients are made of."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int

    def conv(self, g: Builder, x: Value, weight: Value, dims: Dims) -> Value:
        return g.Conv(x, weight, strides=self.stride, pads=self.padding * 2, dilations=self.dilation, group=self.groups)

    def transposed_conv(self, g: Builder, grad: Value, weight: Value, dims: Dims) -> Value:
        """Back to an input of these sizes; what a stride stepped over at the end gets nothing."""
        shapes = (g.dims(weight), dims, g.dims(grad))
        kernel, sizes, outs = (known(shape[2:], "the gradient of a convolution over") for shape in shapes)
        rows = zip(sizes, outs, kernel, self.stride, self.padding, self.dilation, strict=True)
        rest = [size - ((out - 1) * s - 2 * p + d * (k - 1) + 1) for size, out, k, s, p, d in rows]
        return g.ConvTranspose(
            grad,
            weight,
            strides=self.stride,
            pads=self.padding * 2,
            dilations=self.dilation,
            group=self.groups,
            output_padding=rest if any(rest) else None,
        )

    def weight_gradient(self, g: Builder, grad: Value, x: Value, dims: Dims) -> Value:
        """The input convolved with the gradient, batch and channels in each other's place, step and spread too."""
        n, *_ = g.dims(x)
        space = list(range(3, 3 + len(self.stride)))
        out, per_group, *kernel = dims
        lines = g.reshape(x, [n, self.groups, per_group, *g.dims(x)[2:]])
        lines = g.reshape(g.transpose(lines, [2, 1, 0, *space]), [per_group, self.groups * n, *g.dims(x)[2:]])
        filters = g.transpose(grad, [1, 0, *(axis - 1 for axis in space)])
        y = g.Conv(
            lines, filters, strides=self.dilation, pads=self.padding * 2, dilations=self.stride, group=self.groups
        )
        for axis, size in enumerate(kernel, 2):
            y = g.slice(y, axis, 0, size)  # a stride that stepped over the end left positions no weight belongs to
        return g.transpose(g.shaped(y, [per_group, out, *kernel]), [1, 0, *range(2, len(dims))])


def known(dims: Sequence[Dim], what: str) -> list[int]:
    """Sizes that must be numbers for a translation to exist."""
    if not all(isinstance(dim, int) for dim in dims):
        raise Unsupported(f"{what} a symbolic size")
    return [int(dim) for dim in dims]
