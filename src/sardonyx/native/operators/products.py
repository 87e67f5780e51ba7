"""Matrix products and convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir
import sympy
from torch.utils._sympy.functions import FloorDiv

from sardonyx.native.region import CannotLower, Lowering, dtype_of
from sardonyx.native.table import (
    FLOAT,
    FLOATS,
    INT64,
    NARROW,
    float_of,
    int_of,
    ints_of,
    lowers,
    need_floats,
    operand,
    optional,
    scaled,
    text_of,
    to_type,
    widened,
)
from sardonyx.native.values import Value, View, dim_of
from sardonyx.sizes import Dim, Dims

MULTIPLIED = FLOATS | {INT64, ir.DataType.INT32, ir.DataType.UINT32, ir.DataType.UINT64}


def matrix_product(r: Lowering, left: Value, right: Value, dtype: ir.DataType) -> Value:
    """Return the batched matrix product."""
    if left.dims[-1] != right.dims[-2]:
        raise CannotLower(f"a product of sizes {left.dims} and {right.dims} whose inner sizes may differ")
    rank = max(len(left.dims), len(right.dims))
    rows = r.unsqueeze(r.stored(left), [len(left.dims) - 1])
    columns = r.unsqueeze(_transpose_if(r, r.stored(right), transpose=True), [len(right.dims) - 2])
    return r.product(rows, columns, [rank], dtype)


def _transpose_if(r: Lowering, x: Value, transpose: bool) -> Value:
    rank = len(x.dims)
    return r.permute(x, [*range(rank - 2), rank - 1, rank - 2]) if transpose else x


def _pair(r: Lowering, node: ir.Node) -> tuple[Value, Value]:
    left, right = operand(r, node, 0), operand(r, node, 1)
    if left.dtype not in MULTIPLIED or left.dtype != right.dtype:
        raise CannotLower(f"{node.op_type} of {left.dtype} and {right.dtype}")
    return left, right


def wide_type(dtype: ir.DataType) -> ir.DataType:
    """Return the accumulator type for results that are computed with further before rounding."""
    return FLOAT if dtype in NARROW else dtype


@lowers("MatMul")
def _matmul(r: Lowering, node: ir.Node) -> None:
    """Vectors become matrices of one row or column, and that axis is removed from the result."""
    left, right = _pair(r, node)
    removed = []
    if len(left.dims) == 1:
        left, removed = r.unsqueeze(left, [0]), [-2]
    if len(right.dims) == 1:
        right, removed = r.unsqueeze(right, [1]), [*removed, -1]
    product = matrix_product(r, left, right, left.dtype)
    r.define(node.outputs[0], r.squeeze(product, [len(product.dims) + axis for axis in removed]))


@lowers("FusedMatMul", domain="com.microsoft")
def _fused_matmul(r: Lowering, node: ir.Node) -> None:
    left, right = _pair(r, node)
    if int_of(node, "transBatchA", 0) or int_of(node, "transBatchB", 0) or min(len(left.dims), len(right.dims)) < 2:
        raise CannotLower("FusedMatMul of vectors, or with transBatch")
    left, right = (
        _transpose_if(r, left, bool(int_of(node, "transA", 0))),
        _transpose_if(r, right, bool(int_of(node, "transB", 0))),
    )
    product = matrix_product(r, left, right, wide_type(left.dtype))
    r.define(node.outputs[0], to_type(r, scaled(r, product, float_of(node, "alpha", 1.0)), left.dtype))


@lowers("Gemm")
def _gemm(r: Lowering, node: ir.Node) -> None:
    left, right = _pair(r, node)
    alpha, beta, bias = float_of(node, "alpha", 1.0), float_of(node, "beta", 1.0), optional(r, node, 2)
    if left.dtype not in FLOATS and (alpha, beta) != (1.0, 1.0):
        raise CannotLower(f"Gemm of {left.dtype} with alpha or beta")
    left, right = (
        _transpose_if(r, left, bool(int_of(node, "transA", 0))),
        _transpose_if(r, right, bool(int_of(node, "transB", 0))),
    )
    result = scaled(r, matrix_product(r, left, right, wide_type(left.dtype)), alpha)
    if bias is not None and beta != 0.0:
        result = r.apply("add", result, scaled(r, widened(r, bias), beta))
    r.define(node.outputs[0], to_type(r, result, left.dtype))


# Convolutions


@dataclass(frozen=True)
class _Windows:
    """Count, size and spacing of windows along one axis of an image."""

    count: Dim
    size: Dim
    stride: int
    dilation: int
    before: Dim
    after: Dim


def _windows(r: Lowering, node: ir.Node, image: Dims, kernel: Sequence[Dim]) -> list[_Windows]:
    rank = len(image)
    strides, dilations = (ints_of(node, name, [1] * rank) for name in ("strides", "dilations"))
    pads, auto_pad = ints_of(node, "pads", [0] * (2 * rank)), text_of(node, "auto_pad", "NOTSET")
    if auto_pad == "VALID":
        pads = [0] * (2 * rank)
    windows = []
    for axis, size in enumerate(image):
        extent = dim_of((kernel[axis] - 1) * dilations[axis] + 1)
        before: Dim = pads[axis]
        after: Dim = pads[axis + rank]
        if auto_pad.startswith("SAME"):
            before, after = _same_padding(size, extent, strides[axis], lower=auto_pad == "SAME_LOWER")
        room = dim_of(before + size + after - extent)
        r.require(room)
        count = dim_of(_floor_div(room, strides[axis]) + 1)
        windows.append(_Windows(count, kernel[axis], strides[axis], dilations[axis], before, after))
    return windows


def _same_padding(size: Dim, extent: Dim, stride: int, *, lower: bool) -> tuple[Dim, Dim]:
    """Return the padding before and after an axis for auto_pad=SAME."""
    last = dim_of((_floor_div(dim_of(size + stride - 1), stride) - 1) * stride)
    missing = dim_of(last + extent - size)
    total = max(0, missing) if isinstance(missing, int) else dim_of(sympy.Max(0, missing))
    before = _floor_div(dim_of(total + int(lower)), 2)
    return before, dim_of(total - before)


def _floor_div(size: Dim, by: int) -> Dim:
    if isinstance(size, int):
        return size // by
    return size if by == 1 else dim_of(FloorDiv(size, by))


def _pad_image(r: Lowering, x: Value, windows: Sequence[_Windows]) -> View:
    for axis, along in enumerate(windows, 2):
        if along.before != 0 or along.after != 0:
            x = r.pad(x, axis, along.before, dim_of(along.before + x.dims[axis] + along.after), 0.0)
    return r.stored(x)


@lowers("Conv")
def _conv(r: Lowering, node: ir.Node) -> None:
    """Sum over the channels of a group and the positions of a window; windows are axes sharing the image's memory."""
    x, weights, bias = operand(r, node, 0), operand(r, node, 1), optional(r, node, 2)
    need_floats(x, node)
    windows = _windows(r, node, x.dims[2:], weights.dims[2:])
    _define_result(r, node, _convolve(r, _pad_image(r, x, windows), _filters(r, node, weights), windows), bias)


