"""A nest of loops as a C++ function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import sympy

from sardonyx.native.nests import Nest, Root, Step, count
from sardonyx.native.region import COSTLY
from sardonyx.native.scalars import TYPES, cast_code, code_of, computed_type, number_code, symbol_name
from sardonyx.native.values import (
    Apply,
    Buffer,
    Expressions,
    Number,
    Value,
    View,
    applied,
    contiguous,
    views_of,
)
from sardonyx.translate.sizes import Dim

_TEMPLATES: Mapping[str, str] = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "neg": "-{0}",
    "and": "{0} & {1}",
    "or": "{0} | {1}",
    "xor": "{0} ^ {1}",
    "not": "~{0}",
}
_FUNCTIONS: Mapping[str, str] = {
    "div": "divided",
    "exp": "exponential",
    "log": "logarithm",
    "erf": "error_function",
    "tanh": "hyperbolic_tangent",
    "sqrt": "square_root",
    "floor": "floored",
    "ceil": "ceiled",
    "round": "rounded",
    "pow": "power",
    "min": "minimum",
    "max": "maximum",
    "abs": "absolute",
    "log1p": "log_one_plus",
    "mod": "modulo",
    "fmod": "c_modulo",
    "shift_left": "shifted_left",
    "shift_right": "shifted_right",
}
_LIBRARY = {"sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh"}

_CHUNK = 4096
"""Places of a row without reductions that are one unit of work."""
_BLOCK = 2048
"""Places of a row that are summed up before a pause."""
_ACROSS = 64
"""Rows that are one unit of work where each lane has a row."""


class Writer:
    """Lines of code, indented."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._depth = 0

    def line(self, text: str) -> None:
        """Add a line."""
        self.lines.append("  " * self._depth + text)

    @contextmanager
    def block(self, head: str, tail: str = "}") -> Iterator[None]:
        """Lines between braces."""
        self.line(head + " {")
        self._depth += 1
        yield
        self._depth -= 1
        self.line(tail)


def dims_in(nest: Nest) -> Iterator[Dim]:
    """Every size that the code of a nest speaks of."""
    yield from nest.dims
    for step in nest.steps:
        for view in (*views_of(step.root.value), step.root.target):
            yield from view.strides
            yield view.offset
            for guard in view.guards:
                yield from (guard.start, guard.end)
        yield from (n.value for n in _numbers(step.root.value) if isinstance(n.value, sympy.Expr))


def _numbers(value: Value) -> Iterator[Number]:
    for apply in applied(value):
        yield from (arg for arg in apply.args if isinstance(arg, Number))
    if isinstance(value, Number):
        yield value


