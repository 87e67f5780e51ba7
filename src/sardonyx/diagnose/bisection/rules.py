"""`bisect_rules`: which rewrite rule changes a model's result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from sardonyx.diagnose.bisection.delta import minimal_subset
from sardonyx.optimize.selection import selected
from sardonyx.options import Options
from sardonyx.telemetry.report import collecting
from sardonyx.telemetry.verify import close, difference

_MANY_COMPILATIONS = 10_000
"""Dynamo gives a function up after a few compilations, and each subset of the rules is one."""


@dataclass(frozen=True)
class RuleCulprit:
    """A rule, or rules that do so only together, whose use changes the result."""

    rules: tuple[str, ...]
    hits: int
    """How often they apply."""
    error: float
    """The difference from the result without any rule, with these alone."""

    def __str__(self) -> str:
        return f"{' with '.join(self.rules)} ×{self.hits}: changes the result by {self.error:.2e} of its magnitude"


@dataclass(frozen=True)
class RuleBisection:
    """What `bisect_rules` found."""

    culprits: tuple[RuleCulprit, ...]
    hits: Counter[str]
    """How often each rule applies, with all in use."""
    error: float
    """The difference from the result without any rule, with all in use."""
    error_without: float
    """The same without the culprits."""
    compilations: int

    @property
    def rules(self) -> tuple[str, ...]:
        """The rules to leave out."""
        return tuple(rule for culprit in self.culprits for rule in culprit.rules)

    def __str__(self) -> str:
        tried = f"{len(self.hits)} rules apply; {self.compilations} compilations"
        if not self.culprits:
            return f"no rule changes the result: it differs by {self.error:.2e} of its magnitude\n{tried}"
        lines = [str(culprit) for culprit in self.culprits]
        without = "default" + "".join(f"-{rule}" for rule in self.rules)
        lines.append(f'with options={{"optimize": "{without}"}} it differs by {self.error_without:.2e}')
        return "\n".join([*lines, tried])


def bisect_rules(
    model: Callable[..., Any],
    *args: Any,
    options: Options | Mapping[str, Any] | None = None,
    tolerance: float | None = None,
    **kwargs: Any,
) -> RuleBisection:
    """Find the rewrite rules whose use changes a model's result, by compiling it with fewer and fewer of them.

    What counts as a change is what `verify` takes for one, or a difference above `tolerance`, relative to the largest
    magnitude. The result must be the same from call to call. Runs without gradients.

    >>> found = bisect_rules(torch.nn.functional.silu, torch.linspace(-3, 3, 7))
    >>> found.culprits, found.hits["Silu"]
    ((), 1)
    """
    search = _Search(model, args, kwargs, Options.of(options), tolerance)
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=_MANY_COMPILATIONS):
        return search.run()


@dataclass
class _Search:
    model: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    options: Options
    tolerance: float | None
    _plain: list[Any] = field(default_factory=list)
    _known: dict[tuple[str, ...], tuple[list[Any], Counter[str]]] = field(default_factory=dict)

    def run(self) -> RuleBisection:
        """Find one culprit after the other, until what is left does no harm."""
        self._plain, _ = self._compiled([])
        allowed = selected(self.options.optimize)
        results, hits = self._compiled(sorted(allowed))
        error = self._error(results)
        culprits: list[RuleCulprit] = []
        suspects = hits
        while not self._same(results):
            culprit = minimal_subset(list(suspects), self._changes)
            if not culprit:
                break  # the result changes from call to call
            alone, applied = self._compiled(culprit)
            culprits.append(RuleCulprit(tuple(culprit), sum(applied.values()), self._error(alone)))
            allowed -= set(culprit)
            results, suspects = self._compiled(sorted(allowed))
        return RuleBisection(tuple(culprits), hits, error, self._error(results), len(self._known))

    def _changes(self, rules: list[str]) -> bool:
        return not self._same(self._compiled(rules)[0])

    def _compiled(self, rules: Sequence[str]) -> tuple[list[Any], Counter[str]]:
        """The model's results, and how often each rule applied; each choice is compiled once."""
        key = tuple(rules)
        if key not in self._known:
            self._known[key] = self._compile(rules)
        return self._known[key]

    def _compile(self, rules: Sequence[str]) -> tuple[list[Any], Counter[str]]:
        from sardonyx.doors.dynamo import sardonyx as backend

        chosen = Options.of(self.options, optimize=rules, verify=False)

        def fresh(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            return backend(graph, inputs, options=chosen)

        with collecting() as report:
            result = torch.compile(self.model, backend=fresh)(*self.args, **self.kwargs)
        return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)], report.rules

    def _error(self, results: list[Any]) -> float:
        return max((difference(a, b) for a, b in zip(results, self._plain, strict=True)), default=0.0)

    def _same(self, results: list[Any]) -> bool:
        if self.tolerance is not None:
            return self._error(results) <= self.tolerance
        return all(close(a, b) for a, b in zip(results, self._plain, strict=True))
