"""The rewrite driver: rules indexed by operator, a worklist of nodes, and passes between rounds."""

from __future__ import annotations

import importlib
import logging
import pkgutil
from collections import Counter, deque
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import cache
from itertools import islice

import onnx_ir as ir

from sardonyx.optimize.cse import eliminate_common_subexpressions
from sardonyx.optimize.fold import fold_constant
from sardonyx.optimize.rule import RULES, Rule
from sardonyx.optimize.subgraphs import bodies_of, graphs_of, is_read, nodes_of, remove_dead, unused_tag
from sardonyx.translate.builder import Builder

log = logging.getLogger(__name__)

PASSES = ("FoldConstant", "ShareCommon")
"""Passes besides the rules, counted and selected like them."""
_MAX_HITS_PER_NODE = 100
"""The limit of rewrites for each node of the graph: a few are usual, more mean that rules undo each other."""


def all_rules() -> tuple[Rule, ...]:
    """Return every rule."""
    _load_rules()
    return tuple(RULES)


@cache
def _load_rules() -> None:
    from sardonyx.optimize import rules

    for module in sorted(m.name for m in pkgutil.iter_modules(rules.__path__)):
        importlib.import_module(f"{rules.__name__}.{module}")


def optimize(model: ir.Model, *, domains: Iterable[str] = (), names: Container[str] | None = None) -> Counter[str]:
    """Rewrite the model in place until no rule applies; return how often each applied.

    `domains` are the operator domains that the engine supports besides ONNX's own; `names` are the rules to run, by
    default all.
    """
    known = {"", *domains}
    rules = [rule for rule in all_rules() if rule.needs in known and (names is None or rule.name in names)]
    fold, cse = (names is None or name in names for name in PASSES)
    rewriter = _Rewriter(model, fold=fold, cse=cse)
    early = [rule for rule in rules if not rule.late and not rule.last]
    late, last = [rule for rule in rules if rule.late], [rule for rule in rules if rule.last]
    rewriter.run_to_fixpoint(early)
    while rewriter.run(late):
        rewriter.run_to_fixpoint(early)
    if last:
        rewriter.run_to_fixpoint(last)
    return rewriter.finish()


class _Rewriter:
    def __init__(self, model: ir.Model, *, fold: bool, cse: bool) -> None:
        self._graph = model.graph
        self._g = Builder(model.graph.opset_imports[""], tag=unused_tag(model.graph))
        self._fold, self._cse = fold, cse
        for value in (*self._graph.inputs, *self._graph.initializers.values()):
            if "dims" in value.meta:
                self._g.sizes.learn(value, value.meta["dims"])
        self._rules: dict[str, list[Rule]] = {}
        self._registered = 0
        self._max_hits = _MAX_HITS_PER_NODE * max(len(nodes_of(self._graph)), 1)
        self.hits: Counter[str] = Counter()

    def run_to_fixpoint(self, rules: Sequence[Rule]) -> None:
        """Apply the rules until none applies."""
        while True:
            removed = eliminate_common_subexpressions(self._graph) if self._cse else 0
            if removed:
                self.hits["ShareCommon"] += removed
            if not self.run(rules):
                break

    def run(self, rules: Iterable[Rule]) -> bool:
        """Apply rules to all nodes once, and to the neighbours of each rewrite; return whether anything changed."""
        self._rules = {}
        for rule in rules:
            self._rules.setdefault(rule.root, []).append(rule)
        before = self.hits.total()
        work = deque(nodes_of(self._graph))
        queued = set(map(id, work))
        while work:
            node = work.popleft()
            queued.discard(id(node))
            if node.graph is None:
                continue  # already removed
            for neighbour in self._visit(node):
                if id(neighbour) not in queued and neighbour.graph is not None:
                    queued.add(id(neighbour))
                    work.append(neighbour)
            if self.hits.total() > self._max_hits:
                log.warning("rules undo each other; stopping: %s", dict(self.hits.most_common(3)))
                return False
        return self.hits.total() > before

    def _visit(self, node: ir.Node) -> list[ir.Node]:
        if not is_read(node):
            return remove_dead(node)
        if self._fold and (constant := fold_constant(node, self._g)) is not None:
            return self._replace("FoldConstant", node, {node.outputs[0]: constant})
        for rule in self._rules.get(node.op_type, ()):
            values = rule.apply(node, self._g)
            if values is not None:
                return self._replace(rule.name, node, values)
            self._discard()
        return []

    def _discard(self) -> None:
        """Discard nodes built by a rule that then refused."""
        for node in reversed(self._g.nodes):
            node.resize_inputs(0)
        if self._g.nodes:
            self._g.nodes.clear()
            self._g.sizes.forget([])

    def _replace(self, name: str, node: ir.Node, values: Mapping[ir.Value, ir.Value]) -> list[ir.Node]:
        nodes = list(self._g.nodes)
        self._g.nodes.clear()
        self._g.sizes.forget([])
        self._register_constants()
        for added in nodes:
            added.meta.setdefault("fx", None)
            added.meta["fx"] = added.meta["fx"] or node.meta.get("fx")
        assert isinstance(node.graph, ir.Graph)
        node.graph.insert_before(node, nodes)
        touched = [*nodes, *(use.node for old in values for use in old.uses())]
        for old, new in values.items():
            _replace_value(node.graph, old, new)
        self.hits[name] += 1
        return [*touched, *remove_dead(node)]

    def _register_constants(self) -> None:
        """Add new constants to the main graph, where bodies see them too."""
        count = len(self._g.initializers)
        for value in islice(reversed(self._g.initializers.values()), count - self._registered):
            self._graph.register_initializer(value)
        self._registered = count

    def finish(self) -> Counter[str]:
        """Remove unused nodes and initializers, declare domains, and return the counts."""
        for node in reversed(nodes_of(self._graph)):
            remove_dead(node)
        for graph in graphs_of(self._graph):
            for name, value in list(graph.initializers.items()):
                if not value.uses() and not value.is_graph_output():
                    del graph.initializers[name]
        for node in nodes_of(self._graph):
            if node.domain:
                imports = self._graph.opset_imports
                imports[node.domain] = max(imports.get(node.domain, 1), node.version or 1)
        if not all(map(_is_sorted, graphs_of(self._graph))):
            self._graph.sort()
        return self.hits


def _is_sorted(graph: ir.Graph) -> bool:
    """Whether every node comes after those that it reads; a rule that reuses an existing value can break this."""
    visited: set[int] = set()
    for node in graph:
        within = [inner for body in bodies_of(node) for inner in nodes_of(body)]
        producers = [x.producer() for reader in (node, *within) for x in reader.inputs if x is not None]
        if any(p is not None and p.graph is graph and id(p) not in visited for p in producers):
            return False
        visited.add(id(node))
    return True


def _replace_value(graph: ir.Graph, old: ir.Value, new: ir.Value) -> None:
    """Replace all uses of a value. A graph output keeps its name, by which callers identify it."""
    if "dims" not in new.meta and "dims" in old.meta:
        new.meta["dims"], new.shape = old.meta["dims"], old.shape
    if new.dtype is None:
        new.type = old.type
    returned = old.is_graph_output()
    if returned:
        producer = new.producer()
        if producer is None or producer.graph is not graph or new.is_graph_output():
            identity = ir.Node("", "Identity", [new], num_outputs=1)
            if "dims" in old.meta:
                identity.outputs[0].meta["dims"] = old.meta["dims"]
            before = old.producer()
            assert before is not None
            graph.insert_before(before, identity)
            new = identity.outputs[0]
        new.shape, new.type, new.name = old.shape, old.type, old.name
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=returned)
