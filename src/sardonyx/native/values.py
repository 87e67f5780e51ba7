"""Tensors inside a region, as expressions over buffers: what a loop computes at each of its places.

A buffer is memory, its elements in order. A view reads one by strides, as torch's do. Everything elementwise is an
expression over views of equal sizes; moving axes about only changes the views below.
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
    """Memory that holds a tensor, contiguous; of kind "places" there is none, its elements are their own places."""

    name: str
    kind: Literal["input", "output", "inner", "places"]
    dims: Dims
    dtype: ir.DataType

    def view(self) -> View:
        """All of it, as it lies."""
        return View(self, self.dims, contiguous(self.dims), 0)

    def __repr__(self) -> str:
        return f"{self.name}{list(self.dims)}"


@dataclass(frozen=True)
class Guard:
    """Along an axis, only places from `start` to before `end` are read; `fill` is what the others have."""

    axis: int
    start: Dim
    end: Dim
    fill: float | int | bool


@dataclass(frozen=True)
class View:
    """A buffer read by strides."""

    buffer: Buffer
    dims: Dims
    strides: Dims
    offset: Dim
    guards: tuple[Guard, ...] = ()

    @property
    def dtype(self) -> ir.DataType:
        """The buffer's."""
        return self.buffer.dtype

    def __repr__(self) -> str:
        return f"{self.buffer.name}{list(self.strides)}" + (f"+{self.offset}" if self.offset else "")


@dataclass(frozen=True)
class Number:
    """The same number everywhere; a size is one that is known when the loops run."""

    value: float | int | bool | sympy.Expr
    dims: Dims
    dtype: ir.DataType

    def __repr__(self) -> str:
        return f"{self.value}"


@dataclass(frozen=True, eq=False)
class Apply:
    """An operator of scalars, applied at each place. Equal ones are one object: see `Expressions.apply`."""

    operator: str
    args: tuple[Value, ...]
    dims: Dims
    dtype: ir.DataType

    @cached_property
    def depth(self) -> int:
        """How many operators there are one inside of the other."""
        return 1 + max(arg.depth if isinstance(arg, Apply) else 0 for arg in self.args)

    def __repr__(self) -> str:
        return f"{self.operator}({', '.join(map(repr, self.args))})"


Value: TypeAlias = View | Number | Apply


@dataclass(frozen=True)
class Reshaped:
    """A value whose places are to be seen with other sizes, which no strides express: it can be written, not read."""

    value: Value
    dims: Dims

    @property
    def dtype(self) -> ir.DataType:
        """The value's."""
        return self.value.dtype


def dim_of(size: Any) -> Dim:
    """A size, multiplied out, so that equal ones compare equal."""
    dim = sizes.dim_of(size)
    return dim if isinstance(dim, int) else sizes.dim_of(sympy.expand(dim))


class CannotView(Exception):
    """A change of axes that no strides express."""


def contiguous(dims: Sequence[Dim]) -> Dims:
    """The strides of a tensor that lies in order."""
    strides: list[Dim] = []
    step: Dim = 1
    for dim in reversed(dims):
        strides.append(step)
        step = dim_of(step * dim)
    return tuple(reversed(strides))


