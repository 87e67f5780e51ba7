"""Resizing of images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import torch

from sardonyx import dtypes
from sardonyx.errors import Unsupported
from sardonyx.sizes import Dim, Dims
from sardonyx.translate.aten.indexing import element_count
from sardonyx.translate.builder import Builder
from sardonyx.translate.table import aten

Value = ir.Value


def _resize(
    g: Builder, x: Value, mode: str, align_corners: bool | None, scales: Sequence[float | None], size: Dims
) -> Value:
    """Resize the axes of `x` after the second."""
    if mode == "nearest":
        transform: str | None = "asymmetric"
    else:
        transform = "align_corners" if align_corners else "half_pixel" if mode == "cubic" else "pytorch_half_pixel"
    if any(scale is not None for scale in scales):
        # torch maps positions by the given scale, not by the ratio of the sizes, and so must ONNX.
        scales = _scales(g.dims(x)[2:], size, scales) if mode == "nearest" else scales
        factors = map(_factor, g.dims(x)[2:], size, scales)
        sizes: tuple[Value | None, ...] = (g.constant(np.array([1.0, 1.0, *factors], dtype=np.float32)),)
    else:
        sizes = (None, g.shape_value([*g.dims(x)[:2], *size]))
    return g.node(
        "Resize",
        (x, None, *sizes),
        mode=mode,
        coordinate_transformation_mode=transform,
        nearest_mode="floor" if mode == "nearest" else None,
        cubic_coeff_a=-0.75 if mode == "cubic" else None,
    )


def _scales(old: Dims, new: Dims, scales: Sequence[float | None]) -> list[float | None]:
    """Return the scales by which torch finds the nearest elements: exact ratios for unchanged or doubled sizes."""
    pairs = zip(old, new, scales, strict=True)
    return [1.0 if after == before else 2.0 if after == 2 * before else scale for before, after, scale in pairs]


def _factor(old: Dim, new: Dim, scale: float | None) -> float:
    if isinstance(old, int) and isinstance(new, int):
        factor = new / old if scale is None else float(scale)
        if np.floor(np.float32(factor) * np.float32(old)) != new:
            raise Unsupported("resizing by a scale that rounds to another size in single precision")
    elif scale is None or (factor := float(scale)) * _EXACT_FRACTION % 1:
        raise Unsupported(f"resizing of a symbolic size by {scale}, whose multiples single precision may round")
    return factor


def _linear(g: Builder, x: Value, align_corners: bool, scales: Sequence[float | None]) -> Value:
    """Copy axes whose size is unchanged, as torch does for any scale; the others are moved behind them.

    A single axis gets another of size one: ONNX Runtime treats a line and its channels as an image, and reads the
    next channel with a weight of zero, which propagates NaN and infinities.
    """
    old, new, rank = g.dims(x), g.like(g.out), g.rank(x)
    same = [axis for axis in range(2, rank) if old[axis] == new[axis]]
    moved = [axis for axis in range(2, rank) if axis not in same]
    if not moved:
        return x
    if not same and len(moved) > 1:
        return _resize(g, x, "linear", align_corners, scales, new[2:])
    order, alone = [0, 1, *same, *moved], len(moved) == 1
    lead = [old[0], element_count([old[axis] for axis in (1, *same)])]
    lines = g.reshape(g.transpose(x, order), [*lead, *[1] * alone, *(old[axis] for axis in moved)])
    size = (*[1] * alone, *(new[axis] for axis in moved))
    chosen = [*[None] * alone, *(scales[axis - 2] for axis in moved)] if scales else []
    y = g.shaped(_resize(g, lines, "linear", align_corners, chosen, size), [*lead, *size])
    return g.transpose(g.reshape(y, [new[axis] for axis in order]), [order.index(axis) for axis in range(rank)])


_EXACT_FRACTION = 64
"""Products of sizes and multiples of 1/64 are exact in single precision for all realistic images."""


@aten("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d")
def upsample_nearest(g: Builder, x: Value, size: Sequence[Dim], *scales: float | None) -> Value:
    return _resize(g, x, "nearest", None, scales, g.like(g.out)[2:])


@aten("upsample_bilinear2d", "upsample_linear1d", "upsample_trilinear3d")
def upsample_linear(g: Builder, x: Value, size: Sequence[Dim], align_corners: bool, *scales: float | None) -> Value:
    if g.dtype(x) == torch.uint8 and g.rank(x) == 4:
        return _resize_bytes(g, x, "upsample_bilinear2d", align_corners, scales)
    return _linear(g, x, align_corners, scales)


@aten("upsample_bicubic2d")
def upsample_bicubic(g: Builder, x: Value, size: Sequence[Dim], align_corners: bool, *scales: float | None) -> Value:
    if g.dtype(x) == torch.uint8:
        return _resize_bytes(g, x, "upsample_bicubic2d", align_corners, scales)
    if g.dims(x) == g.like(g.out) and not align_corners and any(scale not in (None, 1) for scale in scales):
        # A scale that leaves all sizes unchanged shifts positions, but ONNX Runtime would copy the image.
        return _map_axes(g, x, _matrices("upsample_bicubic2d", g.dims(x), g.dims(x), False, scales))
    return _resize(g, x, "cubic", align_corners, scales, g.like(g.out)[2:])


@aten("upsample_nearest1d.vec", "upsample_nearest2d.vec", "upsample_nearest3d.vec")
def upsample_nearest_vec(
    g: Builder, x: Value, size: Sequence[Dim] | None, scale_factors: Sequence[float] | None
) -> Value:
    return upsample_nearest(g, x, size or (), *(scale_factors or ()))


@aten("upsample_bilinear2d.vec", "upsample_linear1d.vec", "upsample_trilinear3d.vec")
def upsample_linear_vec(
    g: Builder, x: Value, size: Sequence[Dim] | None, align_corners: bool, scale_factors: Sequence[float] | None
) -> Value:
    return upsample_linear(g, x, size or (), align_corners, *(scale_factors or ()))


@aten("upsample_bicubic2d.vec")
def upsample_bicubic_vec(
    g: Builder, x: Value, size: Sequence[Dim] | None, align_corners: bool, scale_factors: Sequence[float] | None
) -> Value:
    return upsample_bicubic(g, x, size or (), align_corners, *(scale_factors or ()))


# Resizing of an axis as a matrix


@dataclass(frozen=True)
class _Matrix:
    """The resizing of one axis: the weight of each element in each result, and whether torch reads it for that.

    It reads some elements of weight zero, which matters if they are infinite or NaN.
    """

    weights: torch.Tensor
    read: torch.Tensor

    @property
    def transposed(self) -> _Matrix:
        return _Matrix(self.weights.T, self.read.T)

    @property
    def taps(self) -> int:
        """Return the maximum number of elements read for a result."""
        return int(self.read.sum(0).max())

    def places(self) -> torch.Tensor:
        """Return, for each tap, the element that each result reads; if it reads fewer, one of them again."""
        order = self.read.int().argsort(dim=0, descending=True, stable=True)[: self.taps]
        return torch.where(self.read.gather(0, order), order, order[:1])

    def factors(self) -> torch.Tensor:
        """Return the weights of the taps, zero for elements of an earlier tap."""
        places = self.places()
        first = torch.ones_like(places[:1], dtype=torch.bool)
        return self.weights.gather(0, places) * torch.cat([first, places[1:] != places[:1]])


def _matrices(name: str, old: Dims, new: Dims, align_corners: bool, scales: Sequence[float | None]) -> list[_Matrix]:
    """Return, for each axis of an image, torch's result for the unit vectors along it."""
    resize = getattr(torch.ops.aten, name).default
    axis_scales = list(scales) or [None, None]
    matrices = []
    for before, after, scale in zip(old[2:], new[2:], axis_scales, strict=True):
        if not isinstance(before, int) or not isinstance(after, int):
            raise Unsupported("resizing of a symbolic size by a matrix")
        units = torch.eye(before, dtype=torch.float64)
        # Two columns, although one suffices: for images of one column, torch 2.13 returns the first row everywhere.
        weights, probed = (
            resize(lines.reshape(1, before, before, 1).repeat(1, 1, 1, 2), [after, 2], align_corners, scale, None)
            for lines in (units, units.masked_fill(units > 0, math.nan))
        )
        matrices.append(_Matrix(weights[0, :, :, 0], probed[0, :, :, 0].isnan()))
    return matrices


