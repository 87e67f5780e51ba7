"""Dynamic sizes of zero and one: torch.export traces them as two or more, and has no guard for what depends on it.

`if x.shape[0] == 1` takes the other branch, `x[:2]` has two rows, and `x[1:]` of no rows has minus one. Where a trace
made such a decision, the model and the graph run once with the small size; with zero they do in any case, as operators
in C++ decide by it without a trace, unless some are not torch's own: those may crash without elements. Calls with that
size are refused if the results differ, or if an operator whose translation may rely on the traced sizes has others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import sympy
import torch
from sympy.core.relational import Relational
from torch.utils import _pytree as pytree

from sardonyx.capture.conditions import sizes_or_number
from sardonyx.capture.example import ExampleCall
from sardonyx.capture.export import Captured
from sardonyx.sizes import Dim, allow_zeros, dim_of, dims_of, environment_of, value_of
from sardonyx.telemetry.source import source_of

_SMALL = (1, 0)


def small_size_conditions(call: ExampleCall, captured: Captured) -> Iterator[tuple[sympy.Expr, str]]:
    """Yield that a size is not zero or one, if that gives other results, with the line of the decision if known."""
    values = [node.meta.get("val") for node in captured.graph.graph.find_nodes(op="placeholder")]
    environment = environment_of(values)
    if environment is None:
        return
    sizes = _sizes_of_call(call, captured, values)
    lines: dict[tuple[sympy.Symbol, int], str] = {}
    for decision, line in captured.decisions:
        expr = _allow_zeros(decision, environment)
        others = [(symbol, size) for symbol in expr.free_symbols for size in _SMALL if _is_other(expr, symbol, size)]
        lines |= {other: line for other in others if other not in lines}
    for symbol, node in _negative_sizes(captured.graph, sizes):
        lines.setdefault((symbol, 0), source_of(node))
    if _is_torchs_own(captured.graph):
        for symbol in sizes:
            if not symbol.is_positive:
                lines.setdefault((symbol, 0), "")
    for (symbol, size), line in lines.items():
        if not _agree(call, captured, values, symbol, {**sizes, symbol: size}):
            yield sympy.Ne(symbol, size), line


def _is_torchs_own(graph: torch.fx.GraphModule) -> bool:
    """Whether every operator of a graph is one of ATen."""
    nodes = (node for module in graph.modules() for node in getattr(getattr(module, "graph", None), "nodes", ()))
    operators = (node.target for node in nodes if isinstance(node.target, torch._ops.OpOverload))
    return all(operator.namespace in ("aten", "prim", "prims") for operator in operators)


def _allow_zeros(decision: sympy.Expr, environment: Any) -> sympy.Expr:
    """Return a decision of symbols that may be zero; its sides one by one, as torch's symbols would decide it."""
    if isinstance(decision, Relational):
        return decision.func(*(allow_zeros(environment.replace(side), environment) for side in decision.args))
    return allow_zeros(environment.replace(decision), environment)


def _sizes_of_call(call: ExampleCall, captured: Captured, placeholders: Sequence[Any]) -> dict[Any, int]:
    """Return the value of each symbol that is a size of an argument, or an argument itself."""
    leaves = pytree.tree_leaves(call.call)
    found: dict[Any, Any] = {}
    for index, place in captured.inputs.items():
        if isinstance(leaves[place], (int, torch.Tensor)):
            found |= dict(zip(_sizes_in(placeholders[index]), sizes_or_number(leaves[place]), strict=False))
    return {symbol: int(size) for symbol, size in found.items() if isinstance(symbol, sympy.Symbol)}


def _sizes_in(value: Any) -> list[Dim]:
    """Return the sizes of a tensor, or of those in a tuple, or an integer."""
    if isinstance(value, torch.Tensor):
        return list(dims_of(value))
    if isinstance(value, (tuple, list)):
        return [size for item in value for size in _sizes_in(item)]
    return [dim_of(value)] if isinstance(value, (int, torch.SymInt)) else []


def _negative_sizes(graph: torch.fx.GraphModule, sizes: dict[Any, int]) -> Iterator[tuple[sympy.Symbol, torch.fx.Node]]:
    """Yield the symbols for which a tensor would have a negative size if they were zero.

    For torch every symbol is positive, so that it decides nothing where it takes `x[1:]` to have one row less.
    """
    nodes = {
        dim: node
        for node in reversed(graph.graph.nodes)
        if isinstance(node.meta.get("val"), (torch.Tensor, tuple, list))
        for dim in _sizes_in(node.meta["val"])
        if isinstance(dim, sympy.Add) and dim.free_symbols <= sizes.keys()
    }
    for dim, node in nodes.items():
        for symbol in dim.free_symbols:
            if not symbol.is_positive and value_of(dim, {**sizes, symbol: 0}) < 0:
                yield symbol, node


def _is_other(expr: sympy.Expr, symbol: sympy.Symbol, size: int) -> bool:
    """Whether a size that is possible decides otherwise."""
    is_possible = size > 0 or not symbol.is_positive
    return is_possible and expr.subs(symbol, size) == sympy.false


