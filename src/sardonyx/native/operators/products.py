"""Products of matrices, and convolutions, which are products of weights and of what windows see of an image."""

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
    given,
    int_of,
    ints_of,
    lowers,
    need_floats,
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
    """The product over the last axis of the one and the last but one of the other, for each pair of matrices."""
    if left.dims[-1] != right.dims[-2]:
        raise CannotLower(f"a product of sizes {left.dims} and {right.dims} that may or may not fit")
    rank = max(len(left.dims), len(right.dims))
    rows = r.unsqueeze(r.stored(left), [len(left.dims) - 1])
    columns = r.unsqueeze(_turned(r, r.stored(right), turned=True), [len(right.dims) - 2])
    return r.product(rows, columns, [rank], dtype)


def _turned(r: Lowering, x: Value, turned: bool) -> Value:
    """A matrix, or each of several, the other way around if so."""
    rank = len(x.dims)
    return r.permute(x, [*range(rank - 2), rank - 1, rank - 2]) if turned else x


def _pair(r: Lowering, node: ir.Node) -> tuple[Value, Value]:
    left, right = given(r, node, 0), given(r, node, 1)
    if left.dtype not in MULTIPLIED or left.dtype != right.dtype:
        raise CannotLower(f"{node.op_type} of {left.dtype} and {right.dtype}")
    return left, right


def wide_type(dtype: ir.DataType) -> ir.DataType:
    """What sums are held in that more is done with before they are rounded."""
    return FLOAT if dtype in NARROW else dtype


@lowers("MatMul")
def _matmul(r: Lowering, node: ir.Node) -> None:
    """Vectors are matrices of one row, or of one column, and that axis is none of the result."""
    left, right = _pair(r, node)
    gone = []
    if len(left.dims) == 1:
        left, gone = r.unsqueeze(left, [0]), [-2]
    if len(right.dims) == 1:
        right, gone = r.unsqueeze(right, [1]), [*gone, -1]
    product = matrix_product(r, left, right, left.dtype)
    r.give(node.outputs[0], r.squeeze(product, [len(product.dims) + axis for axis in gone]))


@lowers("FusedMatMul", domain="com.microsoft")
def _fused_matmul(r: Lowering, node: ir.Node) -> None:
    left, right = _pair(r, node)
    if int_of(node, "transBatchA", 0) or int_of(node, "transBatchB", 0) or min(len(left.dims), len(right.dims)) < 2:
        raise CannotLower("FusedMatMul of vectors, or of batches the other way around")
    left, right = _turned(r, left, bool(int_of(node, "transA", 0))), _turned(r, right, bool(int_of(node, "transB", 0)))
    product = matrix_product(r, left, right, wide_type(left.dtype))
    r.give(node.outputs[0], to_type(r, scaled(r, product, float_of(node, "alpha", 1.0)), left.dtype))


@lowers("Gemm")
def _gemm(r: Lowering, node: ir.Node) -> None:
    left, right = _pair(r, node)
    alpha, beta, bias = float_of(node, "alpha", 1.0), float_of(node, "beta", 1.0), optional(r, node, 2)
    if left.dtype not in FLOATS and (alpha, beta) != (1.0, 1.0):
        raise CannotLower(f"Gemm of {left.dtype} with factors")
    left, right = _turned(r, left, bool(int_of(node, "transA", 0))), _turned(r, right, bool(int_of(node, "transB", 0)))
    result = scaled(r, matrix_product(r, left, right, wide_type(left.dtype)), alpha)
    if bias is not None and beta != 0.0:
        result = r.apply("add", result, scaled(r, widened(r, bias), beta))
    r.give(node.outputs[0], to_type(r, result, left.dtype))


# Convolutions


@dataclass(frozen=True)
class _Windows:
    """Along one axis of an image: how many windows there are, of how many places, and how both are spaced."""

    count: Dim
    size: Dim
    stride: int
    dilation: int
    before: Dim
    after: Dim


