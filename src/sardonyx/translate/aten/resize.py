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
from sardonyx.translate.aten.indexing import count_of
from sardonyx.translate.builder import Builder
from sardonyx.translate.table import aten

Value = ir.Value


def _resize(
    g: Builder, x: Value, mode: str, align_corners: bool | None, scales: Sequence[float | None], size: Dims
) -> Value:
    """`x` with its axes after the second of other sizes."""
    if mode == "nearest":
        transform: str | None = "asymmetric"
    else:
        transform = "align_corners" if align_corners else "half_pixel" if mode == "cubic" else "pytorch_half_pixel"
    if any(scale is not None for scale in scales):
        # torch maps positions by the given scale, not by the ratio of the sizes: say it to ONNX in the same way.
        factors = map(_factor, g.dims(x)[2:], size, _used(g.dims(x)[2:], size, scales) if mode == "nearest" else scales)
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


def _used(old: Dims, new: Dims, scales: Sequence[float | None]) -> list[float | None]:
    """The scales by which torch finds the nearest elements: those of the sizes where a size stays or is doubled."""
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
    """Axes of the same size are copied, as torch does whatever the scale; the others are moved behind them.

    One axis alone gets another of size one: ONNX Runtime takes a line and its channels for an image, and reads the
    next channel with a weight of zero, which carries NaN and infinities over.
    """
    old, new, rank = g.dims(x), g.like(g.out), g.rank(x)
    same = [axis for axis in range(2, rank) if old[axis] == new[axis]]
    moved = [axis for axis in range(2, rank) if axis not in same]
    if not moved:
        return x
    if not same and len(moved) > 1:
        return _resize(g, x, "linear", align_corners, scales, new[2:])
    order, alone = [0, 1, *same, *moved], len(moved) == 1
    lead = [old[0], count_of([old[axis] for axis in (1, *same)])]
    lines = g.reshape(g.transpose(x, order), [*lead, *[1] * alone, *(old[axis] for axis in moved)])
    size = (*[1] * alone, *(new[axis] for axis in moved))
    chosen = [*[None] * alone, *(scales[axis - 2] for axis in moved)] if scales else []
    y = g.shaped(_resize(g, lines, "linear", align_corners, chosen, size), [*lead, *size])
    return g.transpose(g.reshape(y, [new[axis] for axis in order]), [order.index(axis) for axis in range(rank)])


_EXACT_FRACTION = 64
"""Products of sizes and of multiples of 1/64 are exact in single precision for all images there are."""


@aten("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d")
def upsample_nearest(g: Builder, x: Value, size: Sequence[Dim], *scales: float | None) -> Value:
    return _resize(g, x, "nearest", None, scales, g.like(g.out)[2:])


@aten("upsample_bilinear2d", "upsample_linear1d", "upsample_trilinear3d")
def upsample_linear(g: Builder, x: Value, size: Sequence[Dim], align_corners: bool, *scales: float | None) -> Value:
    if g.dtype(x) == torch.uint8 and g.rank(x) == 4:
        return _bytes_resized(g, x, "upsample_bilinear2d", align_corners, scales)
    return _linear(g, x, align_corners, scales)


@aten("upsample_bicubic2d")
def upsample_bicubic(g: Builder, x: Value, size: Sequence[Dim], align_corners: bool, *scales: float | None) -> Value:
    if g.dtype(x) == torch.uint8:
        return _bytes_resized(g, x, "upsample_bicubic2d", align_corners, scales)
    if g.dims(x) == g.like(g.out) and not align_corners and any(scale not in (None, 1) for scale in scales):
        # A scale that leaves all sizes as they are moves positions, but ONNX Runtime would copy the image.
        return _resampled(g, x, _matrices("upsample_bicubic2d", g.dims(x), g.dims(x), False, scales))
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
    """How an axis is resized: the weight of each element in each result, and whether torch reads it for that.

    It reads some elements of weight zero, which matter if they are infinite or NaN.
    """

    weights: torch.Tensor
    read: torch.Tensor

    @property
    def transposed(self) -> _Matrix:
        return _Matrix(self.weights.T, self.read.T)

    @property
    def taps(self) -> int:
        """How many elements are read for a result at most."""
        return int(self.read.sum(0).max())

    def places(self) -> torch.Tensor:
        """For each tap, the element that each result reads; where it reads fewer, one of those again."""
        order = self.read.int().argsort(dim=0, descending=True, stable=True)[: self.taps]
        return torch.where(self.read.gather(0, order), order, order[:1])

    def factors(self) -> torch.Tensor:
        """The weights of the taps, zero for what an earlier tap has read."""
        places = self.places()
        first = torch.ones_like(places[:1], dtype=torch.bool)
        return self.weights.gather(0, places) * torch.cat([first, places[1:] != places[:1]])


