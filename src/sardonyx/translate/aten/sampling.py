"""Sampling of images and volumes at the positions of a grid, and its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import onnx_ir as ir
import torch

from sardonyx import dtypes, opsets
from sardonyx.errors import Unsupported
from sardonyx.sizes import Dim
from sardonyx.translate.aten.indexing import element_count
from sardonyx.translate.aten.scatter import scatter_combined
from sardonyx.translate.builder import Builder
from sardonyx.translate.table import aten

Value = ir.Value
_LINEAR, _NEAREST, _CUBIC = range(3)
_ZEROS, _BORDER, _REFLECTION = range(3)
_SHARPNESS = -0.75
"""The parameter of torch's cubic convolution."""


@aten("grid_sampler_2d", "grid_sampler_3d")
def grid_sampler(
    g: Builder, x: Value, grid: Value, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> Value:
    names = ("linear", "nearest", "cubic") if g.opset >= opsets.GELU else ("bilinear", "nearest", "bicubic")
    if g.opset < opsets.GELU and g.rank(x) != 4:
        raise Unsupported("sampling of volumes before opset 20")
    if (interpolation_mode, padding_mode) == (_NEAREST, _REFLECTION):
        return _nearest(g, x, grid, padding_mode, align_corners)
    mode = names[interpolation_mode]
    edge = ("zeros", "border", "reflection")[padding_mode]
    return g.GridSample(x, grid, mode=mode, padding_mode=edge, align_corners=int(align_corners))


def _nearest(g: Builder, x: Value, grid: Value, padding_mode: int, align_corners: bool) -> Value:
    """Gather the nearest elements. ONNX Runtime rounds before it reflects, and rounds halves to the other side."""
    batch, channels, *sides = g.dims(x)
    positions = g.dims(grid)[1:-1]
    many = element_count(positions)
    places = g.cast(grid, dtypes.accumulation_dtype(g.dtype(grid)))
    axes = _taps(g, g.reshape(places, [batch, many, len(sides)]), sides, _NEAREST, padding_mode, align_corners)
    index = g.expand(_plane_index(g, [taps[0] for taps in axes], sides), [batch, channels, many])
    read = g.GatherElements(g.reshape(x, [batch, channels, element_count(sides)]), index, axis=2)
    return g.reshape(g.shaped(read, [batch, channels, many]), [batch, channels, *positions])


@dataclass(frozen=True)
class _Tap:
    """An element along one axis that is read for each position of the grid."""

    index: Value
    inside: Value
    weight: Value
    slope: Value
    """The derivative of the weight by the grid's coordinate."""


@aten("grid_sampler_2d_backward", "grid_sampler_3d_backward")
def grid_sampler_backward(
    g: Builder,
    grad: Value,
    x: Value,
    grid: Value,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
    output_mask: Sequence[bool],
) -> tuple[Value | None, Value | None]:
    batch, channels, *sides = g.dims(x)
    spatial = len(sides)
    many = element_count(g.dims(grid)[1:-1])
    places = g.reshape(grid, [batch, many, spatial])
    taps = list(product(*_taps(g, places, sides, interpolation_mode, padding_mode, align_corners)))
    flat = _joined(g, [_plane_index(g, tap, sides) for tap in taps], [batch, 1, len(taps) * many])
    index = g.expand(flat, [batch, channels, len(taps) * many])
    flat_grad = g.reshape(grad, [batch, channels, many])
    of_x = of_grid = None
    if output_mask[0]:
        shares = [g.Mul(flat_grad, g.unsqueeze(_weight(g, tap), [1])) for tap in taps]
        zeros = g.expand(g.scalar(0, g.dtype(x)), [batch, channels, element_count(sides)])
        summed = scatter_combined(g, zeros, 2, index, _joined(g, shares, g.dims(index)), "add")
        of_x = g.reshape(summed, g.dims(x))
    if output_mask[1]:
        read = g.GatherElements(g.reshape(x, [batch, channels, element_count(sides)]), index, axis=2)
        read = g.reshape(g.shaped(read, g.dims(index)), [batch, channels, len(taps), many])
        products = g.ReduceSum(g.Mul(read, g.unsqueeze(flat_grad, [2])), g.ints([1]), keepdims=0)
        of_grid = _grid_gradient(g, taps, g.shaped(products, [batch, len(taps), many]), g.dims(grid))
    return of_x, of_grid


def _taps(
    g: Builder, places: Value, sides: Sequence[Dim], mode: int, padding_mode: int, align_corners: bool
) -> list[list[_Tap]]:
    """Return the elements read along each axis for places of the grid, [batch, positions, axes]."""
    axes = []
    for axis, size in enumerate(sides):  # the grid's last coordinate is of the first axis
        at = g.Gather(places, g.scalar(len(sides) - 1 - axis, torch.int64), axis=2)
        along = _Axis(g, size, padding_mode, align_corners)
        axes.append(along.taps(g.shaped(at, g.dims(places)[:2]), mode))
    return axes


def _joined(g: Builder, parts: Sequence[Value], dims: Sequence[Dim]) -> Value:
    return g.shaped(parts[0] if len(parts) == 1 else g.Concat(*parts, axis=2), dims)


def _plane_index(g: Builder, tap: Sequence[_Tap], sides: Sequence[Dim]) -> Value:
    """Return the index of an element in a plane, [batch, 1, positions]."""
    place = tap[0].index
    for one, size in zip(tap[1:], sides[1:], strict=True):
        place = g.Add(g.Mul(place, g.scalar(size, torch.int64)), one.index)
    return g.unsqueeze(place, [1])


def _weight(g: Builder, tap: Sequence[_Tap], by: int | None = None) -> Value:
    """Return the weight of an element; with `by`, its derivative along an axis."""
    total = None
    for axis, one in enumerate(tap):
        factor = g.Where(one.inside, one.slope if axis == by else one.weight, g.scalar(0, g.dtype(one.weight)))
        total = factor if total is None else g.Mul(total, factor)
    assert total is not None
    return total


def _grid_gradient(g: Builder, taps: Sequence[Sequence[_Tap]], products: Value, dims: Sequence[Dim]) -> Value:
    """Return, for each axis, the sum over elements read of their products times the derivatives of their weights."""
    columns = []
    for axis in reversed(range(len(taps[0]))):
        slopes = [g.unsqueeze(_weight(g, tap, by=axis), [1]) for tap in taps]
        changes = slopes[0] if len(slopes) == 1 else g.Concat(*slopes, axis=1)
        total = g.ReduceSum(g.Mul(products, g.shaped(changes, g.dims(products))), g.ints([1]), keepdims=0)
        columns.append(g.unsqueeze(g.shaped(total, [g.dims(products)[0], g.dims(products)[2]]), [2]))
    joined = g.Concat(*columns, axis=2)
    return g.reshape(g.shaped(joined, [*g.dims(columns[0])[:2], len(columns)]), dims)


class _Axis:
    """One axis of an image: from the grid's coordinate, −1 to 1, to elements and their weights."""

    def __init__(self, g: Builder, size: Dim, padding_mode: int, align: bool) -> None:
        self._g, self._size, self._padding, self._align = g, size, padding_mode, align

    def taps(self, coordinate: Value, mode: int) -> list[_Tap]:
        """Return the elements read along this axis for each coordinate."""
        at, scale = self._unnormalized(coordinate)
        if mode == _CUBIC:
            return self._cubic(at, scale)
        at, slope = self._padded(at)
        g = self._g
        if mode == _NEAREST:
            return [self._tap(g.Round(at), g.Add(g.Mul(at, self._number(0)), self._number(1)), self._number(0))]
        low = g.Floor(at)
        part = g.Sub(at, low)
        scale = g.Mul(slope, scale)
        return [
            self._tap(low, g.Sub(self._number(1), part), g.Neg(scale)),
            self._tap(g.Add(low, self._number(1)), part, scale),
        ]

    def _unnormalized(self, coordinate: Value) -> tuple[Value, Value]:
        """Return the coordinate in elements, and its slope."""
        self._dtype = self._g.dtype(coordinate)
        g, one, half = self._g, self._number(1), self._number(0.5)
        self._end = g.scalar(g.dim(self._size - 1), self._dtype)
        length = self._end if self._align else g.scalar(self._size, self._dtype)
        scale = g.Mul(length, half)
        at = g.Mul(g.Add(coordinate, one), scale)
        return (at if self._align else g.Sub(at, half)), scale

    def _number(self, value: float) -> Value:
        return self._g.scalar(value, self._dtype)

    def _padded(self, at: Value) -> tuple[Value, Value]:
        """Return a coordinate moved inside according to the padding, and its slope."""
        g, one = self._g, self._number(1)
        if self._padding == _ZEROS:
            return at, one
        slope = one
        if self._padding == _REFLECTION:
            at, slope = self._reflected(at)
        outside = g.Or(g.LessOrEqual(at, self._number(0)), g.GreaterOrEqual(at, self._end))
        return g.Max(g.Min(at, self._end), self._number(0)), g.Where(outside, self._number(0), slope)

    def _reflected(self, at: Value) -> tuple[Value, Value]:
        """Reflect between the centres of the outermost elements, or between their edges."""
        g = self._g
        low = self._number(0.0 if self._align else -0.5)
        span = self._end if self._align else g.scalar(self._size, self._dtype)
        from_low = g.Sub(at, low)
        distance = g.Abs(from_low)
        flips = g.Floor(g.Div(distance, span))
        extra = g.Sub(distance, g.Mul(flips, span))
        odd = g.Equal(g.Mod(flips, self._number(2), fmod=1), self._number(1))
        there = g.Add(g.Where(odd, g.Sub(span, extra), extra), low)
        sign = g.Where(g.Less(from_low, self._number(0)), self._number(-1), self._number(1))
        return there, g.Where(odd, g.Neg(sign), sign)

    def _tap(self, at: Value, weight: Value, slope: Value) -> _Tap:
        """Return an element, with weight zero if it is outside."""
        g = self._g
        inside = g.And(g.GreaterOrEqual(at, self._number(0)), g.LessOrEqual(at, self._end))
        index = g.cast(g.Where(inside, at, self._number(0)), torch.int64)
        return _Tap(index, inside, weight, slope)

    def _cubic(self, at: Value, scale: Value) -> list[_Tap]:
        """Return the four elements around; padding moves each of them, not the coordinate."""
        g = self._g
        low = g.Floor(at)
        part = g.Sub(at, low)
        taps = []
        for step in (-1, 0, 1, 2):
            weight, slope = self._curve(part, step)
            element = self._padded(g.Add(low, self._number(step)))[0]
            taps.append(self._tap(element, weight, g.Mul(slope, scale)))
        return taps

    def _curve(self, part: Value, step: int) -> tuple[Value, Value]:
        """Return the cubic weight of an element this many steps from the one below, and its slope."""
        g, a = self._g, _SHARPNESS
        outer, inner = (-4 * a, 8 * a, -5 * a, a), (1, 0, -(a + 3), a + 2)
        coefficients = inner if step in (0, 1) else outer
        far, sign = {-1: (1.0, 1.0), 0: (0.0, 1.0), 1: (1.0, -1.0), 2: (2.0, -1.0)}[step]
        t = g.Add(g.Mul(part, self._number(sign)), self._number(far))
        value, slope = self._number(coefficients[3]), self._number(0)
        for coefficient in reversed(coefficients[:3]):
            slope = g.Add(g.Mul(slope, t), value)
            value = g.Add(g.Mul(value, t), self._number(coefficient))
        return value, g.Mul(slope, self._number(sign))
