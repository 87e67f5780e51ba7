"""Rewrite rules: a pattern, and a function that checks the match and builds the replacement."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import onnx_ir as ir

from sardonyx.errors import Unsupported
from sardonyx.optimize.pattern import Bindings, Pattern
from sardonyx.sizes import Dims
from sardonyx.translate.builder import Builder

log = logging.getLogger(__name__)

Replacement: TypeAlias = "ir.Value | tuple[ir.Value, ...] | Mapping[ir.Value, ir.Value]"
"""For a node: its new result, all its new results, or new values for any values of the graph."""
Rewrite: TypeAlias = Callable[["Match"], Replacement]


class Refused(Exception):
    """A check of a rule failed; the message says which."""


class Match:
    """A match of a pattern. Bound values are attributes; `g` builds the replacement."""

    def __init__(self, node: ir.Node, bound: Bindings, g: Builder) -> None:
        self.node, self.g, self._bound = node, g, bound
        self.result = node.outputs[0]

    def __getattr__(self, name: str) -> ir.Value:
        try:
            return self._bound[name]
        except KeyError:
            raise AttributeError(name) from None

    def require(self, condition: bool, reason: str) -> None:
        """Refuse the match with this reason, unless the condition holds."""
        if not condition:
            raise Refused(reason)

    def dims(self, value: ir.Value) -> Dims:
        """Return the sizes of a value; refuse the match if they are unknown."""
        dims: Dims | None = value.meta.get("dims")
        if dims is None:
            raise Refused(f"the shape of {value.name} is unknown")
        return dims

    def attribute(self, value: ir.Value, name: str, default: Any = None) -> Any:
        """Return an attribute of the node that computes the value."""
        producer = value.producer()
        assert producer is not None
        return producer.attributes[name].value if name in producer.attributes else default


@dataclass(frozen=True)
class Rule:
    """A named rewrite. `needs` is the operator domain that the engine must support.

    A `late` rule runs when no other rule applies any more, because it would hide patterns of others. A `last` rule runs
    when all are done, because others would undo it.
    """

    name: str
    root: str
    matches: Callable[[ir.Node], Iterator[Bindings]]
    rewrite: Rewrite
    doc: str
    needs: str = ""
    late: bool = False
    last: bool = False

    def apply(self, node: ir.Node, g: Builder) -> Mapping[ir.Value, ir.Value] | None:
        """Return the replacements of values, or None; the reason is logged."""
        for bound in self.matches(node):
            try:
                replacement = self.rewrite(Match(node, bound, g))
                if isinstance(replacement, Mapping):
                    return replacement
                values = replacement if isinstance(replacement, tuple) else (replacement,)
                if len(values) != len(node.outputs):
                    raise Refused("it has more outputs")
                return dict(zip(node.outputs, values, strict=True))
            except (Refused, Unsupported) as refusal:
                log.debug("%s refused at %s: %s", self.name, node.outputs[0].name, refusal)
        return None


def rule_name(text: str) -> str:
    """Return the name of a rule from that of its function.

    >>> rule_name("drop_double_not")
    'DropDoubleNot'
    """
    return "".join(part.capitalize() for part in text.split("_"))


RULES: list[Rule] = []
"""All rules, in the order in which they are tried at a node."""


def rule(*patterns: Pattern, needs: str = "", late: bool = False, last: bool = False) -> Callable[[Rewrite], Rewrite]:
    """Register a function as the rewrite of one or more patterns; the rule has its name in CamelCase."""

    def register(rewrite: Rewrite) -> Rewrite:
        name = rule_name(rewrite.__name__)
        for pattern in patterns:

            def matches(node: ir.Node, pattern: Pattern = pattern) -> Iterator[Bindings]:
                return pattern.matches(node, {})

            RULES.append(Rule(name, pattern.op_type, matches, rewrite, rewrite.__doc__ or "", needs, late, last))
        return rewrite

    return register


def rule_at(*op_types: str, needs: str = "", late: bool = False, last: bool = False) -> Callable[[Rewrite], Rewrite]:
    """Register a rewrite that inspects every node of these operators itself, where no pattern suffices."""

    def register(rewrite: Rewrite) -> Rewrite:
        name = rule_name(rewrite.__name__)
        doc = rewrite.__doc__ or ""
        RULES.extend(
            Rule(name, op_type, lambda node: iter([{}]), rewrite, doc, needs, late, last) for op_type in op_types
        )
        return rewrite

    return register
