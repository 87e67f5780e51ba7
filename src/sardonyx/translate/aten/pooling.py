"""Pooling, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from sardonyx.translate import dtypes
from sardonyx.translate.aten.conv import each, known
from sardonyx.translate.builder import Builder
from sardonyx.translate.errors import Unsupported
from sardonyx.translate.sizes import Dim, Dims
from sardonyx.translate.table import aten

Value = ir.Value


def _batched(g: Builder, x: Value, spatial: int) -> tuple[Value, bool]:
    return (x, True) if g.rank(x) == spatial + 2 else (g.unsqueeze(x, [0]), False)


def _unbatched(g: Builder, y: Value, batched: bool, like: torch.Tensor) -> Value:
    return y if batched else g.squeeze(g.shaped(y, [1, *g.like(like)]), [0])


def _count(dims: Dims) -> Dim:
    total: Dim = 1
    for dim in dims:
        total = total * dim
    return total


def _planes(g: Builder, x: Value, spatial: int) -> Value:
    """`x` as rows, each one plane (or line, or volume)."""
    dims = g.dims(x)
    return g.reshape(x, [_count(dims[:-spatial]), _count(dims[-spatial:])])


# Largest of a window


def _max_pool(
    g: Builder, x: Value, spatial: int, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool, indices: bool
) -> tuple[Value, Value | None]:
    like = g.out[0] if isinstance(g.out, (tuple, list)) else g.out
    source, batched = _batched(g, x, spatial)
    kernel = each(kernel, spatial)
    attributes = {
        "kernel_shape": kernel,
        "strides": each(stride, spatial) if stride else kernel,
        "pads": each(padding, spatial) * 2,
        "dilations": each(dilation, spatial),
        "ceil_mode": int(ceil),
    }
    if not indices:
        return _unbatched(g, g.MaxPool(source, **attributes), batched, like), None
    y, index = g.several("MaxPool", 2, [source], **attributes)
    index.type = ir.TensorType(ir.DataType.INT64)
    return _unbatched(g, y, batched, like), _plane_index(g, source, index, spatial, batched, like)


def _plane_index(g: Builder, x: Value, index: Value, spatial: int, batched: bool, like: torch.Tensor) -> Value:
    """ONNX counts positions over the whole tensor, torch within one plane."""
    index = g.Mod(index, g.scalar(_count(g.dims(x)[-spatial:]), torch.int64))
    return _unbatched(g, index, batched, like)


def _max_pool_backward(g: Builder, grad: Value, x: Value, indices: Value, spatial: int) -> Value:
    """Each gradient goes to the place its largest came from; overlapping windows add up."""
    rows = _planes(g, x, spatial)
    dtype = dtypes.summing(g.dtype(grad))
    nothing = g.expand(g.scalar(0, dtype), g.dims(rows))
    places, grads = _planes(g, indices, spatial), _planes(g, g.cast(grad, dtype), spatial)
    return g.reshape(g.ScatterElements(nothing, places, grads, axis=1, reduction="add"), g.dims(x))


# Average of a window


def _windows(size: int, out: int, kernel: int, stride: int, pad: int, count_padding: bool) -> list[int]:
    """How many elements torch divides by, for each window along an axis."""
    starts = [i * stride - pad for i in range(out)]
    ends = [min(start + kernel, size + pad) for start in starts]
    if count_padding:
        return [end - start for start, end in zip(starts, ends, strict=True)]
    return [min(end, size) - max(start, 0) for start, end in zip(starts, ends, strict=True)]


def _sums(g: Builder, x: Value, out: Sequence[int], kernel: list[int], stride: list[int], pad: list[int]) -> Value:
    """The sum of every window, the last ones reaching as far over the edge as the result asks."""
    sizes = [int(n) for n in g.dims(x)[2:]]
    far = [(o - 1) * s + k - n - p for o, s, k, n, p in zip(out, stride, kernel, sizes, pad, strict=True)]
    # A window may end before the edge: what lies behind the last one is cut by the pool itself.
    pads = [*pad, *(max(f, 0) for f in far)]
    if any(p >= k for p, k in zip(pads, kernel * 2, strict=True)):
        raise Unsupported("average pooling whose last window lies outside")
    mean = g.AveragePool(x, kernel_shape=kernel, strides=stride, pads=pads, count_include_pad=1)
    return g.Mul(g.shaped(mean, [*g.dims(x)[:2], *out]), g.scalar(prod(kernel), g.dtype(x)))


def _average_by_count(
    g: Builder, x: Value, kernel: list[int], stride: list[int], pad: list[int], count_padding: bool, divisor: int | None
) -> Value:
    spatial = len(kernel)
    out = g.like(g.out)[-spatial:]
    if not all(isinstance(n, int) for n in (*out, *g.dims(x)[2:])):
        raise Unsupported("average pooling of a symbolic size with ceil_mode or a divisor")
    total = _sums(g, x, [int(n) for n in out], kernel, stride, pad)
    sizes, outs = [int(n) for n in g.dims(x)[2:]], [int(n) for n in out]
    return g.Div(total, _divisors(g, sizes, outs, kernel, stride, pad, count_padding, divisor))


def _divisors(
    g: Builder,
    sizes: list[int],
    outs: list[int],
    kernel: list[int],
    stride: list[int],
    pad: list[int],
    count_padding: bool,
    divisor: int | None,
) -> Value:
    """What the sum of each window is divided by, in the dtype of the result."""
    dtype = g.out.dtype
    if divisor is not None:
        return g.scalar(divisor, dtype)
    counts = np.ones((), dtype=np.int64)
    for size, out, k, s, p in zip(sizes, outs, kernel, stride, pad, strict=True):
        counts = np.multiply.outer(counts, np.array(_windows(size, out, k, s, p, count_padding)))
    return g.cast(g.constant(counts), dtype)


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
    stride, pad = each(stride, spatial) if stride else kernel, each(padding, spatial)
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
    """Each gradient, divided as its average was, goes to every place of its window: a convolution with ones, back."""
    spatial = len(kernel)
    stride, pad = each(stride, spatial) if stride else kernel, each(padding, spatial)
    sizes = known(g.dims(x)[-spatial:], "the gradient of pooling of")
    outs = known(g.dims(grad)[-spatial:], "the gradient of pooling to")
    share = g.Div(grad, _divisors(g, sizes, outs, kernel, stride, pad, count_padding, divisor))
    planes = g.reshape(share, [_count(g.dims(grad)[:-spatial]), 1, *outs])
    ones = torch.ones(1, 1, *kernel, dtype=g.dtype(grad))
    spread = g.ConvTranspose(planes, g.constant(dtypes.to_array(ones), dtypes.to_onnx(ones.dtype)), strides=stride)
    rows = list(zip(sizes, outs, kernel, stride, pad, strict=True))
    missing = [max(p + size - (out - 1) * s - k, 0) for size, out, k, s, p in rows]
    if any(missing):
        spread = g.Pad(spread, g.ints([0] * (spatial + 2) + [0, 0, *missing]), g.scalar(0, g.dtype(grad)))
    for axis, (size, _, _, _, p) in enumerate(rows, 2):
        spread = g.slice(spread, axis, p, p + size)
    return g.reshape(spread, g.dims(x))


# Adaptive: as many windows as asked, of sizes that differ by one


def _edges(size: int, out: int) -> list[range]:
    return [range(i * size // out, -((i + 1) * size // -out)) for i in range(out)]


def _adaptive_average(g: Builder, x: Value, spatial: int, size: Sequence[Dim]) -> Value:
    sides = g.dims(x)[-spatial:]
    if all(dim == 1 for dim in size) and 0 not in sides:
        return g.ReduceMean(x, g.ints(list(range(-spatial, 0))), keepdims=1)
    pairs = list(zip(known(sides, "adaptive pooling of"), known(size, "adaptive pooling to"), strict=True))
    if all(old % new == 0 for old, new in pairs):
        source, batched = _batched(g, x, spatial)
        kernel = [old // new for old, new in pairs]
        return _unbatched(g, g.AveragePool(source, kernel_shape=kernel, strides=kernel), batched, g.out)
    for axis, (old, new) in enumerate(pairs, g.rank(x) - spatial):
        if old != new:
            x = along(g, x, axis, _averages(old, new))
    return x


def _adaptive_average_backward(g: Builder, grad: Value, x: Value, spatial: int) -> Value:
    first = g.rank(x) - spatial
    sizes, outs = (known(g.dims(v)[first:], "the gradient of adaptive pooling of") for v in (x, grad))
    for axis, (old, new) in enumerate(zip(sizes, outs, strict=True), first):
        grad = along(g, grad, axis, _averages(old, new).T)
    return grad


def _averages(old: int, new: int) -> torch.Tensor:
    """Adaptive averaging of a line, as a matrix."""
    return torch.nn.functional.adaptive_avg_pool1d(torch.eye(old, dtype=torch.float64)[None], new)[0]


def along(g: Builder, x: Value, axis: int, matrix: torch.Tensor) -> Value:
    """Every line along an axis times a matrix: how a linear map of one axis is applied."""
    rank = g.rank(x)
    held = matrix.to(g.dtype(x))
    m = g.constant(dtypes.to_array(held), dtypes.to_onnx(held.dtype))
    order = [*(i for i in range(rank) if i != axis), axis]
    dims = g.dims(x)
    line = g.MatMul(g.transpose(x, order), m)
    g.shaped(line, [dims[i] for i in order[:-1]] + [matrix.shape[1]])
    return g.transpose(line, [order.index(i) for i in range(rank)])


def _cells(sides: Sequence[int], size: Sequence[int]) -> np.ndarray:
    """For each result the positions of its window within the plane, the short windows filled with their last."""
    windows = [
        [sum(i * prod(sides[axis + 1 :]) for axis, i in enumerate(place)) for place in product(*ranges)]
        for ranges in product(*(_edges(a, b) for a, b in zip(sides, size, strict=True)))
    ]
    longest = max(map(len, windows))
    return np.array([w + w[-1:] * (longest - len(w)) for w in windows], dtype=np.int64)


def _adaptive_max(g: Builder, x: Value, spatial: int, output_size: Any) -> tuple[Value, Value]:
    sides = known(g.dims(x)[-spatial:], "adaptive pooling of")
    size = known(each(output_size, spatial), "adaptive pooling to")
    cells = g.constant(_cells(sides, size))
    rows = _planes(g, x, spatial)
    lead = g.dims(rows)[0]
    windows = g.shaped(g.Gather(rows, cells, axis=1), [lead, *g.dims(cells)])
    best = g.shaped(g.ArgMax(windows, axis=2, keepdims=1), [lead, g.dims(cells)[0], 1])
    places = g.GatherElements(g.expand(g.unsqueeze(cells, [0]), g.dims(windows)), best, axis=2)
    shape = g.like(g.out[0])
    return g.reshape(g.ReduceMax(windows, g.ints([2]), keepdims=0), shape), g.reshape(places, shape)


def _register(spatial: int) -> None:
    @aten(f"max_pool{spatial}d_with_indices")
    def with_indices(
        g: Builder,
        x: Value,
        kernel_size: Any,
        stride: Any = (),
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
    ) -> tuple[Value, Value | None]:
        wanted = g.reads_output(1)
        return _max_pool(g, x, spatial, kernel_size, stride, padding, dilation, ceil_mode, wanted)

    @aten(f"max_pool{spatial}d")
    def plain(
        g: Builder,
        x: Value,
        kernel_size: Any,
        stride: Any = (),
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
    ) -> Value:
        return _max_pool(g, x, spatial, kernel_size, stride, padding, dilation, ceil_mode, False)[0]

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
        kernel = each(kernel_size, spatial)
        return _average(g, x, kernel, stride, padding, ceil_mode, count_include_pad, divisor_override)

    names = [f"adaptive_avg_pool{spatial}d"] + ([f"_adaptive_avg_pool{spatial}d"] if spatial > 1 else [])

    @aten(*names)
    def adaptive_average(g: Builder, x: Value, output_size: Any) -> Value:
        return _adaptive_average(g, x, spatial, each(output_size, spatial))

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
        return _max_pool_backward(g, grad, x, indices, spatial)

    @aten(f"adaptive_max_pool{spatial}d_backward")
    def adaptive_backward(g: Builder, grad: Value, x: Value, indices: Value) -> Value:
        return _max_pool_backward(g, grad, x, indices, spatial)

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
        kernel = each(kernel_size, spatial)
        return _average_backward(g, grad, x, kernel, stride, padding, count_include_pad, divisor_override)


for _spatial in (1, 2, 3):
    _register(_spatial)
for _spatial in (2, 3):
    _register_backward(_spatial)
