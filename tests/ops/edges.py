"""Samples at the edges of a dtype: limits, ±0, infinities, NaN, denormals, 2^53 ± 1, negative divisors.

The database draws small numbers. These samples join its own: every pair of edges for operators of two operands, a
vector of them for operators of one, short rows for reductions, and the database's first samples with edges in place of
some of their numbers for all others.
"""

from __future__ import annotations

import re
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

UNFIT_ON_CUDA = frozenset({"matrix_exp", "multinomial"})
"""Operators that torch itself, on CUDA, never ends for infinities, or aborts the process for NaN."""
SEQUENCES = frozenset({"searchsorted", "bucketize"})
"""Operators that search in a sequence: what they find in one that is not sorted is unspecified."""
WITHOUT_NAN = frozenset({"mode"})
"""Operators without NaN in their samples. torch's `mode` sorts by `<`: of (1, 1, NaN, NaN, NaN, 0, 0, 0) it gives 1."""
COORDINATES = frozenset({"grid_sampler_2d", "grid_sampler_3d", "nn.functional.grid_sample"})
"""Operators whose second operand says where to read: torch converts infinities and NaN to integers there, which C++
leaves undefined."""
CANCELLING = re.compile(r"fft\..*fft[2n]?|i?stft|nn\.functional\.conv.*")
"""Operators each of whose results is a sum of many products: at the edges large ones cancel, and the error of what is
left is that of the large ones."""
LARGEST_EXPONENT = 2.0**40
"""For zeta functions: beyond it the coefficients of torch's series overflow, in double precision too, and it gives NaN
where the value is 0."""

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


def largest_finite(x: Tensor) -> Tensor:
    """The largest magnitude of what is finite, or 1 where nothing is larger than 0."""
    largest = torch.where(x.isfinite(), x.abs(), 0).amax() if x.numel() else x.new_tensor(0).abs()
    return torch.where(largest > 0, largest, 1)


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
        pairs = list(_pairs(edge_values(dtype), op.name in DIVISIONS))
        return [_with_small_exponents(pair) for pair in pairs] if op.name == "special.zeta" else pairs
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


def _with_small_exponents(pair: Any) -> Any:
    exponents = pair.input
    return _sample(exponents[~(exponents.double() > LARGEST_EXPONENT)][:, None], args=pair.args)


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
    if op.name in WITHOUT_NAN:
        values = values[~values.isnan()]
    if op.name in COORDINATES and dtype.itemsize < 4:  # how a coordinate is rounded decides which elements are read
        values = values[values.isfinite()]

    def replaced(leaf: Any) -> Any:
        return _sprinkled(leaf, values) if _is_strided(leaf, dtype) else leaf

    for sample in op.sample_inputs("cpu", dtype, requires_grad=False):
        first = tree_map(replaced, sample.input)
        further = (tuple(sample.args), dict(sample.kwargs))
        values_too = dtype.is_floating_point and op.name not in COORDINATES
        args, kwargs = tree_map(replaced, further) if values_too else further
        if _is_strided(first, dtype) and first.numel():
            made = _sample(first, args=args, kwargs=kwargs)
            yield _with_sorted_sequence(op.name, made) if op.name in SEQUENCES else made


def _with_sorted_sequence(name: str, sample: Any) -> Any:
    """The sample with its sequence in order, or with a sorter that is right for it."""
    if name == "bucketize":
        return _sample(sample.input, args=(sample.args[0].sort().values, *sample.args[1:]), kwargs=sample.kwargs)
    if sample.kwargs.get("sorter") is not None:
        return _sample(sample.input, sample.args, {**sample.kwargs, "sorter": sample.input.argsort(-1)})
    return _sample(sample.input.sort(-1).values, sample.args, sample.kwargs)


def _is_strided(leaf: Any, dtype: torch.dtype) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype == dtype and leaf.layout == torch.strided


def _sprinkled(x: Tensor, values: Tensor) -> Tensor:
    """A copy in which every third element is an edge."""
    copy = x.detach().clone(memory_format=torch.contiguous_format)
    places = copy.view(-1)[::3]
    places.copy_(values.repeat(len(places) // len(values) + 1)[: len(places)])
    return copy
