"""The driver: rules by operator, a worklist of nodes, and what every round begins and ends with."""

from __future__ import annotations

import importlib
import logging
import pkgutil
from collections import Counter, deque
from collections.abc import Iterable
from functools import cache

import onnx_ir as ir

from sardonyx.optimize.fold import fold_constant
from sardonyx.optimize.rule import RULES, Rule
from sardonyx.optimize.sharing import share_common
from sardonyx.translate.builder import Builder

log = logging.getLogger(__name__)


@cache
def all_rules() -> tuple[Rule, ...]:
    """Every rule there is."""
    from sardonyx.optimize import rules

    for module in sorted(m.name for m in pkgutil.iter_modules(rules.__path__)):
        importlib.import_module(f"{rules.__name__}.{module}")
    return tuple(RULES)


def optimize(model: ir.Model, *, domains: Iterable[str] = ()) -> Counter[str]:
    """Rewrite the model in place until no rule applies; how often each did.

    `domains` are the operator domains that the engine knows beside ONNX's own.
    """
    rewriter = _Rewriter(model, [rule for rule in all_rules() if not rule.needs or rule.needs in set(domains)])
    while True:
        shared = share_common(model.graph)
        if shared:
            rewriter.hits["ShareCommon"] += shared
        if not rewriter.run():
            break
    return rewriter.finish()


class _Rewriter:
    def __init__(self, model: ir.Model, rules: Iterable[Rule]) -> None:
        self._graph = model.graph
        self._g = Builder(model.graph.opset_imports[""], tag="r")
        for value in (*self._graph.inputs, *self._graph.initializers.values()):
            if "dims" in value.meta:
                self._g.sizes.learn(value, value.meta["dims"])
        self._rules: dict[str, list[Rule]] = {}
        for rule in rules:
            self._rules.setdefault(rule.root, []).append(rule)
        self.hits: Counter[str] = Counter()

    def run(self) -> bool:
        """Work through the graph once, following each rewrite to its neighbours; whether anything changed."""
        before = sum(self.hits.values())
        work = deque(self._graph)
        queued = set(map(id, work))
        while work:
            node = work.popleft()
            queued.discard(id(node))
            if node.graph is None:
                continue  # replaced meanwhile
            for neighbour in self._visit(node):
                if id(neighbour) not in queued and neighbour.graph is not None:
                    queued.add(id(neighbour))
                    work.append(neighbour)
        return sum(self.hits.values()) > before

    def _visit(self, node: ir.Node) -> list[ir.Node]:
        if not node.outputs[0].uses() and not any(o.uses() or o.is_graph_output() for o in node.outputs):
            return _remove_dead(node)
        if (constant := fold_constant(node, self._g)) is not None:
            return self._replace("FoldConstant", node, (constant,))
        for rule in self._rules.get(node.op_type, ()):
            replacement = rule.apply(node, self._g)
            if replacement is not None:
                values = replacement if isinstance(replacement, tuple) else (replacement,)
                return self._replace(rule.name, node, values)
            self._discard()
        return []

    def _discard(self) -> None:
        """Forget what a rule built before it gave up."""
        for node in reversed(self._g.nodes):
            node.resize_inputs(0)
        if self._g.nodes:
            self._g.nodes.clear()
            self._g.sizes.forget([])

    def _replace(self, name: str, node: ir.Node, values: tuple[ir.Value, ...]) -> list[ir.Node]:
        made = list(self._g.nodes)
        self._g.nodes.clear()
        self._g.sizes.forget([])
        self._register_constants()
        for fresh in made:
            fresh.meta.setdefault("fx", None)
            fresh.meta["fx"] = fresh.meta["fx"] or node.meta.get("fx")
        self._graph.insert_before(node, made)
        touched = [*made, *(use.node for output in node.outputs for use in output.uses())]
        for old, new in zip(node.outputs, values, strict=True):
            _take_place(self._graph, old, new)
        self.hits[name] += 1
        return [*touched, *_remove_dead(node)]

    def _register_constants(self) -> None:
        for value in self._g.initializers.values():
            if value.name not in self._graph.initializers:
                self._graph.register_initializer(value)

    def finish(self) -> Counter[str]:
        """Clean up what nothing reads, declare domains, and report."""
        for node in reversed(list(self._graph)):
            if not any(o.uses() or o.is_graph_output() for o in node.outputs):
                _remove_dead(node)
        for name, value in list(self._graph.initializers.items()):
            if not value.uses() and not value.is_graph_output():
                del self._graph.initializers[name]
        for node in self._graph:
            if node.domain:
                self._graph.opset_imports.setdefault(node.domain, 1)
        return self.hits


def _take_place(graph: ir.Graph, old: ir.Value, new: ir.Value) -> None:
    if "dims" not in new.meta and "dims" in old.meta:
        new.meta["dims"], new.shape = old.meta["dims"], old.shape
    if new.dtype is None:
        new.type = old.type
    if old.is_graph_output():
        if new.producer() is None or new.is_graph_output():
            identity = ir.Node("", "Identity", [new], num_outputs=1)
            identity.outputs[0].meta["dims"] = old.meta.get("dims")
            identity.outputs[0].name = f"{old.name}_kept"
            producer = old.producer()
            assert producer is not None
            graph.insert_before(producer, identity)
            new = identity.outputs[0]
        new.shape, new.type = old.shape, old.type
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)


def _remove_dead(node: ir.Node) -> list[ir.Node]:
    """Remove the node and all before it that only it kept alive; the producers whose use count fell."""
    graph = node.graph
    if graph is None or any(o.uses() or o.is_graph_output() for o in node.outputs):
        return [node]
    producers = [x.producer() for x in node.inputs if x is not None]
    graph.remove(node, safe=True)
    affected: list[ir.Node] = []
    for producer in producers:
        if producer is not None and producer.graph is not None:
            affected += _remove_dead(producer)
    return affected
