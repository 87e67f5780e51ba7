"""Attention: products of queries and keys, masks, softmax, and the weighted values."""

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
    define_optional,
    float_of,
    indices_along,
    int_of,
    ints_of,
    is_used,
    less,
    lowers,
    need_floats,
    operand,
    optional,
    scaled,
    to_type,
    where,
    widened,
)
from sardonyx.native.values import Number, Value, dim_of
from sardonyx.sizes import Dim

_QUERIES, _KEYS = 2, 3
"""Axes of scores, which are (batch, heads, queries, keys)."""


@dataclass(frozen=True)
class _AttentionSteps:
    scores: Value
    capped: Value
    masked: Value
    weights: Value
    result: Value


def _split_heads(r: Lowering, x: Value, count: int) -> Value:
    """Reshape (batch, length, hidden) to (batch, heads, length, head size)."""
    batch, length, hidden = x.dims
    if not isinstance(hidden, int) or not count or hidden % count:
        raise CannotLower(f"a hidden size of {hidden} with {count} heads")
    return r.permute(r.view_as(x, (batch, length, count, hidden // count)), [0, 2, 1, 3])


def _merge_heads(r: Lowering, x: Value) -> Value:
    """Reshape (batch, heads, length, head size) to (batch, length, hidden)."""
    batch, heads, length, size = x.dims
    return r.view_as(r.permute(x, [0, 2, 1, 3]), (batch, length, dim_of(heads * size)))


def _group_heads(r: Lowering, x: Value, groups: Dim) -> Value:
    batch, heads, *rest = x.dims
    if not isinstance(heads, int) or not isinstance(groups, int) or heads % groups:
        raise CannotLower(f"{heads} query heads with {groups} key heads")
    return r.view_as(x, (batch, groups, heads // groups, *rest))


def _grouped_product(r: Lowering, left: Value, right: Value) -> Value:
    """Return the matrix product for each head; a head of the right operand may serve several of the left."""
    dtype = wide_type(left.dtype)
    heads, key_heads = left.dims[1], right.dims[1]
    if heads == key_heads:
        return matrix_product(r, left, right, dtype)
    product = matrix_product(r, _group_heads(r, left, key_heads), r.unsqueeze(right, [2]), dtype)
    return r.view_as(product, (product.dims[0], heads, *product.dims[3:]))


def _attend(
    r: Lowering, q: Value, k: Value, v: Value, *, scale: float, bias: Value | None = None, softcap: float = 0.0
) -> _AttentionSteps:
    scores = scaled(r, _grouped_product(r, q, r.permute(k, [0, 1, 3, 2])), scale or 1 / math.sqrt(_size_of_head(q)))
    capped = scores
    if softcap:
        capped = scaled(r, r.apply("tanh", scaled(r, scores, 1 / softcap)), softcap)
    masked = capped if bias is None else r.apply("add", capped, to_type(r, bias, capped.dtype))
    weights = _softmax(r, r.stored_if_costly(masked))
    return _AttentionSteps(scores, capped, masked, weights, _grouped_product(r, weights, r.stored(widened(r, v))))


def _size_of_head(q: Value) -> int:
    if not isinstance(q.dims[3], int):
        raise CannotLower("a symbolic head size")
    return q.dims[3]


def _softmax(r: Lowering, x: Value) -> Value:
    """Return the softmax over the keys; zero where all of them are masked by −∞."""
    axes, masked = [_KEYS], r.number(-math.inf, x)
    largest = r.stored(r.reduce("Largest", x, axes))
    is_empty = r.apply("equal", largest, masked, dtype=BOOL)
    powers = r.stored(r.apply("exp", r.apply("sub", x, where(r, is_empty, r.number(0.0, x), largest))))
    total = r.reduce("Sum", powers, axes)
    share = r.apply("div", r.number(1.0, x), where(r, is_empty, r.number(1.0, x), total))
    return r.stored(r.apply("mul", powers, r.stored(share)))


def _add_optional(r: Lowering, x: Value | None, y: Value | None) -> Value | None:
    if x is None or y is None:
        return y if x is None else x
    return r.apply("add", to_type(r, x, y.dtype), y)


def _bias(r: Lowering, allowed: Value, masked: float, dtype: ir.DataType) -> Value:
    """Return what is added to scores: 0 where they are allowed."""
    return where(r, allowed, Number(0.0, (), dtype), Number(masked, (), dtype))


def _is_before(r: Lowering, place: Value, end: Value) -> Value:
    return less(r, place, to_type(r, end, INT64))


def _past_length(past: Value | None) -> Dim:
    return 0 if past is None else past.dims[2]


def _append_past(r: Lowering, past: Value | None, x: Value) -> Value:
    if past is None:
        return x
    batch, heads, before, size = past.dims
    total = dim_of(before + x.dims[2])
    return r.concat([past, to_type(r, x, past.dtype)], 2, (batch, heads, total, size))


# ONNX's operator


@lowers("Attention")
def _attention(r: Lowering, node: ir.Node) -> None:
    q, k, v = (operand(r, node, index) for index in range(3))
    need_floats(q, node)
    flat = len(q.dims) == 3
    if flat:
        heads = [int_of(node, f"{name}_num_heads", 0) for name in ("q", "kv", "kv")]
        q, k, v = (_split_heads(r, x, count) for x, count in zip((q, k, v), heads, strict=True))
    past = optional(r, node, 4)
    k, v = _append_past(r, past, k), _append_past(r, optional(r, node, 5), v)
    for index, value in ((1, k), (2, v)):
        define_optional(r, node, index, value)
    scale = float(np.sqrt(np.float32(float_of(node, "scale", 0.0)))) ** 2  # ONNX scales both by its root in float32
    bias = _all_masks(r, node, q, k, _past_length(past))
    steps = _attend(r, q, k, v, scale=scale, bias=bias, softcap=float_of(node, "softcap", 0.0))
    if is_used(node, 3):
        outputs = (steps.scores, steps.capped, steps.masked, steps.weights)
        r.define(node.outputs[3], to_type(r, outputs[int_of(node, "qk_matmul_output_mode", 0)], q.dtype))
    result = to_type(r, steps.result, q.dtype)
    r.define(node.outputs[0], _merge_heads(r, result) if flat else result)


def _all_masks(r: Lowering, node: ir.Node, q: Value, k: Value, past: Dim) -> Value | None:
    """Return what is added to scores: the mask operand, and the masks of attributes and lengths."""
    dtype = wide_type(q.dtype)
    mask, lengths = optional(r, node, 3), optional(r, node, 6)
    bias = None if mask is None else _mask_bias(r, mask, k.dims[2], dtype)
    column = indices_along(r, k.dims[2], 4, _KEYS)
    row = indices_along(r, q.dims[2], 4, _QUERIES)
    offset: Value = Number(past, (), INT64)
    if lengths is not None:
        lengths = r.unsqueeze(lengths, [1, 2, 3])
        offset = r.apply("sub", lengths, Number(q.dims[2], (), INT64))
        bias = _add_optional(r, _bias(r, less(r, column, lengths), -math.inf, dtype), bias)
    distance = r.apply("sub", column, r.apply("add", row, offset))  # key index relative to the query's
    left, right = int_of(node, "left_window_size", -1), int_of(node, "right_window_size", -1)
    if int_of(node, "is_causal", 0):
        right = 0
    if right >= 0:
        allowed = r.apply("less_equal", distance, Number(right, (), INT64), dtype=BOOL)
        bias = _add_optional(r, _bias(r, allowed, -math.inf, dtype), bias)
    if left >= 0:
        allowed = r.apply("less_equal", Number(-left, (), INT64), distance, dtype=BOOL)
        bias = _add_optional(r, _bias(r, allowed, -math.inf, dtype), bias)
    return bias


def _mask_bias(r: Lowering, mask: Value, keys: Dim, dtype: ir.DataType) -> Value:
    """Return an additive or boolean mask as a bias; keys beyond its size are masked."""
    bias = _bias(r, mask, -math.inf, dtype) if mask.dtype == BOOL else to_type(r, mask, dtype)
    last = len(bias.dims) - 1
    size = bias.dims[last]
    if size == keys or size == 1:
        return bias
    if not isinstance(size, int) or not isinstance(keys, int) or size > keys:
        raise CannotLower(f"a mask of size {size} for {keys} keys")
    return r.pad(bias, last, 0, keys, -math.inf)


# ONNX Runtime's operators


def _ort_bias(r: Lowering, node: ir.Node, mask: Value | None, more: Value | None, scores: _ScoreInfo) -> Value | None:
    """Return what is added to scores: a large negative number where the mask operand says so, and `more`."""
    bias = more
    if mask is not None:
        allowed = _allowed(r, mask, scores)
        bias = _add_optional(r, _bias(r, allowed, float_of(node, "mask_filter_value", -10000.0), scores.dtype), bias)
    if int_of(node, "unidirectional", 0):
        if scores.keys != dim_of(scores.past + scores.queries):
            raise CannotLower(
                f"{node.op_type} of {scores.queries} queries and {scores.keys} keys that do not end together"
            )
        column = indices_along(r, scores.keys, 4, _KEYS)
        row = indices_along(r, scores.queries, 4, _QUERIES)
        last = r.apply("add", row, Number(scores.past, (), INT64))
        allowed = r.apply("less_equal", column, last, dtype=BOOL)
        bias = _add_optional(r, _bias(r, allowed, -math.inf, scores.dtype), bias)
    return bias


@dataclass(frozen=True)
class _ScoreInfo:
    batch: Dim
    queries: Dim
    keys: Dim
    past: Dim
    """The number of keys from earlier calls."""
    dtype: ir.DataType


def _allowed(r: Lowering, mask: Value, scores: _ScoreInfo) -> Value:
    """Return which keys are allowed: by length, or by a nonzero mask."""
    if mask.dims == (scores.batch,):
        return _is_before(r, indices_along(r, scores.keys, 4, _KEYS), r.unsqueeze(mask, [1, 2, 3]))
    shapes = {(scores.batch, scores.keys): [1, 2], (scores.batch, scores.queries, scores.keys): [1]}
    if mask.dims not in shapes:
        raise CannotLower(f"a mask of sizes {mask.dims} for {scores.queries} queries and {scores.keys} keys")
    return r.unsqueeze(less(r, r.number(0, mask), mask), shapes[mask.dims])


def _check_unsupported(node: ir.Node, inputs: dict[int, str], attributes: dict[str, str]) -> None:
    for index, what in inputs.items():
        if index < len(node.inputs) and node.inputs[index] is not None:
            raise CannotLower(f"{node.op_type} with {what}")
    for name, what in attributes.items():
        if int_of(node, name, 0):
            raise CannotLower(f"{node.op_type} with {what}")


@lowers("Attention", domain="com.microsoft")
def _self_attention(r: Lowering, node: ir.Node) -> None:
    _check_unsupported(
        node,
        {6: "a past length in a shared buffer"},
        {"do_rotary": "rotary embedding", "past_present_share_buffer": "a shared buffer"},
    )
    x, weights, bias, past = operand(r, node, 0), operand(r, node, 1), optional(r, node, 2), optional(r, node, 4)
    need_floats(x, node)
    qkv: Value = matrix_product(r, x, weights, wide_type(x.dtype))
    if bias is not None:
        qkv = r.apply("add", qkv, widened(r, bias))
    heads = int_of(node, "num_heads", 0)
    q, k, v = (_split_heads(r, part, heads) for part in _split_qkv(r, node, r.stored(qkv)))
    before: tuple[Value | None, Value | None] = (None, None)
    if past is not None:
        before = r.squeeze(r.slice(past, 0, 0, 1, 1), [0]), r.squeeze(r.slice(past, 0, 1, 1, 1), [0])
    k, v = _append_past(r, before[0], k), _append_past(r, before[1], v)
    if is_used(node, 1):
        pair = [r.unsqueeze(to_type(r, part, x.dtype), [0]) for part in (k, v)]
        r.define(node.outputs[1], r.concat(pair, 0, (2, *k.dims)))
    scores = _ScoreInfo(x.dims[0], x.dims[1], k.dims[2], _past_length(before[0]), q.dtype)
    added = _ort_bias(r, node, optional(r, node, 3), optional(r, node, 5), scores)
    steps = _attend(r, q, to_type(r, k, q.dtype), v, scale=float_of(node, "scale", 0.0), bias=added)
    r.define(node.outputs[0], to_type(r, _merge_heads(r, steps.result), x.dtype))


def _split_qkv(r: Lowering, node: ir.Node, qkv: Value) -> list[Value]:
    total = qkv.dims[-1]
    if not isinstance(total, int):
        raise CannotLower("a symbolic hidden size")
    sizes = ints_of(node, "qkv_hidden_sizes", [total // 3] * 3)
    if sum(sizes) != total or sizes[0] != sizes[1]:
        raise CannotLower(f"queries, keys and values of sizes {sizes} in {total}")
    starts = (0, sizes[0], sizes[0] + sizes[1])
    return [r.slice(qkv, 2, start, 1, size) for start, size in zip(starts, sizes, strict=True)]


@lowers("MultiHeadAttention", domain="com.microsoft")
def _multi_head(r: Lowering, node: ir.Node) -> None:
    _check_unsupported(node, {8: "a past length in a shared buffer", 9: "beams"}, {})
    dtype = operand(r, node, 0).dtype
    need_floats(operand(r, node, 0), node)
    q, k, v = _query_key_value(r, node, int_of(node, "num_heads", 0))
    k, v = (_append_past(r, optional(r, node, index), x) for index, x in ((6, k), (7, v)))
    for index, value in ((1, k), (2, v), (3, None)):
        define_optional(r, node, index, value)
    scores = _ScoreInfo(q.dims[0], q.dims[2], k.dims[2], _past_length(optional(r, node, 6)), wide_type(dtype))
    added = _ort_bias(r, node, optional(r, node, 4), optional(r, node, 5), scores)
    steps = _attend(r, q, k, v, scale=float_of(node, "scale", 0.0), bias=added)
    r.define(node.outputs[0], to_type(r, _merge_heads(r, steps.result), dtype))


def _query_key_value(r: Lowering, node: ir.Node, heads: int) -> list[Value]:
    """Return queries, keys and values, each with its bias, by heads."""
    q, k, v = operand(r, node, 0), optional(r, node, 1), optional(r, node, 2)
    if k is None or v is None or len(q.dims) != 3:
        raise CannotLower("MultiHeadAttention of packed queries, keys and values")
    bias = optional(r, node, 3)
    biases = [None] * 3 if bias is None else _biases(r, bias, q, v)
    return [_by_heads(r, x, b, heads) for x, b in zip((q, k, v), biases, strict=True)]


def _biases(r: Lowering, bias: Value, q: Value, v: Value) -> list[Value]:
    if len(v.dims) != 3 or not isinstance(q.dims[2], int) or not isinstance(v.dims[2], int):
        raise CannotLower("a bias for keys and values that are split by heads")
    starts = ((0, q.dims[2]), (q.dims[2], q.dims[2]), (2 * q.dims[2], v.dims[2]))
    return [r.slice(bias, 0, start, 1, size) for start, size in starts]


def _by_heads(r: Lowering, x: Value, bias: Value | None, heads: int) -> Value:
    if len(x.dims) == 4:
        return x
    return _split_heads(r, x if bias is None else r.stored(r.apply("add", x, bias)), heads)
