"""Resizing of images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import onnx_ir as ir
import torch

from sardonyx.translate import dtypes
from sardonyx.translate.aten.pooling import along
from sardonyx.translate.builder import Builder
from sardonyx.translate.errors import Unsupported
from sardonyx.translate.sizes import Dim, Dims
from sardonyx.translate.table import aten

Value = ir.Value


def _resize(g: Builder, x: Value, mode: str, align_corners: bool | None, scales: Sequence[float | None]) -> Value:
    if mode == "nearest":
        transform: str | None = "asymmetric"
    else:
        transform = "align_corners" if align_corners else "half_pixel" if mode == "cubic" else "pytorch_half_pixel"
    if any(scale is not None for scale in scales):
        # torch maps positions by the given scale, not by the ratio of the sizes: say it to ONNX in the same way.
        arguments: tuple[Value | None, ...] = (x, None, g.constant(_factors(g.dims(x), g.like(g.out), scales)))
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


def _factors(old: Dims, new: Dims, scales: Sequence[float | None]) -> np.ndarray:
    """The factor of each axis, if ONNX will make the sizes of them that torch has."""
    return np.array([1.0, 1.0, *map(_factor, old[2:], new[2:], scales)], dtype=np.float32)


def _factor(old: Dim, new: Dim, scale: float | None) -> float:
    if isinstance(old, int) and isinstance(new, int):
        factor = new / old if scale is None else float(scale)
        if np.floor(np.float32(factor) * np.float32(old)) != new:
            raise Unsupported("resizing by a scale that rounds to another size in single precision")
    elif scale is None or (factor := float(scale)) * _EXACT_FRACTION % 1:
        raise Unsupported(f"resizing of a symbolic size by {scale}, whose multiples single precision may round")
    return factor


_EXACT_FRACTION = 64
"""Products of sizes and of multiples of 1/64 are exact in single precision for all images there are."""


@aten("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d")
def upsample_nearest(g: Builder, x: Value, size: Sequence[Dim], *scales: float | None) -> Value:
    return _resize(g, x, "nearest", None, scales)


@aten("upsample_bilinear2d", "upsample_linear1d", "upsample_trilinear3d")
def upsample_linear(g: Builder, x: Value, size: Sequence[Dim], align_corners: bool, *scales: float | None) -> Value:
    return _resize(g, x, "linear", align_corners, scales)


@aten("upsample_bicubic2d")
def upsample_bicubic(g: Builder, x: Value, size: Sequence[Dim], align_corners: bool, *scales: float | None) -> Value:
    return _resize(g, x, "cubic", align_corners, scales)


@aten("upsample_nearest1d.vec", "upsample_nearest2d.vec", "upsample_nearest3d.vec")
def upsample_nearest_vec(
    g: Builder, x: Value, size: Sequence[Dim] | None, scale_factors: Sequence[float] | None
) -> Value:
    return _resize(g, x, "nearest", None, scale_factors or ())


@aten("upsample_bilinear2d.vec", "upsample_linear1d.vec", "upsample_trilinear3d.vec")
def upsample_linear_vec(
    g: Builder, x: Value, size: Sequence[Dim] | None, align_corners: bool, scale_factors: Sequence[float] | None
) -> Value:
    return _resize(g, x, "linear", align_corners, scale_factors or ())


@aten("upsample_bicubic2d.vec")
def upsample_bicubic_vec(
    g: Builder, x: Value, size: Sequence[Dim] | None, align_corners: bool, scale_factors: Sequence[float] | None
) -> Value:
    return _resize(g, x, "cubic", align_corners, scale_factors or ())


def _smoothing(g: Builder, old: Dim, new: Dim, resize: Callable[[torch.Tensor, int], torch.Tensor]) -> Value:
    """Resizing of an axis with antialiasing, as a matrix: what torch makes of each unit vector."""
    if not isinstance(old, int) or not isinstance(new, int):
        raise Unsupported("resizing of a symbolic size with antialiasing")
    # Two columns, though one would do: of images of one column, torch 2.13 returns the first row everywhere.
    units = torch.eye(old, dtype=torch.float64).reshape(1, old, old, 1).repeat(1, 1, 1, 2)
    held = resize(units, new)[0, :, :, 0].to(g.out.dtype)
    return g.constant(dtypes.to_array(held), dtypes.to_onnx(held.dtype))


def _register_antialiased(name: str) -> None:
    resize = getattr(torch.ops.aten, name).default

    def matrices(g: Builder, old: Dims, new: Dims, align: bool, scales: Sequence[float | None]) -> list[Value]:
        def line(scale: float | None, units: torch.Tensor, size: int) -> torch.Tensor:
            resized: torch.Tensor = resize(units, [size, 2], align, scale, None)
            return resized

        sizes = zip(old[2:], new[2:], scales, strict=True)
        return [_smoothing(g, before, after, partial(line, scale)) for before, after, scale in sizes]

    @aten(name)
    def antialiased(
        g: Builder,
        x: Value,
        size: Sequence[Dim],
        align_corners: bool,
        scale_h: float | None = None,
        scale_w: float | None = None,
    ) -> Value:
        for axis, matrix in enumerate(matrices(g, g.dims(x), g.like(g.out), align_corners, [scale_h, scale_w]), 2):
            x = along(g, x, axis, matrix)
        return x

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
        there = matrices(g, tuple(input_size), g.dims(grad), align_corners, [scale_h, scale_w])
        for axis, matrix in enumerate(there, 2):
            grad = along(g, grad, axis, g.transpose(matrix, [1, 0]))
        return grad


for _name in ("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"):
    _register_antialiased(_name)
