"""Samples at the edges of a dtype: limits, ±0, infinities, NaN, denormals, 2^53 ± 1, negative divisors.

The database draws small numbers. These samples join its own: every pair of edges for operators of two operands, a
vector of them for operators of one, short rows for reductions, and the database's first samples with edges in place of
some of their numbers for all others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.opinfo.core import BinaryUfuncInfo, ReductionOpInfo, SampleInput, UnaryUfuncInfo
from torch.utils._pytree import tree_map

EDGES = "edges"
"""The name of these samples."""
_SAMPLES_WITH_EDGES = 2
_ROW = 3
COUNTS_OR_INDICES = frozenset({"bincount", "nn.functional.one_hot", "unravel_index", "tensor_split", "histogramdd"})
"""Operators whose integers are sizes, counts or indices: at the edges they ask for all of the memory there is."""
TRAPS = frozenset({"lcm"})
"""Operators on which torch itself ends the process at the edges of integers."""

SORTS_BY_LESS = frozenset({"mode"})
"""Operators that torch computes by a sort that knows no NaN: their results depend on its place."""

DIVISIONS = frozenset({"div", "floor_divide", "remainder", "fmod", "__rmod__"})


def edge_values(dtype: torch.dtype) -> Tensor:
    """The edges of a dtype in one dimension.

    >>> edge_values(torch.uint8).tolist()
    [0, 1, 2, 3, 7, 254, 255]
    """
    if dtype == torch.bool:
        return torch.tensor([False, True])
    if dtype.is_floating_point:
        return torch.tensor(_float_edges(dtype), dtype=dtype)
    limits = torch.iinfo(dtype)
    wide = [2**31, 2**32 + 1, 2**53 - 1, 2**53 + 1, -(2**53) - 1]
    numbers = [limits.min, limits.min + 1, -7, -2, -1, 0, 1, 2, 3, 7, *wide, limits.max - 1, limits.max]
    return torch.tensor(sorted({n for n in numbers if limits.min <= n <= limits.max}), dtype=dtype)


def _float_edges(dtype: torch.dtype) -> list[float]:
    limits = torch.finfo(dtype)
    inf = float("inf")
    denormal = limits.smallest_normal * limits.eps
    small = [limits.smallest_normal, denormal, -denormal, limits.eps]
    large = [1 / limits.eps - 1, 1 / limits.eps + 1, limits.max, limits.min, inf, -inf]
    return [0.0, -0.0, 1.0, -1.0, 0.5, -1.5, 2.5, 3.0, -7.0, *small, *large, float("nan")]


def is_elementwise(op: Any) -> bool:
    """Whether an operator of the database computes each element by itself."""
    return isinstance(op, (UnaryUfuncInfo, BinaryUfuncInfo))


def orders_or_maps(op: Any) -> bool:
    """Whether no result is a sum of several operands, beside reductions: infinities have one right place then."""
    return is_elementwise(op) or isinstance(op, ReductionOpInfo)


def _without_limits(values: Tensor) -> Tensor:
    """Without the largest numbers: whether a sum of them overflows depends on its order."""
    if not values.is_floating_point():
        return values
    limits = torch.finfo(values.dtype)
    return values[(values != limits.max) & (values != limits.min)]


def edge_samples(op: Any, dtype: torch.dtype) -> list[Any]:
    """Samples at the edges, in the database's own form; none for complex numbers."""
    if dtype.is_complex or dtype not in op.supported_dtypes("cpu") or _is_unfit(op.name):
        return []
    if isinstance(op, UnaryUfuncInfo):
        values = edge_values(dtype)
        return [_sample(values, kwargs=op.sample_kwargs("cpu", dtype, values)[0])]
    if isinstance(op, BinaryUfuncInfo):
        return list(_pairs(edge_values(dtype), op.name in DIVISIONS))
    if isinstance(op, ReductionOpInfo):
        return list(_rows(op, _without_limits(edge_values(dtype))))
    return list(islice(_with_edges(op, dtype), _SAMPLES_WITH_EDGES))


def _sample(value: Tensor, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
    return SampleInput(value, args=tuple(args), kwargs=kwargs or {}, name=EDGES)


def _is_unfit(name: str) -> bool:
    return name in COUNTS_OR_INDICES | TRAPS or "_polynomial_" in name  # a degree at the edges takes minutes


def _pairs(values: Tensor, divides: bool) -> Iterator[Any]:
    """Every pair, except that integers are not divided by zero, nor the smallest by −1, on which torch traps."""
    if values.is_floating_point() or values.dtype == torch.bool or not divides:
        yield _sample(values[:, None], args=(values,))
        return
    divisors = values[values != 0]
    yield _sample(values[:, None], args=(divisors[divisors != -1],) if values.dtype.is_signed else (divisors,))
    yield _sample(values[values != torch.iinfo(values.dtype).min][:, None], args=(divisors,))


def _rows(op: Any, values: Tensor) -> Iterator[Any]:
    """Rows of neighbouring edges, along the last dimension and altogether."""
    rows = torch.stack([values.roll(-shift) for shift in range(_ROW)], 1)
    args, kwargs = next(iter(op.generate_args_kwargs(rows, dim=-1)), ((), {}))
    yield _sample(rows, args=args, kwargs={**kwargs, "dim": -1})
    yield _sample(values, args=args, kwargs=kwargs)


def _with_edges(op: Any, dtype: torch.dtype) -> Iterator[Any]:
    """The database's samples that have elements, with edges among their numbers.

    Of integers, only those of the first operand: others may be indices.
    """
    values = _without_limits(edge_values(dtype))
    if op.name in SORTS_BY_LESS:
        values = values[values == values]

    def replaced(leaf: Any) -> Any:
        return _sprinkled(leaf, values) if _is_strided(leaf, dtype) else leaf

    for sample in op.sample_inputs("cpu", dtype, requires_grad=False):
        first = tree_map(replaced, sample.input)
        further = (tuple(sample.args), dict(sample.kwargs))
        args, kwargs = tree_map(replaced, further) if dtype.is_floating_point else further
        if _is_strided(first, dtype) and first.numel():
            yield _sample(first, args=args, kwargs=kwargs)


def _is_strided(leaf: Any, dtype: torch.dtype) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype == dtype and leaf.layout == torch.strided


def _sprinkled(x: Tensor, values: Tensor) -> Tensor:
    """A copy in which every third element is an edge."""
    copy = x.detach().clone(memory_format=torch.contiguous_format)
    places = copy.view(-1)[::3]
    places.copy_(values.repeat(len(places) // len(values) + 1)[: len(places)])
    return copy
