"""`bisect`: find the rule, kernel, optimizer or option that changes a model's result or time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal, TypeAlias

import torch

from sardonyx.diagnose.bisection.delta import minimal_subset
from sardonyx.diagnose.bisection.setting import KINDS, Item, ItemKind, Settings
from sardonyx.diagnose.comparison.comparing import opset_for
from sardonyx.diagnose.comparison.errors import error_of, tolerance_of
from sardonyx.diagnose.comparison.result import as_number
from sardonyx.diagnose.comparison.run_config import RunConfig
from sardonyx.diagnose.comparison.subject import Model, subject_of
from sardonyx.diagnose.comparison.trace import TorchTrace
from sardonyx.errors import OptionError
from sardonyx.options import Options
from sardonyx.timing import in_turns

By: TypeAlias = Literal["result", "time"]

_ROUNDS = 9
_SLOWER = 1.25
"""Slowdown that counts as a change: smaller ones may come from other programs on the machine."""


@dataclass(frozen=True)
class Culprit:
    """A minimal set of items that changes the result or the time."""

    kind: ItemKind
    names: tuple[str, ...]
    error: float
    """Difference from the result without them, relative to the largest magnitude."""
    slower: float = 1.0
    """Slowdown of a call, with `by="time"`."""

    @property
    def remedy(self) -> str:
        """The option that disables them."""
        return _REMEDIES[self.kind](self.names)

    def __str__(self) -> str:
        effect = f"a call takes {self.slower:.1f} times as long" if self.slower != 1.0 else f"changes {self.error:.2e}"
        return f"{self.kind} {' with '.join(self.names)}: {effect}\n  next: {self.remedy}"


_REMEDIES: Mapping[ItemKind, Callable[[Sequence[str]], str]] = {
    "rule": lambda names: f'optimize="default{"".join(f"-{name}" for name in names)}"',
    "kernel": lambda names: "native=False, or sardonyx.native.compile(model, select=…) without these nodes",
    "level": lambda names: 'session_options={"graph_optimization_level": …}, a lower one',
    "optimizer": lambda names: (
        f'session_options={{"config": {{"optimization.disable_specified_optimizers": "{";".join(names)}"}}}}'
    ),
    "option": lambda names: "leave it out",
}


@dataclass(frozen=True)
class Bisection:
    """The result of `bisect`."""

    culprits: tuple[Culprit, ...]
    tried: Mapping[str, int]
    """Number of items of each kind."""
    error: float
    """Difference between the results with all items and with none, relative to the largest magnitude."""
    engine: float | None
    """Difference between the result with no items and torch's, if there is a module."""
    runs: int

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        culprits = [{**asdict(x), "error": as_number(x.error), "remedy": x.remedy} for x in self.culprits]
        engine = None if self.engine is None else as_number(self.engine)
        return {
            "culprits": culprits,
            "tried": dict(self.tried),
            "error": as_number(self.error),
            "engine": engine,
            "runs": self.runs,
        }

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {kind}s" for kind, count in self.tried.items() if count)
        tried = f"{counts or 'nothing'} tried in {self.runs} runs"
        lines = [str(x) for x in self.culprits] or [f"nothing is at fault: everything changes {self.error:.2e}"]
        if self.engine is not None:
            lines.append(f"without any of these the engine differs from torch by {self.engine:.2e}")
        return "\n".join([*lines, tried])


def bisect(
    model: Model,
    *args: Any,
    options: Options | Mapping[str, Any] | None = None,
    over: Sequence[ItemKind] = KINDS,
    by: By = "result",
    tolerance: float | None = None,
    slower: float = _SLOWER,
    progress: Callable[[str], object] | None = None,
    **kwargs: Any,
) -> Bisection:
    """Find what changes a model's result between the exported graph and the engine, by disabling it.

    These are disabled in turn: entries of options ("option": of `session_options`, `engine_options` and
    `compile_options`), the optimizers of ONNX Runtime ("optimizer") and the rest of its optimization level ("level"),
    native kernels ("kernel", with `native=True`) and rewrite rules ("rule"). If that changes the result, delta
    debugging finds a minimal subset. `over` selects some of these kinds: the others stay enabled, except kernels,
    which are disabled. With `by="time"`, find what makes a call `slower` times as slow, by the medians of interleaved
    calls.

    The model and its arguments are as in `compare`. `tolerance` is relative to the largest magnitude; by
    default that of `verify`.

    >>> found = bisect(torch.nn.functional.silu, torch.linspace(-3, 3, 7))
    >>> found.culprits, found.tried["rule"] > 50
    ((), True)
    """
    unknown = [kind for kind in over if kind not in KINDS]
    if unknown or by not in ("result", "time"):
        raise OptionError(f"bisect cannot go over {unknown or by}", hint=f"over={list(KINDS)}, by='result' or 'time'")
    chosen = Options.of(options)
    subject = subject_of(
        model, args, kwargs, opset=opset_for([RunConfig(chosen.engine, chosen)]), translator=chosen.translator
    )
    judge = _Slower(slower) if by == "time" else _Changed(tolerance)
    search = _Search(Settings(subject, chosen), judge, progress or (lambda line: None))
    culprits = search.run([kind for kind in KINDS if kind in over])
    engine = None
    if subject.captured is not None:
        expected = TorchTrace(RunConfig.of("torch"), subject).outputs(0)
        engine = max(map(error_of, search.results(()), expected), default=0.0)
    error = max(map(error_of, search.results(search.everything), search.results(())), default=0.0)
    return Bisection(tuple(culprits), search.tried, error, engine, search.runs)


