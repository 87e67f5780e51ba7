"""Convolution."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from sardonyx.errors import Unsupported
from sardonyx.sizes import Dim, Dims, dim_of
from sardonyx.translate.aten.indexing import element_count
from sardonyx.translate.builder import Builder
from sardonyx.translate.table import aten

Value = ir.Value
_Offset: TypeAlias = dict[int, int]
"""An offset in a kernel along some of its axes."""


def per_axis(values: Any, count: int) -> list[int]:
    """Return a torch size argument for every spatial axis: one number applies to all."""
    sizes: list[int] = [values] if isinstance(values, int) else list(values)
    return sizes * count if len(sizes) == 1 else sizes


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
        "strides": per_axis(stride, spatial),
        "pads": per_axis(padding, spatial) * 2,
        "dilations": per_axis(dilation, spatial),
        "group": groups,
    }
    batched = g.rank(x) == spatial + 2
    source = x if batched else g.unsqueeze(x, [0])
    if transposed:
        y = g.ConvTranspose(source, weight, bias, **common | _pad_output(common, per_axis(output_padding, spatial)))
    else:
        y = g.Conv(source, weight, bias, **common)
    if batched:
        return y
    return g.squeeze(g.shaped(y, [1, *g.like(g.out)]), [0])


def _pad_output(common: Mapping[str, Any], extra: list[int]) -> dict[str, Any]:
    """Apply torch's output padding. Engines support less than the stride; beyond, padding at the end is reduced."""
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
    stride, padding, dilation = (per_axis(values, 1) for values in (stride, padding, dilation))
    return convolution(g, x, weight, bias, stride, padding, dilation, False, [0], groups)


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
        raise Unsupported("the gradient of an unbatched convolution")
    steps = _Steps(per_axis(stride, spatial), per_axis(padding, spatial), per_axis(dilation, spatial), groups)
    back = steps.conv if transposed else steps.transposed_conv
    of_x = back(g, grad, weight, g.dims(x)) if output_mask[0] else None
    # A transposed convolution is the gradient of a plain one: input and result are swapped.
    small, large = (x, grad) if transposed else (grad, x)
    of_weight = steps.weight_gradient(g, small, large, g.dims(weight)) if output_mask[1] else None
    axes = g.ints([axis for axis in range(g.rank(grad)) if axis != 1])
    return of_x, of_weight, g.ReduceSum(grad, axes, keepdims=0) if output_mask[2] else None