def _constant(g: Builder, array: torch.Tensor, dtype: torch.dtype) -> Value:
    return g.constant(dtypes.to_array(array.to(dtype)), dtypes.to_onnx(dtype))


def _resize_bytes(g: Builder, x: Value, name: str, align_corners: bool, scales: Sequence[float | None]) -> Value:
    """Resize bytes in fixed-point arithmetic, first along the width, rounding to bytes in between."""
    old, new = g.dims(x), g.like(g.out)
    matrices = _matrices(name, old, new, align_corners, scales)
    for axis in (3, 2):
        if old[axis] != new[axis]:
            x = _resize_axis_fixed_point(g, x, axis, matrices[axis - 2].weights)
    return x


def _resize_axis_fixed_point(g: Builder, x: Value, axis: int, matrix: torch.Tensor) -> Value:
    """Use torch's 16-bit integers: weights with as many binary digits as the largest of them allows."""
    digits = next((p for p in range(22) if int(0.5 + matrix.max().item() * 2 ** (p + 1)) >= 2**15), 22)
    weights = (matrix * 2**digits + matrix.sign() / 2).trunc()
    total = _multiply_integer(g, x, axis, weights)
    rounded = g.Div(g.Add(total, _integer(g, 2 ** (digits - 1))), _integer(g, 2**digits))
    return g.cast(g.Clip(rounded, _integer(g, 0), _integer(g, 255)), torch.uint8)


