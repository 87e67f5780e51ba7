"""The driver: rules by operator, a worklist of nodes, and what every round begins and ends with."""

from __future__ import annotations

import importlib
import logging
import pkgutil
from collections import Counter, deque
from collections.abc import Container, Iterable, Sequence
from functools import cache
from itertools import islice

import onnx_ir as ir

from sardonyx.optimize.fold import fold_constant
from sardonyx.optimize.rule import RULES, Rule
from sardonyx.optimize.scopes import bodies_of, free_tag, graphs_of, is_read, nodes_of, remove_dead
from sardonyx.optimize.sharing import share_common
from sardonyx.translate.builder import Builder

log = logging.getLogger(__name__)

PASSES = ("FoldConstant", "ShareCommon")
"""What runs beside the rules, counted and chosen like them."""
_MOST_HITS = 100
"""Rewrites for each node of the graph, of which a few are usual; more happen only where rules go in circles."""


def all_rules() -> tuple[Rule, ...]:
    """Every rule there is."""
    _load_rules()
    return tuple(RULES)


@cache
def _load_rules() -> None:
    from sardonyx.optimize import rules

    for module in sorted(m.name for m in pkgutil.iter_modules(rules.__path__)):
        importlib.import_module(f"{rules.__name__}.{module}")


def optimize(model: ir.Model, *, domains: Iterable[str] = (), names: Container[str] | None = None) -> Counter[str]:
    """Rewrite the model in place until no rule applies; how often each did.

    `domains` are the operator domains that the engine knows beside ONNX's own; `names` the rules that may run, by
    default all.
    """
    known = {"", *domains}
    rules = [rule for rule in all_rules() if rule.needs in known and (names is None or rule.name in names)]
    fold, share = (names is None or name in names for name in PASSES)
    rewriter = _Rewriter(model, fold=fold, share=share)
    early, late = ([rule for rule in rules if rule.late == turn] for turn in (False, True))
    while True:
        rewriter.exhaust(early)
        if not rewriter.run(late):
            return rewriter.finish()


class _Rewriter:
    def __init__(self, model: ir.Model, *, fold: bool, share: bool) -> None:
        self._graph = model.graph
        self._g = Builder(model.graph.opset_imports[""], tag=free_tag(model.graph))
        self._fold, self._share = fold, share
        for value in (*self._graph.inputs, *self._graph.initializers.values()):
            if "dims" in value.meta:
                self._g.sizes.learn(value, value.meta["dims"])
        self._rules: dict[str, list[Rule]] = {}
        self._registered = 0
        self._most = _MOST_HITS * max(len(nodes_of(self._graph)), 1)
        self.hits: Counter[str] = Counter()

    def exhaust(self, rules: Sequence[Rule]) -> None:
        """Apply the rules until none applies."""
        while True:
            shared = share_common(self._graph) if self._share else 0
            if shared:
                self.hits["ShareCommon"] += shared
            if not self.run(rules):
                break

    def run(self, rules: Iterable[Rule]) -> bool:
        """Work through the graph once, following each rewrite to its neighbours; whether anything changed."""
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
                continue  # replaced meanwhile
            for neighbour in self._visit(node):
                if id(neighbour) not in queued and neighbour.graph is not None:
                    queued.add(id(neighbour))
                    work.append(neighbour)
            if self.hits.total() > self._most:
                log.warning("rules keep undoing one another: %s", dict(self.hits.most_common(3)))
                return False
        return self.hits.total() > before

    def _visit(self, node: ir.Node) -> list[ir.Node]:
        if not is_read(node):
            return remove_dead(node)
        if self._fold and (constant := fold_constant(node, self._g)) is not None:
            return self._replace("FoldConstant", node, (constant,))
        for rule in self._rules.get(node.op_type, ()):
            values = rule.apply(node, self._g)
            if values is not None:
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
        assert isinstance(node.graph, ir.Graph)
        node.graph.insert_before(node, made)
        touched = [*made, *(use.node for output in node.outputs for use in output.uses())]
        for old, new in zip(node.outputs, values, strict=True):
            _take_place(node.graph, old, new)
        self.hits[name] += 1
        return [*touched, *remove_dead(node)]

    def _register_constants(self) -> None:
        """Hand the constants made since the last time to the graph, where every body sees them too."""
        count = len(self._g.initializers)
        for value in islice(reversed(self._g.initializers.values()), count - self._registered):
            self._graph.register_initializer(value)
        self._registered = count

    def finish(self) -> Counter[str]:
        """Clean up what nothing reads, declare domains, and report."""
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
        if not _is_ordered(self._graph):
            self._graph.sort()
        return self.hits


def _is_ordered(graph: ir.Graph) -> bool:
    """Whether every node comes after those it reads, which a rule that finds an existing value may have changed."""
    made: set[int] = set()
    for node in graph:
        within = [inner for body in bodies_of(node) for inner in nodes_of(body)]
        producers = [x.producer() for reader in (node, *within) for x in reader.inputs if x is not None]
        if any(p is not None and p.graph is graph and id(p) not in made for p in producers):
            return False
        made.add(id(node))
    return True


def _take_place(graph: ir.Graph, old: ir.Value, new: ir.Value) -> None:
    """Let all that read a value read another. What a graph returns keeps its name, by which callers ask for it."""
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
