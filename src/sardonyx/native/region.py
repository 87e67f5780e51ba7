"""A region being lowered: its buffers, and the values computed so far."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import sympy

from sardonyx.native.nests import Reduction, Root, count
from sardonyx.native.values import (
    Apply,
    Buffer,
    CannotView,
    Expressions,
    Number,
    Reshaped,
    Value,
    View,
    contiguous,
    dim_of,
    gathered_buffers,
    operations,
    views_of,
)
from sardonyx.optimize.pattern import array_of
from sardonyx.sizes import Dim, Dims, symbol_of
from sardonyx.translate.inference import broadcast

COSTLY = frozenset({"exp", "log", "erf", "tanh", "sigmoid", "pow", "sin", "cos", "sqrt", "div", "softplus"})
"""Operators whose result is stored rather than computed twice."""

_MAX_RECOMPUTED = 1
"""Up to this many operators are computed again rather than stored."""


_MAX_DEPTH = 64
"""The maximum depth of an expression: traversals are recursive."""


class CannotLower(Exception):
    """A node or its shapes cannot be lowered to loops; the message says why."""


def _broadcast(*shapes: Dims) -> Dims:
    dims = broadcast(*shapes)
    if dims is None or any(
        have not in (1, want) for shape in shapes for have, want in zip(reversed(shape), reversed(dims), strict=False)
    ):
        raise CannotLower(f"sizes {list(shapes)} that may or may not be equal")
    return dims


class Lowering:
    """Lowers the nodes of a region, in order, to roots. Lowerings of operators call its methods."""

    def __init__(self, returned: Collection[ir.Value] = (), *, hoists: bool = True) -> None:
        """Lower a region with these results; `hoists` is whether a small value is worth a loop of its own."""
        self._returned, self._hoists = returned, hoists
        self.x = Expressions()
        self.roots: list[Root] = []
        self.inputs: dict[ir.Value, Buffer] = {}
        self.outputs: dict[ir.Value, Buffer] = {}
        self.inner: list[Buffer] = []
        self.required: list[Dim] = []
        self._symbol_values: dict[sympy.Symbol, Dim] = {}
        self._buffer_count = 0
        self._values: dict[ir.Value, Value | Reshaped] = {}
        self._stored: dict[Value | Reshaped, View] = {}
        self._source: dict[View, Value | Reshaped] = {}
        self._concatenations: dict[View, _Concatenation] = {}
        self._reduced: dict[tuple[Reduction, Value | Reshaped, tuple[int, ...]], View] = {}

    # Inputs and outputs

    def value(self, operand: ir.Value) -> Value:
        """Return a node's operand, to compute with."""
        value = self.operand(operand)
        if isinstance(value, Reshaped):
            value = self._values[operand] = self.stored(value)
        return value

    def operand(self, source: ir.Value) -> Value | Reshaped:
        """Return a node's operand: a computed value, a number, or an input; a `Reshaped` one can only be written."""
        if source in self._values:
            return self._values[source]
        array = constant_of(source)
        if array is not None and array.size == 1 and not _is_negative_zero(array):
            self._values[source] = Number(array.reshape(()).item(), self.dims(source), dtype_of(source))
        else:
            self._values[source] = self._input(source).view()
        return self._values[source]

    def _input(self, source: ir.Value) -> Buffer:
        if source not in self.inputs:
            self.inputs[source] = Buffer(f"in{len(self.inputs)}", "input", self.dims(source), dtype_of(source))
        return self.inputs[source]

    def dims(self, value: ir.Value) -> Dims:
        """Return the sizes of a value, in symbols that inputs have."""
        return tuple(
            dim_of(dim.subs(self._symbol_values)) if isinstance(dim, sympy.Expr) else dim for dim in dims_of(value)
        )

    def _resolve_symbols(self, inferred: Dims, computed: Dims) -> None:
        """Map new symbols of shape inference to the computed sizes."""
        input_dims = {dim for buffer in self.inputs.values() for dim in buffer.dims}
        for name, dim in zip(inferred, computed, strict=False):
            if isinstance(name, sympy.Symbol) and name != dim and name not in input_dims:
                self._symbol_values.setdefault(name, dim)

    def define(self, result: ir.Value, value: Value | Reshaped) -> None:
        """Set a node's result; costly results with several uses, and deep expressions, are stored."""
        self._resolve_symbols(self.dims(result), value.dims)
        if value.dims != self.dims(result):
            raise CannotLower(f"{result.name} has sizes {value.dims}, expected {self.dims(result)}")
        if value.dtype != dtype_of(result):
            raise CannotLower(f"{result.name} has type {value.dtype}, expected {dtype_of(result)}")
        if isinstance(value, Apply) and (_is_shared(value, result) or value.depth > _MAX_DEPTH):
            value = self.stored(value)
        if result in self._returned:
            value = self._output(result, value)
        self._values[result] = value

    def _output(self, result: ir.Value, value: Value | Reshaped) -> Value | Reshaped:
        """Make a result an output of the region, which other nodes read from there."""
        name = f"out{len(self.outputs)}"
        if isinstance(value, View) and value.buffer.kind == "inner" and _is_whole_buffer(value):
            value.buffer.name, value.buffer.kind, value.buffer.dims = name, "output", value.dims
            self.inner.remove(value.buffer)
            self.outputs[result] = value.buffer
            return value
        buffer = self.outputs[result] = Buffer(name, "output", self.dims(result), dtype_of(result))
        self._write(value, buffer.view())
        return value if isinstance(value, (View, Number)) else buffer.view()

    def require(self, least: Dim) -> None:
        """Require a size to be nonnegative at each call."""
        if not isinstance(least, int):
            self.required.append(least)
        elif least < 0:
            raise CannotLower("a slice is out of bounds")

    # Operations for lowerings

    def apply(self, operator: str, *args: Value, dtype: ir.DataType | None = None) -> Value:
        """Apply a scalar operator to broadcast arguments of one type, except for a condition."""
        if len({arg.dtype for arg in args[operator == "select" :]}) > 1:
            raise CannotLower(f"{operator} of {', '.join(str(arg.dtype) for arg in args)}")
        dims = _broadcast(*(arg.dims for arg in args))
        return self.x.apply(operator, [self.expand(arg, dims) for arg in args], dtype or args[0].dtype)

    def permute(self, value: Value, permutation: Sequence[int]) -> Value:
        """Permute the axes."""
        return self._change_axes(self.x.permute, value, permutation)

    def expand(self, value: Value, dims: Dims) -> Value:
        """Broadcast to these sizes."""
        return self._change_axes(self.x.expand, value, dims)

    def squeeze(self, value: Value, axes: Sequence[int]) -> Value:
        """Remove axes of size one."""
        return self._change_axes(self.x.squeeze, value, axes)

    def unsqueeze(self, value: Value, axes: Sequence[int]) -> Value:
        """Insert axes of size one."""
        return self._change_axes(self.x.unsqueeze, value, axes)

    def slice(self, value: Value, axis: int, start: Dim, step: int, size: Dim) -> Value:
        """Take every `step`-th element along an axis, from `start` on."""
        return self._change_axes(self.x.slice, value, axis, start, step, size)

    def _change_axes(self, change: Callable[..., Value], value: Value, *args: Any) -> Value:
        """Apply a change of axes, to the stored value if strides cannot express it."""
        try:
            return change(value, *args)
        except CannotView:
            return change(self.stored(value), *args)

    def number(self, value: float | int | bool, like: Value) -> Number:
        """Return a constant of another value's type."""
        return Number(value, (), like.dtype)

    def reduce(self, reduction: Reduction, value: Value, axes: Sequence[int], *, keep: bool = True) -> Value:
        """Reduce over axes, which stay with size one if `keep`."""
        rank = len(value.dims)
        axes = sorted({axis % rank for axis in axes}) if rank else []
        dims = tuple(1 if axis in axes else dim for axis, dim in enumerate(value.dims))
        if all(value.dims[axis] == 1 for axis in axes):
            result = value
        else:
            result = self.x.unsqueeze(self._reduction(reduction, value, axes), axes)
        assert result.dims == dims
        return result if keep else self.x.squeeze(result, axes)

    def _reduction(self, reduction: Reduction, value: Value, axes: Sequence[int]) -> View:
        """Return the reduction without the axes; equal reductions are computed once."""
        source = self._source.get(value, value) if isinstance(value, View) else value
        key = (reduction, source, tuple(axes))
        if key not in self._reduced:
            buffer = self._new(tuple(dim for axis, dim in enumerate(value.dims) if axis not in axes), value.dtype)
            self._write(value, buffer.view(), reduction, axes)
            self._reduced[key] = buffer.view()
        return self._reduced[key]

    def product(self, left: Value, right: Value, axes: Sequence[int], dtype: ir.DataType) -> View:
        """Return the product of two stored values, summed over axes, which are removed."""
        return self._reduction("Dot", self.apply("mul", left, right, dtype=dtype), axes)

    def mean(self, value: Value, axes: Sequence[int]) -> Value:
        """Return the mean over axes, which stay with size one."""
        total = self.reduce("Sum", value, axes)
        size = count([value.dims[axis] for axis in axes])
        if isinstance(size, int):
            return self.apply("mul", total, Number(1.0 / size if size else float("nan"), (), total.dtype))
        return self.apply("div", total, Number(size, (), total.dtype))

    def indices(self, dims: Dims) -> View:
        """Return the flat index of each element of a tensor of these sizes."""
        return Buffer("", "indices", dims, ir.DataType.INT64).view()

    def stored(self, value: Value | Reshaped) -> View:
        """Return the value in memory."""
        if isinstance(value, View) and not value.guards and value.buffer.kind != "indices":
            return value
        if value not in self._stored:
            buffer = self._new(value.dims, value.dtype)
            self._write(value, buffer.view())
            self._stored[value] = buffer.view()
            self._source[buffer.view()] = value
        return self._stored[value]

    def hoisted(self, value: Value) -> Value:
        """Return a value that larger loops read: stored, if a loop of its own is cheaper than computing it there."""
        return self.stored(value) if self._hoists else value

    def stored_if_costly(self, value: Value) -> Value:
        """Return a value that several passes over a row read: stored, if that is cheaper than computing it again."""
        return self.stored(value) if len(operations(value)) > _MAX_RECOMPUTED else value

    def pad(self, value: Value, axis: int, before: Dim, size: Dim, fill: float | int | bool) -> Value:
        """Pad an axis with `fill` to a size; negative padding crops."""
        if not isinstance(value, View) or value.buffer.kind == "indices" or any(g.fill != fill for g in value.guards):
            value = self.stored(value)
        return self.x.pad(value, axis, before, size, fill)

    def reshape(self, value: Value | Reshaped, dims: Dims) -> Value | Reshaped:
        """Reshape; the result can only be written if strides cannot express it."""
        if isinstance(value, Reshaped):
            return Reshaped(value.value, dims)
        try:
            return self.x.reshape(value, dims)
        except CannotView:
            return Reshaped(value, dims)

    def view_as(self, value: Value, dims: Dims) -> Value:
        """Reshape to compute with: stored if strides cannot express it."""
        reshaped = self.reshape(value, dims)
        return self.stored(reshaped) if isinstance(reshaped, Reshaped) else reshaped

    def gather(self, view: Value, whole: View, axis: int, index: Value) -> Value:
        """Read, at each index of a view, the element of `whole` offset by `index` along an axis."""
        dims = _broadcast(view.dims, index.dims)
        step, size = Number(whole.strides[axis], dims, index.dtype), Number(whole.dims[axis], dims, index.dtype)
        return self.x.apply("gather", [self.expand(view, dims), self.expand(index, dims), step, size], view.dtype)

    def concat(self, pieces: Sequence[Value | Reshaped], axis: int, dims: Dims) -> Value:
        """Concatenate along an axis, each piece written to its part."""
        buffer = self._new(dims, pieces[0].dtype)
        start: Dim = 0
        for piece in pieces:
            part = self.x.slice(buffer.view(), axis, start, 1, piece.dims[axis])
            assert isinstance(part, View)
            self._write(piece, part)
            start = dim_of(start + piece.dims[axis])
        values = [piece for piece in pieces if not isinstance(piece, Reshaped)]
        if len(values) == len(pieces) and not any(v.operator in COSTLY for piece in values for v in operations(piece)):
            self._concatenations[buffer.view()] = _Concatenation(axis, values)
        return buffer.view()

    def _new(self, dims: Dims, dtype: ir.DataType) -> Buffer:
        self._buffer_count += 1
        buffer = Buffer(f"t{self._buffer_count}", "inner", dims, dtype)
        self.inner.append(buffer)
        return buffer

    def _write(
        self, value: Value | Reshaped, target: View, reduction: Reduction | None = None, axes: Sequence[int] = ()
    ) -> None:
        """Add a root, without axes of size one; if it reads a concatenation, one for each piece."""
        if reduction is None and isinstance(value, Apply):
            by_index = gathered_buffers(value)
            candidates = (v for v in views_of(value) if v in self._concatenations and v.buffer not in by_index)
            concatenation = next(candidates, None)
            if concatenation is not None:
                self._write_pieces(value, target, concatenation)
                return
        if isinstance(value, Reshaped):
            try:
                reshaped = self.x.reshape(target, value.value.dims)
                assert isinstance(reshaped, View)
                value, target = value.value, reshaped
            except CannotView:
                raise CannotLower("a reshape of a concatenation") from None
        guarded = {guard.axis for view in views_of(value) for guard in view.guards}
        ones = [axis for axis, dim in enumerate(value.dims) if dim == 1 and axis not in guarded]
        keep = [axis for axis in range(len(value.dims)) if axis not in ones]
        remaining = [axis for axis in range(len(value.dims)) if axis not in axes]
        squeezed = self.x.squeeze(target, [at for at, axis in enumerate(remaining) if axis in ones])
        assert isinstance(squeezed, View)
        reduced = frozenset(keep.index(axis) for axis in axes if axis in keep)
        self.roots.append(Root(self.x.squeeze(value, ones), squeezed, reduction if reduced else None, reduced))

    def _write_pieces(self, value: Apply, target: View, read: View) -> None:
        """Compute an expression over a concatenation piece by piece, which then needs no memory."""
        concatenation = self._concatenations[read]
        start: Dim = 0
        for piece in concatenation.pieces:
            size = piece.dims[concatenation.axis]
            part = self.x.slice(target, concatenation.axis, start, 1, size)
            assert isinstance(part, View)
            self._write(self.x.slice(value, concatenation.axis, start, 1, size, {read: piece}), part)
            start = dim_of(start + size)


