"""Embeddings, single or in bags, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from sardonyx import dtypes
from sardonyx.errors import Unsupported
from sardonyx.sizes import Dim
from sardonyx.translate.aten.indexing import positions
from sardonyx.translate.aten.scatter import scatter_combined
from sardonyx.translate.builder import Builder
from sardonyx.translate.table import aten

Value = ir.Value
_SUM, _MEAN, _MAX = range(3)
_SPARSE = "a sparse gradient, but ONNX tensors are dense: use sparse=False for a dense gradient"


@aten("embedding")
def embedding(
    g: Builder, weight: Value, indices: Value, padding_idx: int = -1, scale_grad: bool = False, sparse: bool = False
) -> Value:
    return g.Gather(weight, indices, axis=0)


@aten("_sparse_coo_tensor_with_dims_and_tensors")
def sparse_tensor(g: Builder, *args: Any, **ignored: Any) -> Value:
    raise Unsupported(_SPARSE)


@aten("_embedding_bag", "_embedding_bag_forward_only")
def embedding_bag(
    g: Builder,
    weight: Value,
    indices: Value,
    offsets: Value,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Value | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Value, ...]:
    """Return the bags, and for the gradients: the bag of each index, the counts, and the indices of the maxima."""
    if g.dims(indices) == (0,):
        raise Unsupported("bags over an empty table")
    bags, width = g.like(g.out[0])
    wide = dtypes.accumulation_dtype(g.dtype(weight))
    rows = g.cast(g.shaped(g.Gather(weight, indices, axis=0), [*g.dims(indices), width]), wide)
    counted = _is_not_padding(g, indices, padding_idx)
    if per_sample_weights is not None:
        rows = g.Mul(rows, g.unsqueeze(g.cast(per_sample_weights, wide), [-1]))
    rows = g.Where(g.unsqueeze(counted, [-1]), rows, g.scalar(-math.inf if mode == _MAX else 0.0, wide))
    bag = _bag_of(g, indices, offsets, bags)
    number = scatter_combined(g, _filled(g, 0, [bags], torch.int64), 0, bag, g.cast(counted, torch.int64), "add")
    if mode == _MAX:
        largest, chosen = _bag_maximum(g, rows, bag, number, bags)
        return largest, bag, number, g.Gather(indices, chosen, axis=0)
    total = _into_bags(g, rows, bag, bags, "add", 0.0)
    if mode == _MEAN:
        total = g.Div(total, g.unsqueeze(g.cast(_at_least_one(g, number), wide), [-1]))
    return total, bag, number, number


def _filled(g: Builder, number: float, dims: Sequence[Dim], dtype: torch.dtype) -> Value:
    return g.expand(g.scalar(number, dtype), dims)


def _is_not_padding(g: Builder, indices: Value, padding_idx: int) -> Value:
    """Return where an index is not the padding."""
    return g.Not(g.Equal(indices, g.scalar(padding_idx, g.dtype(indices))))


def _at_least_one(g: Builder, number: Value) -> Value:
    return g.Max(number, g.scalar(1, g.dtype(number)))


def _bag_of(g: Builder, indices: Value, offsets: Value, bags: Dim) -> Value:
    """Return the bag of each index: the number of bags that begin up to it, minus one. Empty bags begin together."""
    (length,) = g.dims(indices)
    begins = g.shaped(g.slice(g.cast(offsets, torch.int64), 0, 0, bags), [bags])
    marks = _filled(g, 0, [length + 1], torch.int64)
    marks = scatter_combined(g, marks, 0, begins, _filled(g, 1, [bags], torch.int64), "add")
    begun = g.shaped(g.slice(g.CumSum(marks, g.scalar(0, torch.int64)), 0, 0, length), [length])
    return g.Sub(begun, g.scalar(1, torch.int64))


def _into_bags(g: Builder, rows: Value, bag: Value, bags: Dim, reduction: str, start: float) -> Value:
    target = _filled(g, start, [bags, g.dims(rows)[1]], g.dtype(rows))
    return scatter_combined(g, target, 0, g.expand(g.unsqueeze(bag, [1]), g.dims(rows)), rows, reduction)


def _bag_maximum(g: Builder, rows: Value, bag: Value, number: Value, bags: Dim) -> tuple[Value, Value]:
    """Return the maximum of each column of a bag, NaN above all, and the index of its first occurrence."""
    dtype = g.dtype(rows)
    missing = g.IsNaN(rows)
    key = g.Where(missing, g.scalar(math.inf, dtype), g.Min(rows, g.scalar(torch.finfo(dtype).max, dtype)))
    best = g.shaped(g.Gather(_into_bags(g, key, bag, bags, "max", -math.inf), bag, axis=0), g.dims(rows))
    length = g.dims(rows)[0]
    place = g.expand(g.unsqueeze(positions(g, length), [1]), g.dims(rows))
    candidates = g.Where(g.Equal(key, best), place, g.scalar(length, torch.int64))
    target = _filled(g, 2**62, [bags, g.dims(rows)[1]], torch.int64)
    first = scatter_combined(g, target, 0, g.expand(g.unsqueeze(bag, [1]), g.dims(rows)), candidates, "min")
    empty = g.unsqueeze(g.Equal(number, g.scalar(0, torch.int64)), [1])
    chosen = g.Where(empty, g.scalar(0, torch.int64), first)
    return g.Where(empty, g.scalar(0, dtype), g.GatherElements(rows, chosen, axis=0)), chosen


@aten("_embedding_bag_backward")
def embedding_bag_backward(
    g: Builder,
    grad: Value,
    indices: Value,
    offsets: Value,
    offset2bag: Value,
    bag_size: Value,
    maximum_indices: Value,
    num_weights: Dim,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: Value | None,
    padding_idx: int = -1,
) -> Value:
    if sparse:
        raise Unsupported(_SPARSE)
    bags, width = g.dims(grad)
    zeros = _filled(g, 0, [num_weights, width], g.dtype(grad))
    number = g.unsqueeze(bag_size, [1])
    if mode == _MAX:
        masked = g.Where(g.Equal(number, g.scalar(0, g.dtype(bag_size))), g.scalar(0, g.dtype(grad)), grad)
        return scatter_combined(g, zeros, 0, g.cast(maximum_indices, torch.int64), masked, "add")
    if mode == _MEAN:
        grad = g.Div(grad, g.cast(_at_least_one(g, number), g.dtype(grad)))
    bag = _bag_of(g, indices, offsets, bags)
    rows = g.shaped(g.Gather(grad, bag, axis=0), [*g.dims(indices), width])
    if per_sample_weights is not None:
        rows = g.Mul(rows, g.unsqueeze(per_sample_weights, [1]))
    if scale_grad_by_freq:
        rows = g.Div(rows, g.unsqueeze(_frequencies(g, indices, num_weights, g.dtype(grad)), [1]))
    counted = g.unsqueeze(_is_not_padding(g, indices, padding_idx), [1])
    rows = g.Where(counted, rows, g.scalar(0, g.dtype(grad)))
    places = g.expand(g.unsqueeze(g.cast(indices, torch.int64), [1]), g.dims(rows))
    return scatter_combined(g, zeros, 0, places, rows, "add")


def _frequencies(g: Builder, indices: Value, count: Dim, dtype: torch.dtype) -> Value:
    """Return how often the index at each position occurs."""
    ones = _filled(g, 1, g.dims(indices), dtype)
    wide = g.cast(indices, torch.int64)
    total = scatter_combined(g, _filled(g, 0, [count], dtype), 0, wide, ones, "add")
    return g.shaped(g.Gather(total, wide, axis=0), g.dims(indices))


@aten("_embedding_bag_per_sample_weights_backward")
def embedding_bag_per_sample_weights_backward(
    g: Builder,
    grad: Value,
    weight: Value,
    indices: Value,
    offsets: Value,
    offset2bag: Value,
    mode: int,
    padding_idx: int = -1,
) -> Value:
    bag = _bag_of(g, indices, offsets, g.dims(grad)[0])
    dims = [*g.dims(indices), g.dims(grad)[1]]
    ends = (g.shaped(g.Gather(x, i, axis=0), dims) for x, i in ((grad, bag), (weight, indices)))
    products = g.ReduceSum(g.Mul(*ends), g.ints([1]), keepdims=0)
    return g.Where(_is_not_padding(g, indices, padding_idx), products, g.scalar(0, g.dtype(grad)))
