"""Scaled dot-product attention, in each form that torch dispatches to."""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir
import torch

from sardonyx import dtypes, opsets
from sardonyx.errors import Unsupported
from sardonyx.sizes import Dim, Dims
from sardonyx.translate.aten.activation import softmax_or_zero
from sardonyx.translate.builder import Builder
from sardonyx.translate.table import aten

Value = ir.Value


def _attention(
    g: Builder, q: Value, k: Value, v: Value, mask: Value | None, dropout: float, causal: bool, scale: float | None
) -> Value:
    if dropout:
        raise Unsupported("attention with dropout")
    q, k, v, mask = _widen(g, q, k, v, mask)
    if g.opset < opsets.ATTENTION or g.rank(q) != 4 or g.rank(k) != 4 or _is_plain_double(g, q, scale):
        return _unfused(g, q, k, v, mask, causal, scale)
    mask = None if mask is None else _mask_of_all_scores(g, mask, g.dims(q)[-2], g.dims(k)[-2])
    y = g.Attention(q, k, v, mask, is_causal=int(causal), scale=scale)
    return g.shaped(y, [*g.dims(q)[:-1], g.dims(v)[-1]])


def _is_plain_double(g: Builder, q: Value, scale: float | None) -> bool:
    """Whether it is decomposed because no engine has Attention in double: the function body computes in single."""
    sized = scale is not None or isinstance(g.dims(q)[-1], int)
    return g.dtype(q) == torch.float64 and sized


def _widen(g: Builder, q: Value, k: Value, v: Value, mask: Value | None) -> tuple[Value, Value, Value, Value | None]:
    """Cast to at least single precision on the CPU, as torch: ONNX Runtime's kernel would round scores to half."""
    result = g.out[0] if isinstance(g.out, (tuple, list)) else g.out
    if result.device.type != "cpu":
        return q, k, v, mask
    wide = dtypes.accumulation_dtype(g.dtype(q))
    if mask is not None and g.dtype(mask) != torch.bool:
        mask = g.cast(mask, wide)
    return g.cast(q, wide), g.cast(k, wide), g.cast(v, wide), mask


def _mask_of_all_scores(g: Builder, mask: Value, queries: Dim, keys: Dim) -> Value:
    """Return a mask for each query and key, as ONNX Runtime needs; it broadcasts from there."""
    if g.rank(mask) < 2:
        mask = g.unsqueeze(mask, range(2 - g.rank(mask)))
    *lead, rows, columns = g.dims(mask)
    return mask if (rows, columns) == (queries, keys) else g.expand(mask, [*lead, queries, keys])


def _unfused(g: Builder, q: Value, k: Value, v: Value, mask: Value | None, causal: bool, scale: float | None) -> Value:
    dtype = g.dtype(q)
    width = g.dims(q)[-1]
    if scale is None and not isinstance(width, int):
        raise Unsupported("attention over a symbolic head size")
    k, v = (_repeat_heads(g, x, g.dims(q)) for x in (k, v))
    factor = 1 / math.sqrt(int(width)) if scale is None else scale
    axes = list(range(g.rank(k)))
    keys = g.transpose(k, [*axes[:-2], axes[-1], axes[-2]])
    scores = g.MatMul(g.Mul(q, g.scalar(factor, dtype)), keys)
    sizes = [*g.dims(q)[:-1], g.dims(k)[-2]]
    g.shaped(scores, sizes)
    if causal:
        ones = g.expand(g.scalar(1, torch.int64), sizes[-2:])
        mask = g.cast(g.Trilu(ones, upper=0), torch.bool)
    if mask is not None and g.dtype(mask) == torch.bool:
        mask = g.Where(mask, g.scalar(0, dtype), g.scalar(-math.inf, dtype))
    if mask is not None:  # added, as in torch: NaN and infinities are not masked
        scores = g.Add(scores, mask)
    g.shaped(scores, sizes)
    weights = g.Softmax(scores, axis=-1) if mask is None else softmax_or_zero(g, scores)
    return g.MatMul(weights, v)


def _repeat_heads(g: Builder, x: Value, queries: Dims) -> Value:
    """Repeat each head of keys or values for the heads of queries that share it."""
    *batch, heads, length, width = g.dims(x)
    if (*batch, heads) == queries[:-2]:
        return x
    wanted = queries[-3]
    grouped = tuple(batch) == queries[:-3] and isinstance(heads, int) and isinstance(wanted, int) and heads > 0
    if not grouped or wanted % heads:
        raise Unsupported("attention of a symbolic number of heads, or of batches that broadcast")
    copies = g.expand(g.unsqueeze(x, [-3]), [*batch, heads, wanted // heads, length, width])
    return g.reshape(copies, [*batch, wanted, length, width])


def _require_only_result(g: Builder) -> None:
    if any(g.reads_output(index) for index in range(1, len(g.out))):
        raise Unsupported("its log-sum-exp is used, as in training")


@aten("_scaled_dot_product_flash_attention_for_cpu")
def flash_for_cpu(
    g: Builder,
    q: Value,
    k: Value,
    v: Value,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Value | None = None,
    scale: float | None = None,
) -> tuple[Value, ...]:
    _require_only_result(g)
    y = _attention(g, q, k, v, attn_mask, dropout_p, is_causal, scale)
    return (y,) * len(g.out)


@aten("_scaled_dot_product_flash_attention")
def flash(
    g: Builder,
    q: Value,
    k: Value,
    v: Value,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Value, ...]:
    return flash_for_cpu(g, q, k, v, dropout_p, is_causal, scale=scale)


@aten("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention")
def efficient(
    g: Builder,
    q: Value,
    k: Value,
    v: Value,
    attn_bias: Value | None,
    compute_log_sumexp: bool = False,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Value, ...]:
    return flash_for_cpu(g, q, k, v, dropout_p, is_causal, attn_mask=attn_bias, scale=scale)


@aten("scaled_dot_product_attention")
def scaled_dot_product_attention(
    g: Builder,
    q: Value,
    k: Value,
    v: Value,
    attn_mask: Value | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Value:
    return _attention(g, q, k, v, attn_mask, dropout_p, is_causal, options.get("scale"))
