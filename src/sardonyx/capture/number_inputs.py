"""Make Python numbers of an exported call inputs of its graph, if the graph does not depend on their values."""

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

from sardonyx.capture.conditions import Condition, assumptions, condition_function, sizes_or_number
from sardonyx.capture.dynamic import leaf_specs, names_of_sizes, names_to_dim_hints, parse_example, unify_sizes
from sardonyx.capture.example import ExampleCall, is_number
from sardonyx.capture.export import Captured, capture
from sardonyx.capture.fake_graph import has_fake_arguments
from sardonyx.capture.small_sizes import small_size_conditions
from sardonyx.errors import CaptureError
from sardonyx.sizes import dim_of, dims_of, size_at

_MAX_SINGLE_ATTEMPTS = 8
"""If not all numbers can be inputs together, up to so many are tried one by one: each attempt is a trace."""


def capture_call(call: ExampleCall, specs: Mapping[str, Any], preserved: Collection[str] = ()) -> Captured:
    """Trace a call with these specs of dynamic sizes."""
    args, kwargs = call.call
    shapes = None if all(spec is None for spec in specs.values()) else names_to_dim_hints(dict(specs))
    # A graph that a backend receives has no argument names, and is not called by its forward.
    with nullcontext() if has_fake_arguments(args, kwargs) else call.patched_forward():
        captured = capture(call.model, args, kwargs, shapes, preserved, empty=True)
    unify_sizes(call, captured, specs)
    return captured