def _windows(r: Lowering, node: ir.Node, image: Dims, kernel: Sequence[Dim]) -> list[_Windows]:
    """The windows along each axis of an image."""
    rank = len(image)
    strides, dilations = (ints_of(node, name, [1] * rank) for name in ("strides", "dilations"))
    pads, auto = ints_of(node, "pads", [0] * (2 * rank)), text_of(node, "auto_pad", "NOTSET")
    if auto == "VALID":
        pads = [0] * (2 * rank)
    found = []
    for axis, size in enumerate(image):
        wide = dim_of((kernel[axis] - 1) * dilations[axis] + 1)
        before: Dim = pads[axis]
        after: Dim = pads[axis + rank]
        if auto.startswith("SAME"):
            before, after = _even(size, wide, strides[axis], lower=auto == "SAME_LOWER")
        room = dim_of(before + size + after - wide)
        r.require(room)
        count = dim_of(_floor(room, strides[axis]) + 1)
        found.append(_Windows(count, kernel[axis], strides[axis], dilations[axis], before, after))
    return found


def _even(size: Dim, wide: Dim, stride: int, *, lower: bool) -> tuple[Dim, Dim]:
    """How much is put before and after a size for one window every so many places, the odd one on one side."""
    last = dim_of((_floor(dim_of(size + stride - 1), stride) - 1) * stride)
    lacking = dim_of(last + wide - size)
    total = max(0, lacking) if isinstance(lacking, int) else dim_of(sympy.Max(0, lacking))
    before = _floor(dim_of(total + int(lower)), 2)
    return before, dim_of(total - before)


def _floor(size: Dim, by: int) -> Dim:
    if isinstance(size, int):
        return size // by
    return size if by == 1 else dim_of(FloorDiv(size, by))


def _padded(r: Lowering, x: Value, windows: Sequence[_Windows]) -> View:
    """An image with as much around it as windows reach."""
    for axis, along in enumerate(windows, 2):
        if along.before != 0 or along.after != 0:
            x = r.pad(x, axis, along.before, dim_of(along.before + x.dims[axis] + along.after), 0.0)
    return r.stored(x)


@lowers("Conv")
def _conv(r: Lowering, node: ir.Node) -> None:
    """A sum over the channels of a group and the places of a window; windows are axes that share an image's memory."""
    x, weights, bias = given(r, node, 0), given(r, node, 1), optional(r, node, 2)
    need_floats(x, node)
    windows = _windows(r, node, x.dims[2:], weights.dims[2:])
    _give(r, node, _convolved(r, _padded(r, x, windows), _filters(r, node, weights), windows), bias)


def _give(r: Lowering, node: ir.Node, product: Value, bias: Value | None) -> None:
    """A convolution plus its bias, in the type of its result."""
    if bias is not None:
        along = r.unsqueeze(widened(r, bias), [0, *range(2, len(product.dims))])
        product = r.apply("add", product, along)
    r.give(node.outputs[0], to_type(r, product, dtype_of(node.outputs[0])))


