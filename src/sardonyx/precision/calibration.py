"""Choose how a layer's weight is stored in a precision, by the activations of the layer in a call."""

from __future__ import annotations

import torch

from sardonyx.native.linear import pack_int4, quantize_int4
from sardonyx.precision.plan import Type
from sardonyx.precision.rounding import round_int4
from sardonyx.precision.smoothing import smoothing_channels
from sardonyx.precision.storage import Rounded, Smoothed, Storage

_ASYMMETRIC_BELOW = 0.9
"""Of the error with symmetric blocks, that zero points must leave: they cost time."""


def calibrated(precision: Type, weight: torch.Tensor, x: torch.Tensor, contents: str, block: int) -> Storage | None:
    """Return the best storage of a weight of depth × columns for these activations; None for the usual one.

    Of weights in four bits `block` share a scale.
    """
    weight = weight.detach().to(torch.float32)
    if precision == "int8":
        channels = smoothing_channels(weight, x)
        return None if channels is None else Smoothed(channels)
    if precision == "int4":
        rounded, method = round_int4(weight, x, block, symmetric=is_symmetric(weight, block))
        return Rounded(method, contents, pack_int4(rounded))
    return None


def is_symmetric(weight: torch.Tensor, block: int) -> bool:
    """Whether blocks without zero points are nearly as good, in a sample of the columns."""
    sample = weight[:, :: -(-weight.shape[1] // 256)]
    errors = [
        float((quantize_int4(sample, block, symmetric=symmetric).dequantized() - sample).norm())
        for symmetric in (True, False)
    ]
    return errors[1] >= errors[0] * _ASYMMETRIC_BELOW
