"""Reductions, softmax, and indices of extremes."""

from __future__ import annotations

import onnx_ir as ir

from sardonyx.native.nests import Reduction
from sardonyx.native.region import Lowering
from sardonyx.native.table import (
    BOOL,
    INT64,
    constants,
    indices_along,
    int_of,
    lowers,
    need_floats,
    operand,
    to_type,
    where,
    widened,
)
from sardonyx.native.values import Number, Value


def _axes(node: ir.Node, rank: int) -> list[int]:
    axes = constants(node, 1, "axes")
    if not axes:
        return [] if int_of(node, "noop_with_empty_axes", 0) else list(range(rank))
    return [axis % rank for axis in axes]


def _define_reduced(r: Lowering, node: ir.Node, result: Value, axes: list[int]) -> None:
    r.define(node.outputs[0], result if int_of(node, "keepdims", 1) else r.squeeze(result, axes))


@lowers("ReduceSum", "ReduceMean", "ReduceProd", "ReduceSumSquare", "ReduceL1", "ReduceL2", "ReduceLogSum")
def _reduce(r: Lowering, node: ir.Node) -> None:
    x_operand = operand(r, node, 0)
    x, kind = widened(r, x_operand), node.op_type.removeprefix("Reduce")
    if kind in ("Mean", "L2", "LogSum"):
        need_floats(x, node)
    axes = _axes(node, len(x.dims))
    if kind in ("SumSquare", "L2"):
        x = r.apply("mul", x, x)
    elif kind == "L1":
        x = r.apply("abs", x)
    result = r.mean(x, axes) if kind == "Mean" else r.reduce("Product" if kind == "Prod" else "Sum", x, axes)
    if kind in ("L2", "LogSum"):
        result = r.apply("sqrt" if kind == "L2" else "log", result)
    _define_reduced(r, node, to_type(r, result, x_operand.dtype), axes)


@lowers("ReduceMax", "ReduceMin")
def _reduce_extreme(r: Lowering, node: ir.Node) -> None:
    x = operand(r, node, 0)
    axes = _axes(node, len(x.dims))
    number = to_type(r, x, ir.DataType.UINT8) if x.dtype == BOOL else x
    result = r.reduce("Largest" if node.op_type == "ReduceMax" else "Smallest", number, axes)
    _define_reduced(r, node, to_type(r, result, x.dtype), axes)


@lowers("ReduceLogSumExp")
def _log_sum_exp(r: Lowering, node: ir.Node) -> None:
    """Return log Σ eˣ = log Σ eˣ⁻ᵐ + m, with m the maximum, unless it is infinite."""
    x_operand = operand(r, node, 0)
    need_floats(x_operand, node)
    x = r.stored_if_costly(widened(r, x_operand))
    axes = _axes(node, len(x.dims))
    largest = r.reduce("Largest", x, axes)
    offset = r.stored(where(r, r.apply("is_inf", largest, dtype=BOOL), r.number(0.0, x), largest))
    total = r.reduce("Sum", r.apply("exp", r.apply("sub", x, offset)), axes)
    _define_reduced(r, node, to_type(r, r.apply("add", r.apply("log", total), offset), x_operand.dtype), axes)


@lowers("GlobalAveragePool", "GlobalMaxPool")
def _global_pool(r: Lowering, node: ir.Node) -> None:
    x = operand(r, node, 0)
    need_floats(x, node)
    axes = range(2, len(x.dims))
    largest = node.op_type == "GlobalMaxPool"
    result = r.reduce("Largest", x, axes) if largest else r.mean(widened(r, x), axes)
    r.define(node.outputs[0], to_type(r, result, x.dtype))


@lowers("Softmax", "LogSoftmax")
def _softmax(r: Lowering, node: ir.Node) -> None:
    x_operand = operand(r, node, 0)
    need_floats(x_operand, node)
    x = r.stored_if_costly(widened(r, x_operand))
    axes = [int_of(node, "axis", -1) % len(x.dims)]
    shifted = r.apply("sub", x, r.reduce("Largest", x, axes))
    if node.op_type == "LogSoftmax":
        total = r.reduce("Sum", r.apply("exp", shifted), axes)
        result: Value = r.apply("sub", shifted, r.apply("log", total))
    else:
        powers = r.stored(r.apply("exp", shifted))
        share = r.apply("div", r.number(1.0, x), r.reduce("Sum", powers, axes))
        result = r.apply("mul", powers, r.stored(share))
    r.define(node.outputs[0], to_type(r, result, x_operand.dtype))


# Indices of extremes


def _arg_extreme_index(r: Lowering, x: Value, axis: int, *, largest: bool, last: bool) -> Value:
    """Return the index of the extreme along an axis, the first or last of equal ones; the axis stays with size one."""
    x = r.stored_if_costly(x)
    extreme = r.reduce("Largest" if largest else "Smallest", x, [axis])
    is_extreme = r.apply("equal", x, extreme, dtype=BOOL)
    if x.dtype not in _WITHOUT_NAN:
        is_extreme = r.apply("or", is_extreme, r.apply("is_nan", x, dtype=BOOL))
    position = indices_along(r, x.dims[axis], len(x.dims), axis)
    otherwise = Number(-1 if last else 2**62, (), INT64)
    reduction: Reduction = "Largest" if last else "Smallest"
    return r.reduce(reduction, where(r, is_extreme, position, otherwise), [axis])


_WITHOUT_NAN = frozenset({ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT32, ir.DataType.INT64})


@lowers("ArgMax", "ArgMin")
def _arg_extreme(r: Lowering, node: ir.Node) -> None:
    x = operand(r, node, 0)
    axis = int_of(node, "axis", 0) % len(x.dims)
    last = bool(int_of(node, "select_last_index", 0))
    position = _arg_extreme_index(r, x, axis, largest=node.op_type == "ArgMax", last=last)
    _define_reduced(r, node, position, [axis])


@lowers("Hardmax")
def _hardmax(r: Lowering, node: ir.Node) -> None:
    x = operand(r, node, 0)
    axis = int_of(node, "axis", -1) % len(x.dims)
    position = r.stored(_arg_extreme_index(r, x, axis, largest=True, last=False))
    chosen = r.apply("equal", indices_along(r, x.dims[axis], len(x.dims), axis), position, dtype=BOOL)
    r.define(node.outputs[0], r.expand(to_type(r, chosen, x.dtype), x.dims))
