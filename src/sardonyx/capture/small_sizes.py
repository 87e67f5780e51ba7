"""Dynamic sizes of zero and one: torch.export traces them as two or more, and has no guard for what depends on it.

`if x.shape[0] == 1` takes the other branch, and `x[:2]` has two rows. Where a trace made such a decision, the model and
the graph run once with the small size: if they differ, calls with that size are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import sympy
import torch
from torch.utils import _pytree as pytree

from sardonyx.capture.conditions import environment_of
from sardonyx.capture.example import ExampleCall
from sardonyx.capture.export import Captured
from sardonyx.sizes import allow_zeros, dims_of

_SMALL = (1, 0)


def small_size_conditions(call: ExampleCall, captured: Captured) -> Iterator[tuple[sympy.Expr, str]]:
    """Yield that a size is not zero or one, if that gives other results, with the line of the decision."""
    values = [node.meta.get("val") for node in captured.graph.graph.find_nodes(op="placeholder")]
    environment = environment_of(values)
    lines: dict[tuple[sympy.Symbol, int], str] = {}
    for decision, line in captured.decisions if environment is not None else ():
        expr = allow_zeros(environment.replace(decision), environment)
        others = [(symbol, size) for symbol in expr.free_symbols for size in _SMALL if _is_other(expr, symbol, size)]
        lines |= {other: line for other in others if other not in lines}
    for (symbol, size), line in lines.items():
        if not _agree(call, captured, values, symbol, size):
            yield sympy.Ne(symbol, size), line


def _is_other(expr: sympy.Expr, symbol: sympy.Symbol, size: int) -> bool:
    """Whether a size that is possible decides otherwise."""
    is_possible = size > 0 or not symbol.is_positive
    return is_possible and expr.subs(symbol, size) == sympy.false


def _agree(call: ExampleCall, captured: Captured, placeholders: Sequence[Any], symbol: sympy.Symbol, size: int) -> bool:
    """Whether the model and its graph give the same results where a size is a small one."""
    leaves, spec = pytree.tree_flatten(call.call)
    small = list(leaves)
    for index, place in captured.inputs.items():
        if isinstance(leaves[place], torch.Tensor) and isinstance(placeholders[index], torch.Tensor):
            axes = [axis for axis, dim in enumerate(dims_of(placeholders[index])) if dim == symbol]
            for axis in axes:
                small[place] = small[place].narrow(axis, 0, min(size, small[place].shape[axis]))
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
            results = torch.fx.Interpreter(captured.graph).run(*inputs)
        except Exception:
            return False
    return _are_close(_returned(captured, results), pytree.tree_leaves(expected))


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
