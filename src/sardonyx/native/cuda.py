"""Loops as CUDA C++: a kernel for each nest, on the stream of the session.

Without reductions a thread computes some elements that lie side by side. Where rows are reduced, some threads share
one, and hold what they read and computed of it in registers from one sweep to the next. Rows that lie side by side,
because another axis than the last is reduced, belong to a thread each, or to some that divide its places.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

from sardonyx.native.body import BodyPrinter, Writer, size_lines, summary
from sardonyx.native.cpp import Kernel
from sardonyx.native.nests import Nest, Root, Step, count
from sardonyx.native.scalars import code_of, computed_type
from sardonyx.native.values import Apply, Buffer, Value, View, views_of
from sardonyx.sizes import Dim

_AT_ONCE = 16
"""Bytes that a thread reads or writes with one instruction."""
_MOST_LANES = 8
_MOST_HELD = 32
"""Elements of a row that a thread holds of each of its values; half of it where these are more than two."""
_SMALL = 2**30
"""Below it, places are counted in 32 bits: a GPU divides those several times as fast."""


class CudaKernel(Kernel):
    """A region as CUDA C++."""

    TELLS = False
    MULTIPLIES = False
    TILES = False

    def _needs_memory(self, buffer: Buffer) -> bool:
        """Whether a buffer may have to outlive a sweep: rows can be too long to be held."""
        if not self._is_local(buffer):
            return True
        nest = self._made_in(buffer)
        step = nest.maker(buffer)
        return step is not None and not step.per_row and nest.crosses(buffer)

    def _made_in(self, buffer: Buffer) -> Nest:
        return next(nest for nest in self.nests if nest.maker(buffer))

    def _write_nest(self, w: Writer, nest: Nest, name: str) -> None:
        CudaPrinter(w, nest, self._is_local).write(name)

    def _run(self, w: Writer) -> None:
        """Memory for the call, and the launches; what goes wrong on the device shows in a later call of CUDA."""
        printers = [CudaPrinter(w, nest, self._is_local) for nest in self.nests]
        w.line("cudaStream_t stream = nullptr;")
        w.line("if (auto s = ort::stream(context, reinterpret_cast<void**>(&stream))) return s;")
        for index, printer in enumerate(printers):
            w.line(f"const bool aligned{index} = {printer.aligned()};")
        w.line("Memory memory(stream);")
        for buffer in self._held:
            size = code_of(count(buffer.dims))
            if self._is_local(buffer):
                index = self.nests.index(self._made_in(buffer))
                size = printers[index].memory(f"aligned{index}", size)
            w.line(f"memory.want(&call.{buffer.name}, {size});")
        w.line("if (auto s = memory.take()) return s;")
        for index, printer in enumerate(printers):
            w.line(f"if (auto s = {printer.launch(f'nest{index}', f'aligned{index}')}) return s;")
        w.line("return nullptr;")


class CudaPrinter(BodyPrinter):
    """Writes one nest as a kernel, and what launches it."""

    def __init__(self, w: Writer, nest: Nest, is_local: Callable[[Buffer], bool]) -> None:
        super().__init__(w, nest, is_local)
        self._in_rows = self._reducing and not self._across
        self._lanes = 1 if self._across else self._most_lanes()
        crosses = self._nest.crosses
        self._crossing = {s.root.buffer for s in self._nest.steps if not s.per_row and crosses(s.root.buffer)}
        self._first_read = dict(self._read_again()) if self._in_rows else {}
        self._level = 0
        if self._is_small():
            self._INDEX = "int32_t"

    # What is known before the call

    def _is_small(self) -> bool:
        buffers = (view.buffer for view in self._accesses())
        sizes = [count(self._nest.dims), *(count(buffer.dims) for buffer in buffers)]
        return all(isinstance(size, int) and size < _SMALL for size in sizes)

    def _accesses(self) -> Iterator[View]:
        for step in self._nest.steps:
            yield from views_of(step.root.value)
            yield step.root.target

    def _side_by_side(self) -> Iterator[View]:
        """What is read or written lane by lane in order: it begins where several lanes may be moved at once."""
        for step in self._nest.steps:
            if not step.once:
                views = [*plain_views(step.root.value), *([] if step.root.how else [step.root.target])]
                yield from (view for view in views if view.strides[self._last] == 1 and not view.guards)

    def _most_lanes(self) -> int:
        """How many elements a thread has side by side, if all that is known only at the call allows it."""
        found = list(self._side_by_side())
        if not found:
            return 1
        outside = [view for view in found if view.buffer.kind != "inner" or not self._is_local(view.buffer)] or found
        lanes = min(_MOST_LANES, _AT_ONCE // max(int(view.dtype.itemsize) for view in outside))
        known = [step for step in self._steps_to_divide(found) if isinstance(step, int)]
        return math.gcd(lanes, *known)

    def _steps_to_divide(self, found: Sequence[View]) -> Iterator[Dim]:
        """Sizes that the lanes have to divide, so that no access is astride."""
        yield self._nest.dims[self._last]
        for view in found:
            yield view.offset
            yield from view.strides[:-1]

    def aligned(self) -> str:
        """Whether several lanes can be read and written at once, when sizes and memory are known."""
        if self._lanes == 1:
            return "true"
        found = list(self._side_by_side())
        steps = dict.fromkeys(code_of(s) for s in self._steps_to_divide(found) if not isinstance(s, int))
        tests = [f"{step} % {self._lanes} == 0" for step in steps]
        given = sorted({view.buffer.name for view in found if view.buffer.kind in ("input", "output")})
        tests += [f"is_aligned(call.{name}, {self._lanes})" for name in given]
        return " && ".join(tests) or "true"

    def _pieces(self) -> int:
        """How many times its lanes a thread holds of a row."""
        held = len(self._crossing) + len(self._first_read)
        return min(8, _MOST_HELD // (1 if held <= 2 else 2) // self._lanes)

    # What launches it

    def memory(self, aligned: str, size: str) -> str:
        """How many elements of memory a buffer has that is of use inside of the nest alone."""
        if not self._in_rows:
            return size
        return f"is_long<{self._lanes}, {self._pieces()}>({aligned}, {self._size()}) ? {size} : 0"

    def launch(self, name: str, aligned: str) -> str:
        """The call that starts the kernel."""
        if not self._reducing:
            places = code_of(count(self._nest.dims))
            kernel = f"[](auto w) {{ return &{name}<decltype(w)::value>; }}"
            return f"over_places<{self._lanes}>({aligned}, {places}, {kernel}, stream, call)"
        if self._across:
            return f"over_rows_beside({self._rows_count()}, {self._size()}, &{name}, stream, call)"
        size = count([self._nest.dims[a] for a in self._inner])
        how = f"{self._lanes}, {self._pieces()}, {size if isinstance(size, int) else -1}"
        kernel = f"[](auto w, auto k) {{ return &{name}<decltype(w)::value, decltype(k)::value>; }}"
        return f"over_rows<{how}>({aligned}, {self._rows_count()}, {self._size()}, {kernel}, stream, call)"

    def _size(self) -> str:
        return code_of(count([self._nest.dims[a] for a in self._inner]))

    def _rows_count(self) -> str:
        return code_of(count([self._nest.dims[a] for a in self._outer]))

    # The kernel

    def write(self, name: str) -> None:
        """The kernel."""
        w, nest = self._w, self._nest
        w.comment(f"{' × '.join(map(code_of, nest.dims))}: " + ", ".join(map(summary, nest.steps)))
        if not self._across:
            w.line("template <int W, int K>" if self._reducing else "template <int W>")
        with w.block(f"__global__ void __launch_bounds__(kMostThreads) {name}(const Call call)"):
            size_lines(w, nest)
            buffers = {view.buffer for view in self._accesses()}
            for buffer in sorted((b for b in buffers if b.kind != "places"), key=lambda b: b.name):
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
        with self._turns("unit", "threadIdx.x", f"{places} / W", "x"):
            if len(self._nest.dims) == 1:
                self._w.line(f"const {self._INDEX} i0 = unit * W;")
            else:
                self._w.line(f"const {self._INDEX} i{self._last} = unit % ({last} / W) * W;")
                self._split(self._outer, f"(unit / ({last} / W))")
            self._places[self._last] = f"i{self._last}"
            self._steps([step for step in self._nest.steps if not step.once], "W")

    def _write_rows(self) -> None:
        with self._turns("unit", "threadIdx.y", self._rows_count(), "y"):
            self._split(self._outer, "unit")
            for held, kind in self._kept():
                self._w.line(f"Pieces<{kind}, W, K> {held};")
            self._passes(lanes="1")

    def _write_rows_beside(self) -> None:
        index, rows = self._INDEX, self._rows_count()
        with self._turns(
            "first", "0", rows, "x"
        ):  # all threads of a block take the same turns, and wait for each other
            self._w.line(f"const {index} unit = std::min<{index}>(first + threadIdx.x, {rows} - 1);")
            self._split(self._outer, "unit")
            self._passes(lanes="1")

    def _turns(self, name: str, own: str, end: str, axis: str) -> AbstractContextManager[None]:
        """A loop over what this thread has of all blocks' work."""
        start, step = (f"{self._INDEX}{{1}} * {grid} * blockDim.{axis}" for grid in ("blockIdx.x", "gridDim.x"))
        self._w.line(f"const {self._INDEX} end = {end}, step = {step};")
        return self._w.block(f"for ({self._INDEX} {name} = {start} + {own}; {name} < end; {name} += step)")

    def _sweep(self, steps: Sequence[Step], lanes: str) -> None:
        w = self._w
        reductions = [step for step in steps if step.root.how]
        width, is_long = ("1", "true") if self._across else ("W", "K == 0")
        for step in reductions:
            kind = computed_type(step.root.value.dtype)
            w.line(f"Total<{step.root.how}, {kind}, {width}, {is_long}> sum_{step.root.buffer.name};")
        self._level = steps[0].level
        if self._across:
            head, tail = f"for ({self._INDEX} place = threadIdx.y; place < {self._size()}; place += blockDim.y)", "}"
        else:
            head, tail = f"swept<W, K>({self._INDEX}{{{self._size()}}}, [&](int piece, {self._INDEX} place)", "});"
        with w.block(head, tail):
            self._split(self._inner, "place")
            self._steps(steps, "1" if self._across else "W")
        joined = "across" if self._across else "together"
        for step in reductions:
            total = f"sum_{step.root.buffer.name}.total()"
            self._keep_row(step.root, f"{joined}<{step.root.how}>({total})")
            self._store(step.root, self._rows[step.root.buffer], lanes, self._outer)

    def _store(self, root: Root, value: str, lanes: str, places: Sequence[int]) -> None:
        """A row's number is written by one thread; what the next sweep reads is held, or written if rows are long."""
        step = self._nest.maker(root.buffer)
        assert step is not None
        if step.per_row and (root.buffer.kind != "inner" or not self._is_local(root.buffer)):
            with self._w.block(f"if (threadIdx.{'y' if self._across else 'x'} == 0)"):
                super()._store(root, value, lanes, places)
            return
        if not self._in_rows or root.buffer not in self._crossing:
            super()._store(root, value, lanes, places)
            return
        self._w.line(f"keep<K>(held_{root.buffer.name}, piece, {value});")
        if self._is_local(root.buffer):
            with self._w.block("if constexpr (K == 0)"):
                super()._store(root, value, lanes, places)
        else:
            super()._store(root, value, lanes, places)

    # What is held

    def _read_again(self) -> Iterator[tuple[View, int]]:
        """Inputs of the nest that several sweeps read, and which is the first to."""
        levels: dict[View, set[int]] = {}
        for step in self._nest.steps:
            for view in [] if step.once else plain_views(step.root.value):
                moves = any(view.strides[axis] != 0 for axis in self._inner)
                if moves and view.buffer.kind != "places" and self._nest.maker(view.buffer) is None:
                    levels.setdefault(view, set()).add(step.level)
        return ((view, min(at)) for view, at in levels.items() if len(at) > 1)

    def _kept(self) -> Iterator[tuple[str, str]]:
        if self._in_rows:
            for buffer in sorted(self._crossing, key=lambda b: b.name):
                yield f"held_{buffer.name}", computed_type(buffer.dtype)
            for view in self._first_read:
                yield self._held_name(view), computed_type(view.dtype)

    def _held_name(self, view: View) -> str:
        return f"held_{view.buffer.name}_{list(self._first_read).index(view)}"

    def _computed(self, value: Value, lanes: str, places: Sequence[int]) -> str:
        code = super()._computed(value, lanes, places)
        if not isinstance(value, View) or not self._in_rows or lanes == "1":
            return code
        if value.buffer in self._crossing:
            return f"again<K>(held_{value.buffer.name}, piece, [&] {{ return {code}; }})"
        if value not in self._first_read:
            return code
        if self._first_read[value] == self._level:
            return f"keep<K>({self._held_name(value)}, piece, {code})"
        return f"again<K>({self._held_name(value)}, piece, [&] {{ return {code}; }})"


def plain_views(value: Value) -> list[View]:
    """The views in an expression that are read at their places, and not where an index says."""
    found: dict[View, None] = {}

    def walk(value: Value) -> None:
        if isinstance(value, View):
            found[value] = None
        elif isinstance(value, Apply):
            for arg in value.args[value.operator == "gather" :]:
                walk(arg)

    walk(value)
    return list(found)
