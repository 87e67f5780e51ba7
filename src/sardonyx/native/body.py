"""Generate the loop bodies of a nest, shared by all targets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import sympy

from sardonyx.native.nests import Nest, Root, Step
from sardonyx.native.scalars import cast_code, code_of, computed_type, number_code, symbol_name
from sardonyx.native.values import Apply, Buffer, Expressions, Number, Value, View, contiguous, operations, views_of
from sardonyx.sizes import Dim
from sardonyx.toolchain.literals import comment

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
LIBRARY = frozenset({"sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh"})
"""Functions computed by the C library, element by element."""


class Writer:
    """Collects indented lines of code."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._depth = 0

    def line(self, text: str) -> None:
        """Add a line."""
        assert "\n" not in text
        self.lines.append("  " * self._depth + text)

    def comment(self, text: str) -> None:
        """Add a one-line comment."""
        self.line(comment(text))

    @contextmanager
    def block(self, head: str, tail: str = "}") -> Iterator[None]:
        """Add lines between braces."""
        self.line(head + " {")
        self._depth += 1
        yield
        self._depth -= 1
        self.line(tail)

    @contextmanager
    def guard(self, condition: str) -> Iterator[None]:
        """Add lines that are compiled on a condition of the preprocessor."""
        self.lines.append(f"#{condition}")
        yield
        self.lines.append("#endif")


def dims_in(nest: Nest) -> Iterator[Dim]:
    """Yield every size that the code of a nest uses."""
    yield from nest.dims
    for step in nest.steps:
        for view in (*views_of(step.root.value), step.root.target):
            yield from view.strides
            yield view.offset
            for guard in view.guards:
                yield from (guard.start, guard.end)
        yield from (n.value for n in _numbers(step.root.value) if isinstance(n.value, sympy.Expr))


def _numbers(value: Value) -> Iterator[Number]:
    for apply in operations(value):
        yield from (arg for arg in apply.args if isinstance(arg, Number))
    if isinstance(value, Number):
        yield value


def symbols_in(nest: Nest) -> list[sympy.Basic]:
    """Return the symbolic sizes that the code of a nest uses."""
    return sorted({s for dim in dims_in(nest) for s in sympy.sympify(dim).free_symbols}, key=str)


def size_lines(w: Writer, nest: Nest, kind: str = "int64_t") -> None:
    """Define the sizes that the code of a nest uses, in a C++ type."""
    for symbol in symbols_in(nest):
        w.line(f"const {kind} {symbol_name(symbol)} = call.{symbol_name(symbol)};")


