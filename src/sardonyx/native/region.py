"""A region being lowered: the buffers it reads and writes, and the results it has so far."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import sympy

from sardonyx.native.nests import How, Root, count
from sardonyx.native.values import (
    Apply,
    Buffer,
    CannotView,
    Expressions,
    Number,
    Reshaped,
    Value,
    View,
    applied,
    contiguous,
    dim_of,
    gathered,
    views_of,
)
from sardonyx.optimize.pattern import array_of
from sardonyx.sizes import Dim, Dims, symbol_of
from sardonyx.translate.inference import broadcast

COSTLY = frozenset({"exp", "log", "erf", "tanh", "sigmoid", "pow", "sin", "cos", "sqrt", "div", "softplus"})
"""Operators that are not computed twice where storing the result would do."""

_RECOMPUTED = 1
"""So many operators are rather computed again than their result stored."""


_DEEPEST = 64
"""So many operators may be one inside of the other: what walks over an expression calls itself for each."""


class CannotLower(Exception):
    """A node or its sizes cannot be expressed by loops; says why."""


class Lowering:
    """Turns the nodes of a region, in order, into roots. Lowerings of operators call its methods."""

    def __init__(self, returned: Collection[ir.Value] = ()) -> None:
        self._returned = returned
        self.x = Expressions()
        self.roots: list[Root] = []
        self.inputs: dict[ir.Value, Buffer] = {}
        self.outputs: dict[ir.Value, Buffer] = {}
        self.inner: list[Buffer] = []
        self.required: list[Dim] = []
        self._meant: dict[sympy.Symbol, Dim] = {}
        self._made = 0
        self._values: dict[ir.Value, Value | Reshaped] = {}
        self._stored: dict[Value | Reshaped, View] = {}
        self._source: dict[View, Value | Reshaped] = {}
        self._joined: dict[View, _Joined] = {}
        self._reduced: dict[tuple[How, Value | Reshaped, tuple[int, ...]], View] = {}

    # What a region reads and returns

    def value(self, given: ir.Value) -> Value:
        """A node's operand, to compute with."""
        value = self.unread(given)
        if isinstance(value, Reshaped):
            value = self._values[given] = self.stored(value)
        return value

    def unread(self, given: ir.Value) -> Value | Reshaped:
        """A node's operand: computed here, a number, or an input of the region; perhaps such as can only be written."""
        if given in self._values:
            return self._values[given]
        array = constant_of(given)
        if array is not None and array.size == 1 and not _is_negative_zero(array):
            self._values[given] = Number(array.reshape(()).item(), self.dims(given), dtype_of(given))
        else:
            self._values[given] = self._input(given).view()
        return self._values[given]

    def _input(self, given: ir.Value) -> Buffer:
        if given not in self.inputs:
            self.inputs[given] = Buffer(f"in{len(self.inputs)}", "input", self.dims(given), dtype_of(given))
        return self.inputs[given]

    def dims(self, value: ir.Value) -> Dims:
        """The sizes of a value, in symbols that inputs tell."""
        return tuple(dim_of(dim.subs(self._meant)) if isinstance(dim, sympy.Expr) else dim for dim in dims_of(value))

    def _learn(self, said: Dims, computed: Dims) -> None:
        """What inference had no better word for than a new name is what was computed."""
        told = {dim for buffer in self.inputs.values() for dim in buffer.dims}
        for name, dim in zip(said, computed, strict=False):
            if isinstance(name, sympy.Symbol) and name != dim and name not in told:
                self._meant.setdefault(name, dim)

    def give(self, result: ir.Value, value: Value | Reshaped) -> None:
        """Say what a node's result is; costly ones that several read are stored, and those of deep expressions."""
        self._learn(self.dims(result), value.dims)
        if value.dims != self.dims(result):
            raise CannotLower(f"{result.name} should have the sizes {self.dims(result)}, and not {value.dims}")
        if value.dtype != dtype_of(result):
            raise CannotLower(f"{result.name} should be {dtype_of(result)}, and not {value.dtype}")
        if isinstance(value, Apply) and (_is_shared(value, result) or value.depth > _DEEPEST):
            value = self.stored(value)
        if result in self._returned:
            value = self._output(result, value)
        self._values[result] = value

    def _output(self, result: ir.Value, value: Value | Reshaped) -> Value | Reshaped:
        """Make a result an output of the region; what else reads it may read it there."""
        name = f"out{len(self.outputs)}"
        if isinstance(value, View) and value.buffer.kind == "inner" and _is_whole(value):
            value.buffer.name, value.buffer.kind, value.buffer.dims = name, "output", value.dims
            self.inner.remove(value.buffer)
            self.outputs[result] = value.buffer
            return value
        buffer = self.outputs[result] = Buffer(name, "output", self.dims(result), dtype_of(result))
        self._write(value, buffer.view())
        return value if isinstance(value, (View, Number)) else buffer.view()

    def require(self, least: Dim) -> None:
        """At each call this must not be negative."""
        if not isinstance(least, int):
            self.required.append(least)
        elif least < 0:
            raise CannotLower("more is cut off than there is")

    # What lowerings are written with

    def apply(self, operator: str, *args: Value, dtype: ir.DataType | None = None) -> Value:
        """An operator of scalars over broadcast arguments, of one type but for a condition."""
        if len({arg.dtype for arg in args[operator == "select" :]}) > 1:
            raise CannotLower(f"{operator} of {', '.join(str(arg.dtype) for arg in args)}")
        dims = broadcast(*(arg.dims for arg in args))
        for arg in args:
            pairs = zip(reversed(arg.dims), reversed(dims), strict=False)
            if any(have not in (1, want) for have, want in pairs):
                raise CannotLower(f"sizes {[arg.dims for arg in args]} that may or may not be equal")
        return self.x.apply(operator, [self.expand(arg, dims) for arg in args], dtype or args[0].dtype)

    def permute(self, value: Value, order: Sequence[int]) -> Value:
        """Axes in another order."""
        return self._viewed(self.x.permute, value, order)

    def expand(self, value: Value, dims: Dims) -> Value:
        """Broadcast to these sizes."""
        return self._viewed(self.x.expand, value, dims)

    def squeeze(self, value: Value, axes: Sequence[int]) -> Value:
        """Without these axes, whose sizes are one."""
        return self._viewed(self.x.squeeze, value, axes)

    def unsqueeze(self, value: Value, axes: Sequence[int]) -> Value:
        """With axes of size one put in."""
        return self._viewed(self.x.unsqueeze, value, axes)

    def cut(self, value: Value, axis: int, start: Dim, step: int, size: Dim) -> Value:
        """Every `step`-th along an axis, from `start` on."""
        return self._viewed(self.x.cut, value, axis, start, step, size)

    def _viewed(self, change: Callable[..., Value], value: Value, *how: Any) -> Value:
        """A change of axes, of the value in memory where strides cannot say it otherwise."""
        try:
            return change(value, *how)
        except CannotView:
            return change(self.stored(value), *how)

    def number(self, value: float | int | bool, like: Value) -> Number:
        """A constant of another value's type."""
        return Number(value, (), like.dtype)

    def reduce(self, how: How, value: Value, axes: Sequence[int], *, keep: bool = True) -> Value:
        """The reduction over these axes, which stay with size one."""
        rank = len(value.dims)
        axes = sorted({axis % rank for axis in axes}) if rank else []
        dims = tuple(1 if axis in axes else dim for axis, dim in enumerate(value.dims))
        if all(value.dims[axis] == 1 for axis in axes):
            result = value
        else:
            result = self.x.unsqueeze(self._reduction(how, value, axes), axes)
        assert result.dims == dims
        return result if keep else self.x.squeeze(result, axes)

    def _reduction(self, how: How, value: Value, axes: Sequence[int]) -> View:
        """The reduction without the axes; the same one is made once, be the value stored by now or not."""
        source = self._source.get(value, value) if isinstance(value, View) else value
        key = (how, source, tuple(axes))
        if key not in self._reduced:
            buffer = self._new(tuple(dim for axis, dim in enumerate(value.dims) if axis not in axes), value.dtype)
            self._write(value, buffer.view(), how, axes)
            self._reduced[key] = buffer.view()
        return self._reduced[key]

    def product(self, one: Value, other: Value, axes: Sequence[int], dtype: ir.DataType) -> View:
        """What two values in memory have multiplied, summed over these axes, which are gone."""
        return self._reduction("Dot", self.apply("mul", one, other, dtype=dtype), axes)

    def mean(self, value: Value, axes: Sequence[int]) -> Value:
        """The mean over these axes, which stay with size one."""
        total = self.reduce("Sum", value, axes)
        size = count([value.dims[axis] for axis in axes])
        if isinstance(size, int):
            return self.apply("mul", total, Number(1.0 / size if size else float("nan"), (), total.dtype))
        return self.apply("div", total, Number(size, (), total.dtype))

    def places(self, dims: Dims) -> View:
        """Of a tensor of these sizes, the place of each element in the order of memory."""
        return Buffer("", "places", dims, ir.DataType.INT64).view()

    def stored(self, value: Value | Reshaped) -> View:
        """The value in memory, to be read again."""
        if isinstance(value, View) and not value.guards and value.buffer.kind != "places":
            return value
        if value not in self._stored:
            buffer = self._new(value.dims, value.dtype)
            self._write(value, buffer.view())
            self._stored[value] = buffer.view()
            self._source[buffer.view()] = value
        return self._stored[value]

    def settled(self, value: Value) -> Value:
        """A value that several passes over a row read: stored, if that costs less than to compute it again."""
        return self.stored(value) if len(applied(value)) > _RECOMPUTED else value

    def pad(self, value: Value, axis: int, before: Dim, size: Dim, fill: float | int | bool) -> Value:
        """With `fill` before and after an axis, up to a size; less than nothing before is cut off."""
        if not isinstance(value, View) or value.buffer.kind == "places" or any(g.fill != fill for g in value.guards):
            value = self.stored(value)
        return self.x.pad(value, axis, before, size, fill)

    def reshape(self, value: Value | Reshaped, dims: Dims) -> Value | Reshaped:
        """Other sizes for the same elements in the same order."""
        if isinstance(value, Reshaped):
            return Reshaped(value.value, dims)
        try:
            return self.x.reshape(value, dims)
        except CannotView:
            return Reshaped(value, dims)

    def seen(self, value: Value, dims: Dims) -> Value:
        """Other sizes for the same elements in the same order, to compute with."""
        shown = self.reshape(value, dims)
        return self.stored(shown) if isinstance(shown, Reshaped) else shown

    def gather(self, view: Value, whole: View, axis: int, index: Value) -> Value:
        """What lies so many steps further along an axis of `whole` as the index says, at each place of a view of it."""
        dims = broadcast(view.dims, index.dims)
        step, size = Number(whole.strides[axis], dims, index.dtype), Number(whole.dims[axis], dims, index.dtype)
        return self.x.apply("gather", [self.expand(view, dims), self.expand(index, dims), step, size], view.dtype)

    def joined(self, pieces: Sequence[Value | Reshaped], axis: int, dims: Dims) -> Value:
        """The pieces one after the other along an axis, each written to its part."""
        buffer = self._new(dims, pieces[0].dtype)
        start: Dim = 0
        for piece in pieces:
            part = self.x.cut(buffer.view(), axis, start, 1, piece.dims[axis])
            assert isinstance(part, View)
            self._write(piece, part)
            start = dim_of(start + piece.dims[axis])
        values = [piece for piece in pieces if not isinstance(piece, Reshaped)]
        if len(values) == len(pieces) and not any(v.operator in COSTLY for piece in values for v in applied(piece)):
            self._joined[buffer.view()] = _Joined(axis, values)
        return buffer.view()

    def _new(self, dims: Dims, dtype: ir.DataType) -> Buffer:
        self._made += 1
        buffer = Buffer(f"t{self._made}", "inner", dims, dtype)
        self.inner.append(buffer)
        return buffer

    def _write(self, value: Value | Reshaped, target: View, how: How | None = None, axes: Sequence[int] = ()) -> None:
        """A root, without axes of size one; where it reads joined pieces at their places, one for each piece."""
        if how is None and isinstance(value, Apply):
            anywhere = gathered(value)
            found = (v for v in views_of(value) if v in self._joined and v.buffer not in anywhere)
            read = next(found, None)
            if read is not None:
                self._write_apart(value, target, read)
                return
        if isinstance(value, Reshaped):
            try:
                seen = self.x.reshape(target, value.value.dims)
                assert isinstance(seen, View)
                value, target = value.value, seen
            except CannotView:
                raise CannotLower("a reshape of what is written in pieces") from None
        guarded = {guard.axis for view in views_of(value) for guard in view.guards}
        ones = [axis for axis, dim in enumerate(value.dims) if dim == 1 and axis not in guarded]
        keep = [axis for axis in range(len(value.dims)) if axis not in ones]
        kept = [axis for axis in range(len(value.dims)) if axis not in axes]
        squeezed = self.x.squeeze(target, [at for at, axis in enumerate(kept) if axis in ones])
        assert isinstance(squeezed, View)
        reduced = frozenset(keep.index(axis) for axis in axes if axis in keep)
        self.roots.append(Root(self.x.squeeze(value, ones), squeezed, how if reduced else None, reduced))

    def _write_apart(self, value: Apply, target: View, read: View) -> None:
        """What reads joined pieces, piece by piece: they need no memory then."""
        joined = self._joined[read]
        start: Dim = 0
        for piece in joined.pieces:
            size = piece.dims[joined.axis]
            part = self.x.cut(target, joined.axis, start, 1, size)
            assert isinstance(part, View)
            self._write(self.x.cut(value, joined.axis, start, 1, size, {read: piece}), part)
            start = dim_of(start + size)


