"""Orthogonal polynomials: Chebyshev's by cosines, for any degree; the others by recurrence."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import onnx_ir as ir
import torch

from sardonyx.translate.builder import Builder, Operand
from sardonyx.translate.formula import Number, loop_numbers, number
from sardonyx.translate.table import aten

Value = ir.Value


class _Angle:
    """θ with cos θ = x for x in [0, 1], and η with cosh η = x beyond."""

    def __init__(self, x: Number) -> None:
        g = x.g
        self._inside = x < 1
        sine = ((1 - x.at_most(1)) / 2).sqrt()
        # The arc sine has single precision; a Newton step doubles its digits.
        half = Number(g, g.cast(g.Asin(g.cast(sine.value, torch.float32)), torch.float64))
        self._theta = 2 * (half + (sine - half.sin()) / half.cos())
        large = x.at_least(1)
        self._eta = (large + ((large - 1) * (large + 1)).sqrt()).log()

    def cos(self, m: Number) -> Number:
        """cos mθ, or cosh mη."""
        grown = (m * self._eta).exp()
        return (m * self._theta).cos().where(self._inside, (grown + 1 / grown) / 2)

    def sin(self, m: Number) -> Number:
        """sin mθ, or sinh mη."""
        grown = (m * self._eta).exp()
        return (m * self._theta).sin().where(self._inside, (grown - 1 / grown) / 2)

    def sines(self, m: Number, unit: float) -> Number:
        """sin(m·θ) / sin(unit·θ), which is m/unit where both are zero."""
        below = self.sin(m.like(unit))
        result = self.sin(m) / below
        return result.where(m.g.Not(below.equals(0)), m / unit)


def _t(angle: _Angle, n: Number) -> Number:
    return angle.cos(n)


def _u(angle: _Angle, n: Number) -> Number:
    return angle.sines(n + 1, 1)


def _v(angle: _Angle, n: Number) -> Number:
    return angle.cos(n + 0.5) / angle.cos(n.like(0.5))


def _w(angle: _Angle, n: Number) -> Number:
    return angle.sines(n + 0.5, 0.5)


_ChebyshevKind = Callable[[_Angle, Number], Number]
_KINDS: dict[str, tuple[_ChebyshevKind, _ChebyshevKind]] = {"t": (_t, _t), "u": (_u, _u), "v": (_v, _w), "w": (_w, _v)}
"""Each kind for positive x, and its mirror, except for the sign, for negative x."""


def _degree(n: Number) -> Number:
    """Truncate to an integer, as torch does; negative if there is none."""
    return n.apply("Ceil").where(n < 0, n.floor()).where(n < 2.0**63, -1)


def _chebyshev(x: Number, n: Number, kinds: tuple[_ChebyshevKind, _ChebyshevKind]) -> Number:
    g = x.g
    endless = g.IsInf(x.value)
    x = x.at_most(1e100).at_least(-1e100)  # ∞ − ∞ would be NaN
    angle = _Angle(abs(x))
    odd = (n - 2 * (n / 2).floor()).equals(1)
    right = kinds[0](angle, n)
    mirrored = right if kinds[1] is kinds[0] else kinds[1](angle, n)
    result = (-mirrored).where(odd, mirrored).where(x < 0, right)
    result = result.where(g.Not(g.And(endless, g.Not(n < 3))), math.nan)
    return result.where(g.Not(n.equals(0)), 1).where(g.Not(n < 0), 0)


def _register_chebyshev(name: str, kinds: tuple[_ChebyshevKind, _ChebyshevKind], shifted: bool) -> None:
    @aten(name, f"{name}.x_scalar", f"{name}.n_scalar")
    def chebyshev(g: Builder, x: Operand, n: Operand) -> Value:
        at = number(g, x)
        return _chebyshev(2 * at - 1 if shifted else at, _degree(number(g, n)), kinds).value


for _kind, _both in _KINDS.items():
    _register_chebyshev(f"special_chebyshev_polynomial_{_kind}", _both, shifted=False)
    _register_chebyshev(f"special_shifted_chebyshev_polynomial_{_kind}", _both, shifted=True)


_Step = Callable[[Number, Number, Number, Number], Number]
"""The polynomial of degree k+1 from x, k and those of degree k and k−1."""

_RECURRENCES: dict[str, _Step] = {
    "hermite_polynomial_h": lambda x, k, p, q: 2 * x * p - 2 * k * q,
    "hermite_polynomial_he": lambda x, k, p, q: x * p - k * q,
    "laguerre_polynomial_l": lambda x, k, p, q: ((2 * k + 1 - x) * p - k * q) / (k + 1),
    "legendre_polynomial_p": lambda x, k, p, q: ((2 * k + 1) * x * p - k * q) / (k + 1),
}
_HIGHEST_HERMITE = 128
"""For higher degrees torch returns NaN in single precision."""


def _recurrence(x: Number, n: Number, step: _Step) -> Number:
    """Compute up to the highest degree; each element keeps the result of its own degree."""
    g = x.g
    dims = g.broadcast(x.value, n.value)
    one, zero = (Number(g, g.expand(x.like(value).value, dims)) for value in (1.0, 0.0))
    rounds = g.cast(g.ReduceMax(n.at_least(0).value, keepdims=0), torch.int64)

    def round_(k: Number, state: Sequence[Number]) -> list[Number]:
        p, q, result = state
        following = step(x, k, p, q)
        return [following, p, following.where(n.equals(k + 1), result)]

    return loop_numbers(rounds, [one, zero, one.where(n.equals(0), zero)], round_)[2]


def _register_recurrence(name: str, step: _Step) -> None:
    @aten(f"special_{name}", f"special_{name}.x_scalar", f"special_{name}.n_scalar")
    def polynomial(g: Builder, x: Operand, n: Operand) -> Value:
        at, degree = number(g, x), _degree(number(g, n))
        if not name.startswith("hermite"):
            return _recurrence(at, degree, step).value
        result = _recurrence(at, degree.at_most(_HIGHEST_HERMITE), step)
        return result.where(degree < _HIGHEST_HERMITE + 1, math.nan).value


for _name, _step in _RECURRENCES.items():
    _register_recurrence(_name, _step)
