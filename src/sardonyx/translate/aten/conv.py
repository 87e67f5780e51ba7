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
from sardonyx.translate.aten.indexing import count_of
from sardonyx.translate.builder import Builder
from sardonyx.translate.table import aten

Value = ir.Value
_Offset: TypeAlias = dict[int, int]
"""A place in a kernel along some of its axes."""


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
        kernel = known(g.dims(weight)[2:], "the gradient of a convolution with a kernel of")
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
        """One product of the gradient and the input, each repeated with shifts along some of the kernel's axes.

        A weight's gradient sums, over batch and positions, gradient times input where the kernel's offset shifts one
        against the other. Which of them is shifted along an axis is free, so each is repeated only a part of the
        kernel's size: with rows shifted in one and columns in the other, three times each for a kernel of 3 × 3.
        """
        out, width, *kernel = known(dims, "the gradient of a convolution with a kernel of")
        on_grad = self._axes_to_shift(kernel, out, width * self.groups)
        on_input = range(len(on_grad), len(kernel))
        sizes, places = g.dims(x)[2:], g.dims(grad)[2:]
        grid = [sizes[axis] if axis in on_grad else places[axis] for axis in range(len(kernel))]
        grads = self._moved_grads(g, self._by_channel(g, grad), _offsets(kernel, on_grad), grid)
        inputs = self._moved_inputs(g, self._by_channel(g, x), _offsets(kernel, on_input), grid)
        product = g.MatMul(self._joined(g, grads), g.transpose(self._joined(g, inputs), [0, 2, 1]))
        return self._in_order(g, product, dims, len(grads))

    def _axes_to_shift(self, kernel: Sequence[int], out: int, width: int) -> list[int]:
        """The first axes along which to shift the gradient, so that least is copied; a stride leaves no choice."""
        free = next((axis for axis, step in enumerate(self.stride) if step > 1), len(kernel))

        def copied(count: int) -> int:
            return math.prod(kernel[:count]) * out + math.prod(kernel[count:]) * width

        return list(range(min(range(free + 1), key=copied)))

    def _by_channel(self, g: Builder, x: Value) -> Value:
        """Groups, channels of a group, batch, positions."""
        n, channels, *sizes = g.dims(x)
        space = range(3, 3 + len(sizes))
        return g.transpose(g.reshape(x, [n, self.groups, channels // self.groups, *sizes]), [1, 2, 0, *space])

    def _moved_grads(self, g: Builder, grad: Value, offsets: Sequence[_Offset], grid: Sequence[Dim]) -> list[Value]:
        """The gradient over the input's positions along the shifted axes, for each offset in the kernel."""
        moved = []
        for at in offsets:
            begins = {axis: offset * self.dilation[axis] - self.padding[axis] for axis, offset in at.items()}
            moved.append(_moved(g, grad, begins, {axis: grid[axis] for axis in at}))
        return moved

    def _moved_inputs(self, g: Builder, x: Value, offsets: Sequence[_Offset], grid: Sequence[Dim]) -> list[Value]:
        """What each position of the result sees along the shifted axes, for each offset in the kernel."""
        if any(self.stride[axis] > 1 for axis in offsets[0]):
            return self._stepped_inputs(g, x, offsets, grid)
        moved = []
        for at in offsets:
            begins = {axis: self.padding[axis] - offset * self.dilation[axis] for axis, offset in at.items()}
            moved.append(_moved(g, x, begins, {axis: grid[axis] for axis in at}))
        return moved

    def _stepped_inputs(self, g: Builder, x: Value, offsets: Sequence[_Offset], grid: Sequence[Dim]) -> list[Value]:
        """As above, with steps: padded once, for all that the kernel reaches."""
        axes = list(offsets[-1])
        reach = {axis: dim_of((grid[axis] - 1) * self.stride[axis] + 1) for axis in axes}
        whole = {axis: dim_of(reach[axis] + offset * self.dilation[axis]) for axis, offset in offsets[-1].items()}
        wide = _moved(g, x, {axis: self.padding[axis] for axis in axes}, whole)
        dims = [grid[axis - 3] if axis - 3 in axes else dim for axis, dim in enumerate(g.dims(x))]
        places, steps = g.ints([3 + axis for axis in axes]), g.ints([self.stride[axis] for axis in axes])
        moved = []
        for at in offsets:
            starts = [offset * self.dilation[axis] for axis, offset in at.items()]
            ends = [dim_of(start + reach[axis]) for start, axis in zip(starts, axes, strict=True)]
            moved.append(g.shaped(g.Slice(wide, g.ints(starts), g.shape_value(ends), places, steps), dims))
        return moved

    def _joined(self, g: Builder, moved: Sequence[Value]) -> Value:
        """Groups, then shifts and channels, then all that is summed."""
        groups, channels, *summed = g.dims(moved[0])
        joined = g.Concat(*moved, axis=1) if len(moved) > 1 else moved[0]
        return g.reshape(joined, [groups, len(moved) * channels, count_of(summed)])

    def _in_order(self, g: Builder, y: Value, dims: Dims, moves: int) -> Value:
        """The weight's gradient from a product whose rows and columns begin with shifts.

        In two steps, each of which moves whole rows: engines take ten times as long for the same in one.
        """
        out, width, *kernel = dims
        places = math.prod(kernel)
        split = g.reshape(y, [self.groups, moves, out // self.groups, places // moves, width])
        by_place = g.reshape(g.transpose(split, [1, 3, 0, 2, 4]), [places, out * width])
        return g.reshape(g.transpose(by_place, [1, 0]), dims)


def _offsets(kernel: Sequence[int], axes: Sequence[int]) -> list[_Offset]:
    """Every place in the kernel along some of its axes."""
    places = itertools.product(*(range(kernel[axis]) for axis in axes))
    return [dict(zip(axes, place, strict=True)) for place in places]


def _moved(g: Builder, x: Value, begins: Mapping[int, int], sizes: Mapping[int, Dim]) -> Value:
    """`x` moved by so much along spatial axes, and cut or filled up to these sizes.

    Engines pad row by row, so all behind the axis is one row. Along the last axis, where rows are short, all positions
    are, and a mask clears what came over from the neighbouring rows.
    """
    dims = list(g.dims(x))
    ends = {axis: dim_of(sizes[axis] - dims[3 + axis] - begin) for axis, begin in begins.items()}
    if not any([*begins.values(), *ends.values()]):
        return x
    made = [sizes.get(axis - 3, dim) for axis, dim in enumerate(dims)]
    if len(begins) > 1:
        amounts = g.shape_value([*begins.values(), *ends.values()])
        return g.shaped(g.Pad(x, amounts, None, g.ints([3 + axis for axis in begins])), made)
    ((axis, begin),) = begins.items()
    if made == dims and axis == len(dims) - 4 > 0 and dims[-1] in range(abs(begin) + 1, _LONG_ROW):
        return _moved_columns(g, x, begin)
    row = count_of(dims[4 + axis :])
    rows = g.reshape(x, [*dims[: 3 + axis], dim_of(dims[3 + axis] * row)])
    amounts = g.shape_value([dim_of(begin * row), dim_of(ends[axis] * row)])
    moved = g.Pad(rows, amounts, None, g.ints([3 + axis]))
    return g.reshape(g.shaped(moved, [*dims[: 3 + axis], dim_of(sizes[axis] * row)]), made)


_LONG_ROW = 32
"""From here on padding each row takes no longer than padding one long row and multiplying by a mask."""


def _moved_columns(g: Builder, x: Value, by: int) -> Value:
    dims = g.dims(x)
    flat = g.reshape(x, [*dims[:2], count_of(dims[2:])])
    moved = g.shaped(g.Pad(flat, g.ints([by, -by]), None, g.ints([2])), g.dims(flat))
    inner = list(itertools.takewhile(lambda dim: isinstance(dim, int), reversed(dims[2:])))[::-1]  # long rows are fast
    columns = np.arange(dims[-1])
    kept = (columns >= by) & (columns < dims[-1] + by)
    mask = g.cast(g.constant(np.broadcast_to(kept.astype(np.float32), inner).reshape(-1)), g.dtype(x))
    rows = g.reshape(moved, [*dims[:2], count_of(dims[2 : len(dims) - len(inner)]), math.prod(inner)])
    return g.reshape(g.Mul(rows, mask), dims)


def known(dims: Sequence[Dim], what: str) -> list[int]:
    """Sizes that must be numbers for a translation to exist."""
    if not all(isinstance(dim, int) for dim in dims):
        raise Unsupported(f"{what} a symbolic size")
    return [int(dim) for dim in dims]
