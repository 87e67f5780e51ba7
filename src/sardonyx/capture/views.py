"""Views, strides and memory order of results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import sympy
import torch

from sardonyx.sizes import Dim, Dims, dim_of, dims_of


def is_view(node: torch.fx.Node) -> bool:
    """Whether the node is a view of its input, by its schema."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or schema.is_mutable:
        return False
    return any(result.alias_info is not None for result in schema.returns)


def views_of_inputs(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Return the chains of views from a graph input to an output.

    AOTAutograd rebuilds such an output from our tensor's strides and base, so it must be torch's own view.
    """
    chains = map(_view_chain, _tensors(graph.output_node().args[0]))
    return {node for root, chain in chains if root.op == "placeholder" for node in chain}


def views_shared_by_outputs(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Return the chains of views whose base is also an output, or the base of another output.

    Such outputs share memory, and a caller may modify one in place; AOTAutograd rebuilds those that need a gradient
    from the strides, the offset and the base of our tensor.
    """
    results = list(dict.fromkeys(_tensors(graph.output_node().args[0])))
    chains = [_view_chain(node) for node in results]
    shared = Counter(root for root, _ in chains)
    return {node for root, chain in chains if shared[root] > 1 for node in chain}


def _view_chain(node: torch.fx.Node) -> tuple[torch.fx.Node, list[torch.fx.Node]]:
    """Return the base of a chain of views, and the views."""
    chain = []
    while node.op == "call_function" and (is_view(node) or _is_item_of_view(node)):
        chain.append(node)
        node = node.all_input_nodes[0]
    return node, chain


def _is_item_of_view(node: torch.fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem" and is_view(node.all_input_nodes[0])


def _tensors(results: Any) -> list[torch.fx.Node]:
    results = results if isinstance(results, (tuple, list)) else (results,)
    return [node for node in results if isinstance(node, torch.fx.Node)]


def rebase_as_strided(graph: torch.fx.Graph) -> None:
    """Apply as_strided to the base of a view, since the view may not cover all of the memory."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.as_strided.default):
        view, size, stride, *rest = node.args
        base = _base(view)
        offset = rest[0] if rest and rest[0] is not None else view.meta["val"].storage_offset()
        if base is not view and base.op == "call_function" and isinstance(offset, (int, torch.fx.Node)):
            node.args = (base, size, stride, offset)


def _base(node: torch.fx.Node) -> torch.fx.Node:
    """Return the base of a chain of views; a reshape, which may copy, is a base."""
    while (is_view(node) and not _is_composite(node.target)) or _is_item_of_view(node):
        node = node.all_input_nodes[0]
    return node


def _is_composite(target: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd")


def layout_of(val: torch.Tensor) -> tuple[int, ...] | None:
    """Return the memory order of the axes, outermost first; None if contiguous or not dense.

    >>> layout_of(torch.empty(2, 3, 4).permute(2, 0, 1))
    (1, 2, 0)
    >>> layout_of(torch.empty(2, 3)) is None
    True
    """
    sizes, strides = [_hint(n) for n in val.shape], [_hint(n) for n in val.stride()]
    order = sorted(range(len(sizes)), key=lambda axis: (-strides[axis], sizes[axis] == 1, axis))
    if order == list(range(len(sizes))) or _is_dense(sizes, strides, range(len(sizes))):
        return None
    return tuple(order) if _is_dense(sizes, strides, order) else None


def input_orders(graph: torch.fx.GraphModule) -> dict[int, tuple[int, ...]]:
    """Return the memory order of the inputs that are permutations of dense memory."""
    vals = [node.meta.get("val") for node in graph.graph.find_nodes(op="placeholder")]
    real = {i: val for i, val in enumerate(vals) if isinstance(val, torch.Tensor) and not val.is_complex()}
    return {i: order for i, val in real.items() if (order := layout_of(val)) is not None}


def strides_to_restore(val: torch.Tensor) -> Dims | None:
    """Return the strides of a result; None if it is dense in the memory order of `layout_of`.

    >>> strides_to_restore(torch.empty(2, 3).t()) is None
    True
    >>> strides_to_restore(torch.empty(2, 6)[:, ::2])
    (6, 2)
    """
    strides = tuple(map(dim_of, val.stride()))
    order = layout_of(val) or range(val.dim())
    return None if strides == _dense_strides(dims_of(val), order) else strides


def _dense_strides(sizes: Dims, order: Sequence[int]) -> Dims:
    """Return the strides of dense memory in this order."""
    strides: list[Dim] = [1] * len(sizes)
    step: Dim = 1
    for axis in reversed(order):
        strides[axis] = step
        step = dim_of(step * (1 if sizes[axis] == 0 else sizes[axis]))
    return tuple(strides)


def _is_dense(sizes: list[int], strides: list[int], order: Any) -> bool:
    expected = 1
    for axis in reversed(list(order)):
        if sizes[axis] != 1 and strides[axis] != expected:
            return 0 in sizes
        expected *= max(sizes[axis], 1)
    return True


def _hint(number: Any) -> int:
    return number if isinstance(number, int) else int(number.node.hint if number.node.has_hint() else 2)


# Copies


_COPIES_OR_VIEWS = frozenset(
    {
        *(torch.ops.aten.reshape.default, torch.ops.aten.flatten.using_ints, torch.ops.aten.ravel.default),
        torch.ops.aten.contiguous.default,
    }
)


def copies_of_more_than_one(graph: torch.fx.Graph) -> Iterator[tuple[sympy.Expr, torch.fx.Node]]:
    """Yield the nodes that copy, but would return a view if a size were one, and that the size is another."""
    for node in graph.nodes:
        source = node.args[0].meta.get("val") if node.target in _COPIES_OR_VIEWS else None
        if isinstance(source, torch.Tensor):
            sizes, strides = dims_of(source), tuple(map(dim_of, source.stride()))
            symbols = {symbol for dim in (*sizes, *strides) for symbol in sympy.sympify(dim).free_symbols}
            for symbol in symbols if not _is_contiguous(sizes, strides) else ():
                small = ([sympy.sympify(dim).subs(symbol, 1) for dim in dims] for dims in (sizes, strides))
                if _is_contiguous(*small):
                    yield sympy.Ne(symbol, 1), node


def _is_contiguous(sizes: Sequence[Any], strides: Sequence[Any]) -> bool:
    step: Any = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size != 1 and stride != step:
            return False
        step = step * size
    return True
