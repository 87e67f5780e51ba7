"""Generate the C++ of a region: one function per nest, and one that reads the sizes and calls them."""

from __future__ import annotations

import sympy

from sardonyx.native.body import Writer, dims_in
from sardonyx.native.cost import ASSUMED_SIZE
from sardonyx.native.nests import Nest, count, live_roots, merge_axes, nests_of
from sardonyx.native.printing import NestPrinter
from sardonyx.native.products import ProductPrinter, VectorPrinter
from sardonyx.native.region import CannotLower, Lowering, is_constant
from sardonyx.native.scalars import TYPES, code_of, symbol_name
from sardonyx.native.values import Buffer, gathered_buffers, views_of
from sardonyx.sizes import value_of


class Kernel:
    """A region as C++: `code(name)` defines its arguments and a function that runs it."""

    CHECKS_INDICES = True
    """Whether an index out of range is an error."""
    RAISES_BY_ZERO = True
    """Whether a division of integers by zero is an error, which ONNX Runtime's kernels report and ours do not."""
    HAS_PRODUCTS = True
    """Whether it supports matrix products, of weights that it holds."""
    HOISTS = True
    """Whether a small value that larger loops read is computed in a loop of its own."""
    HAS_TILES = True
    """Whether transposed accesses are computed in tiles."""
    READS_ACROSS = False
    """Whether adjacent threads, not lanes, access adjacent elements, so that short strided rows cost nothing."""
    CHECKS_SIZES = False
    """Whether the number of elements of every buffer, inputs too, decides at run time how it is indexed."""

    def __init__(self, region: Lowering) -> None:
        self.region = region
        self.nests = [merge_axes(nest, region.x) for nest in nests_of(live_roots(region.roots), region.x)]
        self.inputs = list(region.inputs.values())
        self.outputs = list(region.outputs.values())
        self._sources = self._symbols()
        used = [view.buffer for nest in self.nests for step in nest.steps for view in views_of(step.root.value)]
        self._readers = {buffer: {i for i, nest in enumerate(self.nests) if _reads(nest, buffer)} for buffer in {*used}}
        self._gathers = self.CHECKS_INDICES and any(
            gathered_buffers(step.root.value) for nest in self.nests for step in nest.steps
        )
        self._constants = {buffer for value, buffer in region.inputs.items() if is_constant(value)}
        self._temporaries = [b for b in region.inner if b in self._readers and self._needs_memory(b)]

    def _symbols(self) -> dict[sympy.Symbol, tuple[int, int]]:
        """Return the input and axis from which each symbol is read."""
        sources: dict[sympy.Symbol, tuple[int, int]] = {}
        for index, buffer in enumerate(self.inputs):
            for axis, dim in enumerate(buffer.dims):
                if isinstance(dim, sympy.Symbol):
                    sources.setdefault(dim, (index, axis))
        needed: set[sympy.Basic] = set()
        for nest in self.nests:
            for dim in dims_in(nest):
                needed |= sympy.sympify(dim).free_symbols
        for buffer in (*self.outputs, *self.region.inner, *(self.inputs if self.CHECKS_SIZES else ())):
            needed |= {s for dim in buffer.dims for s in sympy.sympify(dim).free_symbols}
        needed |= {s for dim in self.region.required for s in sympy.sympify(dim).free_symbols}
        missing = needed - sources.keys()
        if missing:
            raise CannotLower(f"no input of the region has the size {sorted(map(str, missing))[0]}")
        return {symbol: sources[symbol] for symbol in sorted(needed, key=str)}

    def _is_local(self, buffer: Buffer) -> bool:
        """Return whether a buffer is written and read by only one nest."""
        writers = {i for i, nest in enumerate(self.nests) if nest.step_writing(buffer)}
        return buffer.kind == "inner" and writers == self._readers.get(buffer, writers) and len(writers) == 1

    def _needs_memory(self, buffer: Buffer) -> bool:
        """Return whether a buffer outlives a row: another nest reads it, or lanes are rows and sweep it again."""
        if not self._is_local(buffer):
            return True
        nest = next(nest for nest in self.nests if nest.step_writing(buffer))
        step = nest.step_writing(buffer)
        return step is not None and not step.per_row and nest.across and nest.crosses(buffer)

    @property
    def is_strided(self) -> bool:
        """Whether loops access memory with strides, without tiles."""
        return any(nest.is_strided and not (self.HAS_TILES and nest.transposed_axis is not None) for nest in self.nests)

    def writes(self) -> int:
        """Return the number of elements it writes, with `ASSUMED_SIZE` for symbolic sizes."""
        symbols = dict.fromkeys(self._sources, ASSUMED_SIZE)
        return sum(value_of(count(buffer.dims), symbols) for buffer in self.outputs)

    def code(self, name: str) -> str:
        """Return the definitions, in a namespace of that name."""
        w = Writer()
        w.line("namespace {")
        with w.block(f"namespace {name}", "}  // namespace"):
            self._weights(w)
            self._call_struct(w)
            for index, nest in enumerate(self.nests):
                w.line("")
                self._printer(w, nest).write(f"nest{index}")
            w.line("")
            self._entry(w)
        w.line("}  // namespace")
        return "\n".join(w.lines)

    def _call_struct(self, w: Writer) -> None:
        """Generate what the nests of a call are given."""
        w.line("struct Call {")
        if self.HAS_PRODUCTS:
            w.line("  const Held* held;")
        for buffer in self.inputs:
            w.line(f"  const {TYPES[buffer.dtype]}* {buffer.name};")
        for buffer in (*self.outputs, *self._temporaries):
            w.line(f"  {TYPES[buffer.dtype]}* {buffer.name};")
        for symbol in self._sources:
            w.line(f"  int64_t {symbol_name(symbol)};")
        if self._gathers:
            w.line("  std::atomic<bool>* out_of_range;")
        w.line("};")

    def _weights(self, w: Writer) -> None:
        """Generate the struct of weights packed at load time, and the function that fills it from constants."""
        printers = [(f"nest{i}", VectorPrinter(w, nest)) for i, nest in enumerate(self.nests) if self._is_vector(nest)]
        w.line("struct Held {")
        for name, printer in printers:
            w.line(f"  {printer.held} {name};")
        w.line("};")
        with w.block("static ort::Status* hold(const ort::Info* info, Held& held)"):
            for name, printer in printers:
                index = self.inputs.index(printer.weights)
                w.line(f"ort::Tensor weights_{name};")
                w.line(f"if (auto s = ort::constant(info, {index}, weights_{name})) return s;")
                tests = " || ".join(
                    f"weights_{name}.dims[{axis}] != {dim}" for axis, dim in enumerate(printer.weights.dims)
                )
                w.line(f"if (weights_{name}.rank != {len(printer.weights.dims)} || {tests}) {_shape_error(index)}")
                printer.hold(name, f"weights_{name}.data")
            w.line("return nullptr;")

    def _is_vector(self, nest: Nest) -> bool:
        return VectorPrinter.suits(nest, self._constants)

    def _printer(self, w: Writer, nest: Nest) -> NestPrinter | ProductPrinter:
        if nest.is_product:
            return VectorPrinter(w, nest) if self._is_vector(nest) else ProductPrinter(w, nest)
        return NestPrinter(w, nest, self._is_local)

    def _entry(self, w: Writer) -> None:
        with w.block("ort::Status* run(ort::Context* context, const Held& held)"):
            w.line("Call call;")
            if self.HAS_PRODUCTS:
                w.line("call.held = &held;")
            w.line(f"ort::Tensor tensors[{len(self.inputs) or 1}];")
            for index, buffer in enumerate(self.inputs):
                w.line(f"if (auto s = ort::input(context, {index}, tensors[{index}])) return s;")
                w.line(f"if (tensors[{index}].rank != {len(buffer.dims)}) {_shape_error(index)}")
                w.line(f"call.{buffer.name} = static_cast<const {TYPES[buffer.dtype]}*>(tensors[{index}].data);")
            for symbol, (index, axis) in self._sources.items():
                name = symbol_name(symbol)
                w.line(f"const int64_t {name} = call.{name} = tensors[{index}].dims[{axis}];")
            for index, buffer in enumerate(self.inputs):
                self._check(w, index, buffer)
            for least in dict.fromkeys(self.region.required):
                w.line(f'if ({code_of(least)} < 0) return ort::failure("a slice is out of bounds");')
            for index, buffer in enumerate(self.outputs):
                dims = ", ".join(map(code_of, buffer.dims))
                w.line(f"const int64_t dims{index}[] = {{{dims or 0}}};")
                target = f"reinterpret_cast<void**>(&call.{buffer.name})"
                w.line(
                    f"if (auto s = ort::output(context, {index}, dims{index}, {len(buffer.dims)}, {target})) return s;"
                )
            self._run(w)

    def _run(self, w: Writer) -> None:
        """Generate temporary memory and the calls of the nests, in order."""
        if self._gathers:
            w.line("std::atomic<bool> out_of_range{false};")
            w.line("call.out_of_range = &out_of_range;")
        for buffer in self._temporaries:
            kind = TYPES[buffer.dtype]
            w.line(f"const auto {buffer.name} = memory<{kind}>({code_of(count(buffer.dims))});")
            w.line(f"call.{buffer.name} = {buffer.name}.get();")
        for index, nest in enumerate(self.nests):
            units, cost = self._printer(w, nest).units(f"nest{index}")
            w.line(f"if (auto s = spread(context, {units}, {cost}, [&](int64_t begin, int64_t end) {{")
            w.line(f"  nest{index}(call, begin, end);")
            w.line("})) return s;")
        if self._gathers:
            w.line('if (out_of_range) return ort::failure("an index is out of range");')
        w.line("return nullptr;")

    def _check(self, w: Writer, index: int, buffer: Buffer) -> None:
        """Generate the check that the sizes of an input are the expected ones."""
        tests = [
            f"tensors[{index}].dims[{axis}] != {code_of(dim)}"
            for axis, dim in enumerate(buffer.dims)
            if isinstance(dim, int)
            or (dim.free_symbols <= self._sources.keys() and self._sources.get(dim) != (index, axis))
        ]
        if tests:
            w.line(f"if ({' || '.join(tests)}) {_shape_error(index)}")


def _shape_error(index: int) -> str:
    return f'return ort::failure("input {index} has an unexpected shape");'


def _reads(nest: Nest, buffer: Buffer) -> bool:
    return any(view.buffer is buffer for step in nest.steps for view in views_of(step.root.value))
