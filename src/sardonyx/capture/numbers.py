"""Python numbers of the exported call as inputs of its graph, where the graph does not depend on them otherwise."""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass, replace
from io import StringIO
from typing import Any

import sympy
import torch
from torch.fx.experimental.proxy_tensor import py_sym_types
from torch.utils import _pytree as pytree

from sardonyx.capture.conditions import Condition, assumptions, function_of, sizes_of
from sardonyx.capture.dynamic import call_of, hints, leaf_specs, names_of_sizes, unify_sizes
from sardonyx.capture.example import ExampleCall, is_number
from sardonyx.capture.export import Captured, capture
from sardonyx.capture.faked import is_faked
from sardonyx.errors import CaptureError
from sardonyx.sizes import dim_of, dims_of, size_at

_ONE_BY_ONE = 8
"""Numbers that are tried one after the other where not all of them can be inputs: each try is a trace."""


def capture_call(call: ExampleCall, specs: Mapping[str, Any], whole: Collection[str] = ()) -> Captured:
    """Trace a call, of which this is declared dynamic."""
    args, kwargs = call.call
    shapes = None if all(spec is None for spec in specs.values()) else hints(dict(specs))
    # A graph that a backend is handed has no argument to name, and is called in other ways than by its forward.
    with nullcontext() if is_faked(args, kwargs) else call.presented():
        captured = capture(call.model, args, kwargs, shapes, whole, empty=True)
    unify_sizes(call, captured, specs)
    return captured


@dataclass(frozen=True)
class TracedCall:
    """A call and its graph, in which some numbers of the call are inputs."""

    call: ExampleCall
    captured: Captured
    specs: Mapping[str, Any]
    """What is declared dynamic, by argument."""
    constant: Captured
    """The graph in which all numbers are constants."""
    whole: Collection[str]

    @classmethod
    def of(cls, call: ExampleCall, specs: Mapping[str, Any], whole: Collection[str]) -> TracedCall:
        """Trace a call; operators named in `whole` stay as they are."""
        captured = capture_call(call, specs, whole)
        return cls(call, captured, specs, captured, whole)

    def candidates(self) -> list[int]:
        """The flattened arguments that are numbers, and of which nothing is declared."""
        declared = leaf_specs(self.call, self.specs)
        return [
            place for place, (_, leaf) in enumerate(self.call.leaves) if is_number(leaf) and declared[place] is None
        ]

    def with_numbers(self, places: Collection[int]) -> TracedCall:
        """The call with as many of these numbers as inputs as can be.

        A number can be an input if the graph is the same with it as a symbol. It cannot where its value decides, or
        its class: `isinstance(n, int)` does not hold for a symbol.
        """
        found = self._attempt(places)
        if found is not None:
            return found
        best = replace(self, call=self.call.with_numbers(()), captured=self.constant)
        for place in places if 1 < len(places) <= _ONE_BY_ONE else ():
            best = self._attempt([*best.call.numbers, place]) or best
        return best

    def _attempt(self, places: Collection[int]) -> TracedCall | None:
        if not places:
            return None
        call = self.call.with_numbers(places)
        try:
            with redirect_stderr(StringIO()), _without_torch_logs():
                found = capture_call(call, self.specs, self.whole)
        except Exception:  # what fails with a symbol may do so anywhere in torch, and has been traced with the constant
            return None
        return replace(self, call=call, captured=found) if _is_same(found, self.constant) else None

    def numbers_of(self, nodes: Iterable[torch.fx.Node]) -> frozenset[int]:
        """The numbers that any of these nodes reads."""
        symbols = self.symbols()
        read: set[Any] = set()
        for node in nodes:
            for source in node.all_input_nodes:
                value = source.meta.get("val")
                read |= value.node.expr.free_symbols if isinstance(value, py_sym_types) else set()
        return frozenset(place for symbol, place in symbols.items() if symbol in read)

    def symbols(self) -> dict[sympy.Symbol, int]:
        """The symbols of numbers that are inputs, and the places of those among the flattened arguments."""
        nodes = self.captured.graph.graph.find_nodes(op="placeholder")
        places = {node: self.captured.given.get(index) for index, node in enumerate(nodes)}
        return {
            node.meta["val"].node.expr: place
            for node in self.captured.graph.graph.find_nodes(op="call_function", target=torch.ops.aten.item.default)
            if (place := places.get(node.args[0])) in self.call.numbers and place is not None
        }

    def names_of_sizes(self) -> dict[sympy.Symbol, str]:
        """The user's names of symbolic sizes."""
        return names_of_sizes(self.call, self.captured, self.specs)

    def conditions(self) -> list[Condition]:
        """What the graph assumes of sizes and numbers of the call."""
        read = self._read_at()
        names = {symbol: sympy.Symbol(self._names()[at]) for symbol, at in read.items()} | {
            symbol: sympy.Symbol(name) for symbol, name in self.names_of_sizes().items()
        }
        assumed = [
            Condition(str(expr.xreplace(names)), holds, where)
            for expr, where in assumptions(self.captured.graph)
            if (holds := function_of(expr, read)) is not None
        ]
        return assumed + self._equalities(read, names)

    def _equalities(
        self, read: Mapping[sympy.Symbol, int], names: Mapping[sympy.Symbol, sympy.Symbol]
    ) -> list[Condition]:
        """That sizes which the trace took for one, or for an expression of others, are that."""
        found = []
        for place, dim in self._dims_at().items():
            if read.get(dim) != place:
                size = size_at(place)
                holds = function_of(sympy.Eq(size, dim), {**read, size: place})
                text = f"{self._names()[place]} == {dim.xreplace(names)}"
                found += [Condition(text, holds)] if holds is not None else []
        return found

    def _dims_at(self) -> dict[int, sympy.Expr]:
        """The symbolic sizes of tensors that the graph reads, by their places among those of all arguments."""
        nodes = self.captured.graph.graph.find_nodes(op="placeholder")
        starts = list(itertools.accumulate((len(sizes_of(leaf)) for _, leaf in self.call.leaves), initial=0))
        read = [(nodes[index], starts[place]) for index, place in self.captured.given.items() if nodes[index].users]
        tensors = [(node.meta["val"], start) for node, start in read if isinstance(node.meta.get("val"), torch.Tensor)]
        sizes = ((start + axis, dim) for value, start in tensors for axis, dim in enumerate(dims_of(value)))
        return {place: dim for place, dim in sizes if not isinstance(dim, int)}

    def _read_at(self) -> dict[sympy.Symbol, int]:
        """Where each symbol is found among the sizes and numbers of all arguments."""
        values = [node.meta.get("val") for node in self.captured.graph.graph.find_nodes(op="placeholder")]
        starts = list(itertools.accumulate((len(sizes_of(leaf)) for _, leaf in self.call.leaves), initial=0))
        read = {symbol: starts[place] for symbol, place in self.symbols().items()}
        for index, place in self.captured.given.items():
            if place not in self.call.numbers:
                sizes = sizes_of(values[index])
                found = {dim_of(x): starts[place] + i for i, x in enumerate(sizes) if isinstance(x, torch.SymInt)}
                read |= {symbol: at for symbol, at in found.items() if symbol not in read}
        return {symbol: at for symbol, at in read.items() if isinstance(symbol, sympy.Symbol)}

    def _names(self) -> list[str]:
        """What the sizes and numbers of all arguments are called."""
        names: list[str] = []
        for path, leaf in self.call.leaves:
            is_tensor = isinstance(leaf, torch.Tensor)
            names += [f"{path}.shape[{axis}]" for axis in range(leaf.dim())] if is_tensor else [path]
        return names


