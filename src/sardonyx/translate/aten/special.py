"""Special functions in double precision by published formulas, or by tables of torch's values."""

from __future__ import annotations

import math

import onnx_ir as ir
import torch

from sardonyx.errors import Unsupported
from sardonyx.translate.builder import Builder, Operand
from sardonyx.translate.formula import Curve, Number, number
from sardonyx.translate.table import aten

Value = ir.Value
_NEARLY_INFINITE = 1e100
"""Represents infinity where ∞ − ∞ or ∞ · 0 would occur."""


def _distance_to_integer(x: Number) -> Number:
    """Return the distance of each element to the next integer; exact, unlike the sine of a large multiple of π."""
    return x - x.apply("Round")


def _is_infinite(x: Number) -> Value:
    return x.g.IsInf(x.value)


# The gamma function and related functions

_LOG_GAMMA = Curve(lambda x: torch.lgamma(x + 1) / (x * (x - 1)), 0, 8)
_DIGAMMA = Curve(lambda x: torch.digamma(x + 1), 0, 8)


@aten("lgamma")
def lgamma(g: Builder, x: Value) -> Value:
    """Stirling's series from 8 on, a table below, and Γ(x)·Γ(1−x) = π / sin πx for negative numbers."""
    at = number(g, x)
    negative = at < 0
    size = (1 - at).where(negative, at)
    small, large = size.at_most(8), size.at_least(8)
    near = small * (small - 1) * _LOG_GAMMA(small) - small.log()
    series = (1 / (large * large)).power_series(1 / 12, -1 / 360, 1 / 1260) / large
    far = (large - 0.5) * large.log() - large + 0.5 * math.log(2 * math.pi) + series
    positive = near.where(size < 8, far)
    reflected = (math.pi / abs((_distance_to_integer(at) * math.pi).sin())).log() - positive
    return at.like(math.inf).where(_is_infinite(at), reflected.where(negative, positive)).value


@aten("digamma")
def digamma(g: Builder, x: Value) -> Value:
    """The asymptotic series from 8 on, a table below, and ψ(1−x) − ψ(x) = π·cot πx for negative numbers."""
    at = number(g, x)
    negative = at < 0
    size = (1 - at).where(negative, at)
    small, large = size.at_most(8), size.at_least(8)
    series = (1 / (large * large)).power_series(-1 / 12, 1 / 120, -1 / 252) / (large * large)
    far = large.log() - 0.5 / large + series
    positive = (_DIGAMMA(small) - 1 / small).where(size < 8, far)
    turn = _distance_to_integer(at) * math.pi
    reflected = (positive - math.pi * turn.cos() / turn.sin()).where(g.Not(turn.equals(0)), math.nan)
    return reflected.where(negative, positive).value


_TERMS = 9


def _hurwitz(s: Number, q: Number) -> Number:
    """Σ (q+k)⁻ˢ over k ≥ 0, for positive q: the first terms, and the rest by the Euler–Maclaurin formula."""
    g = s.g
    steps = Number(g, g.constant(torch.arange(float(_TERMS), dtype=torch.float64).numpy()))
    terms = (Number(g, g.unsqueeze(q.value, [-1])) + steps) ** Number(g, g.unsqueeze((-s).value, [-1]))
    total = g.ReduceSum(terms.value, g.ints([-1]), keepdims=0)
    head = Number(g, g.shaped(total, g.broadcast(s.value, q.value)))
    a = q + _TERMS
    third = s * (s + 1) * (s + 2) / (a * a * a)
    fifth = third * (s + 3) * (s + 4) / (a * a)
    return head + a ** (-s) * (a / (s - 1) + 0.5 + s / (12 * a) - third / 720 + fifth / 30240)


def _zeta(s: Number, q: Number) -> Number:
    """Hurwitz's zeta function; for negative q, a difference of two values for positive numbers."""
    g = s.g
    q = Number(g, g.expand(q.value, g.broadcast(s.value, q.value)))
    negative, is_integer = q < 0, q.equals(q.floor())
    rest = -q - (-q).floor()
    starts = [(1 - rest).where(negative, q), rest.where(negative, 1), (1 - q).where(negative, 1)]
    joined = g.Concat(*(g.unsqueeze(start.value, [0]) for start in starts), axis=0)
    sums = _hurwitz(s, Number(g, g.shaped(joined, [3, *g.dims(q.value)])))
    ahead, below, above = (_row(sums, i) for i in range(3))
    sign = 1 - 2 * (s - 2 * (s / 2).floor())
    left = ahead + sign * (below - above)
    left = left.where(s.equals(s.floor()), math.nan)
    result = left.where(negative, ahead).where(g.Not(g.And(is_integer, q < 0.5)), math.inf)
    return result.where(g.Not(s < 1), math.nan).where(g.Not(s.equals(1)), math.inf)


def _row(x: Number, index: int) -> Number:
    row = x.g.Gather(x.value, x.g.scalar(index, torch.int64), axis=0)
    return Number(x.g, x.g.shaped(row, x.g.dims(x.value)[1:]))


