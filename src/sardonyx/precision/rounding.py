"""Rounding of weights to four bits with less error in what a layer computes than by rounding to the nearest.

Scales are those of the least squared error of each block. With enough rows of activations, codes are chosen one row of
the weight after the other, and the error of each is made up for by the rows after it, as in GPTQ (arXiv:2210.17323).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from sardonyx.native.linear import Int4Weight, quantize_int4
from sardonyx.precision.metric import relative_error

LEAST_ROWS = 32
"""Of activations; fewer say little about other calls."""
_MOST_ROWS = 2048
_MOST_DEPTH = 8192
"""Of a layer whose Hessian is inverted: time grows with its cube, and memory with its square."""
_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7)
"""Shares of the range of a block that scales are tried for."""
_LEAST_DAMPING, _DAMPING = 0.01, 0.1
"""Added to the diagonal of the Hessian, as a share of its mean: the least, and for as many rows as channels; more for
fewer rows, which say little about the directions that they do not have."""
_CHUNK = 64
"""Rows of the weight after which the error is spread over all others."""
_COLUMNS = 4096
"""Rounded at a time: a chunk of them fits into a processor's cache."""
_ELEMENTS = 2**18
"""Of the weight that scales are found for at a time, likewise."""
_SAMPLE = 256
"""Columns that decide whether error feedback pays."""
_LESS = 0.95
"""Of the error to the nearest, for activations that were not used, that error feedback must leave."""


def round_int4(weight: torch.Tensor, x: torch.Tensor, block: int, *, symmetric: bool) -> tuple[Int4Weight, str]:
    """Return a weight of depth × columns rounded for activations of rows × depth, and the name of the method."""
    rows = usable_rows(x)
    nearest = nearest_int4(weight, block, symmetric=symmetric)
    if len(rows) < LEAST_ROWS or len(weight) > _MOST_DEPTH:
        return nearest, "least squares"
    unseen = len(rows) // 4
    order, factor = inverse_factor(rows[unseen:])
    if not _feedback_pays(weight, nearest, rows[:unseen], order, factor):
        return nearest, "least squares"
    return round_with_feedback(weight, nearest, order, factor), "GPTQ"