@dataclass(frozen=True)
class TracedCall:
    """A call and its traced graph, in which some numbers of the call are inputs."""

    call: ExampleCall
    captured: Captured
    specs: Mapping[str, Any]
    """The specs of dynamic sizes, by argument."""
    constant: Captured
    """The trace in which all numbers are constants."""
    preserved: Collection[str]

    @classmethod
    def of(cls, call: ExampleCall, specs: Mapping[str, Any], preserved: Collection[str]) -> TracedCall:
        """Trace a call; operators named in `preserved` are not decomposed."""
        captured = capture_call(call, specs, preserved)
        return cls(call, captured, specs, captured, preserved)

    def candidates(self) -> list[int]:
        """Return the flattened arguments that are numbers without a spec."""
        declared = leaf_specs(self.call, self.specs)
        return [
            place for place, (_, leaf) in enumerate(self.call.leaves) if is_number(leaf) and declared[place] is None
        ]

    def with_numbers(self, places: Collection[int]) -> TracedCall:
        """Return the call with as many of these numbers as inputs as possible.

        A number can be an input if the graph is the same when it is a symbol. It cannot if control flow depends on its
        value or its class: `isinstance(n, int)` is False for a symbol.
        """
        traced = self._attempt(places)
        if traced is not None:
            return traced
        best = replace(self, call=self.call.with_numbers(()), captured=self.constant)
        for place in places if 1 < len(places) <= _MAX_SINGLE_ATTEMPTS else ():
            best = self._attempt([*best.call.numbers, place]) or best
        return best

    def _attempt(self, places: Collection[int]) -> TracedCall | None:
        if not places:
            return None
        call = self.call.with_numbers(places)
        try:
            with redirect_stderr(StringIO()), _without_torch_logs():
                captured = capture_call(call, self.specs, self.preserved)
        except Exception:  # torch may fail anywhere on a symbol; the trace with constants succeeded
            return None
        return replace(self, call=call, captured=captured) if _same_graph(captured, self.constant) else None

    def numbers_of(self, nodes: Iterable[torch.fx.Node]) -> frozenset[int]:
        """Return the numbers that any of these nodes reads."""
        symbols = self.symbols()
        read: set[Any] = set()
        for node in nodes:
            for source in node.all_input_nodes:
                value = source.meta.get("val")
                read |= value.node.expr.free_symbols if isinstance(value, py_sym_types) else set()
        return frozenset(place for symbol, place in symbols.items() if symbol in read)

    def symbols(self) -> dict[sympy.Symbol, int]:
        """Return the symbol of each number that is an input, with its index among the flattened arguments."""
        nodes = self.captured.graph.graph.find_nodes(op="placeholder")
        places = {node: self.captured.inputs.get(index) for index, node in enumerate(nodes)}
        return {
            node.meta["val"].node.expr: place
            for node in self.captured.graph.graph.find_nodes(op="call_function", target=torch.ops.aten.item.default)
            if (place := places.get(node.args[0])) in self.call.numbers and place is not None
        }

    def names_of_sizes(self) -> dict[sympy.Symbol, str]:
        """Return the user's names of symbolic sizes."""
        return names_of_sizes(self.call, self.captured, self.specs)

    def conditions(self) -> list[Condition]:
        """Return the guards of the graph on sizes and numbers of the call."""
        read = self._symbol_indices()
        names = {symbol: sympy.Symbol(self._size_names()[at]) for symbol, at in read.items()} | {
            symbol: sympy.Symbol(name) for symbol, name in self.names_of_sizes().items()
        }
        captured = self.captured
        expressions = (*assumptions(captured.graph, captured.equations), *small_size_conditions(self.call, captured))
        assumed = [
            Condition(str(expr.xreplace(names)), holds, where)
            for expr, where in expressions
            if (holds := condition_function(expr, read)) is not None
        ]
        return assumed + self._equalities(read, names)

    def _equalities(
        self, read: Mapping[sympy.Symbol, int], names: Mapping[sympy.Symbol, sympy.Symbol]
    ) -> list[Condition]:
        """Return the conditions that sizes are equal which the trace unified, or expressed by others."""
        conditions = []
        for place, dim in self._symbolic_dims().items():
            if read.get(dim) != place:
                size = size_at(place)
                holds = condition_function(sympy.Eq(size, dim), {**read, size: place})
                text = f"{self._size_names()[place]} == {dim.xreplace(names)}"
                conditions += [Condition(text, holds)] if holds is not None else []
        return conditions

    def _symbolic_dims(self) -> dict[int, sympy.Expr]:
        """Return the symbolic sizes of tensors that the graph reads, by index among the sizes of all arguments."""
        nodes = self.captured.graph.graph.find_nodes(op="placeholder")
        starts = list(itertools.accumulate((len(sizes_or_number(leaf)) for _, leaf in self.call.leaves), initial=0))
        read = [(nodes[index], starts[place]) for index, place in self.captured.inputs.items() if nodes[index].users]
        tensors = [(node.meta["val"], start) for node, start in read if isinstance(node.meta.get("val"), torch.Tensor)]
        sizes = ((start + axis, dim) for value, start in tensors for axis, dim in enumerate(dims_of(value)))
        return {place: dim for place, dim in sizes if not isinstance(dim, int)}

    def _symbol_indices(self) -> dict[sympy.Symbol, int]:
        """Return the index of each symbol among the sizes and numbers of all arguments."""
        values = [node.meta.get("val") for node in self.captured.graph.graph.find_nodes(op="placeholder")]
        starts = list(itertools.accumulate((len(sizes_or_number(leaf)) for _, leaf in self.call.leaves), initial=0))
        read = {symbol: starts[place] for symbol, place in self.symbols().items()}
        for index, place in self.captured.inputs.items():
            if place not in self.call.numbers:
                sizes = sizes_or_number(values[index])
                symbols = {dim_of(x): starts[place] + i for i, x in enumerate(sizes) if isinstance(x, torch.SymInt)}
                read |= {symbol: at for symbol, at in symbols.items() if symbol not in read}
        return {symbol: at for symbol, at in read.items() if isinstance(symbol, sympy.Symbol)}

    def _size_names(self) -> list[str]:
        """Return the names of the sizes and numbers of all arguments."""
        names: list[str] = []
        for path, leaf in self.call.leaves:
            is_tensor = isinstance(leaf, torch.Tensor)
            names += [f"{path}.shape[{axis}]" for axis in range(leaf.dim())] if is_tensor else [path]
        return names


