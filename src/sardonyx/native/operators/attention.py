"""Attention: products of queries and keys, what masks leave of them, softmax, and the values weighted by it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from sardonyx.native.operators.products import matrix_product, wide_type
from sardonyx.native.region import CannotLower, Lowering
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
    optional,
    places_along,
    scaled,
    to_type,
    where,
    widened,
)
from sardonyx.native.values import Number, Value, dim_of
from sardonyx.sizes import Dim

_QUERIES, _KEYS = 2, 3
"""The axes of scores: a batch, heads, queries, keys."""


@dataclass(frozen=True)
class _Attended:
    """What attention computes, step by step; sizes are those of a batch, heads, queries and keys or values."""

    scores: Value
    capped: Value
    masked: Value
    shares: Value
    result: Value


def _heads(r: Lowering, x: Value, count: int) -> Value:
    """(batch, places, hidden) as (batch, heads, places, size of a head)."""
    batch, places, hidden = x.dims
    if not isinstance(hidden, int) or not count or hidden % count:
        raise CannotLower(f"{hidden} numbers in {count} heads")
    return r.permute(r.seen(x, (batch, places, count, hidden // count)), [0, 2, 1, 3])


def _flat(r: Lowering, x: Value) -> Value:
    """(batch, heads, places, size of a head) as (batch, places, hidden)."""
    batch, heads, places, size = x.dims
    return r.seen(r.permute(x, [0, 2, 1, 3]), (batch, places, dim_of(heads * size)))


def _grouped(r: Lowering, x: Value, groups: Dim) -> Value:
    """The heads of queries in as many groups as there are heads of keys."""
    batch, heads, *rest = x.dims
    if not isinstance(heads, int) or not isinstance(groups, int) or heads % groups:
        raise CannotLower(f"{heads} heads of queries for {groups} of keys")
    return r.seen(x, (batch, groups, heads // groups, *rest))


def _by_group(r: Lowering, left: Value, right: Value) -> Value:
    """The product of matrices, one for each head; each head of the right operand serves as many of the left."""
    dtype = wide_type(left.dtype)
    heads, of_keys = left.dims[1], right.dims[1]
    if heads == of_keys:
        return matrix_product(r, left, right, dtype)
    product = matrix_product(r, _grouped(r, left, of_keys), r.unsqueeze(right, [2]), dtype)
    return r.seen(product, (product.dims[0], heads, *product.dims[3:]))


def _attend(
    r: Lowering, q: Value, k: Value, v: Value, *, scale: float, bias: Value | None = None, softcap: float = 0.0
) -> _Attended:
    scores = scaled(r, _by_group(r, q, r.permute(k, [0, 1, 3, 2])), scale or 1 / math.sqrt(_size_of_head(q)))
    capped = scores
    if softcap:
        capped = scaled(r, r.apply("tanh", scaled(r, scores, 1 / softcap)), softcap)
    masked = capped if bias is None else r.apply("add", capped, to_type(r, bias, capped.dtype))
    shares = _softmax(r, r.settled(masked))
    return _Attended(scores, capped, masked, shares, _by_group(r, shares, r.stored(widened(r, v))))


def _size_of_head(q: Value) -> int:
    if not isinstance(q.dims[3], int):
        raise CannotLower("heads of a symbolic size")
    return q.dims[3]


def _softmax(r: Lowering, x: Value) -> Value:
    """Softmax over the keys; zero for each of them where all are masked by −∞."""
    axes, nothing = [_KEYS], r.number(-math.inf, x)
    largest = r.stored(r.reduce("Largest", x, axes))
    is_empty = r.apply("equal", largest, nothing, dtype=BOOL)
    powers = r.stored(r.apply("exp", r.apply("sub", x, where(r, is_empty, r.number(0.0, x), largest))))
    total = r.reduce("Sum", powers, axes)
    share = r.apply("div", r.number(1.0, x), where(r, is_empty, r.number(1.0, x), total))
    return r.stored(r.apply("mul", powers, r.stored(share)))


def _plus(r: Lowering, one: Value | None, other: Value | None) -> Value | None:
    if one is None or other is None:
        return other if one is None else one
    return r.apply("add", to_type(r, one, other.dtype), other)


def _bias(r: Lowering, allowed: Value, masked: float, dtype: ir.DataType) -> Value:
    """What is added to scores: nothing where they count."""
    return where(r, allowed, Number(0.0, (), dtype), Number(masked, (), dtype))


def _before(r: Lowering, place: Value, end: Value) -> Value:
    return less(r, place, to_type(r, end, INT64))


def _length(past: Value | None) -> Dim:
    return 0 if past is None else past.dims[2]


def _appended(r: Lowering, past: Value | None, x: Value) -> Value:
    """Keys or values after those of earlier calls."""
    if past is None:
        return x
    batch, heads, before, size = past.dims
    total = dim_of(before + x.dims[2])
    return r.joined([past, to_type(r, x, past.dtype)], 2, (batch, heads, total, size))


# The operator of ONNX


@lowers("Attention")
def _attention(r: Lowering, node: ir.Node) -> None:
    q, k, v = (given(r, node, index) for index in range(3))
    need_floats(q, node)
    flat = len(q.dims) == 3
    if flat:
        heads = [int_of(node, f"{name}_num_heads", 0) for name in ("q", "kv", "kv")]
        q, k, v = (_heads(r, x, count) for x, count in zip((q, k, v), heads, strict=True))
    past = optional(r, node, 4)
    k, v = _appended(r, past, k), _appended(r, optional(r, node, 5), v)
    for index, value in ((1, k), (2, v)):
        give_optional(r, node, index, value)
    scale = float(np.sqrt(np.float32(float_of(node, "scale", 0.0)))) ** 2  # ONNX scales both by its root in float32
    bias = _all_masks(r, node, q, k, _length(past))
    found = _attend(r, q, k, v, scale=scale, bias=bias, softcap=float_of(node, "softcap", 0.0))
    if is_asked_for(node, 3):
        steps = (found.scores, found.capped, found.masked, found.shares)
        r.give(node.outputs[3], to_type(r, steps[int_of(node, "qk_matmul_output_mode", 0)], q.dtype))
    result = to_type(r, found.result, q.dtype)
    r.give(node.outputs[0], _flat(r, result) if flat else result)


def _all_masks(r: Lowering, node: ir.Node, q: Value, k: Value, past: Dim) -> Value | None:
    """What is added to scores: the mask that is given, and those that attributes and lengths ask for."""
    dtype = wide_type(q.dtype)
    mask, lengths = optional(r, node, 3), optional(r, node, 6)
    bias = None if mask is None else _given_mask(r, mask, k.dims[2], dtype)
    column = places_along(r, k.dims[2], 4, _KEYS)
    row = places_along(r, q.dims[2], 4, _QUERIES)
    offset: Value = Number(past, (), INT64)
    if lengths is not None:
        lengths = r.unsqueeze(lengths, [1, 2, 3])
        offset = r.apply("sub", lengths, Number(q.dims[2], (), INT64))
        bias = _plus(r, _bias(r, less(r, column, lengths), -math.inf, dtype), bias)
    ahead = r.apply("sub", column, r.apply("add", row, offset))  # of the query's own place
    left, right = int_of(node, "left_window_size", -1), int_of(node, "right_window_size", -1)
    if int_of(node, "is_causal", 0):
        right = 0
    if right >= 0:
        allowed = r.apply("less_equal", ahead, Number(right, (), INT64), dtype=BOOL)
        bias = _plus(r, _bias(r, allowed, -math.inf, dtype), bias)
    if left >= 0:
        allowed = r.apply("less_equal", Number(-left, (), INT64), ahead, dtype=BOOL)
        bias = _plus(r, _bias(r, allowed, -math.inf, dtype), bias)
    return bias


def _given_mask(r: Lowering, mask: Value, keys: Dim, dtype: ir.DataType) -> Value:
    """Numbers that are added, or which scores count; keys beyond it are masked."""
    bias = _bias(r, mask, -math.inf, dtype) if mask.dtype == BOOL else to_type(r, mask, dtype)
    last = len(bias.dims) - 1
    have = bias.dims[last]
    if have == keys or have == 1:
        return bias
    if not isinstance(have, int) or not isinstance(keys, int) or have > keys:
        raise CannotLower(f"a mask of {have} places for {keys} keys")
    return r.pad(bias, last, 0, keys, -math.inf)


# Those of ONNX Runtime


def _ort_bias(r: Lowering, node: ir.Node, mask: Value | None, more: Value | None, scores: _Scores) -> Value | None:
    """What is added to scores: a large negative number where a mask says so, and what is given."""
    bias = more
    if mask is not None:
        allowed = _allowed(r, mask, scores)
        bias = _plus(r, _bias(r, allowed, float_of(node, "mask_filter_value", -10000.0), scores.dtype), bias)
    if int_of(node, "unidirectional", 0):
        if scores.keys != dim_of(scores.past + scores.queries):
            raise CannotLower(f"{node.op_type} of {scores.queries} queries before other keys, {scores.keys} of them")
        column = places_along(r, scores.keys, 4, _KEYS)
        row = places_along(r, scores.queries, 4, _QUERIES)
        last = r.apply("add", row, Number(scores.past, (), INT64))
        allowed = r.apply("less_equal", column, last, dtype=BOOL)
        bias = _plus(r, _bias(r, allowed, -math.inf, scores.dtype), bias)
    return bias


@dataclass(frozen=True)
class _Scores:
    """What scores are of."""

    batch: Dim
    queries: Dim
    keys: Dim
    past: Dim
    """How many of the keys are those of earlier calls."""
    dtype: ir.DataType


def _allowed(r: Lowering, mask: Value, scores: _Scores) -> Value:
    """Which keys count: as many as a length says, or those whose number in a mask is not zero."""
    if mask.dims == (scores.batch,):
        return _before(r, places_along(r, scores.keys, 4, _KEYS), r.unsqueeze(mask, [1, 2, 3]))
    shapes = {(scores.batch, scores.keys): [1, 2], (scores.batch, scores.queries, scores.keys): [1]}
    if mask.dims not in shapes:
        raise CannotLower(f"a mask of sizes {mask.dims} for {scores.queries} queries and {scores.keys} keys")
    return r.unsqueeze(less(r, r.number(0, mask), mask), shapes[mask.dims])


def _need_nothing_else(node: ir.Node, inputs: dict[int, str], attributes: dict[str, str]) -> None:
    for index, what in inputs.items():
        if index < len(node.inputs) and node.inputs[index] is not None:
            raise CannotLower(f"{node.op_type} with {what}")
    for name, what in attributes.items():
        if int_of(node, name, 0):
            raise CannotLower(f"{node.op_type} with {what}")


@lowers("Attention", domain="com.microsoft")
def _self_attention(r: Lowering, node: ir.Node) -> None:
    _need_nothing_else(
        node,
        {6: "a length of the past in a shared buffer"},
        {"do_rotary": "rotary embedding", "past_present_share_buffer": "a shared buffer"},
    )
    x, weights, bias, past = given(r, node, 0), given(r, node, 1), optional(r, node, 2), optional(r, node, 4)
    need_floats(x, node)
    joint: Value = matrix_product(r, x, weights, wide_type(x.dtype))
    if bias is not None:
        joint = r.apply("add", joint, widened(r, bias))
    heads = int_of(node, "num_heads", 0)
    q, k, v = (_heads(r, part, heads) for part in _three(r, node, r.stored(joint)))
    before: tuple[Value | None, Value | None] = (None, None)
    if past is not None:
        before = r.squeeze(r.cut(past, 0, 0, 1, 1), [0]), r.squeeze(r.cut(past, 0, 1, 1, 1), [0])
    k, v = _appended(r, before[0], k), _appended(r, before[1], v)
    if is_asked_for(node, 1):
        pair = [r.unsqueeze(to_type(r, part, x.dtype), [0]) for part in (k, v)]
        r.give(node.outputs[1], r.joined(pair, 0, (2, *k.dims)))
    scores = _Scores(x.dims[0], x.dims[1], k.dims[2], _length(before[0]), q.dtype)
    added = _ort_bias(r, node, optional(r, node, 3), optional(r, node, 5), scores)
    found = _attend(r, q, to_type(r, k, q.dtype), v, scale=float_of(node, "scale", 0.0), bias=added)
    r.give(node.outputs[0], to_type(r, _flat(r, found.result), x.dtype))


def _three(r: Lowering, node: ir.Node, joint: Value) -> list[Value]:
    """Queries, keys and values that lie side by side."""
    whole = joint.dims[-1]
    if not isinstance(whole, int):
        raise CannotLower("a hidden size that is symbolic")
    sizes = ints_of(node, "qkv_hidden_sizes", [whole // 3] * 3)
    if sum(sizes) != whole or sizes[0] != sizes[1]:
        raise CannotLower(f"queries, keys and values of sizes {sizes} in {whole}")
    starts = (0, sizes[0], sizes[0] + sizes[1])
    return [r.cut(joint, 2, start, 1, size) for start, size in zip(starts, sizes, strict=True)]


@lowers("MultiHeadAttention", domain="com.microsoft")
def _multi_head(r: Lowering, node: ir.Node) -> None:
    _need_nothing_else(node, {8: "a length of the past in a shared buffer", 9: "beams"}, {})
    dtype = given(r, node, 0).dtype
    need_floats(given(r, node, 0), node)
    q, k, v = _separate(r, node, int_of(node, "num_heads", 0))
    k, v = (_appended(r, optional(r, node, index), x) for index, x in ((6, k), (7, v)))
    for index, value in ((1, k), (2, v), (3, None)):
        give_optional(r, node, index, value)
    scores = _Scores(q.dims[0], q.dims[2], k.dims[2], _length(optional(r, node, 6)), wide_type(dtype))
    added = _ort_bias(r, node, optional(r, node, 4), optional(r, node, 5), scores)
    found = _attend(r, q, k, v, scale=float_of(node, "scale", 0.0), bias=added)
    r.give(node.outputs[0], to_type(r, _flat(r, found.result), dtype))


def _separate(r: Lowering, node: ir.Node, heads: int) -> list[Value]:
    """Queries, keys and values, each with its bias, by heads."""
    q, k, v = given(r, node, 0), optional(r, node, 1), optional(r, node, 2)
    if k is None or v is None or len(q.dims) != 3:
        raise CannotLower("MultiHeadAttention of packed queries, keys and values")
    bias = optional(r, node, 3)
    biases = [None] * 3 if bias is None else _biases(r, bias, q, v)
    return [_by_heads(r, x, b, heads) for x, b in zip((q, k, v), biases, strict=True)]


def _biases(r: Lowering, bias: Value, q: Value, v: Value) -> list[Value]:
    if len(v.dims) != 3 or not isinstance(q.dims[2], int) or not isinstance(v.dims[2], int):
        raise CannotLower("a bias of keys and values that have heads already")
    starts = ((0, q.dims[2]), (q.dims[2], q.dims[2]), (2 * q.dims[2], v.dims[2]))
    return [r.cut(bias, 0, start, 1, size) for start, size in starts]


def _by_heads(r: Lowering, x: Value, bias: Value | None, heads: int) -> Value:
    if len(x.dims) == 4:
        return x
    return _heads(r, x if bias is None else r.stored(r.apply("add", x, bias)), heads)
