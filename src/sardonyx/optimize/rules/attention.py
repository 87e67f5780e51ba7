"""Fuse decomposed attention, and remove transposes and repeated heads around Attention."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from sardonyx import opsets
from sardonyx.optimize.pattern import P, array_of, is_private, permutation_of, scalar_of
from sardonyx.optimize.rule import Match, Refused, rule, rule_at
from sardonyx.translate.builder import MICROSOFT

_BSNH_TO_BNSH = [0, 2, 1, 3]
_LOWEST = -1e30
"""If all scores of a row are below this, softmax is uniform; the operator treats the row as masked instead."""


@rule(P.MatMul(P.Softmax("scores", _name="weights"), "v"), late=True)
def attention(m: Match) -> ir.Value:
    """softmax(c·q·kᵀ + bias)·v = Attention(q, k, v, bias; scale=c), for batches with heads and without.

    Only for a constant bias that masks no row entirely: for such rows the operator returns zeros.
    """
    m.require(m.g.opset >= opsets.ATTENTION, "Attention needs opset 23")
    m.require(m.v.dtype == ir.DataType.FLOAT, "no kernel for the dtype")
    rank = len(m.dims(m.scores))
    m.require(rank in (3, 4) and m.attribute(m.weights, "axis", -1) in (-1, rank - 1), "not softmax over the keys")
    scores, bias = _split_bias(m, m.scores)
    q, k, scale = _split_scores(m, scores, 1.0)
    m.require(m.dims(q)[:-2] == m.dims(k)[:-2] == m.dims(m.v)[:-2], "the batch dimensions differ")
    m.require(all(0 not in m.dims(x) for x in (q, k, m.v)), "an operand is empty, which the operator does not support")
    m.require(len(m.dims(m.v)) == rank and math.isfinite(scale) and scale > 0, "unsupported rank or scale")
    heads = 1 if rank == 3 else None
    y = m.g.Attention(q, k, m.v, bias, scale=scale, q_num_heads=heads, kv_num_heads=heads)
    return m.g.shaped(y, m.dims(m.result))


def _private_producer(value: ir.Value | None, *op_types: str) -> ir.Node | None:
    """Return the producer of a value if it is one of these operators and only the pattern reads the value."""
    node = value.producer() if value is not None else None
    return node if value is not None and node is not None and node.op_type in op_types and is_private(value) else None


def _split_bias(m: Match, scores: ir.Value) -> tuple[ir.Value, ir.Value | None]:
    """Return the scores before a constant bias is added, and that bias."""
    node = _private_producer(scores, "Add")
    if node is None:
        return scores, None
    left, right = node.inputs
    assert left is not None
    assert right is not None
    plain, bias = (left, right) if array_of(right) is not None else (right, left)
    array = array_of(bias)
    m.require(array is not None, "the bias is not constant and may mask a row entirely")
    m.require(m.dims(plain) == m.dims(scores) and array.shape == m.dims(scores)[-2:], "the bias broadcasts")
    m.require(bool(np.isfinite(array).all() and (array.max(-1) > _LOWEST).all()), "the bias masks a row entirely")
    return plain, bias


def _split_scores(m: Match, scores: ir.Value, scale: float) -> tuple[ir.Value, ir.Value, float]:
    """Return q, k and c of c·q·kᵀ."""
    node = _private_producer(scores, "Mul", "Div", "MatMul", "FusedMatMul")
    if node is None or node.domain not in ("", MICROSOFT) or len(node.inputs) != 2:
        raise Refused("not a product of queries and keys")
    left, right = node.inputs
    assert left is not None
    assert right is not None
    if node.op_type in ("Mul", "Div"):
        number = scalar_of(right)
        m.require(bool(number) and m.dims(left) == m.dims(scores), "not scaled by a constant number")
        assert number is not None
        return _split_scores(m, left, scale * number if node.op_type == "Mul" else scale / number)
    if node.op_type == "MatMul":
        return left, _untransposed_keys(m, right), scale
    flags = {name: attribute.value for name, attribute in node.attributes.items()}
    alpha = flags.pop("alpha", 1.0)
    transposed = flags.pop("transB", 0)
    m.require(not any(flags.values()), "the queries are transposed")
    return left, right if transposed else _untransposed_keys(m, right), scale * alpha


def _untransposed_keys(m: Match, transposed: ir.Value) -> ir.Value:
    """Return keys from their transpose, if a Transpose with another permutation gives them."""
    node = transposed.producer()
    order = permutation_of(node)
    if node is None or node.inputs[0] is None or not order:
        raise Refused("the keys are not transposed")
    *lead, x, y = order
    m.dims(node.inputs[0])
    return m.g.transpose(node.inputs[0], [*lead, y, x])


def _untransposed_heads(value: ir.Value | None) -> ir.Value | None:
    """Return x if the value is Transpose(x) from (batch, length, heads, width) to (batch, heads, length, width)."""
    producer = value.producer() if value is not None else None
    return producer.inputs[0] if producer is not None and permutation_of(producer) == _BSNH_TO_BNSH else None


@rule_at("Attention")
def attention_in_rows(m: Match) -> ir.Value:
    """Attention over transposed heads, its result transposed back = Attention over rows (batch, length, heads·width).

    The operator splits heads itself, so the Transposes of the operands and of the result are not needed.
    """
    m.require(not m.node.domain and len(m.dims(m.result)) == 4, "already in rows")
    sources = [_untransposed_heads(x) for x in m.node.inputs[:3]]
    m.require(all(s is not None for s in sources), "an operand is not transposed from rows")
    readers = list(m.result.uses())
    m.require(not m.result.is_graph_output() and bool(readers), "the graph returns it")
    m.require(all(permutation_of(use.node) == _BSNH_TO_BNSH for use in readers), "the result is not transposed back")
    heads = [m.dims(s)[2] for s in sources if s is not None]
    m.require(all(isinstance(h, int) and h > 0 for h in heads), "the number of heads is symbolic or zero")
    rows = [_in_rows(m, s) for s in sources if s is not None]
    attributes = {name: a.value for name, a in m.node.attributes.items()}
    attributes |= {"q_num_heads": heads[0], "kv_num_heads": heads[1]}
    y = m.g.node("Attention", [*rows, *m.node.inputs[3:]], **attributes)
    batch, count, length, width = m.dims(m.result)
    m.g.shaped(y, [batch, length, count * width])
    return m.g.transpose(m.g.reshape(y, [batch, length, count, width]), _BSNH_TO_BNSH)


def _in_rows(m: Match, x: ir.Value) -> ir.Value:
    batch, length, heads, width = m.dims(x)
    return m.g.reshape(x, [batch, length, heads * width])


@rule_at("Attention")
def attention_repeats_heads(m: Match) -> ir.Value:
    """Keys and values repeated for each group of heads need no repeating: Attention groups heads itself."""
    m.require(not m.node.domain, "an operator of another domain")
    sources = [_unrepeated_heads(m, x) for x in m.node.inputs[1:3]]
    m.require(all(s is not None for s in sources), "keys and values are not repeated")
    attributes = {name: a.value for name, a in m.node.attributes.items()}
    return m.g.node("Attention", [m.node.inputs[0], *sources, *m.node.inputs[3:]], **attributes)


def _unrepeated_heads(m: Match, value: ir.Value | None) -> ir.Value | None:
    """Return x of Reshape(Expand(x)), which repeats heads: x is (batch, heads, 1, length, width)."""
    joined = value.producer() if value is not None else None
    repeated = joined.inputs[0].producer() if joined is not None and joined.inputs[0] is not None else None
    if joined is None or repeated is None or (joined.op_type, repeated.op_type) != ("Reshape", "Expand"):
        return None
    source = repeated.inputs[0]
    before, after = m.dims(source) if source is not None else (), m.dims(repeated.outputs[0])
    if source is None or len(before) != 5 or len(after) != 5 or len(m.dims(joined.outputs[0])) != 4:
        return None
    batch, heads, single, length, width = before
    if single != 1 or (*after[:2], *after[3:]) != (batch, heads, length, width):
        return None
    return m.g.reshape(source, [batch, heads, length, width])


@rule_at("Attention")
def drop_open_mask(m: Match) -> ir.Value:
    """Attention with a mask that masks nothing = Attention without it."""
    m.require(not m.node.domain and len(m.node.inputs) == 4, "no mask, or a cache")
    mask = m.node.inputs[3]
    producer = mask.producer() if mask is not None else None
    values = array_of(producer.inputs[0] if producer is not None and producer.op_type == "Expand" else mask)
    m.require(values is not None, "the mask is not constant")
    m.require(bool(values.all() if values.dtype == bool else (values == 0).all()), "it masks something")
    attributes = {name: a.value for name, a in m.node.attributes.items()}
    return m.g.shaped(m.g.node("Attention", m.node.inputs[:3], **attributes), m.dims(m.result))


@rule_at("Attention")
def attention_takes_scale(m: Match) -> ir.Value:
    """Attention(c·q, k, v; scale=s) = Attention(q, k, v; scale=c·s), where the factor is one of the projection."""
    scale = m.node.attributes.get("scale")
    m.require(not m.node.domain and scale is not None, "an operator of another domain, or a scale by size")
    assert scale is not None
    queries = m.node.inputs[0]
    view = _private_producer(queries, "Reshape")
    product = _private_producer(queries if view is None else view.inputs[0], "Gemm", "FusedMatMul")
    if queries is None or product is None:
        raise Refused("the queries are not a product that only it reads")
    flags = {name: attribute.value for name, attribute in product.attributes.items()}
    factor = flags.pop("alpha", 1.0)
    shift = flags.pop("beta", factor if len(product.inputs) == 2 else 1.0)
    m.require(factor > 0 and factor != 1 and shift == factor, "the queries are not scaled")
    plain = m.g.node(product.op_type, product.inputs, domain=product.domain, **flags)
    plain = m.g.reshape(m.g.shaped(plain, m.dims(product.outputs[0])), m.dims(queries))
    attributes = {name: a.value for name, a in m.node.attributes.items()} | {"scale": factor * scale.as_float()}
    return m.g.shaped(m.g.node("Attention", [plain, *m.node.inputs[1:]], **attributes), m.dims(m.result))


@rule_at("Attention", needs=MICROSOFT, late=True)
def projections_into_attention(m: Match) -> ir.Value:
    """Attention(x·Wqᵀ + bq, x·Wkᵀ + bk, x·Wvᵀ + bv) = com.microsoft's Attention(x, [Wq; Wk; Wv]ᵀ, [bq; bk; bv]).

    Only for constants in the model: the concatenated weights are computed when the model is written, and not stored.
    """
    m.require(not m.node.domain and len(m.node.inputs) == 3 and len(m.dims(m.result)) == 3, "masked, or not in rows")
    flags = {name: a.value for name, a in m.node.attributes.items()}
    heads = flags.pop("q_num_heads", 0)
    m.require(heads == flags.pop("kv_num_heads", 0) and heads > 0, "grouped heads")
    scale = flags.pop("scale", None)
    m.require(not any(flags.values()), "it is causal or has other attributes")
    projections = [_projection(m, x) for x in m.node.inputs]
    rows = projections[0].inputs[0]
    assert rows is not None
    m.require(all(gemm.inputs[0] is rows for gemm in projections), "projections of different tensors")
    weights, biases = ([gemm.inputs[i] for gemm in projections] for i in (1, 2))
    joined = [_concatenated(m, weights, transposed=True), _concatenated(m, biases, transposed=False)]
    x = m.g.reshape(rows, [*m.dims(m.result)[:2], m.dims(rows)[-1]])
    y = m.g.node("Attention", [x, *joined], domain=MICROSOFT, num_heads=heads, scale=scale)
    return m.g.shaped(y, m.dims(m.result))


def _projection(m: Match, value: ir.Value | None) -> ir.Node:
    """Return the Gemm, with torch's weight layout and a bias, of which the value is a Reshape."""
    view = _private_producer(value, "Reshape")
    gemm = _private_producer(view.inputs[0], "Gemm") if view is not None else None
    if value is None or gemm is None or len(gemm.inputs) != 3 or gemm.inputs[2] is None:
        raise Refused("an operand is not a projection with a bias")
    flags = {name: a.value for name, a in gemm.attributes.items()}
    m.require(flags.pop("transB", 0) == 1 and not flags.pop("transA", 0), "the weights have another layout")
    m.require(all(flag == 1 for flag in flags.values()), "the projection is scaled")
    projected, expected = m.dims(gemm.outputs[0]), m.dims(value)
    m.require(projected[-1] == expected[-1] and m.dims(gemm.inputs[2]) == projected[-1:], "the Reshape splits rows")
    m.require(expected == m.dims(m.result), "another length or width")
    return gemm


def _concatenated(m: Match, parts: Sequence[ir.Value | None], *, transposed: bool) -> ir.Value:
    """Concatenate constants along the last axis, each matrix transposed if `transposed`."""
    arrays = [array_of(part) for part in parts]
    m.require(all(a is not None and a.dtype == np.float32 for a in arrays), "its values are not in the model")
    shape = arrays[0].shape[1:] if transposed else ()

    def make() -> np.ndarray:
        return np.concatenate([array.T if transposed else array for array in arrays], axis=-1)

    return m.g.constant_on_demand(make, (*shape, sum(a.shape[0] for a in arrays)), ir.DataType.FLOAT)
