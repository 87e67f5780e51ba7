"""Scales of values that are rounded to codes, and which values around layers are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import onnx_ir as ir
import torch

from sardonyx.optimize.pattern import is_private
from sardonyx.precision.layers import Layer

Range: TypeAlias = tuple[float, float]
"""The least and the largest number that a value has in calibration calls."""
KEEP_RANGE = ("MaxPool", "Flatten", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Identity")


@dataclass(frozen=True)
class Scale:
    """How numbers become codes of a byte."""

    scale: float
    zero_point: int
    dtype: torch.dtype = torch.uint8

    @classmethod
    def of(cls, numbers: Range) -> Scale:
        """Return the scale of a range, which zero is added to.

        >>> Scale.of((-0.5, 2.05))
        Scale(scale=0.01, zero_point=50, dtype=torch.uint8)
        """
        low, high = min(numbers[0], 0.0), max(numbers[1], 0.0)
        scale = _rounded((high - low) / 255)
        return cls(scale, round(-low / scale))

    @classmethod
    def symmetric(cls, numbers: Range) -> Scale:
        """Return the scale of a range with zero as its zero point, so that codes can be added; signed if it has to be.

        >>> Scale.symmetric((-1.27, 0.5))
        Scale(scale=0.01, zero_point=0, dtype=torch.int8)
        >>> Scale.symmetric((0.0, 2.55))
        Scale(scale=0.01, zero_point=0, dtype=torch.uint8)
        """
        low, high = numbers
        most, dtype = (127, torch.int8) if low < 0 else (255, torch.uint8)
        return cls(_rounded(max(-low, high, 0.0) / most), 0, dtype)


_LEAST_SCALE = 1e-35
"""Its inverse is a number in float32."""


def _rounded(scale: float) -> float:
    """Return a scale with as many digits as float32 has."""
    return float(f"{scale:.9g}") if scale >= _LEAST_SCALE else 1.0


def activated(layer: Layer) -> ir.Value:
    """Return what of a convolution's result is quantized: its Relu, if nothing else reads it."""
    y = layer.result
    readers = [use.node for use in y.uses()]
    return readers[0].outputs[0] if is_private(y) and readers[0].op_type == "Relu" else y


def quantized_values(layers: Sequence[Layer]) -> Mapping[str, str]:
    """Return the values around convolutions, each with the value that has its range, by name."""
    values = dict.fromkeys(value for layer in layers if layer.convolves for value in (layer.x, activated(layer)))
    return {str(value.name): str(_with_range_of(value).name) for value in values}


def _with_range_of(value: ir.Value) -> ir.Value:
    """Return the value whose range bounds this one's, so that both have the same codes."""
    node = value.producer()
    while node is not None and node.op_type in KEEP_RANGE and node.inputs[0] is not None:
        value = node.inputs[0]
        node = value.producer()
    return value


def range_of(x: torch.Tensor) -> Range:
    """Return the range of the finite numbers of a tensor.

    >>> range_of(torch.tensor([1.0, -2.0, float("inf")]))
    (-2.0, 1.0)
    """
    low, high = (float(extreme) for extreme in x.aminmax()) if x.numel() else (0.0, 0.0)
    if math.isfinite(low) and math.isfinite(high):
        return low, high
    return range_of(x[x.isfinite()])


def joined(ranges: Sequence[Range]) -> Range:
    """Return the least range with all of these."""
    lows, highs = zip(*ranges, strict=True)
    return min(lows), max(highs)
