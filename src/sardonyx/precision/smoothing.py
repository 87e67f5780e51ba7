"""Scales of channels that move outliers of activations into the weight, so that rows lose less in int8.

A row in int8 has one scale: a channel a thousand times as large as the others leaves them no codes. As in SmoothQuant
(arXiv:2211.10438), x is divided by a number for each channel, and the weight multiplied by it.
"""

from __future__ import annotations

import torch

from sardonyx.native.linear import quantize_int8
from sardonyx.precision.metric import relative_error
from sardonyx.precision.rounding import LEAST_ROWS, usable_rows

_SHARES = (0.5, 0.65, 0.8, 1.0)
"""Of the range of a channel that moves into the weight, on a logarithmic scale."""
_ROWS, _COLUMNS = 256, 512
"""Of the sample that decides."""
_LESS = 0.8
"""Of the error in plain int8, that scales must leave in rows that they were not computed from."""


def smoothing_channels(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
    """Return what each channel of x is multiplied by, and each row of the weight divided; None if it gains little."""
    rows = usable_rows(x)
    rows = rows[:: -(-len(rows) // _ROWS) or 1]
    if len(rows) < LEAST_ROWS:
        return None
    half, sample = len(rows) // 2, weight[:, :: -(-weight.shape[1] // _COLUMNS)]
    unseen, expected = rows[half:], rows[half:] @ sample
    plain = relative_error(int8_product(unseen, sample), expected)
    errors = {}
    for share in _SHARES:
        channels = _channels(weight, rows[:half], share)
        errors[share] = relative_error(int8_product(unseen * channels, sample / channels[:, None]), expected)
    best = min(errors, key=lambda share: errors[share])
    return _channels(weight, usable_rows(x), best) if errors[best] < plain * _LESS else None


def _channels(weight: torch.Tensor, rows: torch.Tensor, share: float) -> torch.Tensor:
    """Return |w|^(1 − share) / |x|^share of the largest numbers of each channel; 1 where one of them is zero."""
    x, w = rows.abs().amax(0).double(), weight.abs().amax(1).double()
    channels = w ** (1 - share) / x**share
    return torch.where((x > 0) & (w > 0), channels, 1.0).clamp(1e-10, 1e10).to(torch.float32)


def int8_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the product of x and a weight as in int8, up to the rounding of float32."""
    codes, scales = quantize_int8(weight)
    low, high = x.amin(1, keepdim=True).clamp(max=0), x.amax(1, keepdim=True).clamp(min=0)
    step = (high - low) / 255
    step = torch.where(step > 0, step, 1.0)
    zero = (-low / step).round()
    rows = ((x / step).round_() + zero).clamp_(0, 255) - zero
    return rows @ codes.to(torch.float32) * step * scales