_BEYOND_SINGLE = 1e40
"""An exponent that represents infinity: its factor is finite."""


@aten("special_zeta", "special_zeta.self_scalar", "special_zeta.other_scalar")
def zeta(g: Builder, s: Operand, q: Operand) -> Value:
    return _zeta(number(g, s).at_most(_BEYOND_SINGLE), number(g, q)).value


_HIGHEST_DERIVATIVE = 20


@aten("polygamma")
def polygamma(g: Builder, n: int, x: Value) -> Value:
    """ψ⁽ⁿ⁾(x) = (−1)ⁿ⁺¹ · n! · ζ(n+1, x)."""
    if n == 0:
        return digamma(g, x)
    if n > _HIGHEST_DERIVATIVE:
        raise Unsupported(f"a polygamma function of order {n}; up to {_HIGHEST_DERIVATIVE} are exact")
    at = number(g, x)
    sign = 1 if n % 2 else -1
    result = _zeta(at.like(n + 1), at) * (sign * math.factorial(n))
    if n == 1:  # it tends to zero at infinity; for the others torch returns no limit
        result = result.where(g.Not(_is_infinite(at)), 1 / at.log())
    return result.value


# The error function and its inverse

_ERFCX = Curve(lambda w: torch.special.erfcx(1 / w - 1) / w, 0, 1)
_ERFINV = Curve(lambda w: torch.erfinv(torch.sqrt(-torch.expm1(-w))) / torch.sqrt(-torch.expm1(-w)), 0, 18)
_NDTRI = Curve(lambda s: torch.special.ndtri(torch.exp(-s * s / 2)), 1.17, 15)


@aten("special_erfcx")
def erfcx(g: Builder, x: Value) -> Value:
    """exp(x²)·erfc(x); for negative numbers 2·exp(x²) − erfcx(−x)."""
    at = number(g, x)
    w = 1 / (1 + abs(at))
    positive = _ERFCX(w) * w
    return (2 * (at * at).exp() - positive).where(at < 0, positive).value


@aten("erfinv")
def erfinv(g: Builder, x: Value) -> Value:
    """x times a smooth function of −log(1 − x²)."""
    at = number(g, x)
    inside = at * _ERFINV(-((1 - at) * (1 + at)).log())
    return (at * math.inf).where(abs(at).equals(1), inside).value


@aten("special_ndtri")
def ndtri(g: Builder, x: Value) -> Value:
    """The normal quantile: a function of √(−2·log p) for the smaller tail p; the other tail is its mirror image."""
    at = number(g, x)
    tail = at.at_most(1 - at)
    left = _NDTRI((-2 * tail.log()).sqrt()).where(g.Not(tail.equals(0)), -math.inf)
    return (-left).where(g.Greater(at.value, at.like(0.5).value), left).value


# Bessel functions

_I0 = Curve(lambda w: torch.special.i0e(1 / w - 1) / torch.sqrt(w), 0, 1)
_I1 = Curve(lambda w: torch.special.i1e(1 / w - 1) / ((1 / w - 1) * w**1.5), 0, 1)


def _i0e(x: Number) -> Number:
    w = 1 / (1 + abs(x))
    return _I0(w) * w.sqrt()


def _i1e(x: Number) -> Number:
    size = abs(x)  # maps −0 to 0, as torch does
    w = 1 / (1 + size)
    result = size.at_most(_NEARLY_INFINITE) * _I1(w) * w * w.sqrt()
    return (-result).where(x < 0, result)


@aten("special_i0e")
def i0e(g: Builder, x: Value) -> Value:
    return _i0e(number(g, x)).value


@aten("special_i1e")
def i1e(g: Builder, x: Value) -> Value:
    return _i1e(number(g, x)).value


@aten("i0", "special_modified_bessel_i0")
def i0(g: Builder, x: Value) -> Value:
    at = number(g, x)
    return (_i0e(at) * abs(at).exp()).value


@aten("special_i1", "special_modified_bessel_i1")
def i1(g: Builder, x: Value) -> Value:
    at = number(g, x)
    return (_i1e(at) * abs(at).exp()).value


_SMALLEST, _LARGEST = -104, 89  # logarithms of the smallest and largest float
_K0 = Curve(
    lambda y: torch.special.scaled_modified_bessel_k0(torch.exp(y)) * torch.sqrt(1 + torch.exp(y)),
    _SMALLEST,
    _LARGEST,
)
_K1 = Curve(
    lambda y: torch.special.scaled_modified_bessel_k1(torch.exp(y)) * torch.exp(y) / torch.sqrt(1 + torch.exp(y)),
    _SMALLEST,
    _LARGEST,
)


def _k0e(x: Number) -> Number:
    return (_K0(x.log()) / (1 + x).sqrt()).where(x.g.Not(x.equals(0)), math.inf)


def _k1e(x: Number) -> Number:
    end = x.at_most(_NEARLY_INFINITE)
    return _K1(x.log()) * (1 + end).sqrt() / end.where(x.g.Not(x.equals(0)), 0)


