"""Attention of one query over Concat(past, new) becomes GroupQueryAttention, which appends to the past in place.

ONNX Runtime's kernel writes the new row behind the past if the past and the present are the same memory; the caller
provides it, with room for that row, and the number of rows that are in use.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
import sympy
import torch

from sardonyx.optimize.subgraphs import unused_tag
from sardonyx.sizes import Dim, Dims
from sardonyx.translate.builder import MICROSOFT, Builder
from sardonyx.translate.inference import set_dims

_ROWS = 2
"""The axis of rows in (batch, heads, rows, size)."""
_UNIT = 8
"""The kernel's heads have a multiple of so many elements."""
_ATTRIBUTES = frozenset({"scale", "is_causal", "softcap"})


@dataclass(frozen=True)
class Appended:
    """Keys or values that a model appends to: the inputs with the past and its number of rows, and the output."""

    past: int
    present: int
    length: int


@dataclass
class CacheInPlace:
    """What a model appends to in place, and why it concatenates the rest at each call."""

    appended: list[Appended] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class _Append:
    """A Concat of an input and new rows, which the graph returns."""

    node: ir.Node

    @property
    def past(self) -> ir.Value:
        return _input(self.node, 0)

    @property
    def new(self) -> ir.Value:
        return _input(self.node, 1)

    @property
    def present(self) -> ir.Value:
        return self.node.outputs[0]

    @property
    def rows(self) -> Dim:
        """The number of rows of the past."""
        return _dims(self.past)[_ROWS]


def append_in_place(model: ir.Model) -> CacheInPlace:
    """Replace attention over concatenated keys and values, in place; new inputs are the lengths of pasts."""
    graph, found = model.graph, CacheInPlace()
    appends = {append.present: append for append in _appends(graph)}
    rewrite = _Rewrite(model)
    for node in list(graph):
        pair = [appends.get(x) for x in node.inputs[1:3] if x is not None] if node.op_type == "Attention" else []
        if len(pair) != 2 or pair[0] is None or pair[1] is None or _refusal(node, pair[0], pair[1]):
            continue
        rewrite.replace(node, pair[0], pair[1])
        del appends[pair[0].present], appends[pair[1].present]
    found.appended = rewrite.finish()
    found.refusals = [f"{append.past.name}: {_reason(append, appends)}" for append in appends.values()]
    return found


def _appends(graph: ir.Graph) -> Iterator[_Append]:
    """Yield the Concats whose first operand is an input of a symbolic size, and whose result the graph returns."""
    inputs = set(graph.inputs)
    for node in graph:
        past = node.inputs[0] if node.op_type == "Concat" and len(node.inputs) == 2 else None
        if past not in inputs or past is None or not node.outputs[0].is_graph_output():
            continue
        axis = node.attributes["axis"].as_int() % max(len(_dims(past)), 1)
        if len(_dims(past)) > axis and not isinstance(_dims(past)[axis], int):
            yield _Append(node)


# Conditions


def _reason(append: _Append, appends: dict[ir.Value, _Append]) -> str:
    """Return why an append is not in place."""
    readers = [use.node for use in append.present.uses()]
    if len(readers) != 1 or readers[0].op_type != "Attention":
        return "something else than one Attention reads keys and values"
    pair = [appends.get(x) for x in readers[0].inputs[1:3] if x is not None]
    if len(pair) != 2 or pair[0] is None or pair[1] is None:
        return "Attention reads other keys or values"
    return str(_refusal(readers[0], pair[0], pair[1]))


def _refusal(node: ir.Node, k: _Append, v: _Append) -> str | None:
    """Return why an Attention cannot be replaced; None if it can."""
    q = _input(node, 0)
    reason = _append_refusal(k) or _append_refusal(v)
    if reason:
        return reason
    if node.domain or set(node.attributes) - _ATTRIBUTES or len([x for x in node.inputs[3:] if x is not None]) > 1:
        return "Attention has attributes or inputs that GroupQueryAttention lacks"
    flags = {name: a.value for name, a in node.attributes.items()}
    if flags.get("is_causal") or flags.get("softcap") or flags.get("scale", 1) <= 0 or any(_is_read(node)):
        return "Attention is causal, caps scores or returns them"
    sizes = [_dims(x) for x in (q, k.past, v.past)]
    if any(len(x) != 4 for x in sizes) or any(x.dtype != ir.DataType.FLOAT for x in (q, k.past, v.past)):
        return "Attention is not of heads in float32"
    if sizes[0][_ROWS] != 1 or any(_dims(x.new)[_ROWS] != 1 for x in (k, v)):
        return "a call has more than one query"
    (batch, heads, _, size), key_sizes, value_sizes = sizes
    if not isinstance(heads, int) or not isinstance(key_sizes[1], int) or not _is_positive(batch):
        return "the number of heads is symbolic, or the batch may be empty"
    same = {(x[0], x[1], x[3]) for x in (key_sizes, value_sizes)} == {(batch, key_sizes[1], size)}
    if not same or not isinstance(size, int) or size % _UNIT or heads % key_sizes[1]:
        return f"heads are not of one size that is a multiple of {_UNIT}"
    return _mask_refusal(node, k)