class BodyPrinter:
    """Generates the computation of a nest; subclasses generate the loops for a target."""

    _INDEX = "int64_t"
    """The C++ type of indices."""
    _RANGE_FLAG = ""
    """A further argument of gathers, which is set for an index out of range."""

    def __init__(self, w: Writer, nest: Nest, is_local: Callable[[Buffer], bool]) -> None:
        if not nest.dims:
            nest = Nest((1,), None, [_as_vector_step(step) for step in nest.steps])
        self._w, self._nest = w, nest
        self._reducing = nest.inner is not None
        inner = nest.inner if nest.inner is not None else frozenset({len(nest.dims) - 1})
        self._inner = sorted(inner)
        self._outer = [axis for axis in range(len(nest.dims)) if axis not in inner]
        self._last = len(nest.dims) - 1
        self._across = nest.across
        self._is_local = is_local
        self._scratch: set[Buffer] = set()
        self._rows: dict[Buffer, str] = {}
        self._names: dict[object, str] = {}
        self._indices: dict[int, str] = {}
        self._next = 0

    def _split(self, axes: Sequence[int], rest: str) -> None:
        """Define the indices along the outer axes from the number of a work unit."""
        for position in reversed(range(len(axes))):
            axis = axes[position]
            size = code_of(self._nest.dims[axis])
            if position:
                self._w.line(f"const {self._INDEX} i{axis} = {rest} % {size};")
                rest = f"({rest} / {size})"
            else:
                self._w.line(f"const {self._INDEX} i{axis} = {rest};")
            self._indices[axis] = f"i{axis}"

    def _passes(self, lanes: str) -> None:
        """Generate the passes over a row: per-row values, then a sweep that reduces or writes, and so on."""
        for level in range(self._nest.passes):
            steps = [step for step in self._nest.steps if step.level == level]
            with self._scope():
                for step in steps:
                    if step.once:
                        self._row_step(step, lanes)
            rest = [step for step in steps if not step.once]
            if rest:
                self._sweep(rest, lanes)

    def _row_step(self, step: Step, lanes: str) -> None:
        value = self._expression(step.root.value, lanes, self._outer)
        self._keep_row(step.root, value)
        self._store(step.root, value, lanes, self._outer)

    def _sweep(self, steps: Sequence[Step], lanes: str) -> None:
        """Generate one pass over a row."""
        raise NotImplementedError

    def _keep_row(self, root: Root, value: str) -> None:
        """Store the value of a row in a variable for later passes."""
        name = f"row_{root.buffer.name}"
        self._w.line(f"const auto {name} = {value};")
        self._rows[root.buffer] = name

    @contextmanager
    def _scope(self) -> Iterator[None]:
        before = dict(self._names)
        yield
        self._names = before

    def _steps(self, steps: Sequence[Step], lanes: str) -> None:
        axes = list(range(len(self._nest.dims)))
        with self._scope():
            for step in steps:
                value = self._expression(step.root.value, lanes, axes)
                if step.root.reduction:
                    self._w.line(f"sum_{step.root.buffer.name}({value});")
                    continue
                self._names[_own_key(step, self._nest)] = value
                self._store(step.root, value, lanes, axes)

    def _store(self, root: Root, value: str, lanes: str, axes: Sequence[int]) -> None:
        buffer = root.buffer
        step = self._nest.step_writing(buffer)
        assert step is not None
        if buffer.kind == "inner" and self._is_local(buffer) and (step.per_row or not self._nest.crosses(buffer)):
            return
        address, stride = self._address(root.target, axes, scratch=buffer in self._scratch)
        if lanes == "1" or stride == 1:
            self._w.line(f"put({address}, {value});")
        else:
            self._w.line(f"put_strided({address}, {code_of(stride)}, {value});")

    def _address(self, view: View, axes: Sequence[int], *, scratch: bool) -> tuple[str, Dim]:
        """Return the address of a view's element at the current indices, and its stride along the lanes."""
        terms = [view.buffer.name] if view.buffer.kind != "indices" else ["int64_t{0}"]
        strides = dict(zip(axes, view.strides, strict=True))
        if scratch:
            rows = contiguous([self._nest.dims[a] for a in self._inner])
            strides = dict(zip(self._inner, rows, strict=True))
        elif view.offset != 0:
            terms.append(code_of(view.offset))
        for axis, stride in strides.items():
            if stride != 0:
                terms.append(self._indices[axis] if stride == 1 else f"{self._indices[axis]} * {code_of(stride)}")
        return " + ".join(terms), strides.get(self._last, 0)

    def _guarded_code(self, view: View, address: str, stride: Dim, lanes: str, axes: Sequence[int]) -> str:
        """Return code that reads an element where the guards allow it."""
        start, end = "0", "std::numeric_limits<int64_t>::max()"
        tests = []
        for guard in view.guards:
            axis = axes[guard.axis]
            if axis == self._last and lanes != "1":
                start, end = (
                    f"std::max<int64_t>({start}, {code_of(guard.start)})",
                    f"std::min<int64_t>({end}, {code_of(guard.end)})",
                )
            else:
                at = self._indices[axis]
                tests.append(f"{at} >= {code_of(guard.start)} && {at} < {code_of(guard.end)}")
        fill = number_code(Number(view.guards[0].fill, (), view.dtype))
        at = self._indices.get(self._last, "0")
        in_range = " && ".join(tests) or "true"
        return f"guarded<{lanes}>({address}, {code_of(stride)}, {in_range}, {at}, {start}, {end}, {fill})"

    def _gather_code(self, value: Apply, lanes: str, axes: Sequence[int]) -> str:
        view, index, step, size = value.args
        assert isinstance(view, View)
        address, stride = self._address(view, axes, scratch=False)
        at = self._expression(index, lanes, axes)
        numbers = ", ".join(number_code(n) for n in (step, size) if isinstance(n, Number))
        return f"gathered<{lanes}>({address}, {code_of(stride)}, {at}, {numbers}{self._RANGE_FLAG})"

    def _expression(self, value: Value, lanes: str, axes: Sequence[int]) -> str:
        """Return the variable that holds a value, computing it if needed."""
        key: object = id(value) if isinstance(value, Apply) else (value, tuple(axes))
        if isinstance(value, View) and value.buffer in self._rows:
            row = self._rows[value.buffer]
            if lanes == "1" or self._across:
                return row
            key = ("row", value.buffer)
            if key not in self._names:
                self._name(key, f"splat<{lanes}>({row})")
            return self._names[key]
        if key not in self._names:
            self._name(key, self._value_code(value, lanes, axes))
        return self._names[key]

    def _name(self, key: object, code: str) -> None:
        name = f"v{self._next}"
        self._next += 1
        self._w.line(f"const auto {name} = {code};")
        self._names[key] = name

    def _value_code(self, value: Value, lanes: str, axes: Sequence[int]) -> str:
        if isinstance(value, Number):
            return f"splat<{lanes}>({number_code(value)})"
        if isinstance(value, View):
            address, stride = self._address(value, axes, scratch=value.buffer in self._scratch)
            if value.buffer.kind == "indices":
                return f"ramp<{lanes}>({address}, {code_of(stride)})"
            if value.guards:
                return self._guarded_code(value, address, stride, lanes, axes)
            if stride == 1:
                return f"row<{lanes}>({address})"
            return f"same<{lanes}>({address})" if stride == 0 else f"strided<{lanes}>({address}, {code_of(stride)})"
        if value.operator == "gather":
            return self._gather_code(value, lanes, axes)
        args = [self._expression(arg, lanes, axes) for arg in value.args]
        if value.operator == "cast":
            return cast_code(args[0], value.args[0].dtype, value.dtype)
        if value.operator in _TEMPLATES:
            code = _TEMPLATES[value.operator].format(*args)
            kind = computed_type(value.dtype)  # C++ promotes shorter types to int
            return f"truncated<{kind}>({code})" if "int8" in kind or "int16" in kind else code
        return self._call(value.operator, ", ".join(args))

    def _call(self, operator: str, args: str) -> str:
        if operator in LIBRARY:
            return f"each({args}, [](auto x) {{ return std::{operator}(x); }})"
        return f"{_FUNCTIONS.get(operator, operator)}({args})"


def _as_vector_step(step: Step) -> Step:
    """Return a step over a scalar as one over an axis of size one."""
    value = Expressions().as_vector(step.root.value)
    target = View(step.root.buffer, (1,), (1,), step.root.target.offset)
    return replace(step, root=replace(step.root, value=value, target=target))


def _own_key(step: Step, nest: Nest) -> object:
    view = View(step.root.buffer, nest.dims, contiguous(nest.dims), 0)
    return view, tuple(range(len(nest.dims)))


def summary(step: Step) -> str:
    """Describe what a step writes, for a comment."""
    root = step.root
    return f"{root.buffer.name} = {root.reduction or ''}{describe(root.value)}"


def describe(value: Value) -> str:
    """Describe a value for a comment, with C++ names of sizes, never names from the model."""
    if isinstance(value, Apply):
        return "…"
    if isinstance(value, Number):
        return number_code(value)
    offset = f"+{code_of(value.offset)}" if value.offset != 0 else ""
    return f"{value.buffer.name}[{', '.join(map(code_of, value.strides))}]{offset}"
