"""Normalisations: two passes, the mean before the variance."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from sardonyx import opsets
from sardonyx.native.operators.indexing import looked_up
from sardonyx.native.region import CannotLower, Lowering, dtype_of
from sardonyx.native.table import (
    BOOL,
    INT64,
    float_of,
    give_optional,
    given,
    int_of,
    ints_of,
    is_asked_for,
    less,
    lowers,
    need_floats,
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
    """The centred value, the mean and the inverse deviation over these axes."""
    x = r.settled(x)
    mean = r.stored(r.mean(x, axes))
    centred = r.apply("sub", x, mean)
    variance = r.mean(r.apply("mul", centred, centred), axes)
    return centred, mean, _inverse_root(r, variance, epsilon)


def _inverse_root(r: Lowering, variance: Value, epsilon: float) -> Value:
    return r.stored(r.apply("div", r.number(1.0, variance), r.apply("sqrt", plus(r, variance, epsilon))))


def _give(r: Lowering, node: ir.Node, x: Value, scale: Value | None, bias: Value | None) -> None:
    """The first result, x · scale + bias, in its type."""
    if scale is not None:
        x = r.apply("mul", x, to_type(r, scale, x.dtype))
    if bias is not None:
        x = r.apply("add", x, to_type(r, bias, x.dtype))
    r.give(node.outputs[0], to_type(r, x, dtype_of(node.outputs[0])))


def _give_moment(r: Lowering, node: ir.Node, index: int, value: Value | None) -> None:
    if value is not None and is_asked_for(node, index):
        value = to_type(r, value, dtype_of(node.outputs[index]))
    give_optional(r, node, index, value)


def _operand(r: Lowering, node: ir.Node) -> Value:
    """What is normalised, wide enough for its sums."""
    x = given(r, node, 0)
    need_floats(x, node)
    return widened(r, x)


@lowers("LayerNormalization")
def _layer_norm(r: Lowering, node: ir.Node) -> None:
    x = _operand(r, node)
    axes = range(int_of(node, "axis", -1) % len(x.dims), len(x.dims))
    centred, mean, inverse = _moments(r, x, axes, float_of(node, "epsilon", 1e-5))
    _give(r, node, r.apply("mul", centred, inverse), given(r, node, 1), optional(r, node, 2))
    _give_moment(r, node, 1, mean)
    _give_moment(r, node, 2, inverse)


@lowers("RMSNormalization", "SimplifiedLayerNormalization")
def _rms_norm(r: Lowering, node: ir.Node) -> None:
    x = _operand(r, node)
    axes = range(int_of(node, "axis", -1) % len(x.dims), len(x.dims))
    inverse = _inverse_root(r, r.mean(r.apply("mul", x, x), axes), float_of(node, "epsilon", 1e-5))
    _give(r, node, r.apply("mul", x, inverse), given(r, node, 1), None)
    _give_moment(r, node, 1, inverse)


@lowers("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", domain="com.microsoft")
def _skip_layer_norm(r: Lowering, node: ir.Node) -> None:
    simple = node.op_type == "SkipSimplifiedLayerNormalization"
    given_x = given(r, node, 0)
    need_floats(given_x, node)
    x = r.apply("add", given_x, given(r, node, 1))
    bias = optional(r, node, 3 if simple else 4)
    x = r.stored(widened(r, x if bias is None else r.apply("add", x, bias)))
    axes, epsilon = [len(x.dims) - 1], float_of(node, "epsilon", 1e-12)
    if simple:
        y: Value = r.apply("mul", x, _inverse_root(r, r.mean(r.apply("mul", x, x), axes), epsilon))
    else:
        centred, _, inverse = _moments(r, x, axes, epsilon)
        y = r.apply("mul", centred, inverse)
    _give(r, node, y, given(r, node, 2), None if simple else optional(r, node, 3))
    for index in (1, 2):
        give_optional(r, node, index, None)
    give_optional(r, node, 3, to_type(r, x, given_x.dtype))


@lowers("EmbedLayerNormalization", domain="com.microsoft")
def _embed_layer_norm(r: Lowering, node: ir.Node) -> None:
    """The sum of what words, places and segments are embedded as, normalised; and how many words a mask has."""
    ids, segments, mask = given(r, node, 0), optional(r, node, 1), optional(r, node, 7)
    words, gamma = given(r, node, 2), given(r, node, 5)
    need_floats(words, node)
    total = r.apply("add", _embedded(r, words, ids), _embedded_places(r, node, ids.dims[1]))
    table = optional(r, node, 4)
    if segments is not None and table is not None:
        total = r.apply("add", total, _embedded(r, table, segments))
    x = r.stored(widened(r, total))
    centred, _, inverse = _moments(r, x, [2], float_of(node, "epsilon", 1e-12))
    _give(r, node, r.apply("mul", centred, inverse), gamma, given(r, node, 6))
    if is_asked_for(node, 1):
        r.give(node.outputs[1], _mask_length(r, ids.dims[0], mask))
    give_optional(r, node, 2, to_type(r, x, words.dtype))


def _embedded(r: Lowering, table: Value, index: Value) -> Value:
    """Rows of a table; an index below zero is an error too, and not one from its end."""
    beyond = Number(table.dims[0], (), INT64)
    wide = to_type(r, index, INT64)
    strict = where(r, less(r, wide, r.number(0, wide)), beyond, wide)
    return looked_up(r, table, 0, r.unsqueeze(strict, [2]), 2)


def _embedded_places(r: Lowering, node: ir.Node, length: Dim) -> Value:
    table, places = given(r, node, 3), optional(r, node, 8)
    if places is not None:
        return _embedded(r, table, places)
    r.require(dim_of(table.dims[0] - length))
    return r.unsqueeze(r.cut(table, 0, 0, 1, length), [0])


def _mask_length(r: Lowering, batch: Dim, mask: Value | None) -> Value:
    kind = ir.DataType.INT32
    if mask is None:
        return r.expand(Number(0, (), kind), (batch,))
    is_one = r.apply("equal", mask, r.number(1, mask), dtype=BOOL)
    return r.reduce("Sum", to_type(r, is_one, kind), [1], keep=False)


def _per_channel(r: Lowering, given: Value, rank: int) -> Value:
    return r.unsqueeze(given, [0, *range(2, rank)])


@lowers("BatchNormalization")
def _batch_norm(r: Lowering, node: ir.Node) -> None:
    x = _operand(r, node)
    scale, bias, mean, variance = (to_type(r, given(r, node, i), x.dtype) for i in range(1, 5))
    rank = len(x.dims)
    if int_of(node, "training_mode", 0):
        x = r.settled(x)
        mean, variance = _learnt(r, node, x, mean, variance)
    factor = r.stored(r.apply("mul", scale, _inverse_root(r, variance, float_of(node, "epsilon", 1e-5))))
    centred = r.apply("sub", x, _per_channel(r, mean, rank))
    _give(r, node, centred, _per_channel(r, factor, rank), _per_channel(r, bias, rank))


def _learnt(r: Lowering, node: ir.Node, x: Value, *running: Value) -> tuple[Value, Value]:
    """The moments of each channel, which also move the running ones."""
    axes = [0, *range(2, len(x.dims))]
    mean = r.stored(r.mean(x, axes))
    centred = r.apply("sub", x, mean)
    variance = r.stored(r.mean(r.apply("mul", centred, centred), axes))
    momentum = float_of(node, "momentum", 0.9)
    now = r.squeeze(mean, axes), r.squeeze(variance, axes)
    for index, (before, value) in enumerate(zip(running, now, strict=True), 1):
        moved = r.apply("add", scaled(r, before, momentum), scaled(r, value, 1 - momentum))
        _give_moment(r, node, index, moved)
    return now


@lowers("InstanceNormalization")
def _instance_norm(r: Lowering, node: ir.Node) -> None:
    x = _operand(r, node)
    rank = len(x.dims)
    centred, _, inverse = _moments(r, x, range(2, rank), float_of(node, "epsilon", 1e-5))
    scale, bias = (_per_channel(r, given(r, node, i), rank) for i in (1, 2))
    _give(r, node, r.apply("mul", centred, inverse), scale, bias)


@lowers("GroupNormalization")
def _group_norm(r: Lowering, node: ir.Node) -> None:
    """The channels in groups, as an axis each; before opset 21 a group had one scale."""
    x = _operand(r, node)
    groups = int_of(node, "num_groups", 1)
    batch, channels, *places = x.dims
    if not isinstance(channels, int) or channels % groups:
        raise CannotLower("GroupNormalization of channels that are no multiple of the groups")
    rank = len(x.dims)
    each = channels // groups
    apart = r.seen(x, (batch, groups, each, *places))
    centred, _, inverse = _moments(r, apart, range(2, rank + 1), float_of(node, "epsilon", 1e-5))
    y = r.seen(r.apply("mul", centred, inverse), x.dims)
    scale, bias = (given(r, node, i) for i in (1, 2))
    if opset_of(node) < opsets.CHANNEL_SCALES:
        scale, bias = (r.seen(r.expand(r.unsqueeze(v, [1]), (groups, each)), (channels,)) for v in (scale, bias))
    _give(r, node, y, _per_channel(r, scale, rank), _per_channel(r, bias, rank))


@lowers("MeanVarianceNormalization")
def _mean_variance(r: Lowering, node: ir.Node) -> None:
    x = r.settled(_operand(r, node))
    axes = [axis % len(x.dims) for axis in ints_of(node, "axes", [0, 2, 3])]
    centred = r.apply("sub", x, r.stored(r.mean(x, axes)))
    deviation = plus(r, r.apply("sqrt", r.mean(r.apply("mul", centred, centred), axes)), 1e-9)
    _give(r, node, r.apply("div", centred, r.stored(deviation)), None, None)


@lowers("LpNormalization")
def _lp_norm(r: Lowering, node: ir.Node) -> None:
    """x / ‖x‖, and nothing where that is nothing."""
    x = r.settled(_operand(r, node))
    axis, square = int_of(node, "axis", -1) % len(x.dims), int_of(node, "p", 2) == 2
    norm = r.reduce("Sum", r.apply("mul", x, x) if square else r.apply("abs", x), [axis])
    norm = r.stored(r.apply("sqrt", norm) if square else norm)
    zero = r.number(0.0, norm)
    _give(r, node, where(r, r.apply("equal", norm, zero, dtype=BOOL), zero, r.apply("div", x, norm)), None, None)
