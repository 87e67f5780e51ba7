"""Scales of channels that move outliers into the weight, for int8."""

from __future__ import annotations

import math

import pytest
import torch

from sardonyx.precision.metric import relative_error
from sardonyx.precision.smoothing import int8_product, smoothing_channels

DEPTH = 96


def weight() -> torch.Tensor:
    w = torch.randn(DEPTH, 64, generator=torch.Generator().manual_seed(0))
    w[3] *= 1e-3
    return w


def activations(seed: int, rows: int = 80, outlier: float = 1e3) -> torch.Tensor:
    x = torch.randn(rows, DEPTH, generator=torch.Generator().manual_seed(seed))
    x[:, 3] *= outlier
    return x


def test_a_channel_of_outliers_moves_into_the_weight() -> None:
    w, unseen = weight(), activations(2)
    channels = smoothing_channels(w, activations(1))
    assert channels is not None
    plain = relative_error(int8_product(unseen, w), unseen @ w)
    smoothed = relative_error(int8_product(unseen * channels, w / channels[:, None]), unseen @ w)
    assert smoothed < 0.05 < 0.5 < plain


def test_even_channels_stay() -> None:
    assert smoothing_channels(weight() + 1, activations(1, outlier=1.0)) is None


@pytest.mark.parametrize("x", [activations(1, rows=0), activations(1, rows=9), activations(1) * math.nan])
def test_few_rows_do_not_decide(x: torch.Tensor) -> None:
    assert smoothing_channels(weight(), x) is None


def test_channels_of_zeros_are_left_alone() -> None:
    w, x = weight(), activations(1)
    w[5], x[:, 7] = 0.0, 0.0
    channels = smoothing_channels(w, x)
    assert channels is not None
    assert channels[5] == channels[7] == 1.0
    assert bool(channels.isfinite().all())
