"""Generate CUDA C++: one kernel per nest, on the session's stream.

One source has the host code, which a C++ compiler builds, and the device code, which NVRTC compiles. Each instance of
a kernel's template is an entry point of the device code; the host code chooses by sizes and alignment.

Without reductions a thread computes some adjacent elements. Where rows are reduced, several threads share a row, and
keep its values in registers between sweeps. If another axis than the last is reduced, adjacent rows go to adjacent
threads, or each row to several threads that divide it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import onnx_ir as ir

from sardonyx.native.body import BodyPrinter, Writer, size_lines, summary, symbols_in
from sardonyx.native.cpp import Kernel
from sardonyx.native.nests import Nest, Root, Step, count
from sardonyx.native.scalars import code_of, computed_type
from sardonyx.native.values import Apply, Buffer, Number, Value, View, operations, views_of
from sardonyx.sizes import Dim

_VECTOR_BYTES, _ROW_VECTOR_BYTES = 16, 32
"""Bytes of adjacent elements that a thread computes: one load, or two for rows, which fewer threads reduce faster."""
_MAX_LANES = 8
_MAX_HELD = 32
"""Elements of a row that a thread keeps of each value; half as many for more than two values."""
_MAX_AHEAD = 3
"""Rows of weights that a thread loads before a reduction that they follow, if it holds one piece of each."""
_INT32_LIMIT = 2**30
"""Below it, indices are 32 bits: a GPU divides those several times as fast."""
DEVICE_CODE, HOST_CODE = "ifdef SARDONYX_DEVICE", "ifndef __CUDACC_RTC__"
"""Preprocessor conditions of the parts of a source."""
_FAST = frozenset({"div", "exp", "erf", "tanh", "sigmoid"})
"""Functions with a faster version, off by some ulp of float."""
_NARROW = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
_DISCONTINUOUS = frozenset({"floor", "ceil", "round", "mod", "fmod", "sign", "equal"})
"""Functions that make a large difference of a small one."""


class CudaKernel(Kernel):
    """A region as CUDA C++."""

    CHECKS_INDICES = False
    RAISES_BY_ZERO = False
    HAS_PRODUCTS = False
    HOISTS = False  # a launch takes longer than computing it again
    HAS_TILES = False
    READS_ACROSS = True
    CHECKS_SIZES = True

    def _needs_memory(self, buffer: Buffer) -> bool:
        """Return whether a buffer may have to outlive a sweep: rows can be too long for registers."""
        if not self._is_local(buffer):
            return True
        nest = self._nest_writing(buffer)
        step = nest.step_writing(buffer)
        return step is not None and not step.per_row and nest.crosses(buffer)

    def _nest_writing(self, buffer: Buffer) -> Nest:
        return next(nest for nest in self.nests if nest.step_writing(buffer))

    def code(self, name: str) -> str:
        """Return the definitions for host and device, and the entry points of the device code."""
        w = Writer()
        printers = [CudaPrinter(w, nest, self._is_local) for nest in self.nests]
        entries = [entry for i, printer in enumerate(printers) for entry in printer.entries(f"nest{i}")]
        w.line("namespace {")
        with w.block(f"namespace {name}", "}  // namespace"):
            self._call_struct(w)
            with w.guard(DEVICE_CODE):
                for index, printer in enumerate(printers):
                    printer.write(f"nest{index}")
            with w.guard(HOST_CODE):
                self._host(w, name, entries)
        w.line("}  // namespace")
        with w.guard(DEVICE_CODE):
            for entry, instance in entries:
                w.line(f"SARDONYX_ENTRY({name}_{entry}, {name}::Call) {{ {name}::{instance}(call); }}")
        return "\n".join(w.lines)

    def _host(self, w: Writer, name: str, entries: Sequence[tuple[str, str]]) -> None:
        w.line("using Held = gpu::Held;")
        w.line("ort::Status* hold(const ort::Info* info, Held& held) { return ort::allocator(info, &held.allocator); }")
        for entry, _ in entries:
            w.line(f'gpu::Function {entry}("{name}_{entry}");')
        self._entry(w)

    def _run(self, w: Writer) -> None:
        """Generate temporary memory and the launches; device errors appear in a later CUDA call."""
        printers = [CudaPrinter(w, nest, self._is_local) for nest in self.nests]
        w.line("void* stream = nullptr;")
        w.line("if (auto s = ort::stream(context, &stream)) return s;")
        for index, printer in enumerate(printers):
            w.line(f"const int lanes{index} = {printer.aligned()} ? {printer.lanes} : 1;")
        w.line("gpu::Memory memory(held);")
        for buffer in self._temporaries:
            size = code_of(count(buffer.dims))
            if self._is_local(buffer):
                index = self.nests.index(self._nest_writing(buffer))
                size = printers[index].memory(f"lanes{index}", size)
            w.line(f"memory.want(&call.{buffer.name}, {size});")
        w.line("if (auto s = memory.take()) return s;")
        w.line("gpu::Launch launch(stream, &call);")
        w.line("if (auto s = launch.prepare()) return s;")
        for index, printer in enumerate(printers):
            w.line(f"if (auto s = {printer.launch(f'nest{index}', f'lanes{index}')}) return s;")
        w.line("return nullptr;")


class CudaPrinter(BodyPrinter):
    """Generates one nest as a CUDA kernel, and its launch."""

    _INDEX = "Index"

    def __init__(self, w: Writer, nest: Nest, is_local: Callable[[Buffer], bool]) -> None:
        super().__init__(w, nest, is_local)
        self._in_rows = self._reducing and not self._across
        self.lanes = 1 if self._across else self._max_lanes()
        crosses = self._nest.crosses
        self._crossing = {s.root.buffer for s in self._nest.steps if not s.per_row and crosses(s.root.buffer)}
        self._first_read = dict(self._reread_views()) if self._in_rows else {}
        self._read_ahead = list(self._late_views())[:_MAX_AHEAD] if self._in_rows else []
        self._level = 0
        self._fast = self._allows_fast()

    # Known at compile time

    def _sizes(self) -> list[Dim]:
        """Return the sizes that bound all indices."""
        buffers = (view.buffer for view in self._accesses())
        return [count(self._nest.dims), *(count(buffer.dims) for buffer in buffers), *symbols_in(self._nest)]

    def _index_type(self) -> str:
        """Return the type of indices; sizes that are not known yet are small where several lanes are used."""
        sizes = self._sizes()
        if any(isinstance(size, int) and size >= _INT32_LIMIT for size in sizes):
            return "int64_t"
        if all(isinstance(size, int) for size in sizes):
            return "int32_t"
        return "int64_t" if self._across else "std::conditional_t<(W > 1), int32_t, int64_t>"

    def _allows_fast(self) -> bool:
        """Return whether an error of some ulp of float is lost in rounding: all results are narrow and continuous."""
        stored = (s.root.buffer for s in self._nest.steps)
        applied = (apply for step in self._nest.steps for apply in operations(step.root.value))
        return all(self._is_local(b) or b.dtype in _NARROW for b in stored) and not any(
            apply.operator in _DISCONTINUOUS or (apply.operator == "cast" and apply.dtype.is_integer())
            for apply in applied
        )

    def _accesses(self) -> Iterator[View]:
        for step in self._nest.steps:
            yield from views_of(step.root.value)
            yield step.root.target

    def _contiguous_accesses(self) -> Iterator[View]:
        """Yield views accessed contiguously along the lanes, which allow vector loads if aligned."""
        for step in self._nest.steps:
            if not step.once:
                views = [*plain_views(step.root.value), *([] if step.root.reduction else [step.root.target])]
                yield from (view for view in views if view.strides[self._last] == 1 and not view.guards)

    def _max_lanes(self) -> int:
        """Return how many adjacent elements a thread computes, if sizes and alignment allow it at run time."""
        views = list(self._contiguous_accesses())
        if not views:
            return 1
        outside = [view for view in views if view.buffer.kind != "inner" or not self._is_local(view.buffer)] or views
        width = _ROW_VECTOR_BYTES if self._in_rows else _VECTOR_BYTES
        lanes = min(_MAX_LANES, width // max(int(view.dtype.itemsize) for view in outside))
        known = [step for step in self._dims_to_divide(views) if isinstance(step, int)]
        return math.gcd(lanes, *known)

    def _dims_to_divide(self, views: Sequence[View]) -> Iterator[Dim]:
        """Yield sizes that must be multiples of the lanes, so that no access is misaligned."""
        yield self._nest.dims[self._last]
        for view in views:
            yield view.offset
            yield from view.strides[:-1]

    def aligned(self) -> str:
        """Return the run-time condition for vector loads and stores, and for indices of 32 bits."""
        if self.lanes == 1:
            return "true"
        views = list(self._contiguous_accesses())
        steps = dict.fromkeys(code_of(s) for s in self._dims_to_divide(views) if not isinstance(s, int))
        tests = [f"{step} % {self.lanes} == 0" for step in steps]
        buffers = sorted({view.buffer.name for view in views if view.buffer.kind in ("input", "output")})
        tests += [f"gpu::is_aligned(call.{name}, {self.lanes})" for name in buffers]
        unknown = dict.fromkeys(code_of(size) for size in self._sizes() if not isinstance(size, int))
        tests += [f"{size} < {_INT32_LIMIT}" for size in unknown]
        return " && ".join(tests) or "true"

    def _pieces(self) -> int:
        """Return how many vectors of a row a thread holds."""
        held = len(self._crossing) + len(self._first_read)
        return min(8, _MAX_HELD // (1 if held <= 2 else 2) // self.lanes)

    # Entry points and their launch

    def entries(self, name: str) -> Iterator[tuple[str, str]]:
        """Yield the name and the template instance of each entry point."""
        if self._across:
            yield f"{name}_w1", name
            return
        for lanes in sorted({self.lanes, 1}):
            if not self._reducing:
                yield f"{name}_w{lanes}", f"{name}<{lanes}>"
                continue
            for suffix, pieces in self._piece_variants(lanes):
                yield f"{name}_w{lanes}{suffix}", f"{name}<{lanes}, {pieces}>"

    def _piece_variants(self, lanes: int) -> Iterator[tuple[str, str]]:
        """Yield how many pieces of a row a thread may hold: one number if the size and number of rows are known."""
        most = self._most_pieces(str(lanes))
        rows, size = (count([self._nest.dims[a] for a in axes]) for axes in (self._outer, self._inner))
        if not isinstance(size, int):
            yield from (("_one", "1"), ("_most", most), ("_none", "0"))
        elif isinstance(rows, int):
            yield "", f"pieces_of(chunks_of({size}, {lanes}), {most}, {rows})"
        else:
            for suffix, number in (("_few", "0"), ("_many", "kManyRows")):
                yield suffix, f"pieces_of(chunks_of({size}, {lanes}), {most}, {number})"

    def _most_pieces(self, lanes: str) -> str:
        return str(self._pieces()) if lanes != "1" and self.lanes > 1 else "kPiecesOfOne"

    def memory(self, lanes: str, size: str) -> str:
        """Return the number of elements of a buffer used only inside the nest: rows too long for registers."""
        if not self._in_rows:
            return size
        return (
            f"pieces_of(chunks_of({self._size()}, {lanes}), {self._most_at(lanes)}, {self._rows_count()}) ? 0 : {size}"
        )

    def _most_at(self, lanes: str) -> str:
        return f"({lanes} == 1 ? kPiecesOfOne : {self._pieces()})"

    def launch(self, name: str, lanes: str) -> str:
        """Return the call that launches the kernel with a number of lanes."""
        if self._across:
            return f"gpu::over_rows_beside(launch, {name}_w1, {self._rows_count()}, {self._size()})"
        if not self._reducing:
            places = code_of(count(self._nest.dims))
            function = self._by_lanes(lanes, lambda w: f"{name}_w{w}")
            return f"gpu::over_places(launch, {function}, {lanes}, {places})"
        functions = self._by_lanes(lanes, lambda w: self._row_functions(f"{name}_w{w}", w))
        sizes = f"{lanes}, {self._most_at(lanes)}, {self._rows_count()}, {self._size()}"
        return f"gpu::over_rows(launch, {functions}, {sizes})"

    def _by_lanes(self, lanes: str, function: Callable[[int], str]) -> str:
        return function(1) if self.lanes == 1 else f"{lanes} == 1 ? {function(1)} : {function(self.lanes)}"

    def _row_functions(self, name: str, lanes: int) -> str:
        """Return the entry points for one piece, several, and none; rows of a known size need one or two of them."""
        variants = [f"{name}{suffix}" for suffix, _ in self._piece_variants(lanes)]
        one, most, none = variants if len(variants) == 3 else (variants[0], variants[-1], variants[0])
        return f"gpu::RowFunctions{{{one}, {most}, {none}}}"

    def _size(self) -> str:
        return code_of(count([self._nest.dims[a] for a in self._inner]))

    def _rows_count(self) -> str:
        return code_of(count([self._nest.dims[a] for a in self._outer]))

    # The kernel

    def write(self, name: str) -> None:
        """Generate the kernel."""
        w, nest = self._w, self._nest
        w.comment(f"{' × '.join(map(code_of, nest.dims))}: " + ", ".join(map(summary, nest.steps)))
        if not self._across:
            w.line("template <int W, int K>" if self._reducing else "template <int W>")
        with w.block(f"__device__ __forceinline__ void {name}(const Call& call)"):
            w.line(f"using {self._INDEX} = {self._index_type()};")
            size_lines(w, nest, self._INDEX)
            buffers = {view.buffer for view in self._accesses()}
            for buffer in sorted((b for b in buffers if b.kind != "indices"), key=lambda b: b.name):
                if buffer.kind != "inner" or not self._is_local(buffer) or buffer in self._crossing:
                    w.line(f"auto* __restrict const {buffer.name} = call.{buffer.name};")
            if not self._reducing:
                self._write_places()
            elif self._across:
                self._write_rows_beside()
            else:
                self._write_rows()

    def _write_places(self) -> None:
        last = code_of(self._nest.dims[self._last])
        places = code_of(count(self._nest.dims))
        with self._grid_loop("unit", "threadIdx.x", f"{places} / W", "x"):
            if len(self._nest.dims) == 1:
                self._w.line(f"const {self._INDEX} i0 = unit * W;")
            else:
                self._w.line(f"const {self._INDEX} i{self._last} = unit % ({last} / W) * W;")
                self._split(self._outer, f"(unit / ({last} / W))")
            self._indices[self._last] = f"i{self._last}"
            self._steps([step for step in self._nest.steps if not step.once], "W")

    def _write_rows(self) -> None:
        self._w.line("bool turn = false;")
        with self._grid_loop("unit", "threadIdx.y", self._rows_count(), "y"):
            self._split(self._outer, "unit")
            for held, kind in self._register_arrays():
                self._w.line(f"Pieces<{kind}, W, K> {held};")
            for view in self._read_ahead:
                self._w.line(f"Pieces<{computed_type(view.dtype)}, W, K == 1> {self._ahead_name(view)};")
            self._passes(lanes="1")

    def _write_rows_beside(self) -> None:
        index, rows = self._INDEX, self._rows_count()
        with self._grid_loop("first", "0", rows, "x"):  # all threads of a block iterate alike, since they synchronize
            self._w.line(f"const {index} unit = std::min<{index}>(first + threadIdx.x, {rows} - 1);")
            self._split(self._outer, "unit")
            self._passes(lanes="1")

    def _grid_loop(self, name: str, own: str, end: str, axis: str) -> AbstractContextManager[None]:
        start, step = (f"{self._INDEX}{{1}} * {grid} * blockDim.{axis}" for grid in ("blockIdx.x", "gridDim.x"))
        self._w.line(f"const {self._INDEX} end = {end}, step = {step};")
        return self._w.block(f"for ({self._INDEX} {name} = {start} + {own}; {name} < end; {name} += step)")

    def _sweep(self, steps: Sequence[Step], lanes: str) -> None:
        w = self._w
        reductions = [step for step in steps if step.root.reduction]
        width, is_long = ("1", "true") if self._across else ("W", "K == 0")
        for step in reductions:
            kind = computed_type(step.root.value.dtype)
            w.line(f"Total<{step.root.reduction}, {kind}, {width}, {is_long}> sum_{step.root.buffer.name};")
        self._level = steps[0].level
        if self._across:
            head, tail = f"for ({self._INDEX} place = threadIdx.y; place < {self._size()}; place += blockDim.y)", "}"
        else:
            head, tail = (
                f"swept<W, K>(static_cast<{self._INDEX}>({self._size()}), [&](int piece, {self._INDEX} place)",
                "});",
            )
        with w.block(head, tail):
            self._split(self._inner, "place")
            if self._level == self._first_sweep():
                self._load_ahead()
            self._steps(steps, "1" if self._across else "W")
        for step in reductions:
            how, total = step.root.reduction, f"sum_{step.root.buffer.name}.total()"
            self._keep_row(step.root, f"across<{how}>({total})" if self._across else f"together<{how}>({total}, turn)")
            self._store(step.root, self._rows[step.root.buffer], lanes, self._outer)

    def _store(self, root: Root, value: str, lanes: str, axes: Sequence[int]) -> None:
        """Write a per-row value from one thread; keep what the next sweep reads in registers, or memory if too long."""
        step = self._nest.step_writing(root.buffer)
        assert step is not None
        if step.per_row and (root.buffer.kind != "inner" or not self._is_local(root.buffer)):
            with self._w.block(f"if (threadIdx.{'y' if self._across else 'x'} == 0)"):
                super()._store(root, value, lanes, axes)
            return
        if not self._in_rows or root.buffer not in self._crossing:
            super()._store(root, value, lanes, axes)
            return
        self._w.line(f"keep<K>(held_{root.buffer.name}, piece, {value});")
        if self._is_local(root.buffer):
            with self._w.block("if constexpr (K == 0)"):
                super()._store(root, value, lanes, axes)
        else:
            super()._store(root, value, lanes, axes)

    # Registers

    def _reread_views(self) -> Iterator[tuple[View, int]]:
        """Yield inputs of the nest that several sweeps read, with the first sweep."""
        return ((view, min(at)) for view, at in self._input_levels().items() if len(at) > 1)

    def _late_views(self) -> Iterator[View]:
        """Yield contiguous inputs that are read only after the first sweep, such as the weights of a norm."""
        for view, at in self._input_levels().items():
            if len(at) == 1 and self._first_sweep() not in at and view.strides[self._last] == 1 and not view.guards:
                yield view

    def _input_levels(self) -> dict[View, set[int]]:
        """Return the sweeps that read each input of the nest."""
        levels: dict[View, set[int]] = {}
        for step in self._nest.steps:
            for view in [] if step.once else plain_views(step.root.value):
                moves = any(view.strides[axis] != 0 for axis in self._inner)
                if moves and view.buffer.kind != "indices" and self._nest.step_writing(view.buffer) is None:
                    levels.setdefault(view, set()).add(step.level)
        return levels

    def _first_sweep(self) -> int:
        return min(step.level for step in self._nest.steps if not step.once)

    def _load_ahead(self) -> None:
        """Load what later sweeps read, so that its latency passes during the reduction."""
        axes = list(range(len(self._nest.dims)))
        for view in self._read_ahead:
            code = super()._value_code(view, "W", axes)
            self._w.line(f"if constexpr (K == 1) keep<1>({self._ahead_name(view)}, 0, {code});")

    def _register_arrays(self) -> Iterator[tuple[str, str]]:
        if self._in_rows:
            for buffer in sorted(self._crossing, key=lambda b: b.name):
                yield f"held_{buffer.name}", computed_type(buffer.dtype)
            for view in self._first_read:
                yield self._held_name(view), computed_type(view.dtype)

    def _held_name(self, view: View) -> str:
        return f"held_{view.buffer.name}_{list(self._first_read).index(view)}"

    def _ahead_name(self, view: View) -> str:
        return f"ahead_{view.buffer.name}_{self._read_ahead.index(view)}"

    def _call(self, operator: str, args: str) -> str:
        code = super()._call(operator, args)
        return f"fast_{code}" if self._fast and operator in _FAST else code

    def _value_code(self, value: Value, lanes: str, axes: Sequence[int]) -> str:
        radicand = _radicand(value) if self._fast else None
        if radicand is not None:
            return f"fast_inverse_root({self._expression(radicand, lanes, axes)})"
        code = super()._value_code(value, lanes, axes)
        if not isinstance(value, View) or not self._in_rows or lanes == "1":
            return code
        if value.buffer in self._crossing:
            return f"again<K>(held_{value.buffer.name}, piece, [&] {{ return {code}; }})"
        if value in self._read_ahead:
            return f"again<(K == 1)>({self._ahead_name(value)}, 0, [&] {{ return {code}; }})"
        if value not in self._first_read:
            return code
        if self._first_read[value] == self._level:
            return f"keep<K>({self._held_name(value)}, piece, {code})"
        return f"again<K>({self._held_name(value)}, piece, [&] {{ return {code}; }})"


def _radicand(value: Value) -> Value | None:
    """Return x if the value is 1 / √x."""
    if not isinstance(value, Apply) or value.operator != "div":
        return None
    one, root = value.args
    if not isinstance(one, Number) or one.value != 1 or not isinstance(root, Apply) or root.operator != "sqrt":
        return None
    return root.args[0]


def plain_views(value: Value) -> list[View]:
    """Return the views in an expression that are not read by index."""
    views: dict[View, None] = {}

    def walk(value: Value) -> None:
        if isinstance(value, View):
            views[value] = None
        elif isinstance(value, Apply):
            for arg in value.args[value.operator == "gather" :]:
                walk(arg)

    walk(value)
    return list(views)
