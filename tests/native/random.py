"""Random graphs of small tensors, which hypothesis draws: `python -m tests.native.random --graphs 600` runs many."""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import ml_dtypes
import numpy as np
import onnx
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from tests.native.precise import Overflows, Precise, differences, precise
from tests.native.running import Together, model_of, run, session_of

FLOAT, DOUBLE, HALF, BFLOAT = TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16
INT64, INT32, BOOL = TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL
NUMPY = {
    FLOAT: np.float32,
    DOUBLE: np.float64,
    HALF: np.float16,
    BFLOAT: ml_dtypes.bfloat16,
    INT64: np.int64,
    INT32: np.int32,
    BOOL: np.bool_,
}
_SMOOTH = ("Exp", "Tanh", "Sigmoid", "Neg", "Abs", "Relu", "Erf", "Sqrt", "Softplus", "LeakyRelu", "Sin", "Softsign")
_WHOLE = ("Neg", "Abs", "Sign")
_OPSET = 20


@dataclass(frozen=True)
class _Tensor:
    """A value of the graph: its type, the sizes it has, and the same as the graph says them."""

    name: str
    kind: int
    shape: tuple[int, ...]
    said: tuple[int | str, ...]

    @property
    def is_real(self) -> bool:
        return self.kind in (FLOAT, DOUBLE, HALF, BFLOAT)


@dataclass
class Graph:
    """A random graph and what to feed it."""

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    inputs: dict[str, tuple[int, Sequence[int | str]]] = field(default_factory=dict)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    feeds: dict[str, np.ndarray] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)

    @property
    def key(self) -> bytes:
        """What tells a graph from others, whatever it is fed."""
        return self.model.SerializeToString(deterministic=True)

    @cached_property
    def model(self) -> onnx.ModelProto:
        return model_of(self.nodes, self.inputs, self.outputs, self.constants, opset=_OPSET)