def _matrices(name: str, old: Dims, new: Dims, align_corners: bool, scales: Sequence[float | None]) -> list[_Matrix]:
    """For each axis of an image, what torch makes of the unit vectors along it."""
    resize = getattr(torch.ops.aten, name).default
    given = list(scales) or [None, None]
    found = []
    for before, after, scale in zip(old[2:], new[2:], given, strict=True):
        if not isinstance(before, int) or not isinstance(after, int):
            raise Unsupported("resizing of a symbolic size by a matrix")
        units = torch.eye(before, dtype=torch.float64)
        # Two columns, though one would do: of images of one column, torch 2.13 returns the first row everywhere.
        weights, probed = (
            resize(lines.reshape(1, before, before, 1).repeat(1, 1, 1, 2), [after, 2], align_corners, scale, None)
            for lines in (units, units.masked_fill(units > 0, math.nan))
        )
        found.append(_Matrix(weights[0, :, :, 0], probed[0, :, :, 0].isnan()))
    return found


def _constant(g: Builder, array: torch.Tensor, dtype: torch.dtype) -> Value:
    return g.constant(dtypes.to_array(array.to(dtype)), dtypes.to_onnx(dtype))


def _bytes_resized(g: Builder, x: Value, name: str, align_corners: bool, scales: Sequence[float | None]) -> Value:
    """Bytes are resized in fixed-point arithmetic, along the width first, and are bytes again in between."""
    old, new = g.dims(x), g.like(g.out)
    matrices = _matrices(name, old, new, align_corners, scales)
    for axis in (3, 2):
        if old[axis] != new[axis]:
            x = _in_fixed_point(g, x, axis, matrices[axis - 2].weights)
    return x


def _in_fixed_point(g: Builder, x: Value, axis: int, matrix: torch.Tensor) -> Value:
    """torch's integers of 16 bits: weights of as many binary digits as the largest of them leaves room for."""
    digits = next((p for p in range(22) if int(0.5 + matrix.max().item() * 2 ** (p + 1)) >= 2**15), 22)
    weights = (matrix * 2**digits + matrix.sign() / 2).trunc()
    total = _weighted(g, x, axis, weights)
    rounded = g.Div(g.Add(total, _integer(g, 2 ** (digits - 1))), _integer(g, 2**digits))
    return g.cast(g.Clip(rounded, _integer(g, 0), _integer(g, 255)), torch.uint8)


def _integer(g: Builder, value: int) -> Value:
    return g.scalar(value, torch.int32)


_MOST_TAPS = 4


def _weighted(g: Builder, x: Value, axis: int, weights: torch.Tensor) -> Value:
    """The integer matrix times each line along an axis: tap by tap where few elements count, as in a cubic curve."""
    matrix = _Matrix(weights, weights != 0)
    if matrix.taps > _MOST_TAPS:
        return g.cast(_along(g, g.cast(x, torch.float64), axis, _constant(g, weights, torch.float64)), torch.int32)
    return _tap_by_tap(g, g.cast(x, torch.int32), axis, matrix)


def _tap_by_tap(g: Builder, x: Value, axis: int, matrix: _Matrix) -> Value:
    """The matrix times each line along an axis, of which only the elements are read that torch reads.

    A product with the whole matrix would carry NaN and infinities to results that do not consist of them.
    """
    dtype = g.dtype(x)
    dims = [matrix.weights.shape[1] if i == axis else dim for i, dim in enumerate(g.dims(x))]
    total = g.scalar(0, dtype)
    for place, factor in zip(matrix.places(), matrix.factors(), strict=True):
        taken = g.shaped(g.Gather(x, _constant(g, place, torch.int64), axis=axis), dims)
        factors = _constant(g, factor.reshape([-1] + [1] * (len(dims) - 1 - axis)), dtype)
        total = g.Add(total, g.Mul(taken, factors))
    return g.shaped(total, dims)


def _by_windows(g: Builder, x: Value, axis: int, matrix: _Matrix) -> Value:
    """The same with an axis of taps, over which a sum is taken."""
    places, factors, dims = matrix.places().T, matrix.factors().T, g.dims(x)
    windows = [*dims[:axis], *places.shape, *dims[axis + 1 :]]
    taken = g.shaped(g.Gather(x, _constant(g, places, torch.int64), axis=axis), windows)
    spread = factors.reshape([*places.shape] + [1] * (len(dims) - 1 - axis))
    products = g.shaped(g.Mul(taken, _constant(g, spread, g.dtype(x))), windows)
    summed = g.ReduceSum(products, g.ints([axis + 1]), keepdims=0)
    return g.shaped(summed, [*dims[:axis], len(places), *dims[axis + 1 :]])


def _along(g: Builder, x: Value, axis: int, matrix: Value) -> Value:
    """Every line along an axis times a matrix: how a linear map of one axis is applied."""
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
            return _bytes_resized(g, x, name, align_corners, scales)
        return _resampled(g, x, _matrices(name, g.dims(x), g.like(g.out), align_corners, scales))

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
        return _resampled(g, grad, [matrix.transposed for matrix in there])


def _resampled(g: Builder, x: Value, matrices: Sequence[_Matrix]) -> Value:
    """An image with each axis multiplied by a matrix."""
    total = g.cast(x, dtypes.accumulation_dtype(g.dtype(x)))
    for axis, matrix in enumerate(matrices, 2):
        total = (_tap_by_tap if matrix.taps <= _MOST_TAPS else _by_windows)(g, total, axis, matrix)
    return g.cast(total, g.dtype(x))


for _name in ("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"):
    _register_antialiased(_name)