def _filters(r: Lowering, node: ir.Node, weights: Value) -> View:
    """Weights by groups: of each, its results, the channels that it sees, and the places of a window."""
    outputs, groups = weights.dims[0], int_of(node, "group", 1)
    if not isinstance(outputs, int) or outputs % groups:
        raise CannotLower(f"a convolution by weights of sizes {weights.dims} in {groups} groups")
    return r.stored(r.seen(r.stored(weights), (groups, outputs // groups, *weights.dims[1:])))


def _convolved(r: Lowering, image: View, weights: View, windows: Sequence[_Windows]) -> Value:
    batch, channels, *_ = image.dims
    groups, outputs, each, *kernel = weights.dims
    if dim_of(each * groups) != channels:
        raise CannotLower(f"a convolution of {channels} channels by weights of sizes {weights.dims}")
    counts = [along.count for along in windows]
    dims = (batch, groups, outputs, *counts, each, *kernel)
    of_batch, of_channel, *steps = image.strides
    moved = [dim_of(step * along.stride) for step, along in zip(steps, windows, strict=True)]
    within = [dim_of(step * along.dilation) for step, along in zip(steps, windows, strict=True)]
    seen = (of_batch, dim_of(of_channel * each), 0, *moved, of_channel, *within)
    of_group, of_output, *of_weight = weights.strides
    told = (0, of_group, of_output, *[0] * len(counts), *of_weight)
    product = r.product(
        View(weights.buffer, dims, told, weights.offset),
        View(image.buffer, dims, seen, image.offset),
        range(3 + len(counts), len(dims)),
        wide_type(image.dtype),
    )
    return r.seen(product, (batch, dim_of(groups * outputs), *counts))


@lowers("ConvTranspose")
def _conv_transpose(r: Lowering, node: ir.Node) -> None:
    """A convolution, by weights turned around, of the image with as many zeros between its places as strides say."""
    x, weights, bias = given(r, node, 0), given(r, node, 1), optional(r, node, 2)
    need_floats(x, node)
    strides = ints_of(node, "strides", [1] * (len(x.dims) - 2))
    windows = _transposed_windows(r, node, x.dims[2:], weights.dims[2:], strides)
    for axis, (stride, along) in enumerate(zip(strides, windows, strict=True), 2):
        apart = _with_zeros(r, x, axis, stride)
        x = r.pad(apart, axis, along.before, dim_of(along.count + (along.size - 1) * along.dilation), 0.0)
    _give(r, node, _convolved(r, r.stored(x), _turned_filters(r, node, weights), windows), bias)


def _with_zeros(r: Lowering, x: Value, axis: int, stride: int) -> Value:
    """An axis with zeros after each of its places."""
    if stride == 1:
        return x
    padded = r.pad(r.unsqueeze(x, [axis + 1]), axis + 1, 0, stride, 0.0)
    return r.seen(padded, (*x.dims[:axis], dim_of(x.dims[axis] * stride), *x.dims[axis + 1 :]))


def _turned_filters(r: Lowering, node: ir.Node, weights: Value) -> View:
    """Weights by groups, with windows from their last place to their first."""
    inputs, groups = weights.dims[0], int_of(node, "group", 1)
    if not isinstance(inputs, int) or inputs % groups:
        raise CannotLower(f"a convolution by weights of sizes {weights.dims} in {groups} groups")
    by_group = r.seen(r.stored(weights), (groups, inputs // groups, *weights.dims[1:]))
    turned = r.permute(by_group, [0, 2, 1, *range(3, len(by_group.dims))])
    for axis in range(3, len(turned.dims)):
        turned = r.cut(turned, axis, dim_of(turned.dims[axis] - 1), -1, turned.dims[axis])
    return r.stored(turned)


def _transposed_windows(
    r: Lowering, node: ir.Node, image: Dims, kernel: Sequence[Dim], strides: Sequence[int]
) -> list[_Windows]:
    """Along each axis, one window for each place of the result; what is padded there is less in the image."""
    rank = len(image)
    dilations = ints_of(node, "dilations", [1] * rank)
    pads, more = ints_of(node, "pads", [0] * (2 * rank)), ints_of(node, "output_padding", [0] * rank)
    wanted, auto = ints_of(node, "output_shape", []), text_of(node, "auto_pad", "NOTSET")
    found = []
    for axis, size in enumerate(image):
        reach = dim_of((kernel[axis] - 1) * dilations[axis])
        whole = dim_of(strides[axis] * (size - 1) + more[axis] + reach + 1)
        before = 0 if auto == "VALID" else pads[axis]
        count = dim_of(whole - before - (0 if auto == "VALID" else pads[axis + rank]))
        if wanted or auto.startswith("SAME"):
            count = wanted[axis - rank] if wanted else dim_of(size * strides[axis])
            before = _first_half(dim_of(whole - count), upper=auto == "SAME_UPPER")
        r.require(dim_of(count - 1))
        found.append(_Windows(count, kernel[axis], 1, dilations[axis], dim_of(reach - before), 0))
    return found


def _first_half(total: Dim, *, upper: bool) -> int:
    """What of some padding is before an axis; the odd one is after it, or before it."""
    if not isinstance(total, int):
        raise CannotLower("ConvTranspose to fixed sizes from symbolic ones")
    return max(0, total) // 2 if upper else -(-max(0, total) // 2)