class _Maker:
    """Grows one graph, node by node."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.numbers = np.random.default_rng(rng.getrandbits(32))
        self.graph = Graph()
        self.kind = self.rng.choices([FLOAT, DOUBLE, HALF, BFLOAT, INT64, INT32], [10, 3, 1, 1, 2, 1])[0]
        self.symbolic = self.rng.random() < 0.4
        self.values: list[_Tensor] = []
        self._count = 0

    def make(self) -> Graph:
        rank = self.rng.randint(1, 4)
        shape = tuple(self._size(rank) for _ in range(rank))
        self.values.append(self._input(self.kind, shape))
        for _ in range(self.rng.randint(3, 12)):
            self._step()
        produced = [x for x in self.values if x.name not in self.graph.inputs]
        read = {name for node in self.graph.nodes for name in node.input}
        ends = [x.name for x in produced if x.name not in read]
        some = [x.name for x in produced if x.name in read and self.rng.random() < 0.15]
        self.graph.outputs = ends + some
        return self.graph

    def _size(self, rank: int) -> int:
        if self.rng.random() < 0.02:
            return 0
        most = {1: 70, 2: 40, 3: 18, 4: 9}[rank]
        return self.rng.choice([1, self.rng.randint(1, most), self.rng.randint(1, 70) if rank < 3 else 3])

    def _name(self) -> str:
        self._count += 1
        return f"x{self._count}"

    def _said(self, shape: Sequence[int]) -> tuple[int | str, ...]:
        return tuple(f"n{size}" if self.symbolic and size > 1 and self.rng.random() < 0.8 else size for size in shape)

    def _input(self, kind: int, shape: Sequence[int], said: Sequence[int | str] | None = None) -> _Tensor:
        name = self._name()
        said = self._said(shape) if said is None else tuple(said)
        self.graph.inputs[name] = (kind, said)
        self.graph.feeds[name] = self._array(kind, shape)
        return _Tensor(name, kind, tuple(shape), said)

    def _array(self, kind: int, shape: Sequence[int]) -> np.ndarray:
        if kind == BOOL:
            return self.numbers.random(shape) < 0.5
        if kind in (INT64, INT32):
            return self.numbers.integers(-9, 10, shape).astype(NUMPY[kind])
        return (self.numbers.standard_normal(shape) * 1.5).astype(NUMPY[kind])

    def _constant(self, array: np.ndarray) -> str:
        name = self._name()
        self.graph.constants[name] = array
        return name

    def _ints(self, values: Sequence[int]) -> str:
        return self._constant(np.array(values, np.int64))

    def _add(
        self, op: str, inputs: Sequence[str], shape: Sequence[int], said: Sequence[int | str], kind: int, **how: object
    ) -> _Tensor:
        name = self._name()
        self.graph.nodes.append(helper.make_node(op, inputs, [name], name=f"{op}_{name}", **how))
        made = _Tensor(name, kind, tuple(shape), tuple(said))
        self.values.append(made)
        return made

    def _like(self, op: str, x: _Tensor, *others: str, kind: int | None = None, **how: object) -> _Tensor:
        return self._add(op, [x.name, *others], x.shape, x.said, x.kind if kind is None else kind, **how)

    def _pick(self) -> _Tensor:
        return self.rng.choice(self.values[-4:] if self.rng.random() < 0.7 else self.values)

    def _step(self) -> None:
        x = self._pick()
        steps: list[Callable[[_Tensor], object]] = [self._binary] * 4 + [self._layout] * 4
        if x.kind == BOOL:
            steps += [self._logic, self._where, self._cast] * 2
        elif x.is_real:
            steps += [self._unary] * 4 + [self._reduce, self._softmax, self._norm] * 2
            steps += [self._compared, self._clip, self._moved_last, self._gather]
        else:
            steps += [self._unary, self._reduce, self._compared, self._cast, self._gather]
        self.rng.choice(steps)(x)

    def _unary(self, x: _Tensor) -> object:
        op = self.rng.choice(_SMOOTH if x.is_real else _WHOLE)
        if op == "Sqrt":
            x = self._like("Abs", x)
        if op == "Exp":
            x = self._like("Tanh", x)
        return self._like(op, x)

    def _partner(self, x: _Tensor) -> _Tensor:
        """Something that x can be computed with: one of the same sizes, or with ones among them."""
        same = [y for y in self.values if y.kind == x.kind and y.said == x.said]
        if same and self.rng.random() < 0.6:
            return self.rng.choice(same)
        shape, said = list(x.shape), list(x.said)
        for axis in range(len(shape)):
            if self.rng.random() < 0.4:
                shape[axis] = said[axis] = 1
        lead = self.rng.randint(0, len(shape)) if self.rng.random() < 0.3 else 0
        if self.rng.random() < 0.3 and all(isinstance(d, int) for d in said[lead:]):
            name = self._constant(self._array(x.kind, shape[lead:]))
            return _Tensor(name, x.kind, tuple(shape[lead:]), tuple(said[lead:]))
        made = self._input(x.kind, shape[lead:], said[lead:])
        self.values.append(made)
        return made

    def _binary(self, x: _Tensor) -> object:
        if x.kind == BOOL:
            return self._logic(x)
        y = self._partner(x)
        ops = ["Add", "Sub", "Mul"] if x.is_real else ["Add", "Sub", "Mul", "Max", "Min"]
        op = self.rng.choice(ops + (["Max", "Min"] if x.kind in (FLOAT, DOUBLE) else []))
        pair = [x.name, y.name]
        if self.rng.random() < 0.5:
            pair.reverse()
        if op == "Mul" and x.is_real:
            return self._add(op, [self._like("Tanh", x).name, y.name], x.shape, x.said, x.kind)
        return self._add(op, pair, x.shape, x.said, x.kind)

    def _logic(self, x: _Tensor) -> object:
        if self.rng.random() < 0.3:
            return self._like("Not", x)
        return self._like(self.rng.choice(["And", "Or", "Xor"]), x, self._partner(x).name)

    def _where(self, x: _Tensor) -> object:
        kind = self.kind
        yes, no = (self._partner(_Tensor("", kind, x.shape, x.said)).name for _ in range(2))
        return self._add("Where", [x.name, yes, no], x.shape, x.said, kind)

    def _compared(self, x: _Tensor) -> object:
        """Of inputs alone: a rounding error must not decide."""
        fresh = [y for y in self.values if y.name in self.graph.inputs and y.kind == x.kind] if x.is_real else [x]
        x = self.rng.choice(fresh) if fresh else self._input(x.kind, x.shape, x.said)
        y = self._input(x.kind, x.shape, x.said)
        ops = ["Less", "LessOrEqual", "Greater", "GreaterOrEqual"]
        return self._like(self.rng.choice(ops), x, y.name, kind=BOOL)

    def _cast(self, x: _Tensor) -> object:
        kind = self.rng.choice([FLOAT, DOUBLE, INT32, INT64] if x.kind == BOOL else [FLOAT, DOUBLE, BOOL])
        return self._like("Cast", x, kind=kind, to=kind)

    def _clip(self, x: _Tensor) -> object:
        if x.kind in (HALF, BFLOAT):
            return self._unary(x)
        low = self._constant(np.array(-0.7, NUMPY[x.kind]))
        high = self._constant(np.array(0.9, NUMPY[x.kind])) if self.rng.random() < 0.7 else ""
        return self._like("Clip", x, low, high)

    def _reduce(self, x: _Tensor) -> object:
        if 0 in x.shape or x.kind == BOOL:
            return self._layout(x)
        axes = sorted(self.rng.sample(range(len(x.shape)), self.rng.randint(1, len(x.shape)))) if x.shape else []
        if not axes:
            return self._unary(x)
        keep = self.rng.random() < 0.6
        ops = ["Sum", "Max", "Min"] + (["Mean", "L2", "L1", "SumSquare", "LogSumExp"] if x.is_real else [])
        op = "Reduce" + self.rng.choice(ops)
        shape = [1 if a in axes else d for a, d in enumerate(x.shape) if keep or a not in axes]
        said = [1 if a in axes else d for a, d in enumerate(x.said) if keep or a not in axes]
        given = [a - len(x.shape) if self.rng.random() < 0.3 else a for a in axes]
        return self._add(op, [x.name, self._ints(given)], shape, said, x.kind, keepdims=int(keep))

    def _softmax(self, x: _Tensor) -> object:
        if not x.shape or 0 in x.shape:
            return self._unary(x)
        axis = self.rng.randrange(-len(x.shape), len(x.shape))
        return self._like(self.rng.choice(["Softmax", "LogSoftmax"]), x, axis=axis)

    def _norm(self, x: _Tensor) -> object:
        if not x.shape or 0 in x.shape:
            return self._unary(x)
        if len(x.shape) >= 3 and self.rng.random() < 0.4 and isinstance(x.said[1], int):
            scale, bias = (self._input(x.kind, [x.shape[1]], [x.said[1]]).name for _ in range(2))
            return self._like("InstanceNormalization", x, scale, bias, epsilon=0.5)
        axis = self.rng.randrange(len(x.shape))
        scale, bias = (self._input(x.kind, x.shape[axis:], x.said[axis:]).name for _ in range(2))
        return self._like("LayerNormalization", x, scale, bias, axis=axis, epsilon=0.5)

    def _gather(self, x: _Tensor) -> object:
        if not x.shape or 0 in x.shape:
            return self._unary(x)
        axis = self.rng.randrange(len(x.shape))
        shape = [self.rng.randint(1, 5) for _ in range(self.rng.randint(0, 2))]
        if len(x.shape) + len(shape) > 5:
            return self._unary(x)
        name = self._name()
        size = x.shape[axis]
        self.graph.inputs[name] = (INT64, shape)
        self.graph.feeds[name] = self.numbers.integers(-size, size, shape)
        dims = [*x.shape[:axis], *shape, *x.shape[axis + 1 :]]
        said = [*x.said[:axis], *shape, *x.said[axis + 1 :]]
        return self._add("Gather", [x.name, name], dims, said, x.kind, axis=axis)

    # Layout

    def _layout(self, x: _Tensor) -> object:
        steps = [self._transpose, self._unsqueeze, self._squeeze, self._reshape, self._slice, self._concat]
        steps += [self._pad, self._expand, self._split]
        return self.rng.choice(steps)(x)

    def _moved_last(self, x: _Tensor) -> object:
        return self._transpose(x)

    def _transpose(self, x: _Tensor) -> object:
        if not x.shape:
            return self._unsqueeze(x)
        order = self.rng.sample(range(len(x.shape)), len(x.shape))
        shape, said = [x.shape[a] for a in order], [x.said[a] for a in order]
        return self._add("Transpose", [x.name], shape, said, x.kind, perm=order)

    def _unsqueeze(self, x: _Tensor) -> object:
        if len(x.shape) > 4:
            return self._squeeze(x)
        at = self.rng.randint(0, len(x.shape))
        shape, said = list(x.shape), list(x.said)
        shape.insert(at, 1)
        said.insert(at, 1)
        return self._add("Unsqueeze", [x.name, self._ints([at])], shape, said, x.kind)

    def _squeeze(self, x: _Tensor) -> object:
        ones = [a for a, d in enumerate(x.said) if d == 1]
        if not ones:
            return self._transpose(x)
        at = self.rng.choice(ones)
        shape, said = ([d for a, d in enumerate(dims) if a != at] for dims in (x.shape, x.said))
        return self._add("Squeeze", [x.name, self._ints([at])], shape, said, x.kind)

    def _reshape(self, x: _Tensor) -> object:
        """Neighbours made one, or one made two; symbols are kept as they are."""
        fixed = [a for a, d in enumerate(x.said) if isinstance(d, int) and d > 0]
        joins = [a for a in fixed if a + 1 in fixed]
        shape, said = list(x.shape), list(x.said)
        if joins and self.rng.random() < 0.6:
            at = self.rng.choice(joins)
            shape[at : at + 2] = said[at : at + 2] = [shape[at] * shape[at + 1]]
        elif fixed and len(x.shape) < 5:
            at = self.rng.choice(fixed)
            factors = [f for f in range(1, shape[at] + 1) if shape[at] % f == 0]
            first = self.rng.choice(factors)
            shape[at : at + 1] = said[at : at + 1] = [first, shape[at] // first]
        else:
            return self._transpose(x)
        kept = [a for a, d in enumerate(said) if isinstance(d, str)]
        if any(a >= len(x.said) or x.said[a] != said[a] for a in kept) or 0 in shape:
            return self._transpose(x)
        target = [0 if isinstance(d, str) else d for d in said]
        return self._add("Reshape", [x.name, self._ints(target)], shape, said, x.kind)

    def _slice(self, x: _Tensor) -> object:
        fixed = [a for a, d in enumerate(x.said) if isinstance(d, int)]
        if not fixed:
            return self._transpose(x)
        axis = self.rng.choice(fixed)
        size = x.shape[axis]
        start, end = self.rng.randint(-size - 1, size), self.rng.randint(-size - 1, size + 2)
        step = self.rng.choice([1, 1, 2, 3, -1, -2])
        left = len(range(size)[start:end:step])
        shape, said = list(x.shape), list(x.said)
        shape[axis] = said[axis] = left
        inputs = [x.name, *(self._ints([v]) for v in (start, end, axis, step))]
        return self._add("Slice", inputs, shape, said, x.kind)

    def _concat(self, x: _Tensor) -> object:
        fixed = [a for a, d in enumerate(x.said) if isinstance(d, int)]
        if not fixed:
            return self._transpose(x)
        axis = self.rng.choice(fixed)
        pieces = [x]
        for _ in range(self.rng.randint(1, 2)):
            fit = [
                y
                for y in self.values
                if y.kind == x.kind
                and len(y.said) == len(x.said)
                and all(a == axis or d == x.said[a] for a, d in enumerate(y.said))
                and isinstance(y.said[axis], int)
            ]
            if self.rng.random() < 0.3:
                shape, said = list(x.shape), list(x.said)
                shape[axis] = said[axis] = self.rng.randint(0, 9)
                fit = [self._input(x.kind, shape, said)]
            pieces.append(self.rng.choice(fit))
        shape, said = list(x.shape), list(x.said)
        shape[axis] = said[axis] = sum(piece.shape[axis] for piece in pieces)
        return self._add("Concat", [piece.name for piece in pieces], shape, said, x.kind, axis=axis)

    def _split(self, x: _Tensor) -> object:
        fixed = [a for a, d in enumerate(x.said) if isinstance(d, int) and d > 1]
        if not fixed:
            return self._transpose(x)
        axis = self.rng.choice(fixed)
        first = self.rng.randint(1, x.shape[axis] - 1)
        sizes = [first, x.shape[axis] - first]
        names = [self._name(), self._name()]
        inputs = [x.name, self._ints(sizes)]
        self.graph.nodes.append(helper.make_node("Split", inputs, names, name=f"Split_{names[0]}", axis=axis))
        for name, size in zip(names, sizes, strict=True):
            shape, said = list(x.shape), list(x.said)
            shape[axis] = said[axis] = size
            self.values.append(_Tensor(name, x.kind, tuple(shape), tuple(said)))
        return None

    def _pad(self, x: _Tensor) -> object:
        fixed = [a for a, d in enumerate(x.said) if isinstance(d, int)]
        if not fixed or x.kind == BFLOAT:
            return self._transpose(x)
        shape, said = list(x.shape), list(x.said)
        before, after = [0] * len(shape), [0] * len(shape)
        for axis in self.rng.sample(fixed, self.rng.randint(1, len(fixed))):
            before[axis], after[axis] = self.rng.randint(-1, 3), self.rng.randint(-1, 3)
            if shape[axis] + min(0, before[axis]) + min(0, after[axis]) < 0 or not shape[axis]:
                before[axis] = after[axis] = 0
            shape[axis] += before[axis] + after[axis]
            said[axis] = shape[axis]
        if math.prod(shape) > 20000:
            return self._transpose(x)
        fill = self._constant(self._array(x.kind, ())) if self.rng.random() < 0.5 else ""
        return self._add("Pad", [x.name, self._ints(before + after), fill], shape, said, x.kind)

    def _expand(self, x: _Tensor) -> object:
        ones = [a for a, d in enumerate(x.said) if d == 1]
        if math.prod(x.shape) > 4000 or any(isinstance(d, str) for d in x.said):
            return self._transpose(x)
        shape = list(x.shape)
        for axis in ones:
            shape[axis] = self.rng.randint(1, 5)
        if len(shape) < 4 and self.rng.random() < 0.3:
            shape.insert(0, self.rng.randint(1, 4))
        return self._add("Expand", [x.name, self._ints(shape)], shape, shape, x.kind)


def graph(rng: random.Random) -> Graph:
    """A random graph."""
    return _Maker(rng).make()


def drawn(number: int, count: int, check: Callable[[Graph], object]) -> None:
    """Let hypothesis draw the graphs of a batch; one that the check raises an error for is made small."""

    @seed(number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.randoms(use_true_random=False))
    def each(rng: random.Random) -> None:
        check(graph(rng))

    each()


def runs(made: Graph) -> list[np.ndarray] | None:
    """What onnxruntime makes of a graph; None if it lacks a kernel for one of the types."""
    try:
        return run(session_of(made.model), made.feeds)
    except Exception as error:
        if "NOT_IMPLEMENTED" in str(error) or "NotImplemented" in type(error).__name__ or "Type Error" in str(error):
            return None
        if "INVALID_GRAPH" in str(error) and "invalid" in str(error):
            return None
        raise


@dataclass
class Outcome:
    """How many graphs were compared, and what was found."""

    compared: int = 0
    kernels: int = 0
    nodes: int = 0
    left: int = 0
    overflowing: int = 0
    without_onnxruntime: int = 0
    worst: float = 0.0
    """The largest error, as a part of what is allowed."""
    worst_of_onnxruntime: float = 0.0
    failures: dict[int, str] = field(default_factory=dict)
    """By the place of the graph."""

    def add(self, other: Outcome, start: int) -> None:
        """Take in what was found of the graphs from a place on."""
        for name in ("compared", "kernels", "nodes", "left", "overflowing", "without_onnxruntime"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("worst", "worst_of_onnxruntime"):
            setattr(self, name, max(getattr(self, name), getattr(other, name)))
        self.failures |= {start + place: what for place, what in other.failures.items()}

    def __str__(self) -> str:
        return (
            f"{self.compared} graphs agree with float64 and onnxruntime, {self.without_onnxruntime} of them with "
            f"float64 alone, as onnxruntime lacks their types; {self.overflowing} overflow; "
            f"{self.nodes} nodes, {self.left} of them left to onnxruntime, in {self.kernels} kernels; "
            f"largest error {self.worst:.2f} of the bound ({self.worst_of_onnxruntime:.2f} in onnxruntime); "
            f"{len(self.failures)} wrong"
        )


def check(graphs: Sequence[Graph], *, quickly: bool = False) -> Outcome:
    """Compare graphs as kernels with float64 and with onnxruntime, all of them in one library."""
    outcome, together = Outcome(), Together()
    expected: dict[int, tuple[Precise, list[np.ndarray] | None]] = {}
    for place, made in enumerate(graphs):
        try:
            wanted = precise(made.model, made.feeds)
        except Overflows:
            outcome.overflowing += 1
            continue
        why = together.add(str(place), made.model)
        if why is not None:
            outcome.failures[place] = f"no kernel: {why}"
            continue
        expected[place] = wanted, runs(made)
    if expected:
        together.build(quickly=quickly)
    for place, (wanted, theirs) in expected.items():
        _compare(outcome, together, graphs[place], place, wanted, theirs)
    return outcome


def _compare(
    outcome: Outcome, together: Together, made: Graph, place: int, wanted: Precise, theirs: list[np.ndarray] | None
) -> None:
    groups = together.groups(str(place))
    outcome.kernels += len(groups)
    outcome.nodes += len(made.nodes)
    outcome.left += len(made.nodes) - sum(map(len, groups))
    try:
        found = together.run(str(place), made.feeds)
    except Exception as error:
        outcome.failures[place] = f"{type(error).__name__}: {error}"[:300]
        return
    told = list(differences(found, wanted))
    outcome.worst = max(outcome.worst, *(part for _, part in told))
    if theirs is None:
        outcome.without_onnxruntime += 1
    else:
        outcome.worst_of_onnxruntime = max(
            outcome.worst_of_onnxruntime, *(part for _, part in differences(theirs, wanted))
        )
        told += [(f"from onnxruntime: {what}", 0.0) for what in _from_onnxruntime(found, theirs, wanted)]
    wrong = [what for what, _ in told if what]
    if wrong:
        outcome.failures[place] = "; ".join(wrong)
    else:
        outcome.compared += 1


def _from_onnxruntime(found: Sequence[np.ndarray], theirs: Sequence[np.ndarray], wanted: Precise) -> list[str]:
    """How results differ from onnxruntime's by more than both may be off."""
    wide = [x.astype(np.float64) if y.dtype.kind == "f" else x for x, y in zip(theirs, wanted.values, strict=True)]
    both = Precise(wide, [2 * bound for bound in wanted.bounds])
    return [what for what, _ in differences(found, both) if what]