@dataclass(frozen=True)
class _Concatenation:
    axis: int
    pieces: Sequence[Value]


def _is_shared(value: Apply, result: ir.Value) -> bool:
    return value.operator in COSTLY and len(result.uses()) > 1


def _is_whole_buffer(view: View) -> bool:
    return (
        count(view.dims) == count(view.buffer.dims)
        and view.offset == 0
        and not view.guards
        and all(
            size == 1 or stride == wanted
            for size, stride, wanted in zip(view.dims, view.strides, contiguous(view.dims), strict=True)
        )
    )


def is_constant(value: ir.Value) -> bool:
    """Return whether a value is a constant of its model."""
    source = value.producer()
    if source is not None:
        return source.op_type == "Constant"
    return value.is_initializer() and not value.is_graph_input()


def constant_of(value: ir.Value) -> Any:
    """Return the array of a constant value; None for a weight that may change or an input with a default."""
    if value.const_value is None and value.producer() is not None:
        tensor = ir.convenience.get_const_tensor(value)  # of a Constant node
        return None if tensor is None else tensor.numpy()
    return None if value.is_graph_input() else array_of(value)


def _is_negative_zero(array: Any) -> bool:
    """Return whether an array is -0.0, which equals 0.0."""
    return array.dtype.kind == "f" and array.item() == 0 and bool(np.signbit(array.item()))


def dims_of(value: ir.Value) -> Dims:
    """Return the sizes of a value: numbers, and expressions of symbols."""
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
    """Return the element type of a value."""
    if value.dtype is None:
        raise CannotLower(f"the type of {value.name} is unknown")
    return value.dtype