def refuse_constant_floats(traced: TracedCall, examples: Sequence[Any]) -> None:
    """Raise for a float that differs between the example calls, and could not become an input."""
    first = traced.call.leaves
    for example in examples:
        call = ExampleCall.of(traced.call.model, *call_of(example, *traced.call.call))
        for place, ((path, one), (_, other)) in enumerate(zip(first, call.leaves, strict=True)):
            if isinstance(one, float) and one != other and place not in traced.call.numbers:
                raise CaptureError(
                    f"{path} is {one!r} in one example and {other!r} in another, and cannot be an input of the model",
                    hint="its value decides what is computed, or no ONNX operator takes it: give it as a tensor",
                )


@contextmanager
def _without_torch_logs() -> Iterator[None]:
    """While active, torch does not tell of a trace that fails."""
    loggers = [logging.getLogger(name) for name in _TELLING]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


_TELLING = ("torch.fx.experimental.symbolic_shapes", "torch.export._trace")


# The same graph but for numbers


def _is_same(found: Captured, constant: Captured) -> bool:
    """Whether two graphs call the same operators with the same operands, where one may have a symbol for a number."""
    ours, theirs = _calls(found.graph), _calls(constant.graph)
    inputs, others = _placeholders(found), _placeholders(constant)
    if (len(ours), len(inputs)) != (len(theirs), len(others)) or found.out_spec != constant.out_spec:
        return False
    if _dynamic_axes(inputs) != _dynamic_axes(others):
        return False
    same = dict(zip(inputs, others, strict=True))
    for node, other in zip(ours, theirs, strict=True):
        if node.target != other.target or not _alike(_operands(node), _operands(other), same):
            return False
        same[node] = other
    return _alike(found.returned, constant.returned, same) and found.mutated.keys() == constant.mutated.keys()


def _placeholders(captured: Captured) -> list[torch.fx.Node]:
    return list(captured.graph.graph.find_nodes(op="placeholder"))


def _dynamic_axes(placeholders: Sequence[torch.fx.Node]) -> list[list[bool]]:
    shapes = (getattr(node.meta.get("val"), "shape", ()) for node in placeholders)
    return [[not isinstance(dim_of(size), int) for size in shape] for shape in shapes]


def _calls(graph: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """The nodes that compute tensors."""
    nodes = (node for node in graph.graph.nodes if node.op not in ("placeholder", "output"))
    return [node for node in nodes if not _is_symbolic(node) and node.meta.get("val") is not None]


def _operands(node: torch.fx.Node) -> tuple[Any, ...]:
    """The operands, with what torch leaves out of a slice only where it has symbols."""
    if node.target is not torch.ops.aten.slice.Tensor:
        return node.args, node.kwargs
    given: list[Any] = [*node.args, *(0, None, None, 1)[len(node.args) - 1 :]]
    start, end = 0 if given[2] is None else given[2], sys.maxsize if given[3] is None else given[3]
    return given[0], given[1], start, end, given[4]


def _is_symbolic(x: Any) -> bool:
    return isinstance(x, torch.fx.Node) and isinstance(x.meta.get("val"), (*py_sym_types, int, float))


def _alike(ours: Any, theirs: Any, same: Mapping[Any, Any]) -> bool:
    leaves, others = pytree.tree_leaves(ours), pytree.tree_leaves(theirs)
    return len(leaves) == len(others) and all(
        _is_symbolic(x) or (same.get(x) is y if isinstance(x, torch.fx.Node) else type(x) is type(y) and x == y)
        for x, y in zip(leaves, others, strict=True)
    )