class Expressions:
    """Makes expressions, equal ones once, so that each is computed once."""

    def __init__(self) -> None:
        self._made: dict[tuple[object, ...], Apply] = {}

    def apply(self, operator: str, args: Sequence[Value], dtype: ir.DataType) -> Apply:
        """An operator of arguments that have equal sizes."""
        key = (operator, dtype, *(id(arg) if isinstance(arg, Apply) else arg for arg in args))
        if key not in self._made:
            made = self._made[key] = Apply(operator, tuple(args), args[0].dims, dtype)
            assert made.depth  # known from now on, so that asking for it never goes deep
        return self._made[key]

    def permute(self, value: Value, order: Sequence[int]) -> Value:
        """Axes in another order."""

        def moved(dims: Dims) -> Dims:
            return tuple(dims[axis] for axis in order)

        return self._seen(value, moved(value.dims), moved, {old: new for new, old in enumerate(order)})

    def expand(self, value: Value, dims: Dims) -> Value:
        """Broadcast to these sizes."""
        if value.dims == dims:
            return value
        lead = len(dims) - len(value.dims)
        given = value.dims
        spread = [have == 1 and want != 1 for have, want in zip(given, dims[lead:], strict=True)]

        def strides(old: Dims) -> Dims:
            return (0,) * lead + tuple(0 if s else stride for s, stride in zip(spread, old, strict=True))

        return self._seen(value, dims, strides, {axis: axis + lead for axis, s in enumerate(spread) if not s})

    def squeeze(self, value: Value, axes: Sequence[int]) -> Value:
        """Without these axes, whose sizes are one."""

        def without(dims: Dims) -> Dims:
            return tuple(dim for axis, dim in enumerate(dims) if axis not in axes)

        kept = [axis for axis in range(len(value.dims)) if axis not in axes]
        return self._seen(value, without(value.dims), without, {old: new for new, old in enumerate(kept)})

    def unsqueeze(self, value: Value, axes: Sequence[int]) -> Value:
        """With axes of size one put in, which have these places afterwards."""

        def put(dims: Dims, new: Dim) -> Dims:
            rest = iter(dims)
            return tuple(new if axis in axes else next(rest) for axis in range(len(dims) + len(axes)))

        kept = [axis for axis in range(len(value.dims) + len(axes)) if axis not in axes]
        return self._seen(value, put(value.dims, 1), lambda strides: put(strides, 0), dict(enumerate(kept)))

    def line(self, value: Value) -> Value:
        """A single place as an axis of size one, along which elements lie in order."""
        return self._mapped(value, (1,), lambda view: replace(view, dims=(1,), strides=(1,)))

    def cut(
        self, value: Value, axis: int, start: Dim, step: int, size: Dim, known: Mapping[View, Value] | None = None
    ) -> Value:
        """Every `step`-th along an axis, from `start` on; of some views it may be known what that is."""
        dims = (*value.dims[:axis], size, *value.dims[axis + 1 :])

        def taken(view: View) -> Value:
            if known and view in known:
                return known[view]
            stride = view.strides[axis]
            strides = (*view.strides[:axis], dim_of(stride * step), *view.strides[axis + 1 :])
            if step != 1 and any(guard.axis == axis for guard in view.guards):
                raise CannotView
            guards = tuple(_moved(guard, start) if guard.axis == axis else guard for guard in view.guards)
            return View(view.buffer, dims, strides, dim_of(view.offset + stride * start), guards)

        return self._mapped(value, dims, taken)

    def pad(self, value: View, axis: int, before: Dim, size: Dim, fill: float | int | bool) -> View:
        """With `fill` before and after an axis, up to a size."""
        stride = value.strides[axis]
        guards = tuple(_moved(guard, -before) if guard.axis == axis else guard for guard in value.guards)
        guard = Guard(axis, before, dim_of(before + value.dims[axis]), fill)
        dims = (*value.dims[:axis], size, *value.dims[axis + 1 :])
        return View(value.buffer, dims, value.strides, dim_of(value.offset - stride * before), (*guards, guard))

    def reshape(self, value: Value, dims: Dims) -> Value:
        """Other sizes, the same elements in the same order; `CannotView` where strides cannot say it."""
        if value.dims == dims:
            return value

        def seen(view: View) -> View:
            if view.guards:
                raise CannotView
            return View(view.buffer, dims, _reshaped(view.dims, view.strides, dims), view.offset)

        return self._mapped(value, dims, seen)

    def merge(self, value: Value, axis: int) -> Value:
        """An axis and the next made one, where all strides and guards allow it."""

        def joined(dims: Dims) -> Dims:
            return (*dims[:axis], dims[axis + 1], *dims[axis + 2 :])

        dims = (*value.dims[:axis], dim_of(value.dims[axis] * value.dims[axis + 1]), *value.dims[axis + 2 :])
        axes = {a: a - (a > axis) for a in range(len(value.dims)) if a not in (axis, axis + 1)}
        return self._seen(value, dims, joined, axes)

    def split(self, value: Value, axis: int, pieces: Dims) -> Value:
        """An axis as several, whose sizes are its factors."""

        def parted(strides: Dims) -> Dims:
            inner = (dim_of(strides[axis] * step) for step in contiguous(pieces))
            return (*strides[:axis], *inner, *strides[axis + 1 :])

        dims = (*value.dims[:axis], *pieces, *value.dims[axis + 1 :])
        more = len(pieces) - 1
        axes = {a: a + more * (a > axis) for a in range(len(value.dims)) if a != axis}
        return self._seen(value, dims, parted, axes)

    def _seen(self, value: Value, dims: Dims, strides: Callable[[Dims], Dims], axes: Mapping[int, int]) -> Value:
        """The same through other strides; `axes` says where each axis goes."""

        def seen(view: View) -> View:
            if any(guard.axis not in axes for guard in view.guards):
                raise CannotView
            guards = tuple(replace(guard, axis=axes[guard.axis]) for guard in view.guards)
            return View(view.buffer, dims, strides(view.strides), view.offset, guards)

        return self._mapped(value, dims, seen)

    def _mapped(self, value: Value, dims: Dims, change: Callable[[View], Value]) -> Value:
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


