"""Windows that move over an image."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir
from torch.utils._sympy.functions import FloorDiv

from sardonyx.native.nests import How
from sardonyx.native.region import CannotLower, Lowering
from sardonyx.native.table import (
    BOOL,
    FLOATS,
    INT64,
    give_optional,
    given,
    int_of,
    ints_of,
    is_asked_for,
    less,
    lowers,
    need_floats,
    places_along,
    text_of,
    to_type,
    where,
    widened,
)
from sardonyx.native.values import Number, Value, View, dim_of
from sardonyx.sizes import Dim

_LARGEST_WINDOW = 16
"""Windows of more places are loops, and not written out."""
_LEAST = {ir.DataType.INT8: -128, ir.DataType.UINT8: 0}


@dataclass(frozen=True)
class _Windows:
    """Where windows lie: for each axis of the image, its size, how many there are, and how they are placed."""

    dims: Sequence[Dim]
    counts: Sequence[Dim]
    kernel: Sequence[int]
    strides: Sequence[int]
    dilations: Sequence[int]
    before: Sequence[int]
    after: Sequence[int]

    @property
    def reaches_out(self) -> bool:
        """Whether a window has places that are not in the image."""
        return any(self.before) or any(self.after)

    @property
    def is_large(self) -> bool:
        """Whether a window has too many places to write them out."""
        return math.prod(self.kernel) > _LARGEST_WINDOW

    def reduced(self, r: Lowering, x: Value, how: How, fill: float) -> Value:
        """Every window reduced by a loop: its places are axes that share the image's memory."""
        image = r.stored(self.padded(r, x, fill))
        steps = image.strides[2:]
        within, moved = (
            [dim_of(step * by) for step, by in zip(steps, spacing, strict=True)]
            for spacing in (self.dilations, self.strides)
        )
        dims = (*image.dims[:2], *self.kernel, *self.counts)
        places = View(image.buffer, dims, (*image.strides[:2], *within, *moved), image.offset)
        return r.reduce(how, places, range(2, 2 + len(self.kernel)), keep=False)

    def offsets(self) -> Iterator[tuple[int, ...]]:
        """The places of a window."""
        return itertools.product(*map(range, self.kernel))

    def padded(self, r: Lowering, x: Value, fill: float) -> Value:
        """The image with as much around it as windows reach."""
        for axis, (size, before, after) in enumerate(zip(self.dims, self.before, self.after, strict=True)):
            if before or after:
                x = r.pad(x, 2 + axis, before, dim_of(before + size + after), fill)
        return x

    def seen(self, r: Lowering, x: Value, offset: Sequence[int], *, padded: bool) -> Value:
        """What a place of the window meets, for each window."""
        for axis, at in enumerate(offset):
            start = at * self.dilations[axis] - (0 if padded else self.before[axis])
            x = r.cut(x, 2 + axis, start, self.strides[axis], self.counts[axis])
        return x


def _windows(r: Lowering, node: ir.Node, x: Value) -> _Windows:
    kernel = ints_of(node, "kernel_shape", [])
    rank = len(kernel)
    strides, dilations = (ints_of(node, name, [1] * rank) for name in ("strides", "dilations"))
    pads = ints_of(node, "pads", [0] * (2 * rank))
    counts, dims = r.dims(node.outputs[0])[2:], x.dims[2:]
    auto = text_of(node, "auto_pad", "NOTSET")
    static = all(isinstance(dim, int) for dim in (*counts, *dims))
    if not static and (auto.startswith("SAME") or int_of(node, "ceil_mode", 0)):
        raise CannotLower(f"{node.op_type} of symbolic sizes with as many windows as begin, or padding for them")
    before, after = pads[:rank], pads[rank:]
    wide = [(size - 1) * dilation + 1 for size, dilation in zip(kernel, dilations, strict=True)]
    if not static:
        counts = tuple(
            _count(r, dim_of(before[axis] + size + after[axis] - wide[axis]), strides[axis])
            for axis, size in enumerate(dims)
        )
    for axis in range(rank if static else 0):
        reach = (counts[axis] - 1) * strides[axis] + wide[axis]
        if auto.startswith("SAME"):
            total = max(0, reach - dims[axis])
            before[axis] = (total + (auto == "SAME_LOWER")) // 2
        after[axis] = max(0, reach - dims[axis] - before[axis])
    return _Windows(dims, counts, kernel, strides, dilations, before, after)


