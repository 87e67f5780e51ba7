"""Signs, including those of zeros, and functions of them. The sign of NaN is undefined."""

from __future__ import annotations

import math

import onnx_ir as ir
import torch

from sardonyx.translate.aten.pointwise import operands
from sardonyx.translate.builder import Builder, Operand
from sardonyx.translate.table import aten

Value = ir.Value


@aten("sign", "sgn")
def sign(g: Builder, x: Value) -> Value:
    if g.out.dtype == torch.bool:
        return x
    signs = g.Sign(x)  # for NaN it is NaN in ONNX and zero in torch
    return g.Where(g.IsNaN(x), g.scalar(0, g.out.dtype), signs) if g.out.dtype.is_floating_point else signs


@aten("angle")
def angle(g: Builder, x: Value) -> Value:
    x = g.cast(x, g.out.dtype)
    zero, half_turn = g.scalar(0, g.out.dtype), g.scalar(math.pi, g.out.dtype)
    return g.Where(g.IsNaN(x), x, g.Where(g.Less(x, zero), half_turn, zero))


@aten("signbit")
def signbit(g: Builder, x: Value) -> Value:
    if g.dtype(x) == torch.bool:
        return g.And(x, g.Not(x))
    negative = g.Less(x, g.scalar(0, g.dtype(x)))
    if not g.dtype(x).is_floating_point:
        return negative
    return g.Or(negative, g.Equal(g.Reciprocal(x), g.scalar(-math.inf, g.dtype(x))))  # 1/-0 is -inf


def sign_factor(g: Builder, x: Value) -> Value:
    """1, or −1 where the sign bit is set: a factor sets the sign of zero, which a Where between zeros may lose."""
    return g.Where(signbit(g, x), g.scalar(-1, g.dtype(x)), g.scalar(1, g.dtype(x)))


@aten("copysign.Tensor", "copysign.Scalar")
def copysign(g: Builder, x: Operand, y: Operand) -> Value:
    x, y = operands(g, x, y)
    return g.Mul(g.Abs(x), sign_factor(g, y))


def _is_zero(g: Builder, x: Value) -> Value:
    return g.Equal(x, g.scalar(0, g.dtype(x)))


@aten("atan2")
def atan2(g: Builder, y: Operand, x: Operand) -> Value:
    y, x = operands(g, y, x)
    dtype = g.out.dtype
    endless = g.And(g.IsInf(y), g.IsInf(x))
    y, x = (g.Where(endless, g.Sign(v), v) for v in (y, x))
    nowhere = g.And(_is_zero(g, y), _is_zero(g, x))
    angle = g.Atan(g.Where(nowhere, y, g.Div(y, x)))
    half_turn = g.Where(signbit(g, y), g.scalar(-math.pi, dtype), g.scalar(math.pi, dtype))
    return g.Where(signbit(g, x), g.Add(angle, half_turn), angle)
