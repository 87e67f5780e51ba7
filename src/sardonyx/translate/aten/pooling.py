"""Pooling, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import sympy
import torch
from torch.utils._sympy.functions import FloorDiv

from sardonyx import dtypes
from sardonyx.sizes import Dim, dims_of
from sardonyx.translate.aten.conv import per_axis, require_static
from sardonyx.translate.aten.indexing import element_count, positions
from sardonyx.translate.builder import Builder
from sardonyx.translate.table import aten

Value = ir.Value


def _batched(g: Builder, x: Value, spatial: int) -> tuple[Value, bool]:
    return (x, True) if g.rank(x) == spatial + 2 else (g.unsqueeze(x, [0]), False)


def _unbatched(g: Builder, y: Value, batched: bool, like: torch.Tensor) -> Value:
    return y if batched else g.squeeze(g.shaped(y, [1, *g.like(like)]), [0])


def _planes(g: Builder, x: Value, spatial: int) -> Value:
    """Reshape `x` to rows, each one plane (or line, or volume)."""
    dims = g.dims(x)
    return g.reshape(x, [element_count(dims[:-spatial]), element_count(dims[-spatial:])])


# Maximum of a window


def _max_pool(
    g: Builder, x: Value, spatial: int, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool, indices: bool
) -> tuple[Value, Value | None]:
    like = g.out[0] if isinstance(g.out, (tuple, list)) else g.out
    source, batched = _batched(g, x, spatial)
    kernel = per_axis(kernel, spatial)
    attributes = {
        "kernel_shape": kernel,
        "strides": per_axis(stride, spatial) if stride else kernel,
        "pads": per_axis(padding, spatial) * 2,
        "dilations": per_axis(dilation, spatial),
        "ceil_mode": int(ceil),
    }
    dims = [*(() if batched else (1,)), *dims_of(like)]
    if not indices:
        return _unbatched(g, g.shaped(g.MaxPool(source, **attributes), dims), batched, like), None
    y, index = g.several("MaxPool", 2, [source], **attributes)
    index.type = ir.TensorType(ir.DataType.INT64)
    places = g.Sub(g.shaped(index, dims), _plane_starts(g, source, spatial))  # ONNX counts over the whole tensor
    return _unbatched(g, g.shaped(y, dims), batched, like), _unbatched(g, places, batched, like)


def _plane_starts(g: Builder, x: Value, spatial: int) -> Value:
    """Return the index of the start of each plane in the whole tensor, so that it broadcasts over positions."""
    planes, size = g.dims(x)[:-spatial], element_count(g.dims(x)[-spatial:])
    starts = g.Mul(positions(g, element_count(planes)), g.scalar(size, torch.int64))
    return g.reshape(g.shaped(starts, [element_count(planes)]), [*planes, *[1] * spatial])


def max_pool_backward(g: Builder, grad: Value, x: Value, indices: Value, spatial: int) -> Value:
    """Add each gradient at the index of its maximum; overlapping windows accumulate."""
    rows = _planes(g, x, spatial)
    dtype = dtypes.accumulation_dtype(g.dtype(grad))
    zeros = g.expand(g.scalar(0, dtype), g.dims(rows))
    places, grads = _planes(g, indices, spatial), _planes(g, g.cast(grad, dtype), spatial)
    return g.reshape(g.ScatterElements(zeros, places, grads, axis=1, reduction="add"), g.dims(x))


def _max_unpool_backward(g: Builder, grad: Value, x: Value, indices: Value, spatial: int) -> Value:
    """The same for windows that do not overlap, by ONNX's MaxUnpool, in a third of the time."""
    source, batched = _batched(g, x, spatial)
    grads, places = (v if batched else g.unsqueeze(v, [0]) for v in (grad, indices))
    ones = [1] * spatial  # the kernel only determines sizes, which are given
    shape = g.shape_value(g.dims(source))
    y = g.MaxUnpool(grads, g.Add(places, _plane_starts(g, source, spatial)), shape, kernel_shape=ones)
    return g.reshape(g.shaped(y, g.dims(source)), g.dims(x))


