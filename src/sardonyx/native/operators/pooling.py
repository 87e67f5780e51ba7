"""Windows that move over an image."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from sardonyx.native.region import CannotLower, Lowering
from sardonyx.native.table import (
    BOOL,
    INT64,
    give_optional,
    given,
    int_of,
    ints_of,
    less,
    lowers,
    need_floats,
    places_along,
    text_of,
    to_type,
    where,
    widened,
)
from sardonyx.native.values import Number, Value
from sardonyx.translate.sizes import Dim

_LARGEST_WINDOW = 16
"""Windows of more places are left to a loop of the engine's."""


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

    def offsets(self) -> Iterator[tuple[int, ...]]:
        """The places of a window."""
        return itertools.product(*map(range, self.kernel))

    def padded(self, r: Lowering, x: Value, fill: float) -> Value:
        """The image with as much around it as windows reach."""
        for axis, (size, before, after) in enumerate(zip(self.dims, self.before, self.after, strict=True)):
            if before or after:
                x = r.pad(x, 2 + axis, before, before + size + after, fill)
        return x

    def seen(self, r: Lowering, x: Value, offset: Sequence[int], *, padded: bool) -> Value:
        """What a place of the window meets, for each window."""
        for axis, at in enumerate(offset):
            start = at * self.dilations[axis] - (0 if padded else self.before[axis])
            x = r.cut(x, 2 + axis, start, self.strides[axis], self.counts[axis])
        return x


def _windows(r: Lowering, node: ir.Node, x: Value) -> _Windows:
    need_floats(x, node)
    kernel = ints_of(node, "kernel_shape", [])
    rank = len(kernel)
    strides, dilations = (ints_of(node, name, [1] * rank) for name in ("strides", "dilations"))
    pads = ints_of(node, "pads", [0] * (2 * rank))
    counts, dims = r.dims(node.outputs[0])[2:], x.dims[2:]
    if math.prod(kernel) > _LARGEST_WINDOW:
        raise CannotLower(f"{node.op_type} over a large window")
    auto = text_of(node, "auto_pad", "NOTSET")
    static = all(isinstance(dim, int) for dim in (*counts, *dims))
    if not static and (any(pads) or auto.startswith("SAME") or int_of(node, "ceil_mode", 0)):
        raise CannotLower(f"{node.op_type} with padding of symbolic sizes")
    before, after = pads[:rank], [0] * rank
    for axis in range(rank if static else 0):
        reach = (counts[axis] - 1) * strides[axis] + (kernel[axis] - 1) * dilations[axis] + 1
        if auto.startswith("SAME"):
            total = max(0, reach - dims[axis])
            before[axis] = (total + (auto == "SAME_LOWER")) // 2
        after[axis] = max(0, reach - dims[axis] - before[axis])
    return _Windows(dims, counts, kernel, strides, dilations, before, after)


@lowers("MaxPool")
def _max_pool(r: Lowering, node: ir.Node) -> None:
    """The largest of each window, and its place in the input, the first of equal ones."""
    x = given(r, node, 0)
    windows = _windows(r, node, x)
    if int_of(node, "storage_order", 0):
        raise CannotLower("MaxPool that counts along columns")
    image, places = windows.padded(r, x, -math.inf), r.places(x.dims)
    first, *others = windows.offsets()
    best = windows.seen(r, image, first, padded=True)
    place = windows.seen(r, places, first, padded=False)
    for offset in others:
        value = windows.seen(r, image, offset, padded=True)
        better = r.apply("or", less(r, best, value), r.apply("is_nan", value, dtype=BOOL))
        place = where(r, better, windows.seen(r, places, offset, padded=False), place)
        best = where(r, better, value, best)
    r.give(node.outputs[0], best)
    give_optional(r, node, 1, place)


@lowers("AveragePool")
def _average_pool(r: Lowering, node: ir.Node) -> None:
    given_x = given(r, node, 0)
    x = widened(r, given_x)
    windows = _windows(r, node, x)
    image = windows.padded(r, x, 0.0)
    first, *others = windows.offsets()
    total = windows.seen(r, image, first, padded=True)
    for offset in others:
        total = r.apply("add", total, windows.seen(r, image, offset, padded=True))
    size = math.prod(windows.kernel)
    if not windows.reaches_out:
        result = r.apply("mul", total, r.number(1 / size, x))
    else:
        pads = ints_of(node, "pads", [0] * (2 * len(windows.kernel)))
        counted = pads if int_of(node, "count_include_pad", 0) else [0] * len(pads)
        result = r.apply("div", total, to_type(r, _inside(r, windows, counted), x.dtype))
    r.give(node.outputs[0], to_type(r, result, given_x.dtype))


def _inside(r: Lowering, windows: _Windows, counted: Sequence[int]) -> Value:
    """How many places of each window are in the image, or in as much around it as counts."""
    result: Value = Number(1, (), INT64)
    rank = len(windows.kernel)
    for axis, (size, count) in enumerate(zip(windows.dims, windows.counts, strict=True)):
        if windows.dilations[axis] != 1:
            raise CannotLower("AveragePool with padding and dilations")
        place = places_along(r, count, 2 + rank, 2 + axis)
        start = r.apply("mul", place, r.number(windows.strides[axis], place))
        start = r.apply("sub", start, r.number(windows.before[axis], place))
        end = r.apply("add", start, r.number(windows.kernel[axis], place))
        start = r.apply("max", start, r.number(-counted[axis], place))
        end = r.apply("min", end, Number(size + counted[axis + rank], (), INT64))
        result = r.apply("mul", result, r.apply("sub", end, start))
    return result