class NestPrinter:
    """Writes one nest. Lanes go along the last axis: along the row if that is swept, else across rows."""

    def __init__(self, w: Writer, nest: Nest, is_local: Callable[[Buffer], bool]) -> None:
        if not nest.dims:
            nest = Nest((1,), None, [_with_place(step) for step in nest.steps])
        self._w, self._nest = w, nest
        self._reducing = nest.inner is not None
        inner = nest.inner if nest.inner is not None else frozenset({len(nest.dims) - 1})
        self._inner = sorted(inner)
        self._outer = [axis for axis in range(len(nest.dims)) if axis not in inner]
        self._last = len(nest.dims) - 1
        self._across = nest.across
        self._is_local = is_local
        self._scratch = {
            step.root.buffer
            for step in nest.steps
            if not step.per_row and not self._across and self._reducing and is_local(step.root.buffer)
        }
        self._rows: dict[Buffer, str] = {}
        self._names: dict[object, str] = {}
        self._places: dict[int, str] = {}
        self._next = 0

    def units(self) -> tuple[str, str]:
        """How much work there is that can run apart, and what a unit of it costs, in elements."""
        dims = self._nest.dims
        if self._across:
            rows = count([dims[a] for a in self._outer[:-1]])
            chunks = _parts(dims[self._last], _ACROSS)
            cost = code_of(count([*(dims[a] for a in self._inner), _ACROSS]))
        elif self._reducing:
            rows, chunks = count([dims[a] for a in self._outer]), "1"
            cost = code_of(count([dims[a] for a in self._inner]))
        else:
            rows = count([dims[a] for a in self._outer])
            chunks = _parts(dims[self._last], _CHUNK)
            cost = f"std::min<int64_t>({code_of(dims[self._last])}, {_CHUNK})"
        units = code_of(rows) if chunks == "1" else f"{code_of(rows)} * {chunks}"
        return units, f"{cost} * {self._nest.passes}"

    def write(self, name: str) -> None:
        """The function that computes some units."""
        w, nest = self._w, self._nest
        w.line(f"// {' × '.join(code_of(dim) for dim in nest.dims)}: " + ", ".join(map(_summary, nest.steps)))
        with w.block(f"static void {name}(const Call& call, int64_t begin, int64_t end)"):
            for symbol in sorted({s for dim in dims_in(nest) for s in sympy.sympify(dim).free_symbols}, key=str):
                w.line(f"const int64_t {symbol_name(symbol)} = call.{symbol_name(symbol)};")
            buffers = {view.buffer for step in nest.steps for view in views_of(step.root.value)}
            buffers |= {step.root.buffer for step in nest.steps}
            for buffer in sorted((b for b in buffers if b.kind != "places"), key=lambda b: b.name):
                if buffer in self._scratch and self._nest.crosses(buffer):
                    size = code_of(count([nest.dims[a] for a in self._inner]))
                    w.line(f"const auto {buffer.name}_memory = memory<{TYPES[buffer.dtype]}>({size});")
                    w.line(f"auto* __restrict const {buffer.name} = {buffer.name}_memory.get();")
                elif buffer.kind != "inner" or not self._is_local(buffer) or self._stored(buffer):
                    w.line(f"auto* __restrict const {buffer.name} = call.{buffer.name};")
            w.line(f"constexpr int W = kNative * {self._registers()};")
            with w.block("for (int64_t unit = begin; unit < end; ++unit)"):
                self._unit()

    def _registers(self) -> int:
        """How many registers are computed side by side: more where each takes long."""
        costly = {id(v) for step in self._nest.steps for v in applied(step.root.value) if v.operator in COSTLY}
        return 4 if len(costly) > 2 else 2

    def _stored(self, buffer: Buffer) -> bool:
        """Whether a buffer has memory of its own."""
        step = self._nest.maker(buffer)
        return step is not None and not step.per_row and buffer not in self._scratch and self._nest.crosses(buffer)

    def _unit(self) -> None:
        w, dims = self._w, self._nest.dims
        outer = self._outer[:-1] if self._across else self._outer
        chunked = _ACROSS if self._across else None if self._reducing else _CHUNK
        rest = "unit"
        if chunked is not None:
            parts = _parts(dims[self._last], chunked)
            if parts != "1":
                w.line(f"const int64_t from = unit % ({parts}) * {chunked};")
                w.line(f"const int64_t to = std::min<int64_t>(from + {chunked}, {code_of(dims[self._last])});")
                rest = f"(unit / ({parts}))"
            else:
                w.line(f"const int64_t from = 0, to = {code_of(dims[self._last])};")
        self._split(outer, rest)
        if self._across:
            with w.block(f"sweep<W>(from, to, [&](auto w, int64_t i{self._last})", "});"):
                self._places[self._last] = f"i{self._last}"
                self._passes(lanes="w")
        elif self._reducing:
            self._passes(lanes="1")
        else:
            self._sweep_lanes("from", "to", [step for step in self._nest.steps if not step.once])

    def _split(self, axes: Sequence[int], rest: str) -> None:
        """The places along the outer axes, from the number of a unit."""
        for at in reversed(range(len(axes))):
            axis = axes[at]
            size = code_of(self._nest.dims[axis])
            if at:
                self._w.line(f"const int64_t i{axis} = {rest} % {size};")
                rest = f"({rest} / {size})"
            else:
                self._w.line(f"const int64_t i{axis} = {rest};")
            self._places[axis] = f"i{axis}"

    def _passes(self, lanes: str) -> None:
        """Row by row: numbers for the row, then a sweep that computes what is reduced or written, and so on."""
        for level in range(self._nest.passes):
            steps = [step for step in self._nest.steps if step.level == level]
            with self._scope():
                for step in steps:
                    if step.once:
                        self._once(step, lanes)
            rest = [step for step in steps if not step.once]
            if rest:
                self._sweep(rest, lanes)

    def _once(self, step: Step, lanes: str) -> None:
        value = self._expression(step.root.value, lanes, self._outer)
        self._keep_row(step.root, value)
        self._store(step.root, value, lanes, self._outer)

    def _keep_row(self, root: Root, value: str) -> None:
        """The number of a row, under a name that later passes know."""
        name = f"row_{root.buffer.name}"
        self._w.line(f"const auto {name} = {value};")
        self._rows[root.buffer] = name

    def _sweep(self, steps: Sequence[Step], lanes: str) -> None:
        w = self._w
        reductions = [step for step in steps if step.root.how]
        for step in reductions:
            kind = computed_type(step.root.value.dtype)
            join = f"Across<{step.root.how}, Of<{kind}, w>>" if self._across else f"Along<{step.root.how}, {kind}, W>"
            w.line(f"{join} sum_{step.root.buffer.name};")
        sums = [
            step for step in reductions if step.root.how == "Sum" and computed_type(step.root.value.dtype) == "float"
        ]
        plain = self._inner if self._across else self._inner[:-1]
        with self._loops(plain):
            if self._across:
                self._steps(steps, "w")
                self._pause(sums)
            elif sums and not self._is_short():
                self._sweep_in_blocks(steps, sums)
            else:
                self._sweep_lanes("0", code_of(self._nest.dims[self._last]), steps)
                if plain:
                    self._pause(sums, code_of(self._nest.dims[self._last]))
        for step in reductions:
            self._keep_row(step.root, f"sum_{step.root.buffer.name}.total()")
            self._store(step.root, self._rows[step.root.buffer], lanes, self._outer)

    def _is_short(self) -> bool:
        size = self._nest.dims[self._last]
        return isinstance(size, int) and size <= _BLOCK

    def _sweep_in_blocks(self, steps: Sequence[Step], sums: Sequence[Step]) -> None:
        """Along the last axis, with a pause now and then."""
        size = code_of(self._nest.dims[self._last])
        with self._w.block(f"for (int64_t block = 0; block < {size}; block += {_BLOCK})"):
            self._sweep_lanes("block", f"std::min<int64_t>(block + {_BLOCK}, {size})", steps)
            self._pause(sums, f"{_BLOCK}")

    def _sweep_lanes(self, begin: str, end: str, steps: Sequence[Step]) -> None:
        with self._w.block(f"sweep<W>({begin}, {end}, [&](auto w, int64_t i{self._last})", "});"):
            self._places[self._last] = f"i{self._last}"
            self._steps(steps, "w")

    def _pause(self, sums: Sequence[Step], count: str = "") -> None:
        for step in sums:
            self._w.line(f"sum_{step.root.buffer.name}.pause({count});")

    @contextmanager
    def _loops(self, axes: Sequence[int]) -> Iterator[None]:
        if not axes:
            yield
            return
        axis = axes[0]
        size = code_of(self._nest.dims[axis])
        with self._w.block(f"for (int64_t i{axis} = 0; i{axis} < {size}; ++i{axis})"):
            self._places[axis] = f"i{axis}"
            with self._loops(axes[1:]):
                yield

    @contextmanager
    def _scope(self) -> Iterator[None]:
        before = dict(self._names)
        yield
        self._names = before

    def _steps(self, steps: Sequence[Step], lanes: str) -> None:
        places = list(range(len(self._nest.dims)))
        with self._scope():
            for step in steps:
                value = self._expression(step.root.value, lanes, places)
                if step.root.how:
                    self._w.line(f"sum_{step.root.buffer.name}({value});")
                    continue
                self._names[_at_own_place(step, self._nest)] = value
                self._store(step.root, value, lanes, places)

    def _store(self, root: Root, value: str, lanes: str, places: Sequence[int]) -> None:
        buffer = root.buffer
        step = self._nest.maker(buffer)
        assert step is not None
        if buffer.kind == "inner" and self._is_local(buffer) and (step.per_row or not self._nest.crosses(buffer)):
            return
        address, stride = self._address(root.target, places, scratch=buffer in self._scratch)
        if lanes == "1" or stride == 1:
            self._w.line(f"put({address}, {value});")
        else:
            self._w.line(f"put_apart({address}, {code_of(stride)}, {value});")

    def _address(self, view: View, places: Sequence[int], *, scratch: bool) -> tuple[str, Dim]:
        """Where a view's element at the current place is, and how far the next one along the lanes."""
        terms = [view.buffer.name] if view.buffer.kind != "places" else ["int64_t{0}"]
        strides = dict(zip(places, view.strides, strict=True))
        if scratch:
            rows = contiguous([self._nest.dims[a] for a in self._inner])
            strides = dict(zip(self._inner, rows, strict=True))
        elif view.offset != 0:
            terms.append(code_of(view.offset))
        for axis, stride in strides.items():
            if stride != 0:
                terms.append(self._places[axis] if stride == 1 else f"{self._places[axis]} * {code_of(stride)}")
        return " + ".join(terms), strides.get(self._last, 0)

    def _guarded(self, view: View, address: str, stride: Dim, lanes: str, places: Sequence[int]) -> str:
        """An element that is read where the guards allow it."""
        start, end = "0", "std::numeric_limits<int64_t>::max()"
        tests = []
        for guard in view.guards:
            axis = places[guard.axis]
            if axis == self._last and lanes != "1":
                start, end = (
                    f"std::max<int64_t>({start}, {code_of(guard.start)})",
                    f"std::min<int64_t>({end}, {code_of(guard.end)})",
                )
            else:
                at = self._places[axis]
                tests.append(f"{at} >= {code_of(guard.start)} && {at} < {code_of(guard.end)}")
        fill = number_code(Number(view.guards[0].fill, (), view.dtype))
        at = self._places.get(self._last, "0")
        ok = " && ".join(tests) or "true"
        return f"guarded<{lanes}>({address}, {code_of(stride)}, {ok}, {at}, {start}, {end}, {fill})"

    def _gathered(self, value: Apply, lanes: str, places: Sequence[int]) -> str:
        """An element that an index names."""
        view, index, step, size = value.args
        assert isinstance(view, View)
        address, stride = self._address(view, places, scratch=False)
        at = self._expression(index, lanes, places)
        numbers = ", ".join(number_code(n) for n in (step, size) if isinstance(n, Number))
        return f"gathered<{lanes}>({address}, {code_of(stride)}, {at}, {numbers}, *call.astray)"

    def _expression(self, value: Value, lanes: str, places: Sequence[int]) -> str:
        """The name of a value, which is computed by now."""
        key: object = id(value) if isinstance(value, Apply) else (value, tuple(places))
        if isinstance(value, View) and value.buffer in self._rows:
            row = self._rows[value.buffer]
            if lanes == "1" or self._across:
                return row
            key = ("row", value.buffer)
            if key not in self._names:
                self._name(key, f"splat<w>({row})")
            return self._names[key]
        if key not in self._names:
            self._name(key, self._computed(value, lanes, places))
        return self._names[key]

    def _name(self, key: object, code: str) -> None:
        name = f"v{self._next}"
        self._next += 1
        self._w.line(f"const auto {name} = {code};")
        self._names[key] = name

    def _computed(self, value: Value, lanes: str, places: Sequence[int]) -> str:
        if isinstance(value, Number):
            return f"splat<{lanes}>({number_code(value)})"
        if isinstance(value, View):
            address, stride = self._address(value, places, scratch=value.buffer in self._scratch)
            if value.buffer.kind == "places":
                return f"ramp<{lanes}>({address}, {code_of(stride)})"
            if value.guards:
                return self._guarded(value, address, stride, lanes, places)
            if stride == 1:
                return f"row<{lanes}>({address})"
            return f"same<{lanes}>({address})" if stride == 0 else f"apart<{lanes}>({address}, {code_of(stride)})"
        if value.operator == "gather":
            return self._gathered(value, lanes, places)
        args = [self._expression(arg, lanes, places) for arg in value.args]
        if value.operator == "cast":
            return cast_code(args[0], value.args[0].dtype, value.dtype)
        if value.operator in _TEMPLATES:
            code = _TEMPLATES[value.operator].format(*args)
            kind = computed_type(value.dtype)  # C++ computes with nothing shorter than an int
            return f"kept<{kind}>({code})" if "int8" in kind or "int16" in kind else code
        if value.operator in _LIBRARY:
            return f"each({args[0]}, [](auto x) {{ return std::{value.operator}(x); }})"
        return f"{_FUNCTIONS.get(value.operator, value.operator)}({', '.join(args)})"


def _with_place(step: Step) -> Step:
    """A step of a single place, as one along an axis of size one."""
    value = Expressions().line(step.root.value)
    target = View(step.root.buffer, (1,), (1,), step.root.target.offset)
    return replace(step, root=replace(step.root, value=value, target=target))


def _at_own_place(step: Step, nest: Nest) -> object:
    view = View(step.root.buffer, nest.dims, contiguous(nest.dims), 0)
    return view, tuple(range(len(nest.dims)))


def _summary(step: Step) -> str:
    root = step.root
    return f"{root.buffer.name} = {root.how or ''}{'…' if isinstance(root.value, Apply) else root.value!r}"


def _parts(size: Dim, chunk: int) -> str:
    if isinstance(size, int):
        return f"{max(1, -(-size // chunk))}"
    return f"parts({code_of(size)}, {chunk})"