# Average of a window


def _sums(g: Builder, x: Value, out: Sequence[Dim], kernel: list[int], stride: list[int], pad: list[int]) -> Value:
    """Return the sum of every window; the last ones extend over the edge as far as the result needs."""
    rows = zip(out, stride, kernel, g.dims(x)[2:], pad, strict=True)
    reach = [((o - 1) * s + k - n - p, p + s - 1) for o, s, k, n, p in rows]
    far = [max(exact, 0) if isinstance(exact, int) else enough for exact, enough in reach]
    wide = g.Pad(x, g.ints([*pad, *far]), None, g.ints(range(2, g.rank(x)))) if any((*pad, *far)) else x
    mean = g.AveragePool(wide, kernel_shape=kernel, strides=stride)
    for axis, size in enumerate(out, 2):
        if not isinstance(size, int):
            mean = g.slice(mean, axis, 0, size)
    return g.Mul(g.shaped(mean, [*g.dims(x)[:2], *out]), g.scalar(math.prod(kernel), g.dtype(x)))


def _average_by_count(
    g: Builder, x: Value, kernel: list[int], stride: list[int], pad: list[int], count_padding: bool, divisor: int | None
) -> Value:
    spatial = len(kernel)
    out = g.like(g.out)[-spatial:]
    total = _sums(g, x, out, kernel, stride, pad)
    return g.Div(total, _divisors(g, g.dims(x)[2:], out, kernel, stride, pad, count_padding, divisor))


def _divisors(
    g: Builder,
    sizes: Sequence[Dim],
    outs: Sequence[Dim],
    kernel: list[int],
    stride: list[int],
    pad: list[int],
    count_padding: bool,
    divisor: int | None,
) -> Value:
    """Return the divisor of each window's sum, in the dtype of the result."""
    if divisor is not None:
        return g.scalar(divisor, g.out.dtype)
    counts = g.scalar(1, torch.int64)
    for axis, row in enumerate(zip(sizes, outs, kernel, stride, pad, strict=True)):
        lengths = _window_lengths(g, *row, count_padding)
        counts = g.Mul(counts, g.unsqueeze(lengths, range(1, len(kernel) - axis)))
    return g.cast(counts, g.out.dtype)


def _window_lengths(g: Builder, size: Dim, out: Dim, kernel: int, stride: int, pad: int, count_padding: bool) -> Value:
    """Return how many elements torch counts in each window along an axis."""
    if isinstance(size, int) and isinstance(out, int):
        starts = np.arange(out) * stride - pad
        ends = np.minimum(starts + kernel, size + pad)
        counts = ends - starts if count_padding else np.minimum(ends, size) - np.maximum(starts, 0)
        return g.constant(counts.astype(np.int64))
    begin = g.Sub(g.Mul(positions(g, out), g.ints([stride])), g.ints([pad]))
    end = g.Min(g.Add(begin, g.ints([kernel])), g.sizes.value(size + pad))
    if count_padding:
        return g.Sub(end, begin)
    return g.Sub(g.Min(end, g.sizes.value(size)), g.Max(begin, g.ints([0])))


def _average(
    g: Builder,
    x: Value,
    kernel: list[int],
    stride: Any,
    padding: Any,
    ceil: bool,
    count_padding: bool,
    divisor: int | None,
) -> Value:
    spatial = len(kernel)
    stride, pad = per_axis(stride, spatial) if stride else kernel, per_axis(padding, spatial)
    source, batched = _batched(g, x, spatial)
    if ceil or divisor is not None:
        y = _average_by_count(g, source, kernel, stride, pad, count_padding, divisor)
    else:
        y = g.AveragePool(
            source, kernel_shape=kernel, strides=stride, pads=pad * 2, count_include_pad=int(count_padding)
        )
    return _unbatched(g, y, batched, g.out)


