"""Decompositions of attention for training, whose backward reuses values of the forward.

Torch's fused kernel saves the logsumexp and recomputes the probabilities from it. Here forward and backward use the
same products and softmax, so the joint graph shares and saves them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from sardonyx.capture.views import layout_of

Tensor = torch.Tensor


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Any:
    if dropout_p:
        return NotImplemented
    rows = _GroupedScores(query, key, attn_mask, is_causal, scale)
    scores = rows.scores()
    out = rows.zero_masked_rows(torch.matmul(torch.softmax(scores, -1), value.to(scores.dtype)))
    sums = rows.split_heads(torch.logsumexp(scores, -1, keepdim=True)).squeeze(-1)
    return _with_layout(rows.split_heads(out).to(query.dtype), layout_of(query)), _with_layout(sums, (0, 2, 1))


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Any:
    """The gradient of a softmax p over rows is p * (g - sum(g * p)); the sum is that of grad_out * out over a row."""
    if dropout_p:
        return NotImplemented
    rows = _GroupedScores(query, key, attn_mask, is_causal, scale)
    scores = rows.scores()
    p = torch.softmax(scores, -1)
    grad, result = rows.merge_heads(grad_out), rows.merge_heads(out)
    row_sums = (grad * result).sum(-1, keepdim=True)
    grad = rows.zero_masked_rows(grad)
    grad_value = torch.matmul(p.transpose(-1, -2), grad)
    grad_scores = p * (torch.matmul(grad, value.to(p.dtype).transpose(-1, -2)) - row_sums)
    grad_query = torch.matmul(grad_scores, rows.key) * rows.scale
    grad_key = torch.matmul(grad_scores.transpose(-1, -2), rows.query) * rows.scale
    return (
        _with_layout(rows.split_heads(grad_query).to(query.dtype), _HEADS_INSIDE),
        _with_layout(grad_key.to(key.dtype), _HEADS_INSIDE),
        _with_layout(grad_value.to(value.dtype), _HEADS_INSIDE),
    )


class _GroupedScores:
    """Attention scores of grouped queries: for each key head the rows of all query heads that share it, stacked.

    The result of a fully masked row is zero: the row is computed unmasked, and then zeroed.
    """

    def __init__(self, query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, scale: float | None) -> None:
        self.scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
        self._wide = torch.promote_types(query.dtype, torch.float32)
        self._heads, self._shared = key.size(1), query.size(1) // key.size(1)
        self._length = query.size(2)
        self.query, self.key = self.merge_heads(query), key.to(self._wide)
        self._mask: Tensor | None = None
        self._valid: Tensor | None = None
        if causal:
            above = torch.arange(self._length, device=query.device).unsqueeze(-1)
            allowed = torch.arange(key.size(2), device=query.device) <= above
            self._mask = torch.where(allowed, 0.0, -math.inf).to(self._wide)
        elif mask is not None:
            mask = mask.to(self._wide)
            self._valid = mask.amax(-1, keepdim=True) > -math.inf
            self._mask = torch.where(self._valid, mask, 0.0)

    def merge_heads(self, x: Tensor) -> Tensor:
        x = x.to(self._wide)
        return x if self._shared == 1 else x.reshape(x.size(0), self._heads, self._shared * x.size(2), x.size(3))

    def split_heads(self, x: Tensor) -> Tensor:
        return x if self._shared == 1 else x.reshape(x.size(0), self._heads * self._shared, self._length, x.size(3))

    def scores(self) -> Tensor:
        scores = torch.matmul(self.query, self.key.transpose(-1, -2)) * self.scale
        mask = self._mask
        return scores if mask is None else self._by_head(scores, lambda x: x + mask)

    def zero_masked_rows(self, x: Tensor) -> Tensor:
        """Set fully masked rows to zero."""
        valid = self._valid
        return x if valid is None else self._by_head(x, lambda x: torch.where(valid, x, 0.0))

    def _by_head(self, x: Tensor, change: Callable[[Tensor], Any]) -> Tensor:
        changed: Tensor = change(self.split_heads(x))
        return changed.reshape(x.shape)


def _with_layout(x: Tensor, order: tuple[int, ...] | None) -> Tensor:
    """Return the tensor with its axes in this memory order, as torch's kernel returns its results."""
    if order is None:
        return x.contiguous()
    return x.permute(order).contiguous().permute([order.index(axis) for axis in range(x.dim())])


_HEADS_INSIDE = (0, 2, 1, 3)
"""Memory order of the gradients: next comes the gradient of a projection, whose rows contain all heads."""


DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: _forward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _backward,
}
