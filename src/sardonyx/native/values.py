"""Tensors of a region as expressions over buffers, evaluated at each index of a loop nest.

A buffer is contiguous memory. A view reads it with strides, as in torch. Elementwise operations are expressions over
views of equal sizes; moving axes only changes the views.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import onnx_ir as ir
import sympy

from sardonyx import sizes
from sardonyx.sizes import Dim, Dims


@dataclass(eq=False)
class Buffer:
    """Contiguous memory of a tensor; one of kind "indices" has none, its elements are their own flat indices."""

    name: str
    kind: Literal["input", "output", "inner", "indices"]
    dims: Dims
    dtype: ir.DataType

    def view(self) -> View:
        """Return a view of the whole buffer."""
        return View(self, self.dims, contiguous(self.dims), 0)

    def __repr__(self) -> str:
        return f"{self.name}{list(self.dims)}"


@dataclass(frozen=True)
class Guard:
    """Along an axis, only indices from `start` to before `end` are read; the others have the value `fill`."""

    axis: int
    start: Dim
    end: Dim
    fill: float | int | bool


@dataclass(frozen=True)
class View:
    """A buffer read with strides."""

    buffer: Buffer
    dims: Dims
    strides: Dims
    offset: Dim
    guards: tuple[Guard, ...] = ()

    @property
    def dtype(self) -> ir.DataType:
        """The buffer's type."""
        return self.buffer.dtype

    def __repr__(self) -> str:
        return f"{self.buffer.name}{list(self.strides)}" + (f"+{self.offset}" if self.offset else "")


@dataclass(frozen=True)
class Number:
    """A scalar constant, or a size known when the loops run."""

    value: float | int | bool | sympy.Expr
    dims: Dims
    dtype: ir.DataType

    def __repr__(self) -> str:
        return f"{self.value}"


@dataclass(frozen=True, eq=False)
class Apply:
    """A scalar operator applied at each index. Equal ones are one object: see `Expressions.apply`."""

    operator: str
    args: tuple[Value, ...]
    dims: Dims
    dtype: ir.DataType

    @cached_property
    def depth(self) -> int:
        """The depth of the expression."""
        return 1 + max(arg.depth if isinstance(arg, Apply) else 0 for arg in self.args)

    def __repr__(self) -> str:
        return f"{self.operator}({', '.join(map(repr, self.args))})"


Value: TypeAlias = View | Number | Apply


@dataclass(frozen=True)
class Reshaped:
    """A value with a shape that strides cannot express: it can be written, not read."""

    value: Value
    dims: Dims

    @property
    def dtype(self) -> ir.DataType:
        """The value's type."""
        return self.value.dtype


def dim_of(size: Any) -> Dim:
    """Return a size in expanded form, so that equal sizes compare equal."""
    dim = sizes.dim_of(size)
    return dim if isinstance(dim, int) else sizes.dim_of(sympy.expand(dim))


class CannotView(Exception):
    """Strides cannot express a change of axes."""


def contiguous(dims: Sequence[Dim]) -> Dims:
    """Return the strides of a contiguous tensor."""
    strides: list[Dim] = []
    step: Dim = 1
    for dim in reversed(dims):
        strides.append(step)
        step = dim_of(step * dim)
    return tuple(reversed(strides))