def usable_rows(x: torch.Tensor) -> torch.Tensor:
    """Return finite rows of activations that are not zero throughout, in float32, as many as are of use."""
    rows = x.detach().flatten(0, -2).to(torch.float32)
    rows = rows[rows.isfinite().all(1) & rows.any(1)]
    return rows[:: -(-len(rows) // _MOST_ROWS) or 1]


def nearest_int4(weight: torch.Tensor, block: int, *, symmetric: bool) -> Int4Weight:
    """Return a weight rounded to the nearest, with the scales of the least squared error for each block."""
    columns = max(1, _ELEMENTS // max(1, len(weight)))
    parts = [_nearest(part.contiguous(), block, symmetric) for part in torch.split(weight, columns, 1)]
    return _side_by_side(parts)


def _side_by_side(parts: Sequence[Int4Weight]) -> Int4Weight:
    """Return one weight of the columns of several."""
    codes, scales = torch.cat([x.codes for x in parts], 1), torch.cat([x.scales for x in parts], 1)
    zero = [x.zero_points for x in parts if x.zero_points is not None]
    return replace(parts[0], codes=codes, scales=scales, zero_points=torch.cat(zero, 1) if zero else None)


def _nearest(weight: torch.Tensor, block: int, symmetric: bool) -> Int4Weight:
    full = quantize_int4(weight, block, symmetric=symmetric)
    blocks = F.pad(weight, (0, 0, 0, -len(weight) % block)).view(-1, block, weight.shape[1])
    errors = torch.stack([_block_errors(blocks, full.scales * shrink, _zero(full)) for shrink in _SHRINKS])
    best = replace(full, scales=full.scales * torch.tensor(_SHRINKS)[errors.argmin(0)])
    scales, zero = _grid(best)
    return replace(best, codes=(weight / scales).add_(zero).round_().clamp_(0, 15).to(torch.uint8))


def _block_errors(blocks: torch.Tensor, scales: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """Return the squared error of each block and column, rounded to the nearest with these scales."""
    scales, zero = scales[:, None], zero[:, None]
    codes = (blocks / scales).add_(zero).round_().clamp_(0, 15)
    return codes.sub_(zero).mul_(scales).sub_(blocks).square_().sum(1)


def _zero(weight: Int4Weight) -> torch.Tensor:
    """Return the zero points of blocks × columns in float32."""
    return torch.full_like(weight.scales, 8) if weight.zero_points is None else weight.zero_points.to(torch.float32)


def _grid(weight: Int4Weight) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scale and zero point of each element of a weight."""
    depth = weight.codes.shape[0]
    scales, zero = (x.repeat_interleave(weight.block, 0)[:depth] for x in (weight.scales, _zero(weight)))
    return scales, zero


def round_with_feedback(
    weight: torch.Tensor, grid: Int4Weight, order: torch.Tensor, factor: torch.Tensor
) -> Int4Weight:
    """Return codes for the scales of `grid`, each chosen with the errors of those before in mind."""
    scales, zero = (x[order] for x in _grid(grid))
    parts = zip(*(torch.split(x, _COLUMNS, 1) for x in (weight[order], scales, zero)), strict=True)
    ordered = torch.cat([_rounded(factor, *part) for part in parts], 1)
    codes = torch.empty_like(ordered)
    codes[order] = ordered
    return replace(grid, codes=codes)


def inverse_factor(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the order of rounding, largest activations first, and the upper U with UᵀU the inverse Hessian in it."""
    rows = rows / rows.abs().amax()  # squares of large numbers would overflow
    order = rows.square().sum(0).argsort(stable=True)
    hessian = rows[:, order].t() @ rows[:, order]
    damping = float(hessian.diagonal().mean()) * max(_LEAST_DAMPING, _DAMPING * len(hessian) / len(rows))
    failed = torch.ones(())
    while failed:
        hessian.diagonal().add_(damping)
        lower, failed = torch.linalg.cholesky_ex(hessian)
        damping *= 10
    identity = torch.eye(len(hessian))
    return order.flip(0), torch.linalg.solve_triangular(lower, identity, upper=False).flip(0, 1)


def _rounded(factor: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """Return the codes of some columns, of rows in the order of the factor."""
    left, codes = weight.clone(), torch.empty_like(weight, dtype=torch.uint8)
    for start in range(0, len(left), _CHUNK):
        chunk = slice(start, start + _CHUNK)
        errors = _round_chunk(left[chunk], scales[chunk], zero[chunk], factor[chunk, chunk], codes[chunk])
        left[start + _CHUNK :].addmm_(factor[chunk, start + _CHUNK :].t(), errors, alpha=-1)
    return codes


def _round_chunk(
    left: torch.Tensor, scales: torch.Tensor, zero: torch.Tensor, factor: torch.Tensor, codes: torch.Tensor
) -> torch.Tensor:
    """Round the rows of a chunk in order, in place; return the error of each, divided by its pivot."""
    errors = torch.empty_like(left)
    for i in range(len(left)):
        code = (left[i] / scales[i] + zero[i]).round_().clamp_(0, 15)
        codes[i] = code
        errors[i] = (left[i] - (code - zero[i]) * scales[i]) / factor[i, i]
        left[i + 1 :].addr_(factor[i, i + 1 :], errors[i], alpha=-1)
    return errors


def _feedback_pays(
    weight: torch.Tensor, nearest: Int4Weight, unseen: torch.Tensor, order: torch.Tensor, factor: torch.Tensor
) -> bool:
    """Whether feedback leaves less error for rows that the factor was not computed from, in a sample of the columns."""
    columns = slice(None, None, -(-weight.shape[1] // _SAMPLE))
    weight, nearest = weight[:, columns], _some_columns(nearest, columns)
    tried, expected = round_with_feedback(weight, nearest, order, factor), unseen @ weight
    errors = [relative_error(unseen @ rounded.dequantized(), expected) for rounded in (tried, nearest)]
    return errors[0] < errors[1] * _LESS


def _some_columns(weight: Int4Weight, columns: slice) -> Int4Weight:
    zero = None if weight.zero_points is None else weight.zero_points[:, columns]
    return replace(weight, codes=weight.codes[:, columns], scales=weight.scales[:, columns], zero_points=zero)