@dataclass(frozen=True)
class _Steps:
    """The steps of a convolution, and the products that compute its gradients."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int

    def conv(self, g: Builder, x: Value, weight: Value, dims: Dims) -> Value:
        return g.Conv(x, weight, strides=self.stride, pads=self.padding * 2, dilations=self.dilation, group=self.groups)

    def transposed_conv(self, g: Builder, grad: Value, weight: Value, dims: Dims) -> Value:
        """Return the gradient of an input of these sizes; elements at the end that a stride skips get zero."""
        kernel = require_static(g.dims(weight)[2:], "the gradient of a convolution with a kernel of")
        rows = zip(dims[2:], g.dims(grad)[2:], kernel, self.stride, self.padding, self.dilation, strict=True)
        rest = [dim_of(size - ((out - 1) * s - 2 * p + d * (k - 1) + 1)) for size, out, k, s, p, d in rows]
        most = [r if isinstance(r, int) else s - 1 for r, s in zip(rest, self.stride, strict=True)]
        y = g.ConvTranspose(
            grad,
            weight,
            strides=self.stride,
            pads=self.padding * 2,
            dilations=self.dilation,
            group=self.groups,
            output_padding=most if any(most) else None,
        )
        for axis, r in enumerate(rest, 2):
            if not isinstance(r, int) and self.stride[axis - 2] > 1:
                y = g.slice(y, axis, 0, dims[axis])
        return y

    def weight_gradient(self, g: Builder, grad: Value, x: Value, dims: Dims) -> Value:
        """Return one product of the gradient and the input, each repeated with shifts along some of the kernel's axes.

        A weight's gradient sums, over batch and positions, gradient times input, one shifted against the other by the
        kernel's offset. Either can be shifted along an axis, so each is repeated only for a part of the kernel: with
        rows shifted in one and columns in the other, three times each for a kernel of 3 × 3.
        """
        out, width, *kernel = require_static(dims, "the gradient of a convolution with a kernel of")
        on_grad = self._axes_to_shift(kernel, out, width * self.groups)
        on_input = range(len(on_grad), len(kernel))
        sizes, positions = g.dims(x)[2:], g.dims(grad)[2:]
        grid = [sizes[axis] if axis in on_grad else positions[axis] for axis in range(len(kernel))]
        grads = self._shifted_grads(g, self._by_channel(g, grad), _offsets(kernel, on_grad), grid)
        inputs = self._shifted_inputs(g, self._by_channel(g, x), _offsets(kernel, on_input), grid)
        product = g.MatMul(self._stack_shifts(g, grads), g.transpose(self._stack_shifts(g, inputs), [0, 2, 1]))
        return self._weight_layout(g, product, dims, len(grads))

    def _axes_to_shift(self, kernel: Sequence[int], out: int, width: int) -> list[int]:
        """Return the leading axes along which to shift the gradient to copy least; strides leave no choice."""
        free = next((axis for axis, step in enumerate(self.stride) if step > 1), len(kernel))

        def copied(count: int) -> int:
            return math.prod(kernel[:count]) * out + math.prod(kernel[count:]) * width

        return list(range(min(range(free + 1), key=copied)))

    def _by_channel(self, g: Builder, x: Value) -> Value:
        """Permute to groups, channels of a group, batch, positions."""
        n, channels, *sizes = g.dims(x)
        space = range(3, 3 + len(sizes))
        return g.transpose(g.reshape(x, [n, self.groups, channels // self.groups, *sizes]), [1, 2, 0, *space])

    def _shifted_grads(self, g: Builder, grad: Value, offsets: Sequence[_Offset], grid: Sequence[Dim]) -> list[Value]:
        """Return the gradient over the input's positions along the shifted axes, for each offset in the kernel."""
        moved = []
        for at in offsets:
            begins = {axis: offset * self.dilation[axis] - self.padding[axis] for axis, offset in at.items()}
            moved.append(_shift(g, grad, begins, {axis: grid[axis] for axis in at}))
        return moved

    def _shifted_inputs(self, g: Builder, x: Value, offsets: Sequence[_Offset], grid: Sequence[Dim]) -> list[Value]:
        """Return the input at each position of the result along the shifted axes, for each offset in the kernel."""
        if any(self.stride[axis] > 1 for axis in offsets[0]):
            return self._strided_inputs(g, x, offsets, grid)
        moved = []
        for at in offsets:
            begins = {axis: self.padding[axis] - offset * self.dilation[axis] for axis, offset in at.items()}
            moved.append(_shift(g, x, begins, {axis: grid[axis] for axis in at}))
        return moved

    def _strided_inputs(self, g: Builder, x: Value, offsets: Sequence[_Offset], grid: Sequence[Dim]) -> list[Value]:
        """As above, with strides: padded once, for all offsets of the kernel."""
        axes = list(offsets[-1])
        reach = {axis: dim_of((grid[axis] - 1) * self.stride[axis] + 1) for axis in axes}
        extent = {axis: dim_of(reach[axis] + offset * self.dilation[axis]) for axis, offset in offsets[-1].items()}
        wide = _shift(g, x, {axis: self.padding[axis] for axis in axes}, extent)
        dims = [grid[axis - 3] if axis - 3 in axes else dim for axis, dim in enumerate(g.dims(x))]
        axes_input, steps = g.ints([3 + axis for axis in axes]), g.ints([self.stride[axis] for axis in axes])
        moved = []
        for at in offsets:
            starts = [offset * self.dilation[axis] for axis, offset in at.items()]
            ends = [dim_of(start + reach[axis]) for start, axis in zip(starts, axes, strict=True)]
            moved.append(g.shaped(g.Slice(wide, g.ints(starts), g.shape_value(ends), axes_input, steps), dims))
        return moved

    def _stack_shifts(self, g: Builder, moved: Sequence[Value]) -> Value:
        """Permute to groups, then shifts and channels, then all that is summed."""
        groups, channels, *summed = g.dims(moved[0])
        joined = g.Concat(*moved, axis=1) if len(moved) > 1 else moved[0]
        return g.reshape(joined, [groups, len(moved) * channels, element_count(summed)])

    def _weight_layout(self, g: Builder, y: Value, dims: Dims, moves: int) -> Value:
        """Return the weight's gradient from a product whose rows and columns begin with shifts.

        In two transposes, each of which moves whole rows: engines take ten times as long for one.
        """
        out, width, *kernel = dims
        count = math.prod(kernel)
        split = g.reshape(y, [self.groups, moves, out // self.groups, count // moves, width])
        by_offset = g.reshape(g.transpose(split, [1, 3, 0, 2, 4]), [count, out * width])
        return g.reshape(g.transpose(by_offset, [1, 0]), dims)


def _offsets(kernel: Sequence[int], axes: Sequence[int]) -> list[_Offset]:
    """Return every offset in the kernel along some of its axes."""
    offsets = itertools.product(*(range(kernel[axis]) for axis in axes))
    return [dict(zip(axes, offset, strict=True)) for offset in offsets]


def _shift(g: Builder, x: Value, begins: Mapping[int, int], sizes: Mapping[int, Dim]) -> Value:
    """Shift `x` along spatial axes, and crop or pad it to these sizes.

    Engines pad row by row, so the dimensions behind the axis are flattened into one row. Along the last axis, where
    rows are short, all positions are, and a mask clears elements that came from neighbouring rows.
    """
    dims = list(g.dims(x))
    ends = {axis: dim_of(sizes[axis] - dims[3 + axis] - begin) for axis, begin in begins.items()}
    if not any([*begins.values(), *ends.values()]):
        return x
    result = [sizes.get(axis - 3, dim) for axis, dim in enumerate(dims)]
    if len(begins) > 1:
        amounts = g.shape_value([*begins.values(), *ends.values()])
        return g.shaped(g.Pad(x, amounts, None, g.ints([3 + axis for axis in begins])), result)
    ((axis, begin),) = begins.items()
    if result == dims and axis == len(dims) - 4 > 0 and dims[-1] in range(abs(begin) + 1, _LONG_ROW):
        return _shift_columns(g, x, begin)
    row = element_count(dims[4 + axis :])
    rows = g.reshape(x, [*dims[: 3 + axis], dim_of(dims[3 + axis] * row)])
    amounts = g.shape_value([dim_of(begin * row), dim_of(ends[axis] * row)])
    moved = g.Pad(rows, amounts, None, g.ints([3 + axis]))
    return g.reshape(g.shaped(moved, [*dims[: 3 + axis], dim_of(sizes[axis] * row)]), result)


_LONG_ROW = 32
"""For rows of at least this size, padding each takes no longer than padding one flat row and masking."""


def _shift_columns(g: Builder, x: Value, by: int) -> Value:
    dims = g.dims(x)
    flat = g.reshape(x, [*dims[:2], element_count(dims[2:])])
    moved = g.shaped(g.Pad(flat, g.ints([by, -by]), None, g.ints([2])), g.dims(flat))
    inner = list(itertools.takewhile(lambda dim: isinstance(dim, int), reversed(dims[2:])))[::-1]  # long rows are fast
    columns = np.arange(dims[-1])
    inside = (columns >= by) & (columns < dims[-1] + by)
    mask = g.cast(g.constant(np.broadcast_to(inside.astype(np.float32), inner).reshape(-1)), g.dtype(x))
    rows = g.reshape(moved, [*dims[:2], element_count(dims[2 : len(dims) - len(inner)]), math.prod(inner)])
    return g.reshape(g.Mul(rows, mask), dims)


def require_static(dims: Sequence[Dim], what: str) -> list[int]:
    """Return the sizes, which must not be symbolic."""
    if not all(isinstance(dim, int) for dim in dims):
        raise Unsupported(f"{what} a symbolic size")
    return [int(dim) for dim in dims]