class Expressions:
    """Creates expressions, equal ones once, so that each is computed once."""

    def __init__(self) -> None:
        self._interned: dict[tuple[object, ...], Apply] = {}

    def apply(self, operator: str, args: Sequence[Value], dtype: ir.DataType) -> Apply:
        """Apply an operator to arguments of equal sizes."""
        key = (operator, dtype, *(id(arg) if isinstance(arg, Apply) else arg for arg in args))
        if key not in self._interned:
            application = self._interned[key] = Apply(operator, tuple(args), args[0].dims, dtype)
            assert application.depth  # cached now, so that computing it never recurses deeply
        return self._interned[key]

    def permute(self, value: Value, permutation: Sequence[int]) -> Value:
        """Permute the axes."""

        def permuted(dims: Dims) -> Dims:
            return tuple(dims[axis] for axis in permutation)

        return self._restride(value, permuted(value.dims), permuted, {old: new for new, old in enumerate(permutation)})

    def expand(self, value: Value, dims: Dims) -> Value:
        """Broadcast to these sizes."""
        if value.dims == dims:
            return value
        lead = len(dims) - len(value.dims)
        old_dims = value.dims
        is_expanded = [have == 1 and want != 1 for have, want in zip(old_dims, dims[lead:], strict=True)]

        def strides(old: Dims) -> Dims:
            return (0,) * lead + tuple(0 if s else stride for s, stride in zip(is_expanded, old, strict=True))

        return self._restride(value, dims, strides, {axis: axis + lead for axis, s in enumerate(is_expanded) if not s})

    def squeeze(self, value: Value, axes: Sequence[int]) -> Value:
        """Remove axes of size one."""

        def without(dims: Dims) -> Dims:
            return tuple(dim for axis, dim in enumerate(dims) if axis not in axes)

        remaining = [axis for axis in range(len(value.dims)) if axis not in axes]
        return self._restride(value, without(value.dims), without, {old: new for new, old in enumerate(remaining)})

    def unsqueeze(self, value: Value, axes: Sequence[int]) -> Value:
        """Insert axes of size one, at these positions of the result."""

        def put(dims: Dims, new: Dim) -> Dims:
            rest = iter(dims)
            return tuple(new if axis in axes else next(rest) for axis in range(len(dims) + len(axes)))

        remaining = [axis for axis in range(len(value.dims) + len(axes)) if axis not in axes]
        return self._restride(value, put(value.dims, 1), lambda strides: put(strides, 0), dict(enumerate(remaining)))

    def as_vector(self, value: Value) -> Value:
        """Return a scalar as an axis of size one and stride one."""
        return self._map_views(value, (1,), lambda view: replace(view, dims=(1,), strides=(1,)))

    def slice(
        self, value: Value, axis: int, start: Dim, step: int, size: Dim, known: Mapping[View, Value] | None = None
    ) -> Value:
        """Take every `step`-th element along an axis, from `start` on; `known` has results for some views."""
        dims = (*value.dims[:axis], size, *value.dims[axis + 1 :])

        def slice_view(view: View) -> Value:
            if known and view in known:
                return known[view]
            stride = view.strides[axis]
            strides = (*view.strides[:axis], dim_of(stride * step), *view.strides[axis + 1 :])
            if step != 1 and any(guard.axis == axis for guard in view.guards):
                raise CannotView
            guards = tuple(_shift_guard(guard, start) if guard.axis == axis else guard for guard in view.guards)
            return View(view.buffer, dims, strides, dim_of(view.offset + stride * start), guards)

        return self._map_views(value, dims, slice_view)

    def pad(self, value: View, axis: int, before: Dim, size: Dim, fill: float | int | bool) -> View:
        """Pad an axis with `fill` to a size."""
        stride = value.strides[axis]
        guards = tuple(_shift_guard(guard, -before) if guard.axis == axis else guard for guard in value.guards)
        guard = Guard(axis, before, dim_of(before + value.dims[axis]), fill)
        dims = (*value.dims[:axis], size, *value.dims[axis + 1 :])
        return View(value.buffer, dims, value.strides, dim_of(value.offset - stride * before), (*guards, guard))

    def reshape(self, value: Value, dims: Dims) -> Value:
        """Reshape; raise `CannotView` if strides cannot express it."""
        if value.dims == dims:
            return value

        def reshape_view(view: View) -> View:
            if view.guards:
                raise CannotView
            return View(view.buffer, dims, _reshape_strides(view.dims, view.strides, dims), view.offset)

        return self._map_views(value, dims, reshape_view)

    def merge(self, value: Value, axis: int) -> Value:
        """Merge an axis with the next, if all strides and guards allow it."""

        def merged(dims: Dims) -> Dims:
            return (*dims[:axis], dims[axis + 1], *dims[axis + 2 :])

        dims = (*value.dims[:axis], dim_of(value.dims[axis] * value.dims[axis + 1]), *value.dims[axis + 2 :])
        axes = {a: a - (a > axis) for a in range(len(value.dims)) if a not in (axis, axis + 1)}
        return self._restride(value, dims, merged, axes)

    def split(self, value: Value, axis: int, factors: Dims) -> Value:
        """Split an axis into several, whose sizes are its factors."""

        def split_strides(strides: Dims) -> Dims:
            inner = (dim_of(strides[axis] * step) for step in contiguous(factors))
            return (*strides[:axis], *inner, *strides[axis + 1 :])

        dims = (*value.dims[:axis], *factors, *value.dims[axis + 1 :])
        more = len(factors) - 1
        axes = {a: a + more * (a > axis) for a in range(len(value.dims)) if a != axis}
        return self._restride(value, dims, split_strides, axes)

    def _restride(self, value: Value, dims: Dims, strides: Callable[[Dims], Dims], axes: Mapping[int, int]) -> Value:
        """Change the strides of all views; `axes` maps old axes to new ones."""

        def restride_view(view: View) -> View:
            if any(guard.axis not in axes for guard in view.guards):
                raise CannotView
            guards = tuple(replace(guard, axis=axes[guard.axis]) for guard in view.guards)
            return View(view.buffer, dims, strides(view.strides), view.offset, guards)

        return self._map_views(value, dims, restride_view)

    def _map_views(self, value: Value, dims: Dims, change: Callable[[View], Value]) -> Value:
        done: dict[int, Value] = {}

        def walk(value: Value) -> Value:
            if isinstance(value, View):
                return change(value)
            if isinstance(value, Number):
                return Number(value.value, dims, value.dtype)
            if id(value) not in done:
                done[id(value)] = self.apply(value.operator, [walk(arg) for arg in value.args], value.dtype)
            return done[id(value)]

        return walk(value)


