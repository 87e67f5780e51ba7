"""`sardonyx bench`: how fast a model is, beside others who run it, and where its time goes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any, TypeAlias

import click
import torch
from torch.utils import _pytree as pytree

from sardonyx import timing
from sardonyx.cli._feeds import Array
from sardonyx.cli._messages import stdout_to_stderr
from sardonyx.cli._parameters import (
    FiniteRange,
    Source,
    as_json,
    duration,
    engine_options,
    example,
    in_memory,
    input_options,
    model_argument,
    option_keywords,
    print_result,
    progress_bar,
    table,
    tensor,
)
from sardonyx.diagnose.profiling import Profile, profile
from sardonyx.engines.registry import engines, require
from sardonyx.errors import OptionError
from sardonyx.native.session import open_session
from sardonyx.options import Options
from sardonyx.telemetry.verify import close, difference

TimedCall: TypeAlias = Callable[[], list[torch.Tensor]]

OURS = "sardonyx"
_IN_TORCH = ("eager", "inductor")
_PLAIN = "onnxruntime"
_USUAL = ("eager", "inductor", _PLAIN, "openvino")
_PAUSE_SECONDS = 0.02
"""A thread pool spins for a moment after a run, and would take a core from who comes next."""
_SHOWN = 5
_WIDE = 0.2
"""The spread from which on a number is told to be uncertain."""


@dataclass
class Contender:
    """Who runs the model, and how it went."""

    name: str
    call: TimedCall | None = None
    first: float | None = None
    difference: float | None = None
    failed: str = ""
    rounds: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float | None:
        """Of a call: the median over the rounds."""
        return median(self.rounds) if self.rounds else None

    @property
    def spread(self) -> float | None:
        """Between the quartiles of the rounds, as a share of the median: how far the number can be trusted."""
        if len(self.rounds) < 2 or not self.seconds:
            return None
        low, _, high = quantiles(self.rounds, n=4, method="inclusive")
        return (high - low) / self.seconds

    def as_dict(self) -> dict[str, Any]:
        """As plain data."""
        names = ("name", "seconds", "spread", "first", "difference", "failed", "rounds")
        return {name: getattr(self, name) for name in names}


@click.command(
    epilog=example(
        "sardonyx bench examples/models.py:bert",
        "sardonyx bench model.onnx --size batch=8 --against onnxruntime,openvino",
        "sardonyx bench examples/models.py:resnet50 --option native=true --rounds 21",
    )
)
@model_argument
@click.option("--against", metavar="NAMES", help="Of eager, inductor, onnxruntime and engines, with commas between.")
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True, help="Turns that each one gets.")
@click.option(
    "--seconds",
    type=FiniteRange(0, 3600),
    default=0.2,
    show_default=True,
    help="How long a turn is, at least one call.",
)
@input_options
@engine_options
@as_json
@click.pass_context
def command(
    ctx: click.Context,
    model: Source,
    against: str | None,
    rounds: int,
    seconds: float,
    inputs: Path | None,
    sizes: Mapping[str, int],
    seed: int,
    options: Options,
    as_json: bool,
) -> None:
    """Time a model, against torch and other engines that are installed.

    All take turns, so that whatever slows the machine slows each of them. `onnxruntime` is the plain one: the model
    without our rules, in a session with default options. The exit code is 1 if sardonyx gives another result.
    """
    names = _names(model, against)
    with stdout_to_stderr(), torch.no_grad():
        bench = _Bench(model, options, inputs, sizes, seed)
        contenders = [bench.prepared(name) for name in progress_bar([*names, OURS], "preparing", as_json)]
        _check_results(contenders)
        for number in progress_bar(range(rounds), "measuring", as_json):
            _round([x for x in contenders if x.call], number, seconds)
        found = bench.profile()
    ours = contenders[-1]
    told = {
        "model": model.text,
        "engine": options.engine,
        "threads": torch.get_num_threads(),
        "contenders": [x.as_dict() for x in contenders],
        "overhead": found.as_dict()["overhead"],
        "operators": found.as_dict()["operators"],
        "dominates": _dominant_cost(found),
    }
    print_result(
        told,
        as_json,
        _table(contenders, ours),
        *[f"{x.name} failed: {x.failed}" for x in contenders if x.failed],
        "",
        *_profile_lines(found),
        *_uncertainty(contenders),
    )
    ctx.exit(int(bool(ours.failed)))


def _names(model: Source, against: str | None) -> list[str]:
    """Who takes part beside sardonyx."""
    here = [engine.name for engine in engines() if engine.installed]
    able = [*(_IN_TORCH if model.kind != "onnx" else ()), *here]
    if against is None:
        return [name for name in _USUAL if name in able]
    chosen = [name.strip() for name in against.split(",") if name.strip()]
    for name in chosen:
        if name in {engine.name for engine in engines()}:
            require(name)
        elif name not in able:
            hint = f"use some of {', '.join(able)}; `sardonyx engines` says why others cannot be used"
            raise OptionError(f"{name!r} cannot run {model.text} here", hint=hint)
    return chosen


class _Bench:
    """A model with its inputs, and how each contender is made to run it."""

    def __init__(
        self, model: Source, options: Options, inputs: Path | None, sizes: Mapping[str, int], seed: int
    ) -> None:
        self._model, self._options = model, options
        self._others = Options.of(options, native=False)
        plain = Options.of(self._others, engine=_PLAIN, optimize="none")
        self._plain = model.model(plain) if model.kind == "onnx" else model.model(plain, domains=())
        self._feeds: dict[str, Array] = model.feeds(inputs, sizes, seed, self._plain)
        self._args, self._kwargs = model.call(self._feeds)
        self._ours: Any = None

    def prepared(self, name: str) -> Contender:
        """A contender after its first call. That one fails is told with the others' results; ours must not."""
        started = time.perf_counter()
        try:
            call = self._call(name)
            call()
        except Exception as error:
            if name == OURS:
                raise
            return Contender(name, failed=(str(error).strip().splitlines() or [type(error).__name__])[0])
        return Contender(name, call, time.perf_counter() - started)

    def profile(self) -> Profile:
        """Where the time of sardonyx goes."""
        if self._model.kind == "onnx":
            return profile(self._ours, *self._args, calls=5)
        return profile(self._model.module(), *self._args, calls=5, options=self._options, **self._kwargs)

    def _call(self, name: str) -> TimedCall:
        if name == _PLAIN:
            return self._session()
        if name == OURS:
            self._ours = self._compiled()
            return self._of(self._ours)
        if name == "eager":
            return self._of(self._model.module())
        if name == "inductor":
            return self._of(torch.compile(self._model.module()))
        return self._of(self._model.program(Options.of(self._others, engine=name)))

    def _compiled(self) -> Any:
        if self._model.kind == "onnx":
            return self._model.program(self._options)
        return torch.compile(self._model.module(), backend="sardonyx", options=option_keywords(self._options))

    def _of(self, function: Callable[..., Any]) -> TimedCall:
        def call() -> list[torch.Tensor]:
            leaves = pytree.tree_leaves(function(*self._args, **self._kwargs))
            return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

        return call

    def _session(self) -> TimedCall:
        session = open_session(in_memory(self._plain), None)
        return lambda: [tensor(x) for x in session.run(None, self._feeds)]


