"""Generate matrix products: with `products.h`, or `vectors.h` for a vector and constant weights.

The axes are classified by the operands that they index.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from sardonyx.native.body import Writer, describe, size_lines
from sardonyx.native.nests import Nest
from sardonyx.native.region import CannotLower
from sardonyx.native.scalars import TYPES, code_of
from sardonyx.native.table import FLOATS
from sardonyx.native.values import Apply, Buffer, View
from sardonyx.sizes import Dim

_MAX_AXES = 8
"""The maximum number of axes of one kind in `products.h`."""


class ProductPrinter:
    """Generates a matrix product. Lanes follow the axes of the right operand, which include the result's last."""

    def __init__(self, w: Writer, nest: Nest) -> None:
        self._w, self._nest = w, nest
        self._out = nest.steps[0].root.target
        left, right = _operands(nest)
        if nest.outer and right.strides[nest.outer[-1]] == 0:
            left, right = right, left
        self._left, self._right = left, right

    def units(self, name: str) -> tuple[str, str]:
        """Return the number of blocks to compute, and the cost of one in elements."""
        return f"{name}_product(call).units()", f"{name}_product(call).cost()"

    def write(self, name: str) -> None:
        """Generate the function that computes some blocks, and one that returns the product's description."""
        w, out = self._w, self._out
        places = " × ".join(code_of(dim) for dim in self._nest.dims)
        kind = f"MatrixProduct<{TYPES[self._left.dtype]}, {TYPES[out.dtype]}>"
        w.comment(f"{places}: {out.buffer.name} = {describe(self._left)} · {describe(self._right)}")
        with w.block(f"static {kind} {name}_product(const Call& call)"):
            size_lines(w, self._nest)
            start = ", ".join(f"call.{v.buffer.name} + {code_of(v.offset)}" for v in (self._left, self._right, out))
            w.line(f"return {{{start}, {', '.join(self._axes())}}};")
        with w.block(f"static void {name}(const Call& call, int64_t begin, int64_t end)"):
            w.line(f"{name}_product(call).run(begin, end);")

    def _axes(self) -> Iterable[str]:
        """Return the batch, row, column and summed axes as code."""
        return (self._axes_array(axes) for axes in self._kinds())

    def _kinds(self) -> tuple[list[int], ...]:
        kinds: tuple[list[int], ...] = ([], [], [], [])
        for axis in range(len(self._nest.dims)):
            moves_left, moves_right = self._left.strides[axis] != 0, self._right.strides[axis] != 0
            summed = axis in (self._nest.inner or ())
            kinds[3 if summed else 0 if moves_left == moves_right else 1 if moves_left else 2].append(axis)
        return kinds

    def _axes_array(self, axes: list[int]) -> str:
        if len(axes) > _MAX_AXES:
            raise CannotLower(f"a product over {len(axes)} axes that cannot be merged")
        out = dict(zip(self._nest.outer, self._out.strides, strict=True))
        steps = (
            (self._nest.dims[axis], self._left.strides[axis], self._right.strides[axis], out.get(axis, 0))
            for axis in axes
        )
        return _axes_code(steps)


class VectorPrinter(ProductPrinter):
    """Generates a product of a vector and constant weights, which the kernel packs in the order it reads them."""

    @classmethod
    def suits(cls, nest: Nest, constants: Collection[Buffer]) -> bool:
        """Return whether a nest is such a product."""
        if not nest.is_product:
            return False
        printer = cls(Writer(), nest)
        batch, rows, _, _ = printer._kinds()
        one = all(nest.dims[axis] == 1 for axis in (*batch, *rows))
        return one and printer.weights in constants and printer.weights.dtype in FLOATS

    @property
    def weights(self) -> Buffer:
        """The packed buffer."""
        return self._right.buffer

    @property
    def held(self) -> str:
        """The type of the packed weights."""
        return f"Weights<{TYPES[self._right.dtype]}>"

    def hold(self, name: str, data: str) -> None:
        """Generate the packing of weights from a constant of the model, before the sizes of a call are known."""
        dims, strides = self._nest.dims, self._right.strides
        columns, depth = (_axes_code((dims[a], 0, strides[a], 0) for a in axes) for axes in self._kinds()[2:])
        start = f"static_cast<const {TYPES[self._right.dtype]}*>({data}) + {code_of(self._right.offset)}"
        self._w.line(f"held.{name}.take({start}, {columns}, {depth});")

    def write(self, name: str) -> None:
        """Generate the function that computes some panels, and one that returns the product's description."""
        w, out = self._w, self._out
        kind = f"VectorProduct<{TYPES[self._left.dtype]}, {TYPES[out.dtype]}>"
        *_, columns, depth = self._axes()
        w.comment(f"{out.buffer.name} = {describe(self._left)} · {describe(self._right)}(constant)")
        with w.block(f"static {kind} {name}_product(const Call& call)"):
            size_lines(w, self._nest)
            start = ", ".join(f"call.{v.buffer.name} + {code_of(v.offset)}" for v in (self._left, out))
            w.line(f"return {{call.held->{name}, {start}, {columns}, {depth}}};")
        with w.block(f"static void {name}(const Call& call, int64_t begin, int64_t end)"):
            w.line(f"{name}_product(call).run(begin, end);")


def _axes_code(axes: Iterable[tuple[Dim, Dim, Dim, Dim]]) -> str:
    """Return axes in C++: the size of each, and its strides in the left and right operands and in the result."""
    listed = ["{" + ", ".join(map(code_of, axis)) + "}" for axis in axes]
    return f"Axes{{{len(listed)}, {{{', '.join(listed)}}}}}"


def _operands(nest: Nest) -> tuple[View, View]:
    value = nest.steps[0].root.value
    assert isinstance(value, Apply)
    left, right = value.args
    assert isinstance(left, View)
    assert isinstance(right, View)
    return left, right