def _average_backward(
    g: Builder,
    grad: Value,
    x: Value,
    kernel: list[int],
    stride: Any,
    padding: Any,
    count_padding: bool,
    divisor: int | None,
) -> Value:
    """Add each gradient, divided like its average, to its whole window: a transposed convolution with ones."""
    spatial = len(kernel)
    stride, pad = per_axis(stride, spatial) if stride else kernel, per_axis(padding, spatial)
    sizes, outs = g.dims(x)[-spatial:], g.dims(grad)[-spatial:]
    share = g.Div(grad, _divisors(g, sizes, outs, kernel, stride, pad, count_padding, divisor))
    planes = g.reshape(share, [element_count(g.dims(grad)[:-spatial]), 1, *outs])
    ones = torch.ones(1, 1, *kernel, dtype=g.dtype(grad))
    spread = g.ConvTranspose(planes, g.constant(dtypes.to_array(ones), dtypes.to_onnx(ones.dtype)), strides=stride)
    reach = [(o - 1) * s + k for o, s, k in zip(outs, stride, kernel, strict=True)]
    g.shaped(spread, [*g.dims(planes)[:2], *reach])
    # Elements at the end that a stride skips are not covered by any window.
    behind = [max(s - 1 - p, 0) for s, p in zip(stride, pad, strict=True)]
    if any(behind):
        spread = g.Pad(spread, g.ints([0] * spatial + behind), None, g.ints(range(2, 2 + spatial)))
    for axis, (size, p) in enumerate(zip(sizes, pad, strict=True), 2):
        spread = g.slice(spread, axis, p, p + size)
    return g.reshape(spread, g.dims(x))


# Adaptive pooling: a given number of windows, whose sizes differ by at most one


