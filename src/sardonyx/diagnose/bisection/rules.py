"""`bisect_rules`: find the rewrite rules that change a model's result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from sardonyx.diagnose.bisection.delta import minimal_subset
from sardonyx.optimize.selection import select_rules
from sardonyx.options import Options
from sardonyx.telemetry.report import collecting
from sardonyx.telemetry.verify import close, difference

_MANY_COMPILATIONS = 10_000
"""Dynamo stops compiling a function after a few compilations; each subset of the rules needs one."""


@dataclass(frozen=True)
class RuleCulprit:
    """A minimal set of rules that changes the result."""

    rules: tuple[str, ...]
    hits: int
    """How often they apply."""
    error: float
    """Difference from the result without rules, with these only."""

    def __str__(self) -> str:
        return f"{' with '.join(self.rules)} ×{self.hits}: changes the result by {self.error:.2e} of its magnitude"


@dataclass(frozen=True)
class RuleBisection:
    """The result of `bisect_rules`."""

    culprits: tuple[RuleCulprit, ...]
    hits: Counter[str]
    """How often each rule applies, with all rules."""
    error: float
    """Difference from the result without rules, with all rules."""
    error_without: float
    """Difference from the result without rules, with all rules but the culprits."""
    compilations: int

    @property
    def rules(self) -> tuple[str, ...]:
        """The rules to disable."""
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
    """Find the rewrite rules that change a model's result, by compiling it with subsets of them.

    A change is a difference above `tolerance`, relative to the largest magnitude; by default that of `verify`. The
    model must be deterministic. Runs without gradients.

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
        """Find one culprit after the other, until the rest makes no difference."""
        self._plain, _ = self._compiled([])
        allowed = select_rules(self.options.optimize)
        results, hits = self._compiled(sorted(allowed))
        error = self._error(results)
        culprits: list[RuleCulprit] = []
        suspects = hits
        while not self._same(results):
            culprit = minimal_subset(list(suspects), self._changes)
            if not culprit:
                break  # the result is not deterministic
            alone, applied = self._compiled(culprit)
            culprits.append(RuleCulprit(tuple(culprit), sum(applied.values()), self._error(alone)))
            allowed -= set(culprit)
            results, suspects = self._compiled(sorted(allowed))
        return RuleBisection(tuple(culprits), hits, error, self._error(results), len(self._known))

    def _changes(self, rules: list[str]) -> bool:
        return not self._same(self._compiled(rules)[0])

    def _compiled(self, rules: Sequence[str]) -> tuple[list[Any], Counter[str]]:
        """Return the model's results, and how often each rule applied; each selection is compiled once."""
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