def _agree(
    call: ExampleCall, captured: Captured, placeholders: Sequence[Any], symbol: sympy.Symbol, sizes: dict[Any, int]
) -> bool:
    """Whether the model and its graph give the same results at these sizes, of which the symbol's is a small one."""
    leaves, spec = pytree.tree_flatten(call.call)
    small = list(leaves)
    for index, place in captured.inputs.items():
        small[place] = _narrowed(leaves[place], placeholders[index], symbol, sizes)
    inputs = [
        captured.weights[i][1] if i in captured.weights else small[captured.inputs[i]] for i in range(len(placeholders))
    ]
    gpus = {x.device for x in inputs if isinstance(x, torch.Tensor) and x.device.type == "cuda"}
    with torch.no_grad(), torch.random.fork_rng(devices=list(gpus)):
        torch.manual_seed(0)
        try:
            expected = _run_model(call, pytree.tree_unflatten(small, spec))
        except Exception:
            return True  # it has no results for this size
        torch.manual_seed(0)
        try:
            results = _SizeCheckingInterpreter(captured.graph, sizes).run(*inputs)
        except Exception:
            return False
    return _are_close(_returned(captured, results), pytree.tree_leaves(expected))


def _narrowed(value: Any, traced: Any, symbol: sympy.Symbol, sizes: dict[Any, int]) -> Any:
    """Return a tensor cut to these sizes along the axes that depend on the symbol."""
    if not isinstance(value, torch.Tensor) or not isinstance(traced, torch.Tensor):
        return value
    for axis, dim in enumerate(dims_of(traced)):
        if isinstance(dim, sympy.Expr) and symbol in dim.free_symbols and dim.free_symbols <= sizes.keys():
            value = value.narrow(axis, 0, min(value_of(dim, sizes), value.shape[axis]))
    return value


class _SizeCheckingInterpreter(torch.fx.Interpreter):
    """Raises if an operator's operands or results have other sizes than the trace says, and it may rely on those."""

    def __init__(self, graph: torch.fx.GraphModule, sizes: dict[Any, int]) -> None:
        super().__init__(graph)
        self._sizes = sizes
        self._others: set[torch.fx.Node] = set()

    def run_node(self, n: torch.fx.Node) -> Any:
        result = self._view(n) if n.target in _VIEWS else super().run_node(n)
        pairs = zip(_sizes_in(n.meta.get("val")), _sizes_in(result), strict=False)
        if any(self._differ(traced, actual) for traced, actual in pairs):
            self._others.add(n)
        if not _is_free_of_sizes(n) and not self._others.isdisjoint([n, *n.all_input_nodes]):
            raise ValueError(f"{n} has sizes that the trace excludes")
        return result

    def _view(self, n: torch.fx.Node) -> Any:
        """Run a view with the sizes of the trace: torch does not infer one of a tensor without elements."""
        (x, shape), _ = self.fetch_args_kwargs_from_env(n)
        dims = dims_of(n.meta["val"])
        if -1 in shape and all(map(self._is_known, dims)):
            shape = [value_of(dim, self._sizes) for dim in dims]
        return self.call_function(n.target, (x, shape), {})

    def _is_known(self, dim: Dim) -> bool:
        return isinstance(dim, int) or dim.free_symbols <= self._sizes.keys()

    def _differ(self, traced: Dim, actual: Dim) -> bool:
        return self._is_known(traced) and value_of(traced, self._sizes) != actual


def _is_free_of_sizes(node: torch.fx.Node) -> bool:
    """Whether the translation of a node reads no traced size."""
    if node.op != "call_function":
        return True
    return node.target in _FREE_OF_SIZES or torch.Tag.pointwise in getattr(node.target, "tags", ())


_ATEN = torch.ops.aten
_VIEWS = frozenset({_ATEN.view.default, _ATEN.reshape.default})
_FREE_OF_SIZES = frozenset(
    {
        *(_ATEN.slice.Tensor, _ATEN.transpose.int, _ATEN.permute.default),
        *(_ATEN.to.dtype, _ATEN._to_copy.default, _ATEN._assert_tensor_metadata.default),
    }
)


def _run_model(call: ExampleCall, arguments: Any) -> Any:
    args, kwargs = pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, arguments)
    buffers = {name: buffer.clone() for name, buffer in call.model.named_buffers()}
    with call.patched_forward():
        return torch.func.functional_call(call.model, buffers, args, kwargs)


def _returned(captured: Captured, results: Sequence[Any]) -> list[Any]:
    """Return the results of the graph that are the model's."""
    nodes: Any = captured.graph.graph.output_node().args[0]
    values = dict(zip((id(node) for node in nodes), results, strict=True))
    return [values.get(id(result), result) for result in captured.returned]


def _are_close(results: Sequence[Any], expected: Sequence[Any]) -> bool:
    try:
        torch.testing.assert_close(list(results), list(expected), rtol=1e-3, atol=1e-3, equal_nan=True)
    except (AssertionError, ValueError, TypeError):
        return False
    return True
