"""Arithmetic at the edges of dtypes, on the device."""

from __future__ import annotations

import math

import torch

WHOLE = [1_700_000_000_123_456_789, -(2**63), 2**63 - 1, 2**53 + 1, -100, -7, 7]


def test_integers_divide_and_add_up_exactly() -> None:
    x, y = torch.tensor(WHOLE), torch.tensor([99, 7, -3, 1000, 99, 2, -2])
    near, far = x.to("ort"), y.to("ort")
    for function in (torch.floor_divide, torch.remainder, torch.fmod):
        assert torch.equal(function(near, far).cpu(), function(x, y))
    assert torch.equal(near.sum().cpu(), x.sum())
    assert torch.equal(near.prod().cpu(), x.prod())


def test_integers_of_64_bits_are_compared_in_all_of_them() -> None:
    x = torch.tensor([2**31, 2**32 + 1, -(2**31), 2**53 + 1, 2, -(2**32) - 1, 2**63 - 1, -(2**63)]).repeat(4)
    y = x.roll(3)
    near, far = x.to("ort"), y.to("ort")
    for function in (torch.maximum, torch.minimum, lambda a, b: a.clamp(-3, 2**32), lambda a, b: a.sign()):
        assert torch.equal(function(near, far).cpu(), function(x, y))
    assert torch.equal(near.amax().cpu(), x.amax())
    assert torch.equal(near.view(4, 8).amin(0).cpu(), x.view(4, 8).amin(0))


def test_floor_division_of_bytes_does_not_overflow() -> None:
    every = torch.arange(-128, 128).to(torch.int8)
    x, y = (part.reshape(-1) for part in torch.meshgrid(every, every[every != 0], indexing="ij"))
    assert torch.equal((x.to("ort") // y.to("ort")).cpu(), x // y)


def test_infinite_divisors_and_signs_of_zero() -> None:
    x, y = torch.tensor([1.0, -1.0, 0.0, -0.0, 5.0]), torch.tensor([-math.inf, math.inf, -2.0, 3.0, -0.0])
    near, far = x.to("ort"), y.to("ort")
    for function in (
        torch.floor_divide,
        torch.copysign,
        lambda a, b: 1 / (a * b),
        lambda a, b: torch.where(a < 9, a, b),
    ):
        got, wanted = function(near, far).cpu(), function(x, y)
        assert torch.equal(got, wanted)
        assert torch.equal(got.signbit(), wanted.signbit())


def test_the_factor_of_a_double_product_is_not_rounded_to_single_precision() -> None:
    a, b, c = (torch.randn(2, 5, 5, dtype=torch.float64) for _ in range(3))
    result = torch.baddbmm(a.to("ort"), b.to("ort"), c.to("ort"), beta=0.2, alpha=0.6).cpu()
    torch.testing.assert_close(result, torch.baddbmm(a, b, c, beta=0.2, alpha=0.6), rtol=1e-13, atol=1e-13)
