"""Mantissas, exponents, and the next number."""

from __future__ import annotations

import math

import pytest
import torch

from .agreement import agrees, onnx

POWERS = torch.tensor([2.0**e for e in range(-24, 16)])
NUMBERS = torch.cat([POWERS, POWERS * (1 - 2**-11), POWERS * (1 + 2**-10), POWERS / 3, torch.tensor([65504.0])])
EDGES = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan])
TINY = torch.tensor([2.0**-149, 2.0**-126, 2.0**-126 - 2.0**-149, 3.4028235e38, 1.1754944e-38])


@pytest.mark.parametrize("x", [NUMBERS, -NUMBERS, EDGES, TINY, NUMBERS.half(), EDGES.half()])
def test_mantissa_and_exponent(x: torch.Tensor) -> None:
    agrees(torch.frexp, x, exact=True)


@pytest.mark.parametrize("x", [NUMBERS, -NUMBERS, EDGES, TINY, NUMBERS.half(), EDGES.half(), NUMBERS.bfloat16()])
def test_the_next_number_is_exact(x: torch.Tensor) -> None:
    x = x[:, None]
    y = torch.tensor([math.inf, -math.inf, 0.0, 1.0, math.nan], dtype=x.dtype)
    result, expected = onnx(torch.nextafter)(x, y), torch.nextafter(x, y)
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(result.signbit() & ~result.isnan(), expected.signbit() & ~expected.isnan())
