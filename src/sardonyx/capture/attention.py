"""Attention in training, taken apart so that its backward finds in the forward all that it would compute again.

Torch's fused kernel saves the logarithms of the sums and computes every probability again from them. Here both halves
are written with the same products and softmax: in the joint graph these are found to be common, and are saved.
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
    out = rows.kept(torch.matmul(torch.softmax(scores, -1), value.to(scores.dtype)))
    sums = rows.split(torch.logsumexp(scores, -1, keepdim=True)).squeeze(-1)
    return _with_layout(rows.split(out).to(query.dtype), layout_of(query)), _with_layout(sums, (0, 2, 1))


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
    """Of a softmax p over rows, gradients are p * (g - sum(g * p)); here the sum is that of the output's gradients."""
    if dropout_p:
        return NotImplemented
    rows = _GroupedScores(query, key, attn_mask, is_causal, scale)
    scores = rows.scores()
    p = torch.softmax(scores, -1)
    grad, made = rows.joined(grad_out), rows.joined(out)
    whole = (grad * made).sum(-1, keepdim=True)
    grad = rows.kept(grad)
    towards_value = torch.matmul(p.transpose(-1, -2), grad)
    towards_scores = p * (torch.matmul(grad, value.to(p.dtype).transpose(-1, -2)) - whole)
    towards_query = torch.matmul(towards_scores, rows.key) * rows.scale
    towards_key = torch.matmul(towards_scores.transpose(-1, -2), rows.query) * rows.scale
    return (
        _with_layout(rows.split(towards_query).to(query.dtype), _HEADS_INSIDE),
        _with_layout(towards_key.to(key.dtype), _HEADS_INSIDE),
        _with_layout(towards_value.to(value.dtype), _HEADS_INSIDE),
    )


class _GroupedScores:
    """The rows of scores of each key head: those of all query heads that share it, one below the other.

    A row that the mask forbids wholly attends to nothing, and its result is zero: it is computed as if unmasked, and
    what comes of it is dropped.
    """

    def __init__(self, query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, scale: float | None) -> None:
        self.scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
        self._wide = torch.promote_types(query.dtype, torch.float32)
        self._heads, self._shared = key.size(1), query.size(1) // key.size(1)
        self._length = query.size(2)
        self.query, self.key = self.joined(query), key.to(self._wide)
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

    def joined(self, x: Tensor) -> Tensor:
        x = x.to(self._wide)
        return x if self._shared == 1 else x.reshape(x.size(0), self._heads, self._shared * x.size(2), x.size(3))

    def split(self, x: Tensor) -> Tensor:
        return x if self._shared == 1 else x.reshape(x.size(0), self._heads * self._shared, self._length, x.size(3))

    def scores(self) -> Tensor:
        scores = torch.matmul(self.query, self.key.transpose(-1, -2)) * self.scale
        mask = self._mask
        return scores if mask is None else self._by_head(scores, lambda x: x + mask)

    def kept(self, x: Tensor) -> Tensor:
        """Without the rows that attend to nothing."""
        valid = self._valid
        return x if valid is None else self._by_head(x, lambda x: torch.where(valid, x, 0.0))

    def _by_head(self, x: Tensor, change: Callable[[Tensor], Any]) -> Tensor:
        made: Tensor = change(self.split(x))
        return made.reshape(x.shape)


def _with_layout(x: Tensor, order: tuple[int, ...] | None) -> Tensor:
    """With its axes in this order in memory, which is how torch's kernel leaves its results."""
    if order is None:
        return x.contiguous()
    return x.permute(order).contiguous().permute([order.index(axis) for axis in range(x.dim())])


_HEADS_INSIDE = (0, 2, 1, 3)
"""The order of gradients: what follows is the gradient of a projection, whose rows hold all heads."""


DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: _forward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _backward,
}