def _append_refusal(append: _Append) -> str | None:
    past, present = append.past, append.present
    others = [use.node for use in past.uses() if use.node is not append.node]
    if append.node.attributes["axis"].as_int() % max(len(_dims(past)), 1) != _ROWS:
        return "rows are not the third axis"
    if past.is_graph_output() or len(past.uses()) != len(others) + 1 or not all(map(_can_read_shape, others)):
        return "the past has other readers"
    if len(present.uses()) != 1 or list(_graph(append.node).outputs).count(present) != 1:
        return "something else than one Attention reads keys and values"
    return None


def _mask_refusal(node: ir.Node, k: _Append) -> str | None:
    mask = _mask(node)
    if mask is None:
        return None
    batch, heads = _dims(_input(node, 0))[:2]
    sizes = (1,) * (4 - len(_dims(mask))) + _dims(mask)
    fits = len(sizes) == 4 and sizes[0] in (1, batch) and sizes[1] in (1, heads) and sizes[2] == 1
    if not fits or sizes[3] != k.rows + 1 or mask.dtype not in (ir.DataType.BOOL, ir.DataType.FLOAT):
        return "the mask has other sizes"
    return None


def _is_positive(size: Dim) -> bool:
    return size > 0 if isinstance(size, int) else bool(size.is_positive)


def _is_read(node: ir.Node) -> list[bool]:
    return [bool(x.uses()) or x.is_graph_output() for x in node.outputs[1:]]


def _can_read_shape(node: ir.Node) -> bool:
    """Whether a node reads of a past only the number of rows, or only other sizes."""
    return node.op_type == "Shape" and not node.domain and (_axes(node) == [_ROWS] or _ROWS not in _axes(node))


def _axes(shape: ir.Node) -> list[int]:
    start, end = (shape.attributes[name].as_int() if name in shape.attributes else None for name in ("start", "end"))
    return list(range(4))[slice(start, end)]


def _mask(node: ir.Node) -> ir.Value | None:
    return node.inputs[3] if len(node.inputs) > 3 else None


# Rewriting