@dataclass
class _Search:
    settings: Settings
    judge: _Changed | _Slower
    progress: Callable[[str], object]
    tried: dict[str, int] = field(default_factory=dict)
    everything: tuple[Item, ...] = ()
    _calls: dict[frozenset[Item], Callable[[], list[torch.Tensor]]] = field(default_factory=dict)
    _known: dict[frozenset[Item], list[torch.Tensor]] = field(default_factory=dict)

    @property
    def runs(self) -> int:
        """Number of configurations that were run."""
        return len(self._known)

    def run(self, kinds: Sequence[ItemKind]) -> list[Culprit]:
        """Disable one kind after the other, and search those that make a difference."""
        items_by_kind: list[tuple[ItemKind, list[Item]]] = []
        context: list[Item] = []
        for kind in reversed(KINDS):  # earlier kinds determine the items of later ones
            items = self.settings.items(kind, context)
            items_by_kind.insert(0, (kind, items))
            context += items
        self.everything = tuple(context)
        culprits: list[Culprit] = []
        for kind, items in items_by_kind:
            if kind in kinds or kind == "kernel":  # kernels are rebuilt for every selection of rules
                context = [item for item in context if item.kind != kind]
            if kind in kinds:
                self.tried[kind] = len(items)
                culprits += self._culprits(kind, items, context)
        return culprits

    def _culprits(self, kind: ItemKind, items: list[Item], context: list[Item]) -> list[Culprit]:
        """Find minimal sets one after the other, until the rest makes no difference."""
        culprits: list[Culprit] = []
        while items and self._matters(items, context):
            part = minimal_subset(items, lambda part: self._matters(part, context))
            if not part:
                break  # the result is not deterministic
            error = max(map(error_of, self.results([*context, *part]), self.results(context)), default=0.0)
            ratio = self.judge.ratio(self._call([*context, *part]), self._call(context))
            culprits.append(Culprit(kind, tuple(item.name for item in part), error, ratio))
            items = [item for item in items if item not in part]
        return culprits

    def _matters(self, part: list[Item], context: list[Item]) -> bool:
        self.progress(f"{len(part)} {part[0].kind}(s), run {self.runs + 1}")
        with_, without = [*context, *part], context
        if isinstance(self.judge, _Changed):
            return self.judge(self.results(with_), self.results(without))
        self.results(with_)
        return self.judge.ratio(self._call(with_), self._call(without)) >= self.judge.least

    def results(self, items: Sequence[Item]) -> list[torch.Tensor]:
        """Return the model's results with some items; each selection is run once."""
        key = frozenset(items)
        if key not in self._known:
            self._known[key] = self._call(items)()
            if isinstance(self.judge, _Changed):
                del self._calls[key]  # sessions hold memory
        return self._known[key]

    def _call(self, items: Sequence[Item]) -> Callable[[], list[torch.Tensor]]:
        key = frozenset(items)
        if key not in self._calls:
            call, feeds = self.settings.call(items), self.settings.subject.calls[0]
            self._calls[key] = lambda: call(feeds)
        return self._calls[key]


@dataclass(frozen=True)
class _Changed:
    """Judges by results: whether they differ by more than the tolerance."""

    tolerance: float | None

    def __call__(self, result: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
        pairs = zip(result, expected, strict=True)
        return any(not error_of(a, b) <= self._allowed(b) for a, b in pairs)

    def _allowed(self, value: torch.Tensor) -> float:
        return tolerance_of(value) if self.tolerance is None else self.tolerance

    def ratio(self, one: Callable[[], Any], other: Callable[[], Any]) -> float:
        """Return 1: time is not measured."""
        return 1.0


@dataclass(frozen=True)
class _Slower:
    """Judges by time: the slowdown of one call against another."""

    least: float

    def ratio(self, one: Callable[[], Any], other: Callable[[], Any]) -> float:
        """Return the ratio of medians of interleaved calls, or of minimums if that is smaller."""
        one(), other()
        ones, others = in_turns([one, other], rounds=_ROUNDS)
        return float(min(median(ones) / max(median(others), 1e-9), min(ones) / max(min(others), 1e-9)))