@dataclass(frozen=True)
class _Joined:
    """Values that lie one after the other along an axis."""

    axis: int
    pieces: Sequence[Value]


def _is_shared(value: Apply, result: ir.Value) -> bool:
    return value.operator in COSTLY and len(result.uses()) > 1


def _is_whole(view: View) -> bool:
    """Whether a view shows all of its buffer, in order."""
    return (
        count(view.dims) == count(view.buffer.dims)
        and view.offset == 0
        and not view.guards
        and all(
            size == 1 or stride == wanted
            for size, stride, wanted in zip(view.dims, view.strides, contiguous(view.dims), strict=True)
        )
    )


def is_fixed(value: ir.Value) -> bool:
    """Whether a value is a constant of its model."""
    source = value.producer()
    if source is not None:
        return source.op_type == "Constant"
    return value.is_initializer() and not value.is_graph_input()


def constant_of(value: ir.Value) -> Any:
    """The array that a value always is; None for a weight that may change or an input with a default."""
    if value.const_value is None and value.producer() is not None:
        held = ir.convenience.get_const_tensor(value)  # of a Constant
        return None if held is None else held.numpy()
    return None if value.is_graph_input() else array_of(value)


def _is_negative_zero(array: Any) -> bool:
    """Whether an array is the one number that equals another."""
    return array.dtype.kind == "f" and array.item() == 0 and bool(np.signbit(array.item()))


def dims_of(value: ir.Value) -> Dims:
    """The sizes of a value: numbers and expressions of names."""
    if "dims" in value.meta:
        return tuple(map(dim_of, value.meta["dims"]))
    if value.shape is None:
        raise CannotLower(f"the sizes of {value.name} are unknown")
    return tuple(_dim(dim, value) for dim in value.shape)


def _dim(dim: int | ir.SymbolicDim, value: ir.Value) -> Dim:
    if isinstance(dim, int):
        return dim
    if dim.value is None:
        raise CannotLower(f"a size of {value.name} is unknown")
    return symbol_of(str(dim.value))


def dtype_of(value: ir.Value) -> ir.DataType:
    """The type of a value's elements."""
    if value.dtype is None:
        raise CannotLower(f"the type of {value.name} is unknown")
    return value.dtype