class _Rewrite:
    """Builds nodes for attention in place, which share what depends on a length or a mask only."""

    def __init__(self, model: ir.Model) -> None:
        self._graph = model.graph
        self._tag = unused_tag(model.graph)
        self._g = Builder(model.graph.opset_imports[""], tag=self._tag)
        self._lengths: dict[Dim, ir.Value] = {}
        self._counts: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}
        self._masks: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}
        self._replaced: list[tuple[ir.Value, int, ir.Value]] = []

    def replace(self, node: ir.Node, k: _Append, v: _Append) -> None:
        """Replace an Attention over keys and values."""
        length = self._length(k)
        result = self._attention(node, k, v, length)
        for append in (k, v):
            self._read_length(append, length)
        self._graph.insert_before(node, self._g.nodes)
        self._g.nodes = []
        ir.convenience.replace_all_uses_with(node.outputs[0], result, replace_graph_outputs=True)
        for old in (node, k.node, v.node):
            self._graph.remove(old, safe=True)

    def finish(self) -> list[Appended]:
        """Add what the graph needs, and return which inputs and outputs are appended in place."""
        for constant in self._g.initializers.values():
            self._graph.register_initializer(constant)
        if self._replaced:
            self._graph.opset_imports.setdefault(MICROSOFT, 1)
        inputs = list(self._graph.inputs)
        return [Appended(inputs.index(x), at, inputs.index(length)) for x, at, length in self._replaced]

    def _length(self, k: _Append) -> ir.Value:
        """Return the input that has the number of rows of the past: pasts of one symbolic size share it."""
        if k.rows not in self._lengths:
            length = ir.Value(
                name=f"past_length_{self._tag}{len(self._lengths)}", type=ir.TensorType(ir.DataType.INT64)
            )
            set_dims(length, (1,))
            self._graph.inputs.append(length)
            self._lengths[k.rows] = length
        return self._lengths[k.rows]

    def _read_length(self, append: _Append, length: ir.Value) -> None:
        """Let readers of the number of rows read the length, as the past becomes the whole buffer."""
        for use in list(append.past.uses()):
            shape = use.node
            if shape.op_type == "Shape" and _axes(shape) == [_ROWS]:
                ir.convenience.replace_all_uses_with(shape.outputs[0], length, replace_graph_outputs=True)
                self._graph.remove(shape, safe=True)

    def _attention(self, node: ir.Node, k: _Append, v: _Append, length: ir.Value) -> ir.Value:
        g, q = self._g, _input(node, 0)
        batch, heads, _, size = _dims(q)
        key_heads = _dims(k.past)[1]
        bias, is_blind = self._mask(_mask(node))
        batch_size = g.ints([batch]) if isinstance(batch, int) else g.Shape(q, start=0, end=1)
        rows = [self._in_rows(x) for x in (q, k.new, v.new)]
        inputs = [*rows, k.past, v.past, *self._count(length, batch_size), None, None, None, bias]
        scale = node.attributes.get("scale")
        attributes = {"num_heads": heads, "kv_num_heads": key_heads}
        attributes |= {} if scale is None else {"scale": scale.as_float()}
        y, *presents = g.several("GroupQueryAttention", 3, inputs, domain=MICROSOFT, **attributes)
        y.producer().meta["fx"] = node.meta.get("fx")  # type: ignore[union-attr]  # a node has just made it
        g.shaped(y, _dims(rows[0]))
        y = self._reshaped(y, (batch, heads, 1, size))
        for append, present in zip((k, v), presents, strict=True):
            self._share(append, present, length)
        return y if is_blind is None else g.shaped(g.Where(is_blind, g.scalar(0.0, torch.float32), y), _dims(y))

    def _in_rows(self, x: ir.Value) -> ir.Value:
        """Return (batch, heads, 1, size) as (batch, 1, heads · size)."""
        batch, heads, _, size = _dims(x)
        producer = x.producer()
        if producer is not None and producer.op_type == "Reshape" and not producer.domain and not x.is_graph_output():
            source = _input(producer, 0)
            if _dims(source) == (batch, 1, heads * size):
                return source
        return self._reshaped(x, (batch, 1, heads * size))

    def _reshaped(self, x: ir.Value, sizes: Dims) -> ir.Value:
        """Reshape a value, keeping the first axis."""
        return self._g.shaped(self._g.Reshape(x, self._g.ints([0, *map(int, sizes[1:])])), sizes)

    def _count(self, length: ir.Value, batch: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Return the index of the new row, for each of the batch, and the number of rows with it."""
        g = self._g
        if length not in self._counts:
            index = g.shaped(g.Cast(length, dtype=ir.DataType.INT32), (1,))
            total = g.shaped(g.Add(index, g.constant(np.array([1], np.int32))), (1,))
            self._counts[length] = g.Expand(index, batch), total
        return self._counts[length]

    def _mask(self, mask: ir.Value | None) -> tuple[ir.Value | None, ir.Value | None]:
        """Return what a mask adds to scores, and which queries see no key: they get zeros, as in torch."""
        if mask is None:
            return None, None
        if mask not in self._masks:
            self._masks[mask] = self._new_mask(mask)
        return self._masks[mask]

    def _new_mask(self, mask: ir.Value) -> tuple[ir.Value, ir.Value]:
        g, lowest, sizes = self._g, self._g.scalar(-np.inf, torch.float32), _dims(mask)
        bias = mask
        if mask.dtype == ir.DataType.BOOL:
            bias = g.shaped(g.Where(mask, g.scalar(0.0, torch.float32), lowest), sizes)
        if len(sizes) < 4:
            bias = g.unsqueeze(bias, range(4 - len(sizes)))
        highest = g.ReduceMax(bias, g.ints([3]), keepdims=1)
        return bias, g.Equal(highest, lowest)

    def _share(self, append: _Append, present: ir.Value, length: ir.Value) -> None:
        """Let the past and the present be the buffer."""
        outputs, past = self._graph.outputs, append.past
        at = list(outputs).index(append.present)
        batch, heads, _, size = _dims(past)
        capacity = sympy.Symbol(f"{past.name}_capacity", integer=True, positive=True)
        for x in (past, present):
            set_dims(x, (batch, heads, capacity, size))
        present.type = past.type
        outputs[at] = present
        self._replaced.append((past, at, length))


def _input(node: ir.Node, index: int) -> ir.Value:
    x = node.inputs[index]
    assert x is not None
    return x


def _graph(node: ir.Node) -> ir.Graph:
    assert isinstance(node.graph, ir.Graph)
    return node.graph


def _dims(x: ir.Value) -> Dims:
    """Return the sizes of a value; none if they are unknown."""
    found: Dims | None = x.meta.get("dims")
    return () if found is None else tuple(found)
