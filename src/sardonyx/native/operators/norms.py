"""Normalizations: two passes, the mean before the variance."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from sardonyx import opsets
from sardonyx.native.operators.indexing import gather_along
from sardonyx.native.region import CannotLower, Lowering, dtype_of
from sardonyx.native.table import (
    BOOL,
    INT64,
    define_optional,
    float_of,
    int_of,
    ints_of,
    is_used,
    less,
    lowers,
    need_floats,
    operand,
    opset_of,
    optional,
    plus,
    scaled,
    to_type,
    where,
    widened,
)
from sardonyx.native.values import Number, Value, dim_of
from sardonyx.sizes import Dim


def _moments(r: Lowering, x: Value, axes: Sequence[int], epsilon: float) -> tuple[Value, Value, Value]:
    """Return the centred value, the mean and the inverse standard deviation over axes."""
    x = r.stored_if_costly(x)
    mean = r.stored(r.mean(x, axes))
    centred = r.apply("sub", x, mean)
    variance = r.mean(r.apply("mul", centred, centred), axes)
    return centred, mean, r.stored(_inverse_root(r, variance, epsilon))


def _inverse_root(r: Lowering, variance: Value, epsilon: float) -> Value:
    return r.apply("div", r.number(1.0, variance), r.apply("sqrt", plus(r, variance, epsilon)))


def _define_result(r: Lowering, node: ir.Node, x: Value, scale: Value | None, bias: Value | None) -> None:
    """Define the first result, x · scale + bias, in its type."""
    if scale is not None:
        x = r.apply("mul", x, to_type(r, scale, x.dtype))
    if bias is not None:
        x = r.apply("add", x, to_type(r, bias, x.dtype))
    r.define(node.outputs[0], to_type(r, x, dtype_of(node.outputs[0])))


def _define_moment(r: Lowering, node: ir.Node, index: int, value: Value | None) -> None:
    if value is not None and is_used(node, index):
        value = to_type(r, value, dtype_of(node.outputs[index]))
    define_optional(r, node, index, value)


def _widened_operand(r: Lowering, node: ir.Node) -> Value:
    x = operand(r, node, 0)
    need_floats(x, node)
    return widened(r, x)


@lowers("LayerNormalization")
def _layer_norm(r: Lowering, node: ir.Node) -> None:
    x = _widened_operand(r, node)
    axes = range(int_of(node, "axis", -1) % len(x.dims), len(x.dims))
    centred, mean, inverse = _moments(r, x, axes, float_of(node, "epsilon", 1e-5))
    _define_result(r, node, r.apply("mul", centred, inverse), operand(r, node, 1), optional(r, node, 2))
    _define_moment(r, node, 1, mean)
    _define_moment(r, node, 2, inverse)


@lowers("RMSNormalization", "SimplifiedLayerNormalization")
def _rms_norm(r: Lowering, node: ir.Node) -> None:
    x = _widened_operand(r, node)
    axes = range(int_of(node, "axis", -1) % len(x.dims), len(x.dims))
    inverse = r.stored(_inverse_root(r, r.mean(r.apply("mul", x, x), axes), float_of(node, "epsilon", 1e-5)))
    _define_result(r, node, r.apply("mul", x, inverse), operand(r, node, 1), None)
    _define_moment(r, node, 1, inverse)


@lowers("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", domain="com.microsoft")
def _skip_layer_norm(r: Lowering, node: ir.Node) -> None:
    simple = node.op_type == "SkipSimplifiedLayerNormalization"
    x_operand = operand(r, node, 0)
    need_floats(x_operand, node)
    x = r.apply("add", x_operand, operand(r, node, 1))
    bias = optional(r, node, 3 if simple else 4)
    x = r.stored(widened(r, x if bias is None else r.apply("add", x, bias)))
    axes, epsilon = [len(x.dims) - 1], float_of(node, "epsilon", 1e-12)
    if simple:
        y: Value = r.apply("mul", x, r.stored(_inverse_root(r, r.mean(r.apply("mul", x, x), axes), epsilon)))
    else:
        centred, _, inverse = _moments(r, x, axes, epsilon)
        y = r.apply("mul", centred, inverse)
    _define_result(r, node, y, operand(r, node, 2), None if simple else optional(r, node, 3))
    for index in (1, 2):
        define_optional(r, node, index, None)
    define_optional(r, node, 3, to_type(r, x, x_operand.dtype))


@lowers("EmbedLayerNormalization", domain="com.microsoft")
def _embed_layer_norm(r: Lowering, node: ir.Node) -> None:
    """Normalize the sum of word, position and segment embeddings; the second result counts the mask."""
    ids, segments, mask = operand(r, node, 0), optional(r, node, 1), optional(r, node, 7)
    words, gamma = operand(r, node, 2), operand(r, node, 5)
    need_floats(words, node)
    total = r.apply("add", _embed(r, words, ids), _embed_positions(r, node, ids.dims[1]))
    table = optional(r, node, 4)
    if segments is not None and table is not None:
        total = r.apply("add", total, _embed(r, table, segments))
    x = r.stored(widened(r, total))
    centred, _, inverse = _moments(r, x, [2], float_of(node, "epsilon", 1e-12))
    _define_result(r, node, r.apply("mul", centred, inverse), gamma, operand(r, node, 6))
    if is_used(node, 1):
        r.define(node.outputs[1], _mask_length(r, ids.dims[0], mask))
    define_optional(r, node, 2, to_type(r, x, words.dtype))


def _embed(r: Lowering, table: Value, index: Value) -> Value:
    """Return rows of a table; a negative index is an error."""
    out_of_range = Number(table.dims[0], (), INT64)
    wide = to_type(r, index, INT64)
    checked = where(r, less(r, wide, r.number(0, wide)), out_of_range, wide)
    return gather_along(r, table, 0, r.unsqueeze(checked, [2]), 2)


def _embed_positions(r: Lowering, node: ir.Node, length: Dim) -> Value:
    table, positions = operand(r, node, 3), optional(r, node, 8)
    if positions is not None:
        return _embed(r, table, positions)
    r.require(dim_of(table.dims[0] - length))
    return r.unsqueeze(r.slice(table, 0, 0, 1, length), [0])


def _mask_length(r: Lowering, batch: Dim, mask: Value | None) -> Value:
    kind = ir.DataType.INT32
    if mask is None:
        return r.expand(Number(0, (), kind), (batch,))
    is_one = r.apply("equal", mask, r.number(1, mask), dtype=BOOL)
    return r.reduce("Sum", to_type(r, is_one, kind), [1], keep=False)


def _per_channel(r: Lowering, operand: Value, rank: int) -> Value:
    return r.unsqueeze(operand, [0, *range(2, rank)])


def _per_last(r: Lowering, operand: Value, rank: int) -> Value:
    return r.unsqueeze(operand, range(rank - 1))


@lowers("BatchNormalization")
def _batch_norm(r: Lowering, node: ir.Node) -> None:
    x = _widened_operand(r, node)
    scale, bias, mean, variance = _batch_norm_operands(r, node, x)
    if int_of(node, "training_mode", 0):
        x = r.stored_if_costly(x)
        mean, variance = _batch_moments(r, node, x, mean, variance)
    _normalize_batch(r, node, x, (scale, bias, mean, variance), _per_channel)


@lowers("BatchNormalization", domain="com.ms.internal.nhwc")
def _batch_norm_of_last(r: Lowering, node: ir.Node) -> None:
    """Normalize with given statistics, with channels last."""
    x = _widened_operand(r, node)
    _normalize_batch(r, node, x, _batch_norm_operands(r, node, x), _per_last)


def _batch_norm_operands(r: Lowering, node: ir.Node, x: Value) -> tuple[Value, ...]:
    """Return scale, bias, mean and variance in the type of x."""
    return tuple(to_type(r, operand(r, node, i), x.dtype) for i in range(1, 5))


def _normalize_batch(
    r: Lowering,
    node: ir.Node,
    x: Value,
    operands: tuple[Value, ...],
    placed: Callable[[Lowering, Value, int], Value],
) -> None:
    """Define the result; `placed` gives one value per channel the axes of `x`."""
    scale, bias, mean, variance = operands
    rank = len(x.dims)
    factor = r.apply("mul", scale, _inverse_root(r, variance, float_of(node, "epsilon", 1e-5)))
    factor = r.stored(factor) if int_of(node, "training_mode", 0) else r.hoisted(factor)
    centred = r.apply("sub", x, placed(r, mean, rank))
    _define_result(r, node, centred, placed(r, factor, rank), placed(r, bias, rank))


def _batch_moments(r: Lowering, node: ir.Node, x: Value, *running: Value) -> tuple[Value, Value]:
    """Return the moments of each channel, and update the running ones."""
    axes = [0, *range(2, len(x.dims))]
    mean = r.stored(r.mean(x, axes))
    centred = r.apply("sub", x, mean)
    variance = r.stored(r.mean(r.apply("mul", centred, centred), axes))
    momentum = float_of(node, "momentum", 0.9)
    moments = r.squeeze(mean, axes), r.squeeze(variance, axes)
    for index, (before, value) in enumerate(zip(running, moments, strict=True), 1):
        moved = r.apply("add", scaled(r, before, momentum), scaled(r, value, 1 - momentum))
        _define_moment(r, node, index, moved)
    return moments


@lowers("InstanceNormalization")
def _instance_norm(r: Lowering, node: ir.Node) -> None:
    x = _widened_operand(r, node)
    rank = len(x.dims)
    centred, _, inverse = _moments(r, x, range(2, rank), float_of(node, "epsilon", 1e-5))
    scale, bias = (_per_channel(r, operand(r, node, i), rank) for i in (1, 2))
    _define_result(r, node, r.apply("mul", centred, inverse), scale, bias)


@lowers("GroupNormalization")
def _group_norm(r: Lowering, node: ir.Node) -> None:
    """Split channels into groups as an axis; before opset 21 there was one scale per group."""
    x = _widened_operand(r, node)
    groups = int_of(node, "num_groups", 1)
    batch, channels, *spatial = x.dims
    if not isinstance(channels, int) or channels % groups:
        raise CannotLower("GroupNormalization whose channels are not a multiple of the groups")
    rank = len(x.dims)
    group_size = channels // groups
    grouped = r.view_as(x, (batch, groups, group_size, *spatial))
    centred, _, inverse = _moments(r, grouped, range(2, rank + 1), float_of(node, "epsilon", 1e-5))
    y = r.view_as(r.apply("mul", centred, inverse), x.dims)
    scale, bias = (operand(r, node, i) for i in (1, 2))
    if opset_of(node) < opsets.CHANNEL_SCALES:
        scale, bias = (
            r.view_as(r.expand(r.unsqueeze(v, [1]), (groups, group_size)), (channels,)) for v in (scale, bias)
        )
    _define_result(r, node, y, _per_channel(r, scale, rank), _per_channel(r, bias, rank))


@lowers("MeanVarianceNormalization")
def _mean_variance(r: Lowering, node: ir.Node) -> None:
    x = r.stored_if_costly(_widened_operand(r, node))
    axes = [axis % len(x.dims) for axis in ints_of(node, "axes", [0, 2, 3])]
    centred = r.apply("sub", x, r.stored(r.mean(x, axes)))
    deviation = plus(r, r.apply("sqrt", r.mean(r.apply("mul", centred, centred), axes)), 1e-9)
    _define_result(r, node, r.apply("div", centred, r.stored(deviation)), None, None)


@lowers("LpNormalization")
def _lp_norm(r: Lowering, node: ir.Node) -> None:
    """Return x / ‖x‖, or zero if the norm is zero."""
    x = r.stored_if_costly(_widened_operand(r, node))
    axis, square = int_of(node, "axis", -1) % len(x.dims), int_of(node, "p", 2) == 2
    norm = r.reduce("Sum", r.apply("mul", x, x) if square else r.apply("abs", x), [axis])
    norm = r.stored(r.apply("sqrt", norm) if square else norm)
    zero = r.number(0.0, norm)
    _define_result(
        r, node, where(r, r.apply("equal", norm, zero, dtype=BOOL), zero, r.apply("div", x, norm)), None, None
    )
