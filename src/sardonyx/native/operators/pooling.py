"""Pooling over windows of an image."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir
from torch.utils._sympy.functions import FloorDiv

from sardonyx.native.nests import Reduction
from sardonyx.native.region import CannotLower, Lowering
from sardonyx.native.table import (
    BOOL,
    FLOATS,
    INT64,
    define_optional,
    indices_along,
    int_of,
    ints_of,
    is_used,
    less,
    lowers,
    need_floats,
    operand,
    text_of,
    to_type,
    where,
    widened,
)
from sardonyx.native.values import Number, Value, View, dim_of
from sardonyx.sizes import Dim

_MAX_UNROLLED = 16
"""Larger windows are loops instead of unrolled code."""
_LOWEST = {ir.DataType.INT8: -128, ir.DataType.UINT8: 0}


@dataclass(frozen=True)
class _Windows:
    """Size, count and spacing of windows along each axis of the image."""

    dims: Sequence[Dim]
    counts: Sequence[Dim]
    kernel: Sequence[int]
    strides: Sequence[int]
    dilations: Sequence[int]
    before: Sequence[int]
    after: Sequence[int]

    @property
    def reaches_out(self) -> bool:
        return any(self.before) or any(self.after)

    @property
    def is_large(self) -> bool:
        return math.prod(self.kernel) > _MAX_UNROLLED

    def reduced(self, r: Lowering, x: Value, reduction: Reduction, fill: float) -> Value:
        """Reduce every window with a loop: its positions are axes that share the image's memory."""
        image = r.stored(self.padded(r, x, fill))
        steps = image.strides[2:]
        window_strides, image_strides = (
            [dim_of(step * by) for step, by in zip(steps, spacing, strict=True)]
            for spacing in (self.dilations, self.strides)
        )
        dims = (*image.dims[:2], *self.kernel, *self.counts)
        windows = View(image.buffer, dims, (*image.strides[:2], *window_strides, *image_strides), image.offset)
        return r.reduce(reduction, windows, range(2, 2 + len(self.kernel)), keep=False)

    def offsets(self) -> Iterator[tuple[int, ...]]:
        return itertools.product(*map(range, self.kernel))

    def padded(self, r: Lowering, x: Value, fill: float) -> Value:
        for axis, (size, before, after) in enumerate(zip(self.dims, self.before, self.after, strict=True)):
            if before or after:
                x = r.pad(x, 2 + axis, before, dim_of(before + size + after), fill)
        return x

    def window_values(self, r: Lowering, x: Value, offset: Sequence[int], *, padded: bool) -> Value:
        """Return the image's value at one position of each window."""
        for axis, position in enumerate(offset):
            start = position * self.dilations[axis] - (0 if padded else self.before[axis])
            x = r.slice(x, 2 + axis, start, self.strides[axis], self.counts[axis])
        return x


def _windows(r: Lowering, node: ir.Node, x: Value) -> _Windows:
    kernel = ints_of(node, "kernel_shape", [])
    rank = len(kernel)
    strides, dilations = (ints_of(node, name, [1] * rank) for name in ("strides", "dilations"))
    pads = ints_of(node, "pads", [0] * (2 * rank))
    counts, dims = r.dims(node.outputs[0])[2:], x.dims[2:]
    auto_pad = text_of(node, "auto_pad", "NOTSET")
    static = all(isinstance(dim, int) for dim in (*counts, *dims))
    if not static and (auto_pad.startswith("SAME") or int_of(node, "ceil_mode", 0)):
        raise CannotLower(f"{node.op_type} of symbolic sizes with ceil_mode or auto_pad")
    before, after = pads[:rank], pads[rank:]
    extent = [(size - 1) * dilation + 1 for size, dilation in zip(kernel, dilations, strict=True)]
    if not static:
        counts = tuple(
            _window_count(r, dim_of(before[axis] + size + after[axis] - extent[axis]), strides[axis])
            for axis, size in enumerate(dims)
        )
    for axis in range(rank if static else 0):
        reach = (counts[axis] - 1) * strides[axis] + extent[axis]
        if auto_pad.startswith("SAME"):
            total = max(0, reach - dims[axis])
            before[axis] = (total + (auto_pad == "SAME_LOWER")) // 2
        after[axis] = max(0, reach - dims[axis] - before[axis])
    return _Windows(dims, counts, kernel, strides, dilations, before, after)


def _window_count(r: Lowering, room: Dim, stride: int) -> Dim:
    """Return how many windows fit if the last may start `room` elements after the first."""
    r.require(room)
    if isinstance(room, int):
        return room // stride + 1
    return dim_of((room if stride == 1 else FloorDiv(room, stride)) + 1)