def refuse_constant_floats(traced: TracedCall, examples: Sequence[Any]) -> None:
    """Raise for a float that differs between the example calls and could not become an input."""
    first = traced.call.leaves
    for example in examples:
        call = ExampleCall.of(traced.call.model, *parse_example(example, *traced.call.call))
        for place, ((path, one), (_, other)) in enumerate(zip(first, call.leaves, strict=True)):
            if isinstance(one, float) and one != other and place not in traced.call.numbers:
                raise CaptureError(
                    f"{path} is {one!r} in one example and {other!r} in another, and cannot be an input of the model",
                    hint="control flow depends on its value, or no ONNX operator takes it: pass it as a tensor",
                )


@contextmanager
def _without_torch_logs() -> Iterator[None]:
    """While active, torch does not log a failing trace."""
    loggers = [logging.getLogger(name) for name in _TORCH_LOGGERS]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


_TORCH_LOGGERS = ("torch.fx.experimental.symbolic_shapes", "torch.export._trace")


# Comparison of graphs


def _same_graph(symbolic: Captured, constant: Captured) -> bool:
    """Whether two graphs call the same operators with the same operands, numbers of one being symbols in the other."""
    ours, theirs = _calls(symbolic.graph), _calls(constant.graph)
    inputs, others = _placeholders(symbolic), _placeholders(constant)
    if (len(ours), len(inputs)) != (len(theirs), len(others)) or symbolic.out_spec != constant.out_spec:
        return False
    if _dynamic_axes(inputs) != _dynamic_axes(others):
        return False
    same = dict(zip(inputs, others, strict=True))
    for node, other in zip(ours, theirs, strict=True):
        if node.target != other.target or not _same_operands(_operands(node), _operands(other), same):
            return False
        same[node] = other
    return (
        _same_operands(symbolic.returned, constant.returned, same)
        and symbolic.mutated.keys() == constant.mutated.keys()
    )


def _placeholders(captured: Captured) -> list[torch.fx.Node]:
    return list(captured.graph.graph.find_nodes(op="placeholder"))


def _dynamic_axes(placeholders: Sequence[torch.fx.Node]) -> list[list[bool]]:
    shapes = (getattr(node.meta.get("val"), "shape", ()) for node in placeholders)
    return [[not isinstance(dim_of(size), int) for size in shape] for shape in shapes]


def _calls(graph: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """Return the nodes that compute tensors."""
    nodes = (node for node in graph.graph.nodes if node.op not in ("placeholder", "output"))
    return [node for node in nodes if not _is_symbolic(node) and node.meta.get("val") is not None]


def _operands(node: torch.fx.Node) -> tuple[Any, ...]:
    """Return the operands; those of a slice with defaults filled in, which torch omits only if it has symbols."""
    if node.target is not torch.ops.aten.slice.Tensor:
        return node.args, node.kwargs
    args: list[Any] = [*node.args, *(0, None, None, 1)[len(node.args) - 1 :]]
    start, end = 0 if args[2] is None else args[2], sys.maxsize if args[3] is None else args[3]
    return args[0], args[1], start, end, args[4]


def _is_symbolic(x: Any) -> bool:
    return isinstance(x, torch.fx.Node) and isinstance(x.meta.get("val"), (*py_sym_types, int, float))


def _same_operands(ours: Any, theirs: Any, same: Mapping[Any, Any]) -> bool:
    leaves, others = pytree.tree_leaves(ours), pytree.tree_leaves(theirs)
    return len(leaves) == len(others) and all(
        _is_symbolic(x) or (same.get(x) is y if isinstance(x, torch.fx.Node) else type(x) is type(y) and x == y)
        for x, y in zip(leaves, others, strict=True)
    )
