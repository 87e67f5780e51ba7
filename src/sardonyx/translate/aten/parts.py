"""The mantissa and exponent of floating-point numbers, and the next representable number."""

from __future__ import annotations

import math

import onnx_ir as ir
import torch

from sardonyx.errors import Unsupported
from sardonyx.translate.builder import Builder
from sardonyx.translate.formula import Number, number
from sardonyx.translate.table import aten

Value = ir.Value


def _parts(x: Number) -> tuple[Number, Number, Value]:
    """Return m in [½, 1) and e with |x| = m·2ᵉ, and where they are defined: for finite nonzero numbers."""
    g, size = x.g, abs(x)
    ordinary = g.And(g.Greater(size.value, x.like(0).value), size < math.inf)
    size = size.where(ordinary, 1)
    exponent = (size.log() / math.log(2)).floor() + 1
    mantissa = _rounded(size * x.like(2) ** (-exponent))  # the power may be inexact on CUDA
    # The logarithm of a power of two, or of a number next to it, may be rounded to the wrong side.
    high, low = g.Not(mantissa < 1), mantissa < 0.5
    exponent = (exponent + 1).where(high, (exponent - 1).where(low, exponent))
    return (mantissa / 2).where(high, (mantissa * 2).where(low, mantissa)), exponent, ordinary


def _rounded(x: Number) -> Number:
    """Return x in single precision, which has every digit of a number that was cast to double precision."""
    return Number(x.g, x.g.cast(x.g.cast(x.value, torch.float32), x.g.dtype(x.value)))


@aten("frexp.Tensor")
def frexp(g: Builder, x: Value) -> tuple[Value, Value]:
    if g.dtype(x) == torch.float64:
        raise Unsupported("no formula that is accurate in double precision")
    at = Number(g, g.cast(x, torch.float64))
    mantissa, exponent, ordinary = _parts(at)
    return (mantissa * at.apply("Sign")).where(ordinary, at).value, exponent.where(ordinary, 0).value


@aten("nextafter")
def nextafter(g: Builder, x: Value, y: Value) -> Value:
    limits = torch.finfo(g.out.dtype)
    digits, lowest = 1 - int(math.log2(limits.eps)), int(math.log2(limits.tiny)) + 1
    at, towards = number(g, x), number(g, y)
    mantissa, exponent, ordinary = _parts(at)
    step = at.like(2) ** (exponent.at_least(lowest) - digits)
    halved = g.And(mantissa.equals(0.5), g.Greater(exponent.value, at.like(lowest).value))
    sign, size = at.apply("Sign"), abs(at)
    outwards = g.Less((sign * at).value, (sign * towards).value)
    moved = sign * (size + step).where(outwards, size - (step / 2).where(halved, step))
    first = towards.apply("Sign") * 2.0 ** (lowest - digits)
    result = moved.where(ordinary, first.where(at.equals(0), sign * limits.max))
    result = towards.where(at.equals(towards), result)
    return (at + towards).where(g.Or(g.IsNaN(at.value), g.IsNaN(towards.value)), result).value
