"""Special functions, over wide ranges, at their poles and at infinity."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from .agreement import agrees, agrees_at, onnx

EDGES = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 1.0, 2.0, 0.5, -0.5, 8.0, -8.0, 1e-40, 1e-30, -1e-30])
SPREAD = torch.cat([EDGES, torch.linspace(-30, 30, 601), torch.logspace(-37, 30, 200), torch.linspace(-1, 1, 201)])
ONE_ARGUMENT = [
    *(torch.lgamma, torch.digamma, torch.erfinv, torch.i0, torch.special.i0e, torch.special.i1, torch.special.i1e),
    *(torch.special.erfcx, torch.special.ndtri, torch.special.log_ndtr, torch.special.airy_ai),
    *(torch.special.bessel_j0, torch.special.bessel_j1, torch.special.bessel_y0, torch.special.bessel_y1),
    *(torch.special.modified_bessel_i0, torch.special.modified_bessel_i1),
    *(torch.special.modified_bessel_k0, torch.special.modified_bessel_k1),
    *(torch.special.scaled_modified_bessel_k0, torch.special.scaled_modified_bessel_k1),
]


def named(function: Callable[..., torch.Tensor]) -> str:
    return function.__name__


@pytest.mark.parametrize("function", ONE_ARGUMENT, ids=named)
def test_a_function_of_one_argument(function: Callable[..., torch.Tensor]) -> None:
    agrees(lambda x: function(x), SPREAD)


@pytest.mark.parametrize("function", ONE_ARGUMENT, ids=named)
def test_integers_become_floating_point(function: Callable[..., torch.Tensor]) -> None:
    agrees(lambda x: function(x), torch.arange(-5, 20), exact=True)


@pytest.mark.parametrize("function", [torch.lgamma, torch.digamma, torch.erfinv, torch.i0], ids=named)
def test_half_precision(function: Callable[..., torch.Tensor]) -> None:
    agrees(function, torch.linspace(-10, 10, 101).half())


def test_far_beyond_zero_the_gamma_function_keeps_its_poles() -> None:
    x = torch.linspace(-200, 200, 1001)
    agrees(lambda x: (torch.lgamma(x), torch.digamma(x)), x)
    agrees(lambda x: (torch.lgamma(x), torch.digamma(x)), torch.tensor([-1.0, -2.0, -3e7, 3e38]))


def test_near_its_zeros_the_gamma_function_keeps_its_digits() -> None:
    x = torch.tensor([1.0, 2.0]).repeat_interleave(200) + torch.linspace(-1e-3, 1e-3, 200).repeat(2)
    torch.testing.assert_close(onnx(torch.lgamma)(x), torch.lgamma(x.double()).float(), rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_derivatives_of_the_digamma_function(n: int) -> None:
    x = torch.cat([torch.linspace(-20.3, 20, 400), torch.logspace(-7, 6, 100), torch.tensor([math.inf, math.nan, 0.0])])
    agrees(lambda x: torch.polygamma(n, x), x[(x - x.round()).abs() != 0])


def test_the_logarithm_of_the_multivariate_gamma_function() -> None:
    agrees(lambda x: torch.mvlgamma(x, 3), torch.linspace(1.5, 50, 100))


def test_hurwitzs_zeta_function_of_an_infinite_exponent_is_that_of_its_first_term() -> None:
    q = torch.tensor([1.0, 0.5, 1e-38, -1.5, -7.0, 2.5, 3e38])
    limits = torch.tensor([1.0, math.inf, math.inf, math.inf, math.inf, 0.0, 0.0])
    assert torch.equal(onnx(torch.special.zeta)(torch.tensor(math.inf), q), limits)


def test_a_modified_bessel_function_of_a_negative_zero_is_zero() -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.special.i1(x), torch.special.i1e(x), torch.special.modified_bessel_i1(x)]

    for got in onnx(function)(torch.tensor([-0.0, 0.0])):
        assert not got.signbit().any()


def test_hurwitzs_zeta_function() -> None:
    s = torch.tensor([0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 10.0, 50.0, math.nan])
    q = torch.tensor([-30.5, -2.0, -1.25, -1e-3, 0.0, 1e-3, 0.5, 1.0, 9.0, 100.0, 1e6, math.nan])
    agrees(lambda s, q: torch.special.zeta(s[:, None], q), s, q)
    agrees(lambda q: torch.special.zeta(2, q), q)


CHEBYSHEV = [
    getattr(torch.special, f"{shift}chebyshev_polynomial_{kind}") for shift in ("", "shifted_") for kind in "tuvw"
]


@pytest.mark.parametrize("function", CHEBYSHEV, ids=named)
def test_chebyshevs_polynomials_of_any_degree(function: Callable[..., torch.Tensor]) -> None:
    x, n = torch.linspace(-1.5, 1.5, 61), torch.tensor([-1.0, -0.5, 0.0, 1.0, 1.5, 2.0, 3.0, 6.0, 7.0, 9.0, 15.0])
    x = torch.cat([x, torch.tensor([1 - 6e-8, -1 + 6e-8, 1.0000001, -1.0000001, 1e4])])
    agrees(lambda x, n: function(x, n[:, None]), x, n)
    agrees(lambda x: function(x, 5), x)


RECURRENCES = [
    *(torch.special.hermite_polynomial_h, torch.special.hermite_polynomial_he),
    *(torch.special.laguerre_polynomial_l, torch.special.legendre_polynomial_p),
]


@pytest.mark.parametrize("function", RECURRENCES, ids=named)
def test_other_polynomials_of_any_degree(function: Callable[..., torch.Tensor]) -> None:
    x, n = torch.linspace(-2, 2, 61), torch.tensor([-1.0, -0.5, 0.0, 1.0, 1.5, 2.0, 9.0, 20.0])
    agrees(lambda x, n: function(x, n[:, None]), x, n)
    agrees(lambda x: function(x, 5), x)
    agrees_at(lambda x, n: function(x, n), (x, torch.tensor(3)), (x[:7], torch.tensor(40)))


@pytest.mark.parametrize("function", [*CHEBYSHEV, *RECURRENCES], ids=named)
def test_a_polynomial_of_an_infinite_degree_is_zero(function: Callable[..., torch.Tensor]) -> None:
    agrees(function, torch.tensor([0.3, 1.5]), torch.tensor([math.inf, 2.0]))


def test_hermites_polynomials_end_where_torchs_do() -> None:
    x, n = torch.tensor([0.25, 0.1]), torch.tensor([20.0, 129.0])
    agrees(torch.special.hermite_polynomial_he, x, n, exact=True)


def test_double_precision_stays_in_torch() -> None:
    with pytest.raises(Exception, match="no formula that is accurate in double precision"):
        onnx(torch.lgamma)(torch.randn(3, dtype=torch.float64))


def test_special_functions_of_any_shape() -> None:
    functions = (torch.lgamma, torch.special.i1e, torch.special.bessel_y1, torch.erfinv)
    agrees_at(lambda x: [f(x) for f in functions], (torch.rand(3, 4),), (torch.rand(5, 2),), (torch.rand(2, 7),))
    agrees(lambda x: [f(x) for f in functions], torch.tensor(0.3))
    agrees(lambda x: [f(x) for f in functions], torch.empty(0, 2))
    agrees(lambda x: [f(x) for f in functions], torch.rand(4, 3).T)


@pytest.mark.parametrize("function", [torch.sigmoid, nn.functional.silu, nn.functional.glu])
def test_sigmoid_in_double_precision_has_its_digits_far_from_zero(function: Callable[..., torch.Tensor]) -> None:
    x = torch.tensor([-17.0, -30, -42, -700, -800, 0, 1, 40], dtype=torch.float64)
    compiled = torch.compile(function, backend="sardonyx", fullgraph=True, options={"fallback": "error"})
    torch.testing.assert_close(compiled(x), function(x), rtol=1e-14, atol=0)