@aten("special_scaled_modified_bessel_k0")
def scaled_k0(g: Builder, x: Value) -> Value:
    return _k0e(number(g, x)).value


@aten("special_scaled_modified_bessel_k1")
def scaled_k1(g: Builder, x: Value) -> Value:
    return _k1e(number(g, x)).value


@aten("special_modified_bessel_k0")
def k0(g: Builder, x: Value) -> Value:
    at = number(g, x)
    return (_k0e(at) * (-at).exp()).value


@aten("special_modified_bessel_k1")
def k1(g: Builder, x: Value) -> Value:
    at = number(g, x)
    return (_k1e(at) * (-at).exp()).value


_SPLIT = 8.0
"""Below this the Bessel functions are tabulated; beyond, they are a cosine and a sine with slowly varying factors."""

_J0 = Curve(torch.special.bessel_j0, 0, _SPLIT)
_J1 = Curve(lambda x: torch.special.bessel_j1(x) / x, 0, _SPLIT)
_Y0 = Curve(lambda x: torch.special.bessel_y0(x) - 2 / math.pi * torch.log(x) * torch.special.bessel_j0(x), 0, _SPLIT)
_Y1 = Curve(
    lambda x: (torch.special.bessel_y1(x) - 2 / math.pi * (torch.log(x) * torch.special.bessel_j1(x) - 1 / x)) / x,
    0,
    _SPLIT,
)


def _factor(order: int, quadrature: bool) -> Curve:
    """Return the factor of the cosine, or the sine, of x − π/4 − order·π/2, as a function of 8/x."""
    j = torch.special.bessel_j1 if order else torch.special.bessel_j0
    y = torch.special.bessel_y1 if order else torch.special.bessel_y0

    def function(u: torch.Tensor) -> torch.Tensor:
        x = _SPLIT / u
        cos, sin = (f(x - math.pi / 4 - order * math.pi / 2) for f in (torch.cos, torch.sin))
        result: torch.Tensor = y(x) * cos - j(x) * sin if quadrature else j(x) * cos + y(x) * sin
        return result * torch.sqrt(math.pi / 2 * x)

    return Curve(function, 0, 1)


_FACTORS = [(_factor(order, False), _factor(order, True)) for order in (0, 1)]


def _waves(x: Number, order: int) -> tuple[Number, Number]:
    """Return the Bessel functions of both kinds far from zero."""
    x = x.where(x.g.Not(x < _SPLIT), _SPLIT)
    u, phase = _SPLIT / x, x - (math.pi / 4 + order * math.pi / 2)
    p, q = (factor(u) for factor in _FACTORS[order])
    cos, sin, size = phase.cos(), phase.sin(), (2 / math.pi / x).sqrt()
    return size * (p * cos - q * sin), size * (p * sin + q * cos)


@aten("special_bessel_j0")
def bessel_j0(g: Builder, x: Value) -> Value:
    size = abs(number(g, x))
    return _J0(size).where(size < _SPLIT, _waves(size, 0)[0]).value


@aten("special_bessel_j1")
def bessel_j1(g: Builder, x: Value) -> Value:
    at = number(g, x)
    size = abs(at)
    far = _waves(size, 1)[0]
    return (at * _J1(size)).where(size < _SPLIT, (-far).where(at < 0, far)).value


@aten("special_bessel_y0")
def bessel_y0(g: Builder, x: Value) -> Value:
    at = number(g, x)
    near = _Y0(at) + 2 / math.pi * at.log() * _J0(at)
    return near.where(at < _SPLIT, _waves(at, 0)[1]).value


@aten("special_bessel_y1")
def bessel_y1(g: Builder, x: Value) -> Value:
    at = number(g, x)
    near = at * _Y1(at) + 2 / math.pi * (at * at.log() * _J1(at) - 1 / at)
    result = near.where(at < _SPLIT, _waves(at, 1)[1])
    return result.where(g.Not(at.equals(0)), -math.inf).value


_AIRY = Curve(torch.special.airy_ai, -_SPLIT, 28)
_AIRY_SERIES = [math.gamma(3 * k + 0.5) / (54**k * math.factorial(k) * math.gamma(k + 0.5)) for k in range(6)]


@aten("special_airy_ai")
def airy_ai(g: Builder, x: Value) -> Value:
    """A table in the middle, and the asymptotic series elsewhere."""
    at = number(g, x)
    size = (-at).at_least(_SPLIT)
    angle = 2 / 3 * size * size.sqrt()
    phase, v = angle - math.pi / 4, 1 / (angle * angle)
    even, odd = (v.power_series(*((-1) ** i * u for i, u in enumerate(_AIRY_SERIES[k::2]))) for k in (0, 1))
    wave = (phase.cos() * even + phase.sin() * odd / angle) / (math.pi * size.sqrt()).sqrt()
    near = _AIRY(at).where(g.Not(g.Greater(at.value, at.like(_AIRY.high).value)), 0)
    result = wave.where(at < -_SPLIT, near)
    return at.like(math.nan).where(_is_infinite(at), result).value
