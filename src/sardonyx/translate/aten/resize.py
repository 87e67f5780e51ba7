"""Resizing and sampling of images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

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
    if not all(isinstance(dim, int) for dim in (*old[2:], *new[2:])):
        raise Unsupported("resizing by a scale over a symbolic size")
    ratios = [int(n) / int(o) if s is None else float(s) for o, n, s in zip(old[2:], new[2:], scales, strict=True)]
    factors = np.array([1.0, 1.0, *ratios], dtype=np.float32)
    sizes = np.floor(factors[2:] * np.array(old[2:], dtype=np.float32))
    if sizes.tolist() != list(new[2:]):
        raise Unsupported("resizing by a scale that rounds to another size in single precision")
    return factors


@aten("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d")
def upsample_nearest(g: Builder, x: Value, size: Sequence[Dim], *scales: float | None) -> Value:
    return _resize(g, x, "nearest", None, scales)


@aten("upsample_bilinear2d", "upsample_linear1d", "upsample_trilinear3d")
def upsample_linear(g: Builder, x: Value, size: Sequence[Dim], align_corners: bool, *scales: float | None) -> Value:
    return _resize(g, x, "linear", align_corners, scales)


@aten("upsample_bicubic2d")
def upsample_bicubic(g: Builder, x: Value, size: Sequence[Dim], align_corners: bool, *scales: float | None) -> Value:
    return _resize(g, x, "cubic", align_corners, scales)


def _smoothed(g: Builder, x: Value, size: Sequence[Dim], axis: int, line: Callable[[torch.Tensor, int], Any]) -> Value:
    """One axis resized by a matrix: what torch makes of each unit vector."""
    old, new = g.dims(x)[axis], size[axis - 2]
    if not isinstance(old, int) or not isinstance(new, int):
        raise Unsupported("resizing of a symbolic size with antialiasing")
    # Two columns, though one would do: of images of one column, torch 2.13 returns the first row everywhere.
    units = torch.eye(old, dtype=torch.float64).reshape(1, old, old, 1).repeat(1, 1, 1, 2)
    return along(g, x, axis, line(units, new)[0, :, :, 0])


def _lines(resize: Any, align_corners: bool, scale: float | None, units: torch.Tensor, new: int) -> Any:
    return resize(units, [new, 2], align_corners, scale, None)


def _register_antialiased(name: str) -> None:
    resize = getattr(torch.ops.aten, name).default

    @aten(name)
    def antialiased(
        g: Builder,
        x: Value,
        size: Sequence[Dim],
        align_corners: bool,
        scale_h: float | None = None,
        scale_w: float | None = None,
    ) -> Value:
        for axis, scale in ((2, scale_h), (3, scale_w)):
            x = _smoothed(g, x, size, axis, partial(_lines, resize, align_corners, scale))
        return x


for _name in ("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"):
    _register_antialiased(_name)


@aten("grid_sampler_2d")
def grid_sampler_2d(
    g: Builder, x: Value, grid: Value, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> Value:
    names = ("linear", "nearest", "cubic") if g.opset >= 20 else ("bilinear", "nearest", "bicubic")
    if g.opset < 20 and g.rank(x) != 4:
        raise Unsupported("sampling of volumes before opset 20")
    mode = names[interpolation_mode]
    edge = ("zeros", "border", "reflection")[padding_mode]
    return g.GridSample(x, grid, mode=mode, padding_mode=edge, align_corners=int(align_corners))


@aten("grid_sampler_3d")
def grid_sampler_3d(
    g: Builder, x: Value, grid: Value, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> Value:
    return grid_sampler_2d(g, x, grid, interpolation_mode, padding_mode, align_corners)