def _shift_guard(guard: Guard, by: Dim) -> Guard:
    return replace(guard, start=dim_of(guard.start - by), end=dim_of(guard.end - by))


def views_of(value: Value) -> list[View]:
    """Return every view that an expression reads, without duplicates."""
    views: dict[View, None] = {}
    seen: set[int] = set()

    def walk(value: Value) -> None:
        if isinstance(value, View):
            views[value] = None
        elif isinstance(value, Apply) and id(value) not in seen:
            seen.add(id(value))
            for arg in value.args:
                walk(arg)

    walk(value)
    return list(views)


def gathered_buffers(value: Value) -> set[Buffer]:
    """Return the buffers that an expression reads by index."""
    return {
        view.buffer for apply in operations(value) if apply.operator == "gather" for view in views_of(apply.args[0])
    }


def operations(value: Value) -> list[Apply]:
    """Return every operator in an expression, without duplicates."""
    by_id: dict[int, Apply] = {}

    def walk(value: Value) -> None:
        if isinstance(value, Apply) and id(value) not in by_id:
            by_id[id(value)] = value
            for arg in value.args:
                walk(arg)

    walk(value)
    return list(by_id.values())


def _reshape_strides(old: Dims, strides: Dims, new: Dims) -> Dims:
    """Return the strides of a reshaped tensor: groups of axes with equal products are matched from the left."""
    if 0 in new:
        return contiguous(new)
    have = [(dim, stride) for dim, stride in zip(old, strides, strict=True) if dim != 1]
    result: list[Dim] = []
    at = 0
    rest = list(new)
    while rest:
        if rest[0] == 1:
            result.append(0)
            rest.pop(0)
            continue
        if at == len(have):
            raise CannotView
        count, piece = _matching_prefix(have[at:], rest)
        group, at = have[at : at + count], at + count
        for (_, outer), (inner_dim, inner) in pairwise(group):
            if outer != dim_of(inner * inner_dim):
                raise CannotView
        step = group[-1][1]
        result += [dim_of(step * stride) for stride in contiguous(rest[:piece])]
        del rest[:piece]
    if at != len(have):
        raise CannotView
    return tuple(result)


def _matching_prefix(have: Sequence[tuple[Dim, Dim]], want: Sequence[Dim]) -> tuple[int, int]:
    """Return how many of the old and of the new sizes, from the left, have the same product."""
    i = j = 1
    left, right = have[0][0], want[0]
    while left != right:
        if _divides(left, right):
            if i == len(have):
                raise CannotView
            left, i = dim_of(left * have[i][0]), i + 1
        else:
            if j == len(want):
                raise CannotView
            right, j = dim_of(right * want[j]), j + 1
    return i, j


def _divides(small: Dim, large: Dim) -> bool:
    if isinstance(small, int) and isinstance(large, int):
        return large % small == 0
    return bool(sympy.denom(sympy.cancel(sympy.sympify(large) / small)) == 1)


def common_factors(first: Dims, second: Dims) -> tuple[list[Dims], list[Dims]] | None:
    """Return factors of the sizes of each shape, axis by axis, in the same order; None if there are none.

    >>> common_factors((32, 10240), (320, 1024))
    ([(32,), (10, 1024)], [(32, 10), (1024,)])
    """
    factors: tuple[list[Dims], list[Dims]] = ([], [])
    rests: list[list[Dim]] = [list(first), list(second)]
    fresh = [True, True]
    while rests[0] and rests[1]:
        a, b = rests[0][0], rests[1][0]
        factor = a if _quotient(b, a) is not None else b
        for side, rest in enumerate(rests):
            left = _quotient(rest[0], factor)
            if left is None:
                return None
            before = () if fresh[side] else factors[side].pop()
            factors[side].append((*before, factor))
            fresh[side] = left == 1
            rest[:1] = [] if left == 1 else [left]
    return None if rests[0] or rests[1] else factors


def _quotient(large: Dim, small: Dim) -> Dim | None:
    """Return the quotient of two sizes, or None if it may not be an integer."""
    if large == small:
        return 1
    if isinstance(large, int) and isinstance(small, int):
        return None if small == 0 or large % small else large // small
    ratio = sympy.cancel(sympy.sympify(large) / small) if small != 0 else sympy.nan
    return dim_of(ratio) if ratio.is_integer and sympy.denom(ratio) == 1 else None