def _check_results(contenders: Sequence[Contender]) -> None:
    """How far each one's result is from the first's that has one."""
    able = [x for x in contenders if x.call]
    expected = able[0].call() if able[0].call else []
    for contender in able:
        found = contender.call() if contender.call else []
        if len(found) == len(expected):  # torch may return one tensor twice, which is one output of a file
            contender.difference = max(map(difference, found, expected), default=0.0)
            if not all(map(close, found, expected)):
                contender.failed = f"another result than {able[0].name}, by {contender.difference:.1e} of its magnitude"


def _round(contenders: Sequence[Contender], number: int, seconds: float) -> None:
    """A turn for each, beginning with another one each time; of its calls the median counts.

    The threads of who was before may still spin, so a turn begins with a pause and a call that does not count.
    """
    start = number % len(contenders)
    for contender in (*contenders[start:], *contenders[:start]):
        assert contender.call is not None
        time.sleep(_PAUSE_SECONDS)
        if not contender.rounds or contender.rounds[-1] < seconds:  # a long call has its own beginning behind it
            contender.call()
        taken = [timing.seconds(contender.call)]
        while sum(taken) < seconds:
            taken.append(timing.seconds(contender.call))
        contender.rounds.append(median(taken))


def _table(contenders: Sequence[Contender], ours: Contender) -> Any:
    rows = []
    for x in contenders:
        if x.seconds is None or ours.seconds is None or x.first is None:
            continue
        off = "" if x.difference is None else f"{x.difference:.1e}"
        spread = "" if x.spread is None else f"±{x.spread / 2:.0%}"
        ratio = f"{x.seconds / ours.seconds:.2f}"
        rows.append((x.name, duration(x.seconds), spread, ratio, duration(x.first), off))
    headings = ["", "a call", "spread", "÷ sardonyx", "first call", "difference"]
    return table(headings, rows, right=headings[1:])


def _uncertainty(contenders: Sequence[Contender]) -> list[str]:
    """What makes the numbers less than certain."""
    wide = [x.name for x in contenders if x.spread is not None and x.spread > _WIDE]
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    busy = f"; the load of this machine is {load:.1f} on {os.cpu_count()} cores" if load > (os.cpu_count() or 1) else ""
    return [f"times of {', '.join(wide)} vary by more than {_WIDE:.0%}{busy}"] if wide else []


def _dominant_cost(found: Profile) -> str:
    """In a word what takes most of a call: an operator, or what is around the kernels."""
    spent = found.overhead
    if not found.operators or spent.outside > spent.kernels:
        return "overhead"
    return found.operators[0].name


def _profile_lines(found: Profile) -> list[str]:
    spent = found.overhead
    whole = spent.profiled or 1.0
    outside = {"the engine between kernels": spent.engine, "binding": spent.binding, "torch around it": spent.torch}
    parts = ", ".join(f"{name} {taken / whole:.0%}" for name, taken in outside.items())
    shares = ", ".join(f"{row.name} {row.seconds / whole:.0%}" for row in found.operators[:_SHOWN])
    what = "overhead outside kernels" if _dominant_cost(found) == "overhead" else f"{_dominant_cost(found)} kernels"
    return [
        f"{what} dominate{'s' if what.startswith('overhead') else ''} a call of sardonyx",
        f"  in kernels      {spent.kernels / whole:.0%}: {shares}",
        f"  outside kernels {spent.outside / whole:.0%}: {parts}",
        *found.remarks,
    ]
