"""Loops as C++: one function a nest, and for each region one that reads the sizes and calls them."""

from __future__ import annotations

import sympy

from sardonyx.native.body import Writer, dims_in
from sardonyx.native.cost import SOME
from sardonyx.native.nests import Nest, count, live, merged, nests_of
from sardonyx.native.printing import NestPrinter
from sardonyx.native.products import ProductPrinter, VectorPrinter
from sardonyx.native.region import CannotLower, Lowering, is_fixed
from sardonyx.native.scalars import TYPES, code_of, symbol_name
from sardonyx.native.values import Buffer, gathered, views_of
from sardonyx.sizes import value_of


class Kernel:
    """A region as C++: `code(name)` defines a struct with its arguments and a function that runs it."""

    TELLS = True
    """Whether an index beyond what it is an index of is an error of the call."""
    MULTIPLIES = True
    """Whether it can have products of matrices."""
    TILES = True
    """Whether what lies along another axis than the last is computed in tiles."""

    def __init__(self, region: Lowering) -> None:
        self.region = region
        self.nests = [merged(nest, region.x) for nest in nests_of(live(region.roots), region.x)]
        self.inputs = list(region.inputs.values())
        self.outputs = list(region.outputs.values())
        self._sources = self._symbols()
        used = [view.buffer for nest in self.nests for step in nest.steps for view in views_of(step.root.value)]
        self._readers = {buffer: {i for i, nest in enumerate(self.nests) if _reads(nest, buffer)} for buffer in {*used}}
        self._gathers = self.TELLS and any(gathered(step.root.value) for nest in self.nests for step in nest.steps)
        self._constants = {buffer for value, buffer in region.inputs.items() if is_fixed(value)}
        self._held = [b for b in region.inner if b in self._readers and self._needs_memory(b)]

    def _symbols(self) -> dict[sympy.Symbol, tuple[int, int]]:
        """Where each symbol is read off: an input and an axis of it."""
        found: dict[sympy.Symbol, tuple[int, int]] = {}
        for index, buffer in enumerate(self.inputs):
            for axis, dim in enumerate(buffer.dims):
                if isinstance(dim, sympy.Symbol):
                    found.setdefault(dim, (index, axis))
        needed: set[sympy.Basic] = set()
        for nest in self.nests:
            for dim in dims_in(nest):
                needed |= sympy.sympify(dim).free_symbols
        for buffer in (*self.outputs, *self.region.inner):
            needed |= {s for dim in buffer.dims for s in sympy.sympify(dim).free_symbols}
        needed |= {s for dim in self.region.required for s in sympy.sympify(dim).free_symbols}
        missing = needed - found.keys()
        if missing:
            raise CannotLower(f"no input of the region tells the size {sorted(map(str, missing))[0]}")
        return {symbol: found[symbol] for symbol in sorted(needed, key=str)}

    def _is_local(self, buffer: Buffer) -> bool:
        """Whether a buffer is written and read by one nest alone."""
        makers = {i for i, nest in enumerate(self.nests) if nest.maker(buffer)}
        return buffer.kind == "inner" and makers == self._readers.get(buffer, makers) and len(makers) == 1

    def _needs_memory(self, buffer: Buffer) -> bool:
        """Whether a buffer outlives a row: another nest reads it, or rows run side by side and sweep it again."""
        if not self._is_local(buffer):
            return True
        nest = next(nest for nest in self.nests if nest.maker(buffer))
        step = nest.maker(buffer)
        return step is not None and not step.per_row and nest.across and nest.crosses(buffer)

    @property
    def strides(self) -> bool:
        """Whether loops go through memory in steps, with no tiles to make up for it."""
        return any(nest.strides and not (self.TILES and nest.turned is not None) for nest in self.nests)

    def writes(self) -> int:
        """How many elements it writes, a symbolic size taken for some dozens."""
        symbols = dict.fromkeys(self._sources, SOME)
        return sum(value_of(count(buffer.dims), symbols) for buffer in self.outputs)

    def code(self, name: str) -> str:
        """The definitions, under a namespace of that name."""
        w = Writer()
        with w.block(f"namespace {name}", "}  // namespace"):
            self._weights(w)
            w.line("struct Call {")
            w.line("  const Held* held;")
            for buffer in self.inputs:
                w.line(f"  const {TYPES[buffer.dtype]}* {buffer.name};")
            for buffer in (*self.outputs, *self._held):
                w.line(f"  {TYPES[buffer.dtype]}* {buffer.name};")
            for symbol in self._sources:
                w.line(f"  int64_t {symbol_name(symbol)};")
            if self._gathers:
                w.line("  std::atomic<bool>* astray;")
            w.line("};")
            for index, nest in enumerate(self.nests):
                w.line("")
                self._write_nest(w, nest, f"nest{index}")
            w.line("")
            self._entry(w)
        return "\n".join(w.lines)

    def _weights(self, w: Writer) -> None:
        """What a kernel holds from when it is made, and the function that takes it from the model's constants."""
        found = [(f"nest{i}", VectorPrinter(w, nest)) for i, nest in enumerate(self.nests) if self._is_vector(nest)]
        w.line("struct Held {")
        for name, printer in found:
            w.line(f"  {printer.held} {name};")
        w.line("};")
        with w.block("static ort::Status* hold(const ort::Info* info, Held& held)"):
            for name, printer in found:
                index = self.inputs.index(printer.weights)
                w.line(f"ort::Tensor weights_{name};")
                w.line(f"if (auto s = ort::constant(info, {index}, weights_{name})) return s;")
                tests = " || ".join(
                    f"weights_{name}.dims[{axis}] != {dim}" for axis, dim in enumerate(printer.weights.dims)
                )
                w.line(f"if (weights_{name}.rank != {len(printer.weights.dims)} || {tests}) {_wrong(index)}")
                printer.hold(name, f"weights_{name}.data")
            w.line("return nullptr;")

    def _is_vector(self, nest: Nest) -> bool:
        return VectorPrinter.suits(nest, self._constants)

    def _write_nest(self, w: Writer, nest: Nest, name: str) -> None:
        self._printer(w, nest).write(name)

    def _printer(self, w: Writer, nest: Nest) -> NestPrinter | ProductPrinter:
        if nest.is_product:
            return VectorPrinter(w, nest) if self._is_vector(nest) else ProductPrinter(w, nest)
        return NestPrinter(w, nest, self._is_local)

    def _entry(self, w: Writer) -> None:
        with w.block("ort::Status* run(ort::Context* context, const Held& held)"):
            w.line("Call call;")
            w.line("call.held = &held;")
            w.line(f"ort::Tensor given[{len(self.inputs) or 1}];")
            for index, buffer in enumerate(self.inputs):
                w.line(f"if (auto s = ort::input(context, {index}, given[{index}])) return s;")
                w.line(f"if (given[{index}].rank != {len(buffer.dims)}) {_wrong(index)}")
                w.line(f"call.{buffer.name} = static_cast<const {TYPES[buffer.dtype]}*>(given[{index}].data);")
            for symbol, (index, axis) in self._sources.items():
                name = symbol_name(symbol)
                w.line(f"const int64_t {name} = call.{name} = given[{index}].dims[{axis}];")
            for index, buffer in enumerate(self.inputs):
                self._check(w, index, buffer)
            for least in dict.fromkeys(self.region.required):
                w.line(f'if ({code_of(least)} < 0) return ort::failure("more would be cut off than there is");')
            for index, buffer in enumerate(self.outputs):
                dims = ", ".join(map(code_of, buffer.dims))
                w.line(f"const int64_t dims{index}[] = {{{dims or 0}}};")
                target = f"reinterpret_cast<void**>(&call.{buffer.name})"
                w.line(
                    f"if (auto s = ort::output(context, {index}, dims{index}, {len(buffer.dims)}, {target})) return s;"
                )
            self._run(w)

    def _run(self, w: Writer) -> None:
        """Memory for the call, and the work of the nests, one after the other."""
        if self._gathers:
            w.line("std::atomic<bool> astray{false};")
            w.line("call.astray = &astray;")
        for buffer in self._held:
            kind = TYPES[buffer.dtype]
            w.line(f"const auto {buffer.name} = memory<{kind}>({code_of(count(buffer.dims))});")
            w.line(f"call.{buffer.name} = {buffer.name}.get();")
        for index, nest in enumerate(self.nests):
            units, cost = self._printer(w, nest).units(f"nest{index}")
            w.line(f"if (auto s = spread(context, {units}, {cost}, [&](int64_t begin, int64_t end) {{")
            w.line(f"  nest{index}(call, begin, end);")
            w.line("})) return s;")
        if self._gathers:
            w.line('if (astray) return ort::failure("an index is beyond what it is an index of");')
        w.line("return nullptr;")

    def _check(self, w: Writer, index: int, buffer: Buffer) -> None:
        """Sizes are what the code was made for."""
        tests = [
            f"given[{index}].dims[{axis}] != {code_of(dim)}"
            for axis, dim in enumerate(buffer.dims)
            if isinstance(dim, int)
            or (dim.free_symbols <= self._sources.keys() and self._sources.get(dim) != (index, axis))
        ]
        if tests:
            w.line(f"if ({' || '.join(tests)}) {_wrong(index)}")


def _wrong(index: int) -> str:
    return f'return ort::failure("input {index} has other sizes than it was made for");'


def _reads(nest: Nest, buffer: Buffer) -> bool:
    return any(view.buffer is buffer for step in nest.steps for view in views_of(step.root.value))
