"""Convolution, pooling, resizing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from sardonyx.translate.builder import Builder
from sardonyx.translate.errors import Unsupported
from sardonyx.translate.sizes import Dim
from sardonyx.translate.table import aten

Value = ir.Value


def _each(values: Any, count: int) -> list[int]:
    """A torch size argument for every spatial axis: one number stands for all."""
    values = [values] if isinstance(values, int) else list(values)
    return values * count if len(values) == 1 else values


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
        "strides": _each(stride, spatial),
        "pads": _each(padding, spatial) * 2,
        "dilations": _each(dilation, spatial),
        "group": groups,
    }
    batched = g.rank(x) == spatial + 2
    source = x if batched else g.unsqueeze(x, [0])
    if transposed:
        extra = _each(output_padding, spatial)
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
    return convolution(g, x, weight, bias, _each(stride, 1), _each(padding, 1), _each(dilation, 1), False, [0], groups)


def _batched(g: Builder, x: Value, spatial: int) -> tuple[Value, bool]:
    return (x, True) if g.rank(x) == spatial + 2 else (g.unsqueeze(x, [0]), False)


def _unbatched(g: Builder, y: Value, batched: bool, like: torch.Tensor) -> Value:
    return y if batched else g.squeeze(g.shaped(y, [1, *g.like(like)]), [0])


def _max_pool(
    g: Builder, x: Value, spatial: int, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool, indices: bool
) -> tuple[Value, Value | None]:
    like = g.out[0] if isinstance(g.out, (tuple, list)) else g.out
    source, batched = _batched(g, x, spatial)
    kernel = _each(kernel, spatial)
    attributes = {
        "kernel_shape": kernel,
        "strides": _each(stride, spatial) if stride else kernel,
        "pads": _each(padding, spatial) * 2,
        "dilations": _each(dilation, spatial),
        "ceil_mode": int(ceil),
    }
    if not indices:
        return _unbatched(g, g.MaxPool(source, **attributes), batched, like), None
    y, index = g.MaxPool(source, outputs=2, **attributes)
    index.type = ir.TensorType(ir.DataType.INT64)
    return _unbatched(g, y, batched, like), _plane_index(g, source, index, spatial, batched, like)


def _plane_index(g: Builder, x: Value, index: Value, spatial: int, batched: bool, like: torch.Tensor) -> Value:
    """ONNX counts positions over the whole tensor, torch within one plane."""
    plane: Dim = 1
    for dim in g.dims(x)[-spatial:]:
        plane = plane * dim
    index = g.Mod(index, g.scalar(plane, torch.int64))
    return _unbatched(g, index, batched, like)


def _register_max_pool(spatial: int) -> None:
    @aten(f"max_pool{spatial}d_with_indices")
    def with_indices(
        g: Builder, x: Value, kernel_size: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
    ) -> tuple[Value, Value | None]:
        wanted = g.reads_output(1)
        return _max_pool(g, x, spatial, kernel_size, stride, padding, dilation, ceil_mode, wanted)

    @aten(f"max_pool{spatial}d")
    def plain(
        g: Builder, x: Value, kernel_size: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
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
        if divisor_override is not None or (ceil_mode and count_include_pad):
            raise Unsupported("average pooling with a divisor override, or with ceil_mode over padding")
        source, batched = _batched(g, x, spatial)
        kernel = _each(kernel_size, spatial)
        y = g.AveragePool(
            source,
            kernel_shape=kernel,
            strides=_each(stride, spatial) if stride else kernel,
            pads=_each(padding, spatial) * 2,
            ceil_mode=int(ceil_mode),
            count_include_pad=int(count_include_pad),
        )
        return _unbatched(g, y, batched, g.out)

    @aten(f"_adaptive_avg_pool{spatial}d", f"adaptive_avg_pool{spatial}d")
    def adaptive_average(g: Builder, x: Value, output_size: Any) -> Value:
        return _adaptive(g, x, spatial, _each(output_size, spatial), "ReduceMean", "AveragePool")


for _spatial in (1, 2, 3):
    _register_max_pool(_spatial)


def _adaptive(g: Builder, x: Value, spatial: int, size: Sequence[Dim], reduce_type: str, pool_type: str) -> Value:
    if all(dim == 1 for dim in size):
        return g.node(reduce_type, [x, g.ints(list(range(-spatial, 0)))], keepdims=1)
    sides = g.dims(x)[-spatial:]
    if list(sides) == list(size):
        return x
    if not all(isinstance(a, int) and isinstance(b, int) and a % b == 0 for a, b in zip(sides, size, strict=True)):
        raise Unsupported("adaptive pooling whose windows are of different sizes")
    source, batched = _batched(g, x, spatial)
    kernel = [a // b for a, b in zip(sides, size, strict=True)]
    return _unbatched(g, g.node(pool_type, [source], kernel_shape=kernel, strides=kernel), batched, g.out)


def _resize(g: Builder, x: Value, mode: str, align_corners: bool | None, scales: Sequence[float | None]) -> Value:
    if mode == "nearest":
        transform: str | None = "asymmetric"
    else:
        transform = "align_corners" if align_corners else "half_pixel" if mode == "cubic" else "pytorch_half_pixel"
    if any(scale is not None for scale in scales):
        # torch maps positions by the given scale, not by the ratio of the sizes: say it to ONNX in the same way.
        given = g.constant(dtypes_floats([1.0, 1.0, *[1.0 if s is None else float(s) for s in scales]]))
        sizes = [int(d * s) if isinstance(d, int) else None for d, s in zip(g.dims(x)[2:], map(float, scales), strict=True)]
        if list(g.like(g.out)[2:]) != sizes:
            raise Unsupported("resizing by a scale over a symbolic size")
        arguments: tuple[Value | None, ...] = (x, None, given)
    else:
        arguments = (x, None, None, g.shape_value(g.like(g.out)))
    return g.node(
        "Resize",
        arguments,
        mode=mode,
        coordinate_transformation_mode=transform,
        nearest_mode="floor" if mode == "nearest" else None,
        cubic_coeff_a=-0.75 if mode == "cubic" else None,
    )


def dtypes_floats(values: Sequence[float]) -> Any:
    return torch.tensor(values, dtype=torch.float32).numpy()


@aten("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d")
def upsample_nearest(g: Builder, x: Value, size: Sequence[Dim], *scales: float | None) -> Value:
    return _resize(g, x, "nearest", None, scales)


@aten("upsample_bilinear2d", "upsample_linear1d", "upsample_trilinear3d")
def upsample_linear(g: Builder, x: Value, size: Sequence[Dim], align_corners: bool, *scales: float | None) -> Value:
    return _resize(g, x, "linear", align_corners, scales)


@aten("upsample_bicubic2d")
def upsample_bicubic(g: Builder, x: Value, size: Sequence[Dim], align_corners: bool, *scales: float | None) -> Value:
    return _resize(g, x, "cubic", align_corners, scales)