@lowers("MaxPool")
def _max_pool(r: Lowering, node: ir.Node) -> None:
    """Return the maximum of each window, and its flat index in the input, the first of equal ones."""
    x = operand(r, node, 0)
    windows = _windows(r, node, x)
    least = _LOWEST.get(x.dtype, -math.inf)
    if not is_used(node, 1) and windows.is_large:
        r.define(node.outputs[0], windows.reduced(r, x, "Largest", least))
        return
    if windows.is_large or int_of(node, "storage_order", 0):
        raise CannotLower(
            "the indices of a MaxPool " + ("over a large window" if windows.is_large else "in column-major order")
        )
    image, indices = windows.padded(r, x, least), r.indices(x.dims)
    first, *others = windows.offsets()
    best = windows.window_values(r, image, first, padded=True)
    index = windows.window_values(r, indices, first, padded=False)
    if windows.reaches_out:
        index = r.apply("add", index, _distance_inside(r, windows, index))
    for offset in others:
        value = windows.window_values(r, image, offset, padded=True)
        better = less(r, best, value)
        if x.dtype in FLOATS:
            better = r.apply("or", better, r.apply("is_nan", value, dtype=BOOL))
        index = where(r, better, windows.window_values(r, indices, offset, padded=False), index)
        best = where(r, better, value, best)
    r.define(node.outputs[0], best)
    define_optional(r, node, 1, index)


def _distance_inside(r: Lowering, windows: _Windows, index: Value) -> Value:
    """Return how far behind the first position of each window the first one inside of the image is, in elements.

    It is the index of a window of −∞, whose maximum is that of the padding, too.
    """
    result: Value = r.number(0, index)
    rank = len(windows.kernel)
    for axis, count in enumerate(windows.counts):
        position = indices_along(r, count, 2 + rank, 2 + axis)
        start = r.apply("mul", position, r.number(windows.strides[axis], position))
        start = r.apply("sub", start, r.number(windows.before[axis], position))
        steps = r.apply("max", _step_count(r, start, 0, windows.dilations[axis]), r.number(0, position))
        step = Number(dim_of(windows.dilations[axis] * math.prod(windows.dims[axis + 1 :])), (), INT64)
        result = r.apply("add", result, r.apply("mul", steps, step))
    return result


@lowers("AveragePool")
def _average_pool(r: Lowering, node: ir.Node) -> None:
    x_operand = operand(r, node, 0)
    need_floats(x_operand, node)
    x = widened(r, x_operand)
    windows = _windows(r, node, x)
    total = windows.reduced(r, x, "Sum", 0.0) if windows.is_large else _sum_windows(r, x, windows)
    size = math.prod(windows.kernel)
    if not windows.reaches_out:
        result = r.apply("mul", total, r.number(1 / size, x))
    else:
        padding = [*windows.before, *windows.after]
        if text_of(node, "auto_pad", "NOTSET") == "NOTSET":  # without the part of the last window beyond the padding
            padding = ints_of(node, "pads", [0] * len(padding))
        counted = padding if int_of(node, "count_include_pad", 0) else [0] * len(padding)
        result = r.apply("div", total, to_type(r, _count_inside(r, windows, counted), x.dtype))
    r.define(node.outputs[0], to_type(r, result, x_operand.dtype))


def _sum_windows(r: Lowering, x: Value, windows: _Windows) -> Value:
    image = windows.padded(r, x, 0.0)
    first, *others = windows.offsets()
    total = windows.window_values(r, image, first, padded=True)
    for offset in others:
        total = r.apply("add", total, windows.window_values(r, image, offset, padded=True))
    return total


def _count_inside(r: Lowering, windows: _Windows, counted: Sequence[int]) -> Value:
    """Return how many positions of each window are in the image or the counted padding."""
    result: Value = Number(1, (), INT64)
    rank = len(windows.kernel)
    for axis, (size, count) in enumerate(zip(windows.dims, windows.counts, strict=True)):
        position = indices_along(r, count, 2 + rank, 2 + axis)
        start = r.apply("mul", position, r.number(windows.strides[axis], position))
        start = r.apply("sub", start, r.number(windows.before[axis], position))
        first = _step_count(r, start, -counted[axis], windows.dilations[axis])
        end = _step_count(r, start, dim_of(size + counted[axis + rank]), windows.dilations[axis])
        first = r.apply("max", first, r.number(0, position))
        end = r.apply("min", end, r.number(windows.kernel[axis], position))
        result = r.apply("mul", result, r.apply("sub", end, first))
    return result


def _step_count(r: Lowering, start: Value, to: Dim, by: int) -> Value:
    """Return how many steps it takes from `start` to reach `to`; zero or less if it is passed already."""
    distance = r.apply("sub", Number(dim_of(to + by - 1), (), INT64), start)
    return distance if by == 1 else r.apply("div", distance, r.number(by, distance))