def _adaptive_average(g: Builder, x: Value, spatial: int, size: Sequence[Dim]) -> Value:
    sides = g.dims(x)[-spatial:]
    if all(dim == 1 for dim in size) and 0 not in sides:
        return g.ReduceMean(x, g.ints(list(range(-spatial, 0))), keepdims=1)
    pairs = list(zip(sides, require_static(size, "adaptive pooling to"), strict=True))
    if all(isinstance(old, int) and old % new == 0 for old, new in pairs):
        source, batched = _batched(g, x, spatial)
        kernel = [int(old) // new for old, new in pairs]
        return _unbatched(g, g.AveragePool(source, kernel_shape=kernel, strides=kernel), batched, g.out)
    total = g.cast(x, dtypes.accumulation_dtype(g.dtype(x)))
    for axis, (old, new) in enumerate(pairs, g.rank(x) - spatial):
        if old != new:
            total = g.Div(_window_sums(g, total, axis, new), _window_sizes(g, total, axis, old, new))
    return g.cast(total, g.dtype(x))


def _adaptive_average_backward(g: Builder, grad: Value, x: Value, spatial: int) -> Value:
    """Distribute each gradient evenly over its window. Windows that contain an element are adaptive windows, too."""
    total = g.cast(grad, dtypes.accumulation_dtype(g.dtype(grad)))
    for axis in range(g.rank(x) - spatial, g.rank(x)):
        old, new = g.dims(x)[axis], g.dims(grad)[axis]
        if old != new:
            total = _window_sums(g, g.Div(total, _window_sizes(g, total, axis, old, new)), axis, old)
    return g.cast(total, g.dtype(grad))


def _window_sizes(g: Builder, x: Value, axis: int, old: Dim, new: Dim) -> Value:
    """Return the number of elements of each adaptive window, so that it broadcasts along an axis of `x`."""
    starts, ends = _window_edges(g, old, new)
    return g.unsqueeze(g.cast(g.Sub(ends, starts), g.dtype(x)), range(1, g.rank(x) - axis))


def _window_sums(g: Builder, x: Value, axis: int, new: Dim) -> Value:
    """Return the sum of each adaptive window along an axis.

    Windows are gathered: a product with a 0/1 matrix would propagate NaN and infinities to all windows.
    """
    dims = list(g.dims(x))
    starts, ends = _window_edges(g, dims[axis], new)
    width = _largest_window(g, dims[axis], new)
    cells = g.Add(g.unsqueeze(starts, [1]), positions(g, width))
    last = g.Sub(g.unsqueeze(ends, [1]), g.ints([1]))
    windows = [*dims[:axis], new, width, *dims[axis + 1 :]]
    gathered = g.shaped(g.Gather(x, g.Min(cells, last), axis=axis), windows)
    inside = g.unsqueeze(g.LessOrEqual(cells, last), range(2, g.rank(x) - axis + 1))
    masked = g.shaped(g.Where(inside, gathered, g.scalar(0, g.dtype(x))), windows)
    return g.shaped(g.ReduceSum(masked, g.ints([axis + 1]), keepdims=0), [*dims[:axis], new, *dims[axis + 1 :]])


def _largest_window(g: Builder, old: Dim, new: Dim) -> Dim:
    """Return the size of the largest adaptive window, or a bound of it if sizes are symbolic."""
    if isinstance(old, int) and isinstance(new, int):
        return int(max((-((i + 1) * old // -new) - i * old // new for i in range(new)), default=0))
    return g.dim(old) if new == 1 else g.dim(FloorDiv(sympy.sympify(old + new - 1), new) + 1)


def _window_edges(g: Builder, old: Dim, new: Dim) -> tuple[Value, Value]:
    """Return the start and end of each window: i·old/new rounded down, (i + 1)·old/new rounded up."""
    if isinstance(old, int) and isinstance(new, int):
        steps = np.arange(new, dtype=np.int64)
        return g.constant(steps * old // new), g.constant(-((steps + 1) * old // -new))
    size, count, place = g.sizes.value(old), g.sizes.value(new), positions(g, new)
    beyond = g.Add(g.Mul(g.Add(place, g.ints([1])), size), g.sizes.value(new - 1))
    return g.Div(g.Mul(place, size), count), g.Div(beyond, count)


def _adaptive_max(g: Builder, x: Value, spatial: int, output_size: Any) -> tuple[Value, Value]:
    """Gather each window's elements, short ones filled with their last element, and take the maximum."""
    sides, size = g.dims(x)[-spatial:], per_axis(output_size, spatial)
    cells = g.scalar(0, torch.int64)
    widths = []
    for axis, (old, new) in enumerate(zip(sides, size, strict=True)):
        width = _largest_window(g, old, new)
        starts, ends = (g.unsqueeze(edge, [1]) for edge in _window_edges(g, old, new))
        cell = g.Min(g.Add(starts, positions(g, width)), g.Sub(ends, g.ints([1])))
        cell = g.Mul(cell, g.scalar(element_count(sides[axis + 1 :]), torch.int64))
        shape: list[Dim] = [1] * (2 * spatial)
        shape[axis], shape[spatial + axis] = new, width
        cells = g.Add(cells, g.reshape(g.shaped(cell, [new, width]), shape))
        widths.append(width)
    cells = g.reshape(cells, [element_count(size), element_count(widths)])
    rows = _planes(g, x, spatial)
    lead = g.dims(rows)[0]
    windows = g.shaped(g.Gather(rows, cells, axis=1), [lead, *g.dims(cells)])
    best = g.shaped(argmax_last_axis(g, windows), [lead, g.dims(cells)[0], 1])
    places = g.GatherElements(g.expand(g.unsqueeze(cells, [0]), g.dims(windows)), best, axis=2)
    shape = list(g.like(g.out[0]))
    return g.reshape(g.GatherElements(windows, best, axis=2), shape), g.reshape(places, shape)


def argmax_last_axis(g: Builder, x: Value) -> Value:
    """Return the index of the maximum along the last axis: the first of equals, and the last NaN."""
    first = g.ArgMax(x, axis=-1, keepdims=1)
    if not g.dtype(x).is_floating_point:
        return first
    missing = g.cast(g.IsNaN(x), torch.int32)
    return g.Where(
        g.Greater(g.ReduceMax(missing, g.ints([-1]), keepdims=1), g.scalar(0, torch.int32)),
        g.ArgMax(missing, axis=-1, keepdims=1, select_last_index=1),
        first,
    )


def _register(spatial: int) -> None:
    @aten(f"max_pool{spatial}d_with_indices", f"max_pool{spatial}d")
    def maximum(
        g: Builder,
        x: Value,
        kernel_size: Any,
        stride: Any = (),
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
    ) -> Value | tuple[Value, Value | None]:
        has_indices = isinstance(g.out, (tuple, list))
        return_indices = has_indices and g.reads_output(1)
        results = _max_pool(g, x, spatial, kernel_size, stride, padding, dilation, ceil_mode, return_indices)
        return results if has_indices else results[0]

    @aten(f"avg_pool{spatial}d")
    def average(
        g: Builder,
        x: Value,
        kernel_size: Any,
        stride: Any = (),
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Value:
        kernel = per_axis(kernel_size, spatial)
        return _average(g, x, kernel, stride, padding, ceil_mode, count_include_pad, divisor_override)

    names = [f"adaptive_avg_pool{spatial}d"] + ([f"_adaptive_avg_pool{spatial}d"] if spatial > 1 else [])

    @aten(*names)
    def adaptive_average(g: Builder, x: Value, output_size: Any) -> Value:
        return _adaptive_average(g, x, spatial, per_axis(output_size, spatial))

    @aten(f"adaptive_max_pool{spatial}d")
    def adaptive_max(g: Builder, x: Value, output_size: Any) -> tuple[Value, Value]:
        return _adaptive_max(g, x, spatial, output_size)


def _register_backward(spatial: int) -> None:
    @aten(f"max_pool{spatial}d_with_indices_backward")
    def backward(
        g: Builder,
        grad: Value,
        x: Value,
        kernel_size: Any,
        stride: Any,
        padding: Any,
        dilation: Any,
        ceil_mode: bool,
        indices: Value,
    ) -> Value:
        steps, spread = per_axis(stride or kernel_size, spatial), per_axis(dilation, spatial)
        rows = zip(steps, per_axis(kernel_size, spatial), spread, strict=True)
        if g.dtype(grad) == torch.float32 and all(s > (k - 1) * d for s, k, d in rows):
            return _max_unpool_backward(g, grad, x, indices, spatial)
        return max_pool_backward(g, grad, x, indices, spatial)

    @aten(f"adaptive_max_pool{spatial}d_backward")
    def adaptive_backward(g: Builder, grad: Value, x: Value, indices: Value) -> Value:
        return max_pool_backward(g, grad, x, indices, spatial)

    @aten(f"_adaptive_avg_pool{spatial}d_backward")
    def adaptive_average_backward(g: Builder, grad: Value, x: Value) -> Value:
        return _adaptive_average_backward(g, grad, x, spatial)

    @aten(f"avg_pool{spatial}d_backward")
    def average_backward(
        g: Builder,
        grad: Value,
        x: Value,
        kernel_size: Any,
        stride: Any,
        padding: Any,
        ceil_mode: bool,
        count_include_pad: bool,
        divisor_override: int | None,
    ) -> Value:
        kernel = per_axis(kernel_size, spatial)
        return _average_backward(g, grad, x, kernel, stride, padding, count_include_pad, divisor_override)


for _spatial in (1, 2, 3):
    _register(_spatial)
for _spatial in (2, 3):
    _register_backward(_spatial)
