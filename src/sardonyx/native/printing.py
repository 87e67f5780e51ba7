"""Generate a loop nest as a C++ function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from sardonyx.native.body import LIBRARY, BodyPrinter, Writer, size_lines, summary
from sardonyx.native.nests import Nest, Step, count
from sardonyx.native.region import COSTLY
from sardonyx.native.scalars import TYPES, code_of, computed_type
from sardonyx.native.values import Buffer, operations, views_of
from sardonyx.sizes import Dim

_CHUNK = 4096
"""Elements of a row without reductions in one unit of work."""
_BLOCK = 2048
"""Elements of a row summed before partial sums are combined."""
_TILE = 16
"""Elements of a tile along the contiguous axis that lanes do not follow: as many as a cache line."""
_ROW_CHUNK = 64
"""Rows in one unit of work if each lane has a row."""


_SLOW = LIBRARY | {"exp", "log", "erf", "tanh", "sigmoid", "log1p"}
_MAX_INLINED = 12
"""Calls of such functions in a nest that are inlined."""


class NestPrinter(BodyPrinter):
    """Generates one nest. Lanes follow the last axis: along the row if it is swept, else across rows."""

    _RANGE_FLAG = ", *call.out_of_range"

    def __init__(self, w: Writer, nest: Nest, is_local: Callable[[Buffer], bool]) -> None:
        super().__init__(w, nest, is_local)
        if self._reducing and not self._across:
            rows = (step.root.buffer for step in nest.steps if not step.per_row)
            self._scratch = {buffer for buffer in rows if is_local(buffer)}
        self._transposed_axis = self._nest.transposed_axis
        self._costly = {v for step in self._nest.steps for v in operations(step.root.value) if v.operator in _SLOW}
        self._outlined = self._outlined_functions()

    def _outlined_functions(self) -> frozenset[str]:
        """Return functions that are not inlined: compile time grows with each copy of a long one."""
        used = {v.operator for v in self._costly}
        return frozenset(used if len(self._costly) > _MAX_INLINED else used & LIBRARY)

    def _call(self, operator: str, args: str) -> str:
        return f"{operator}_of({args})" if operator in self._outlined else super()._call(operator, args)

    def units(self, name: str) -> tuple[str, str]:
        """Return the number of independent work units, and the cost of one in elements."""
        dims = self._nest.dims
        if self._across:
            rows = count([dims[a] for a in self._outer[:-1]])
            chunks = _chunk_count(dims[self._last], _ROW_CHUNK)
            cost = code_of(count([*(dims[a] for a in self._inner), _ROW_CHUNK]))
        elif self._reducing:
            rows, chunks = count([dims[a] for a in self._outer]), "1"
            cost = code_of(count([dims[a] for a in self._inner]))
        elif self._transposed_axis is not None:
            rows = count([dims[a] for a in self._outer if a != self._transposed_axis])
            tiles = _chunk_count(dims[self._transposed_axis], _TILE)
            chunks = f"{tiles} * {_chunk_count(dims[self._last], _CHUNK // _TILE)}"
            cost = f"{_CHUNK}"
        else:
            rows = count([dims[a] for a in self._outer])
            chunks = _chunk_count(dims[self._last], _CHUNK)
            cost = f"std::min<int64_t>({code_of(dims[self._last])}, {_CHUNK})"
        units = code_of(rows) if chunks == "1" else f"{code_of(rows)} * {chunks}"
        return units, f"{cost} * {self._nest.passes}"

    def write(self, name: str) -> None:
        """Generate the function that computes a range of units."""
        w, nest = self._w, self._nest
        w.comment(f"{' × '.join(map(code_of, nest.dims))}: " + ", ".join(map(summary, nest.steps)))
        with w.block(f"static void {name}(const Call& call, int64_t begin, int64_t end)"):
            size_lines(w, nest)
            buffers = {view.buffer for step in nest.steps for view in views_of(step.root.value)}
            buffers |= {step.root.buffer for step in nest.steps}
            for buffer in sorted((b for b in buffers if b.kind != "indices"), key=lambda b: b.name):
                if buffer in self._scratch and self._nest.crosses(buffer):
                    size = code_of(count([nest.dims[a] for a in self._inner]))
                    w.line(f"const auto {buffer.name}_memory = memory<{TYPES[buffer.dtype]}>({size});")
                    w.line(f"auto* __restrict const {buffer.name} = {buffer.name}_memory.get();")
                elif buffer.kind != "inner" or not self._is_local(buffer) or self._stored(buffer):
                    w.line(f"auto* __restrict const {buffer.name} = call.{buffer.name};")
            w.line(f"constexpr int W = kNative * {self._registers()};")
            for operator in sorted(self._outlined):
                body = super()._call(operator, "x")
                w.line(f"const auto {operator}_of = [](const auto& x) __attribute__((noinline)) {{ return {body}; }};")
            with w.block("for (int64_t unit = begin; unit < end; ++unit)"):
                self._unit()

    def _registers(self) -> int:
        """Return how many registers are computed at once: more for expensive functions."""
        costly = {v for step in self._nest.steps for v in operations(step.root.value) if v.operator in COSTLY}
        return 4 if len(costly) > 2 else 2

    def _stored(self, buffer: Buffer) -> bool:
        step = self._nest.step_writing(buffer)
        return step is not None and not step.per_row and buffer not in self._scratch and self._nest.crosses(buffer)

    def _unit(self) -> None:
        w = self._w
        outer = self._outer[:-1] if self._across else [axis for axis in self._outer if axis != self._transposed_axis]
        chunk = _ROW_CHUNK if self._across else _CHUNK if self._transposed_axis is None else _CHUNK // _TILE
        rest = "unit"
        if self._across or not self._reducing:
            rest = self._define_range(self._last, chunk, rest, ("from", "to"))
        if self._transposed_axis is not None:
            rest = self._define_range(self._transposed_axis, _TILE, rest, ("first", "past"))
        self._split(outer, rest)
        if self._transposed_axis is not None:
            self._sweep_tile(self._transposed_axis)
        elif self._across:
            with w.block(f"sweep<W>(from, to, [&](auto w, int64_t i{self._last})", "});"):
                self._indices[self._last] = f"i{self._last}"
                self._passes(lanes="w")
        elif self._reducing:
            self._passes(lanes="1")
        else:
            self._sweep_lanes("from", "to", [step for step in self._nest.steps if not step.once])

    def _define_range(self, axis: int, size: int, rest: str, names: tuple[str, str]) -> str:
        """Define the range of an axis that a unit covers; return code for the rest of the unit's number."""
        begin, end = names
        size_code = code_of(self._nest.dims[axis])
        chunks = _chunk_count(self._nest.dims[axis], size)
        if chunks == "1":
            self._w.line(f"const int64_t {begin} = 0, {end} = {size_code};")
            return rest
        self._w.line(f"const int64_t {begin} = {rest} % ({chunks}) * {size};")
        self._w.line(f"const int64_t {end} = std::min<int64_t>({begin} + {size}, {size_code});")
        return f"({rest} / ({chunks}))"

    def _sweep_tile(self, axis: int) -> None:
        """Sweep a tile: lanes along the last axis, and for each vector some indices along the contiguous axis."""
        with self._w.block(f"sweep<W>(from, to, [&](auto w, int64_t i{self._last})", "});"):
            self._indices[self._last] = f"i{self._last}"
            with self._w.block(f"for (int64_t i{axis} = first; i{axis} < past; ++i{axis})"):
                self._indices[axis] = f"i{axis}"
                self._steps([step for step in self._nest.steps if not step.once], "w")

    def _sweep(self, steps: Sequence[Step], lanes: str) -> None:
        w = self._w
        reductions = [step for step in steps if step.root.reduction]
        for step in reductions:
            kind = computed_type(step.root.value.dtype)
            join = (
                f"Across<{step.root.reduction}, Of<{kind}, w>>"
                if self._across
                else f"Along<{step.root.reduction}, {kind}, W>"
            )
            w.line(f"{join} sum_{step.root.buffer.name};")
        sums = [
            step
            for step in reductions
            if step.root.reduction == "Sum" and computed_type(step.root.value.dtype) == "float"
        ]
        plain = self._inner if self._across else self._inner[:-1]
        with self._loops(plain):
            if self._across:
                self._steps(steps, "w")
                self._combine_sums(sums)
            elif sums and not self._is_short():
                self._sweep_in_blocks(steps, sums)
            else:
                self._sweep_lanes("0", code_of(self._nest.dims[self._last]), steps)
                if plain:
                    self._combine_sums(sums, code_of(self._nest.dims[self._last]))
        for step in reductions:
            self._keep_row(step.root, f"sum_{step.root.buffer.name}.total()")
            self._store(step.root, self._rows[step.root.buffer], lanes, self._outer)

    def _is_short(self) -> bool:
        size = self._nest.dims[self._last]
        return isinstance(size, int) and size <= _BLOCK

    def _sweep_in_blocks(self, steps: Sequence[Step], sums: Sequence[Step]) -> None:
        """Sweep the last axis in blocks, combining partial sums after each."""
        size = code_of(self._nest.dims[self._last])
        with self._w.block(f"for (int64_t block = 0; block < {size}; block += {_BLOCK})"):
            self._sweep_lanes("block", f"std::min<int64_t>(block + {_BLOCK}, {size})", steps)
            self._combine_sums(sums, f"{_BLOCK}")

    def _sweep_lanes(self, begin: str, end: str, steps: Sequence[Step]) -> None:
        with self._w.block(f"sweep<W>({begin}, {end}, [&](auto w, int64_t i{self._last})", "});"):
            self._indices[self._last] = f"i{self._last}"
            self._steps(steps, "w")

    def _combine_sums(self, sums: Sequence[Step], count: str = "") -> None:
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
            self._indices[axis] = f"i{axis}"
            with self._loops(axes[1:]):
                yield


def _chunk_count(size: Dim, chunk: int) -> str:
    if isinstance(size, int):
        return f"{max(1, -(-size // chunk))}"
    return f"parts({code_of(size)}, {chunk})"