def _moved(guard: Guard, by: Dim) -> Guard:
    return replace(guard, start=dim_of(guard.start - by), end=dim_of(guard.end - by))


def views_of(value: Value) -> list[View]:
    """Every view that an expression reads, each once."""
    found: dict[View, None] = {}
    seen: set[int] = set()

    def walk(value: Value) -> None:
        if isinstance(value, View):
            found[value] = None
        elif isinstance(value, Apply) and id(value) not in seen:
            seen.add(id(value))
            for arg in value.args:
                walk(arg)

    walk(value)
    return list(found)


def gathered(value: Value) -> set[Buffer]:
    """The buffers of which an expression reads what an index says, at any place."""
    return {view.buffer for apply in applied(value) if apply.operator == "gather" for view in views_of(apply.args[0])}


def applied(value: Value) -> list[Apply]:
    """Every operator in an expression, each once."""
    found: dict[int, Apply] = {}

    def walk(value: Value) -> None:
        if isinstance(value, Apply) and id(value) not in found:
            found[id(value)] = value
            for arg in value.args:
                walk(arg)

    walk(value)
    return list(found.values())


def _reshaped(old: Dims, strides: Dims, new: Dims) -> Dims:
    """Strides that show a tensor with other sizes: pieces of equal count are matched from the left."""
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
        count, piece = _matching(have[at:], rest)
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


def _matching(have: Sequence[tuple[Dim, Dim]], want: Sequence[Dim]) -> tuple[int, int]:
    """How many of the old and of the new sizes, from the left, have the same product."""
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


def common_pieces(one: Dims, other: Dims) -> tuple[list[Dims], list[Dims]] | None:
    """Factors of the sizes of each, axis by axis, which are the same one after the other; None if there are none.

    >>> common_pieces((32, 10240), (320, 1024))
    ([(32,), (10, 1024)], [(32, 10), (1024,)])
    """
    pieces: tuple[list[Dims], list[Dims]] = ([], [])
    rests: list[list[Dim]] = [list(one), list(other)]
    fresh = [True, True]
    while rests[0] and rests[1]:
        a, b = rests[0][0], rests[1][0]
        piece = a if _quotient(b, a) is not None else b
        for side, rest in enumerate(rests):
            left = _quotient(rest[0], piece)
            if left is None:
                return None
            before = () if fresh[side] else pieces[side].pop()
            pieces[side].append((*before, piece))
            fresh[side] = left == 1
            rest[:1] = [] if left == 1 else [left]
    return None if rests[0] or rests[1] else pieces


def _quotient(large: Dim, small: Dim) -> Dim | None:
    """How often a size is in another; None if that may be no integer."""
    if large == small:
        return 1
    if isinstance(large, int) and isinstance(small, int):
        return None if small == 0 or large % small else large // small
    ratio = sympy.cancel(sympy.sympify(large) / small) if small != 0 else sympy.nan
    return dim_of(ratio) if ratio.is_integer and sympy.denom(ratio) == 1 else None