def batch(number: int, count: int, *, quickly: bool = False) -> tuple[Outcome, str]:
    """Compare so many graphs, each another, in one library; what was found, and of what is wrong the smallest graph."""
    graphs: dict[bytes, Graph] = {}

    def take(made: Graph) -> None:
        if len(graphs) < count:
            graphs.setdefault(made.key, made)

    drawn(number, _MORE * count, take)
    chosen = list(graphs.values())
    outcome = check(chosen, quickly=quickly)
    wrong = {chosen[place].key for place in outcome.failures}
    return outcome, _smallest(number, _MORE * count, wrong) if wrong else ""


_MORE = 3
"""So many times as many are drawn as are wanted: hypothesis draws the simplest again and again."""


def _smallest(number: int, count: int, wrong: set[bytes]) -> str:
    """The same graphs drawn again, and the first of the wrong ones made small."""
    found: list[str] = []

    def right(made: Graph) -> None:
        if found or made.key in wrong:
            outcome = check([made], quickly=True)
            if outcome.failures:
                found.append(f"{outcome.failures[0]}\n{onnx.printer.to_text(made.model)}")
            assert not outcome.failures

    try:
        drawn(number, count, right)
    except AssertionError:
        return found[-1]
    return "none of them is wrong by itself"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.native.random", description=__doc__)
    parser.add_argument("--graphs", type=int, default=200, help="how many (default: 200)")
    parser.add_argument("--first", type=int, default=0, help="the number of the first batch (default: 0)")
    parser.add_argument("--batch", type=int, default=50, help="graphs in a library (default: 50)")
    parser.add_argument("--quickly", action="store_true", help="compile with less care")
    asked = parser.parse_args()
    total, start = Outcome(), 0
    for number in range(asked.first, asked.first + -(-asked.graphs // asked.batch)):
        outcome, smallest = batch(number, min(asked.batch, asked.graphs - start), quickly=asked.quickly)
        for place, what in outcome.failures.items():
            print(f"batch {number}, graph {place}: {what}", flush=True)
        print(smallest or f"batch {number}: {outcome}", flush=True)
        total.add(outcome, start)
        start += asked.batch
    print(total)
    return int(bool(total.failures))


if __name__ == "__main__":
    sys.exit(main())