def _integer(g: Builder, value: int) -> Value:
    return g.scalar(value, torch.int32)


_MOST_TAPS = 4


def _multiply_integer(g: Builder, x: Value, axis: int, weights: torch.Tensor) -> Value:
    """Multiply each line along an axis by the integer matrix: tap by tap if few elements count, as for cubic."""
    matrix = _Matrix(weights, weights != 0)
    if matrix.taps > _MOST_TAPS:
        return g.cast(_map_axis(g, g.cast(x, torch.float64), axis, _constant(g, weights, torch.float64)), torch.int32)
    return _multiply_taps(g, g.cast(x, torch.int32), axis, matrix)


def _multiply_taps(g: Builder, x: Value, axis: int, matrix: _Matrix) -> Value:
    """Multiply each line along an axis by the matrix, reading only the elements that torch reads.

    A product with the whole matrix would propagate NaN and infinities to results that do not contain them.
    """
    dtype = g.dtype(x)
    dims = [matrix.weights.shape[1] if i == axis else dim for i, dim in enumerate(g.dims(x))]
    total = g.scalar(0, dtype)
    for place, factor in zip(matrix.places(), matrix.factors(), strict=True):
        gathered = g.shaped(g.Gather(x, _constant(g, place, torch.int64), axis=axis), dims)
        factors = _constant(g, factor.reshape([-1] + [1] * (len(dims) - 1 - axis)), dtype)
        total = g.Add(total, g.Mul(gathered, factors))
    return g.shaped(total, dims)


def _multiply_windows(g: Builder, x: Value, axis: int, matrix: _Matrix) -> Value:
    """The same with an axis of taps, which is summed."""
    places, factors, dims = matrix.places().T, matrix.factors().T, g.dims(x)
    windows = [*dims[:axis], *places.shape, *dims[axis + 1 :]]
    gathered = g.shaped(g.Gather(x, _constant(g, places, torch.int64), axis=axis), windows)
    spread = factors.reshape([*places.shape] + [1] * (len(dims) - 1 - axis))
    products = g.shaped(g.Mul(gathered, _constant(g, spread, g.dtype(x))), windows)
    summed = g.ReduceSum(products, g.ints([axis + 1]), keepdims=0)
    return g.shaped(summed, [*dims[:axis], len(places), *dims[axis + 1 :]])


def _map_axis(g: Builder, x: Value, axis: int, matrix: Value) -> Value:
    """Multiply every line along an axis by a matrix: apply a linear map to one axis."""
    rank = g.rank(x)
    order = [*(i for i in range(rank) if i != axis), axis]
    dims = g.dims(x)
    line = g.MatMul(g.transpose(x, order), matrix)
    g.shaped(line, [dims[i] for i in order[:-1]] + [g.dims(matrix)[1]])
    return g.transpose(line, [order.index(i) for i in range(rank)])


# Antialiasing


def _register_antialiased(name: str) -> None:
    @aten(name)
    def antialiased(
        g: Builder,
        x: Value,
        size: Sequence[Dim],
        align_corners: bool,
        scale_h: float | None = None,
        scale_w: float | None = None,
    ) -> Value:
        scales = [scale_h, scale_w]
        if g.dtype(x) == torch.uint8:
            return _resize_bytes(g, x, name, align_corners, scales)
        return _map_axes(g, x, _matrices(name, g.dims(x), g.like(g.out), align_corners, scales))

    @aten(f"{name}_backward")
    def antialiased_backward(
        g: Builder,
        grad: Value,
        size: Sequence[Dim],
        input_size: Sequence[Dim],
        align_corners: bool,
        scale_h: float | None = None,
        scale_w: float | None = None,
    ) -> Value:
        there = _matrices(name, tuple(input_size), g.dims(grad), align_corners, [scale_h, scale_w])
        return _map_axes(g, grad, [matrix.transposed for matrix in there])


def _map_axes(g: Builder, x: Value, matrices: Sequence[_Matrix]) -> Value:
    """Multiply each axis of an image by a matrix."""
    total = g.cast(x, dtypes.accumulation_dtype(g.dtype(x)))
    for axis, matrix in enumerate(matrices, 2):
        total = (_multiply_taps if matrix.taps <= _MOST_TAPS else _multiply_windows)(g, total, axis, matrix)
    return g.cast(total, g.dtype(x))


for _name in ("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"):
    _register_antialiased(_name)