def _define_result(r: Lowering, node: ir.Node, product: Value, bias: Value | None) -> None:
    """Define a convolution plus its bias, in the type of its result."""
    if bias is not None:
        along = r.unsqueeze(widened(r, bias), [0, *range(2, len(product.dims))])
        product = r.apply("add", product, along)
    r.define(node.outputs[0], to_type(r, product, dtype_of(node.outputs[0])))


def _filters(r: Lowering, node: ir.Node, weights: Value) -> View:
    """Return weights by group: results, input channels, and window positions."""
    outputs, groups = weights.dims[0], int_of(node, "group", 1)
    if not isinstance(outputs, int) or outputs % groups:
        raise CannotLower(f"a convolution with weights of sizes {weights.dims} in {groups} groups")
    return r.stored(r.view_as(r.stored(weights), (groups, outputs // groups, *weights.dims[1:])))


def _convolve(r: Lowering, image: View, weights: View, windows: Sequence[_Windows]) -> Value:
    batch, channels, *_ = image.dims
    groups, outputs, group_channels, *kernel = weights.dims
    if dim_of(group_channels * groups) != channels:
        raise CannotLower(f"a convolution of {channels} channels with weights of sizes {weights.dims}")
    counts = [along.count for along in windows]
    dims = (batch, groups, outputs, *counts, group_channels, *kernel)
    of_batch, of_channel, *steps = image.strides
    window_strides = [dim_of(step * along.stride) for step, along in zip(steps, windows, strict=True)]
    dilated_strides = [dim_of(step * along.dilation) for step, along in zip(steps, windows, strict=True)]
    image_strides = (of_batch, dim_of(of_channel * group_channels), 0, *window_strides, of_channel, *dilated_strides)
    of_group, of_output, *of_weight = weights.strides
    weight_strides = (0, of_group, of_output, *[0] * len(counts), *of_weight)
    product = r.product(
        View(weights.buffer, dims, weight_strides, weights.offset),
        View(image.buffer, dims, image_strides, image.offset),
        range(3 + len(counts), len(dims)),
        wide_type(image.dtype),
    )
    return r.view_as(product, (batch, dim_of(groups * outputs), *counts))


@lowers("ConvTranspose")
def _conv_transpose(r: Lowering, node: ir.Node) -> None:
    """Convolve the image, dilated by the strides, with flipped weights."""
    x, weights, bias = operand(r, node, 0), operand(r, node, 1), optional(r, node, 2)
    need_floats(x, node)
    strides = ints_of(node, "strides", [1] * (len(x.dims) - 2))
    windows = _transposed_windows(r, node, x.dims[2:], weights.dims[2:], strides)
    for axis, (stride, along) in enumerate(zip(strides, windows, strict=True), 2):
        dilated = _dilate(r, x, axis, stride)
        x = r.pad(dilated, axis, along.before, dim_of(along.count + (along.size - 1) * along.dilation), 0.0)
    _define_result(r, node, _convolve(r, r.stored(x), _flipped_filters(r, node, weights), windows), bias)


def _dilate(r: Lowering, x: Value, axis: int, stride: int) -> Value:
    if stride == 1:
        return x
    padded = r.pad(r.unsqueeze(x, [axis + 1]), axis + 1, 0, stride, 0.0)
    return r.view_as(padded, (*x.dims[:axis], dim_of(x.dims[axis] * stride), *x.dims[axis + 1 :]))


def _flipped_filters(r: Lowering, node: ir.Node, weights: Value) -> View:
    inputs, groups = weights.dims[0], int_of(node, "group", 1)
    if not isinstance(inputs, int) or inputs % groups:
        raise CannotLower(f"a convolution with weights of sizes {weights.dims} in {groups} groups")
    by_group = r.view_as(r.stored(weights), (groups, inputs // groups, *weights.dims[1:]))
    flipped = r.permute(by_group, [0, 2, 1, *range(3, len(by_group.dims))])
    for axis in range(3, len(flipped.dims)):
        flipped = r.slice(flipped, axis, dim_of(flipped.dims[axis] - 1), -1, flipped.dims[axis])
    return r.stored(flipped)


def _transposed_windows(
    r: Lowering, node: ir.Node, image: Dims, kernel: Sequence[Dim], strides: Sequence[int]
) -> list[_Windows]:
    """Return one window per element of the result along each axis; padding of the result crops the image."""
    rank = len(image)
    dilations = ints_of(node, "dilations", [1] * rank)
    pads, output_padding = ints_of(node, "pads", [0] * (2 * rank)), ints_of(node, "output_padding", [0] * rank)
    output_shape, auto_pad = ints_of(node, "output_shape", []), text_of(node, "auto_pad", "NOTSET")
    windows = []
    for axis, size in enumerate(image):
        reach = dim_of((kernel[axis] - 1) * dilations[axis])
        full_size = dim_of(strides[axis] * (size - 1) + output_padding[axis] + reach + 1)
        before = 0 if auto_pad == "VALID" else pads[axis]
        count = dim_of(full_size - before - (0 if auto_pad == "VALID" else pads[axis + rank]))
        if output_shape or auto_pad.startswith("SAME"):
            count = output_shape[axis - rank] if output_shape else dim_of(size * strides[axis])
            before = _padding_before(dim_of(full_size - count), upper=auto_pad == "SAME_UPPER")
        r.require(dim_of(count - 1))
        windows.append(_Windows(count, kernel[axis], 1, dilations[axis], dim_of(reach - before), 0))
    return windows


def _padding_before(total: Dim, *, upper: bool) -> int:
    """Return the padding before an axis; an odd element goes after it if `upper`, else before."""
    if not isinstance(total, int):
        raise CannotLower("ConvTranspose to fixed sizes from symbolic ones")
    return max(0, total) // 2 if upper else -(-max(0, total) // 2)