def _count(r: Lowering, room: Dim, stride: int) -> Dim:
    """How many windows there are where the last may begin this much after the first."""
    r.require(room)
    if isinstance(room, int):
        return room // stride + 1
    return dim_of((room if stride == 1 else FloorDiv(room, stride)) + 1)


@lowers("MaxPool")
def _max_pool(r: Lowering, node: ir.Node) -> None:
    """The largest of each window, and its place in the input, the first of equal ones."""
    x = given(r, node, 0)
    windows = _windows(r, node, x)
    least = _LEAST.get(x.dtype, -math.inf)
    if not is_asked_for(node, 1) and windows.is_large:
        r.give(node.outputs[0], windows.reduced(r, x, "Largest", least))
        return
    if windows.is_large or int_of(node, "storage_order", 0):
        raise CannotLower("the places of a MaxPool, " + ("over a large window" if windows.is_large else "by columns"))
    image, places = windows.padded(r, x, least), r.places(x.dims)
    first, *others = windows.offsets()
    best = windows.seen(r, image, first, padded=True)
    place = windows.seen(r, places, first, padded=False)
    for offset in others:
        value = windows.seen(r, image, offset, padded=True)
        better = less(r, best, value)
        if x.dtype in FLOATS:
            better = r.apply("or", better, r.apply("is_nan", value, dtype=BOOL))
        place = where(r, better, windows.seen(r, places, offset, padded=False), place)
        best = where(r, better, value, best)
    r.give(node.outputs[0], best)
    give_optional(r, node, 1, place)


@lowers("AveragePool")
def _average_pool(r: Lowering, node: ir.Node) -> None:
    given_x = given(r, node, 0)
    need_floats(given_x, node)
    x = widened(r, given_x)
    windows = _windows(r, node, x)
    total = windows.reduced(r, x, "Sum", 0.0) if windows.is_large else _written_out(r, x, windows)
    size = math.prod(windows.kernel)
    if not windows.reaches_out:
        result = r.apply("mul", total, r.number(1 / size, x))
    else:
        around = [*windows.before, *windows.after]
        if text_of(node, "auto_pad", "NOTSET") == "NOTSET":  # without what windows reach beyond it, as the last may
            around = ints_of(node, "pads", [0] * len(around))
        counted = around if int_of(node, "count_include_pad", 0) else [0] * len(around)
        result = r.apply("div", total, to_type(r, _inside(r, windows, counted), x.dtype))
    r.give(node.outputs[0], to_type(r, result, given_x.dtype))


def _written_out(r: Lowering, x: Value, windows: _Windows) -> Value:
    """The sum of each window."""
    image = windows.padded(r, x, 0.0)
    first, *others = windows.offsets()
    total = windows.seen(r, image, first, padded=True)
    for offset in others:
        total = r.apply("add", total, windows.seen(r, image, offset, padded=True))
    return total


def _inside(r: Lowering, windows: _Windows, counted: Sequence[int]) -> Value:
    """How many places of each window are in the image, or in as much around it as counts."""
    result: Value = Number(1, (), INT64)
    rank = len(windows.kernel)
    for axis, (size, count) in enumerate(zip(windows.dims, windows.counts, strict=True)):
        place = places_along(r, count, 2 + rank, 2 + axis)
        start = r.apply("mul", place, r.number(windows.strides[axis], place))
        start = r.apply("sub", start, r.number(windows.before[axis], place))
        first = _steps(r, start, -counted[axis], windows.dilations[axis])
        end = _steps(r, start, dim_of(size + counted[axis + rank]), windows.dilations[axis])
        first = r.apply("max", first, r.number(0, place))
        end = r.apply("min", end, r.number(windows.kernel[axis], place))
        result = r.apply("mul", result, r.apply("sub", end, first))
    return result


def _steps(r: Lowering, start: Value, to: Dim, by: int) -> Value:
    """How many steps of a size there are to a place or beyond it; none or fewer from where it is passed."""
    far = r.apply("sub", Number(dim_of(to + by - 1), (), INT64), start)
    return far if by == 1 else r.apply("div", far, r.number(by, far))
