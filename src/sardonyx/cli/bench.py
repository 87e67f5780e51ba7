"""`sardonyx bench`: time a model against other engines, and show where its time goes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any, TypeAlias

import click
import torch
from torch.utils import _pytree as pytree

from sardonyx import timing
from sardonyx.cli import _bench_generation
from sardonyx.cli._feeds import Array
from sardonyx.cli._generation import GenerationRequest, Generator, generation_options
from sardonyx.cli._messages import example, print_result, progress_bar, stdout_to_stderr, table
from sardonyx.cli._parameters import (
    FiniteRange,
    as_json,
    engine_options,
    input_options,
    model_argument,
    precision_options,
)
from sardonyx.cli._source import Inputs, Source, in_memory, option_keywords, tensor, tensors
from sardonyx.diagnose.profiling import Profile, profile
from sardonyx.engines.registry import engines, require
from sardonyx.errors import OptionError
from sardonyx.native.session import open_session
from sardonyx.options import Options
from sardonyx.precision.metric import relative_error
from sardonyx.telemetry.text import duration
from sardonyx.telemetry.verify import close, difference

TimedCall: TypeAlias = Callable[[], list[torch.Tensor]]

OURS = "sardonyx"
_IN_TORCH = ("eager", "inductor")
_PLAIN = "onnxruntime"
_GENERATES = "it measures eager and sardonyx; `make bench-generate` measures others"
_USUAL = ("eager", "inductor", _PLAIN, "openvino")
_PAUSE_SECONDS = 0.02
"""Pause between contenders: a thread pool spins for a moment after a run, and would slow the next one."""
_SHOWN = 5
_WIDE = 0.2
"""Spread above which a time is reported as uncertain."""


@dataclass
class Contender:
    """A way to run the model, and its measurements."""

    name: str
    call: TimedCall | None = None
    first: float | None = None
    difference: float | None = None
    failed: str = ""
    rounds: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float | None:
        """Seconds of a call: the median over the rounds."""
        return median(self.rounds) if self.rounds else None

    @property
    def spread(self) -> float | None:
        """Interquartile range of the rounds, relative to the median."""
        if len(self.rounds) < 2 or not self.seconds:
            return None
        low, _, high = quantiles(self.rounds, n=4, method="inclusive")
        return (high - low) / self.seconds

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        names = ("name", "seconds", "spread", "first", "difference", "failed", "rounds")
        return {name: getattr(self, name) for name in names}


@click.command(
    epilog=example(
        "sardonyx bench examples/models.py:bert",
        "sardonyx bench model.onnx --size batch=8 --against onnxruntime,openvino",
        "sardonyx bench examples/models.py:resnet50 --option native=true --rounds 21",
        "sardonyx bench examples/models.py:llama --generate --prompt 128 --new-tokens 64",
    )
)
@model_argument
@click.option("--against", metavar="NAMES", help="Comma-separated: eager, inductor, onnxruntime, engines.")
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True, help="Turns of each contender.")
@click.option(
    "--seconds",
    type=FiniteRange(0, 3600),
    default=0.2,
    show_default=True,
    help="Duration of a turn, at least one call.",
)
@generation_options
@input_options
@engine_options
@precision_options
@as_json
@click.pass_context
def command(
    ctx: click.Context,
    model: Source,
    against: str | None,
    rounds: int,
    seconds: float,
    generation: GenerationRequest | None,
    inputs: Inputs,
    options: Options,
    as_json: bool,
) -> None:
    """Time a model against torch and other installed engines.

    All take turns, so that a slow machine slows all of them. `onnxruntime` runs the model without our rewrite rules, in
    a session with default options. The exit code is 1 if the result of sardonyx differs.

    With --generate, generate() of a transformers model in torch and compiled: the time to the first token, tokens a
    second, the bytes of the cache and the peak memory. A turn is one call.
    """
    if generation is not None:
        if against is not None:
            raise OptionError("--against cannot be used with --generate", hint=_GENERATES)
        differs = _bench_generation.bench(Generator(model, generation, inputs), options, rounds, as_json)
        ctx.exit(int(differs))
    names = _names(model, against)
    with stdout_to_stderr(), torch.no_grad():
        bench = _Bench(model, options, inputs)
        contenders = [bench.prepare(name) for name in progress_bar([*names, OURS], "preparing", as_json)]
        _check_results(contenders, options)
        for number in progress_bar(range(rounds), "measuring", as_json):
            _round([x for x in contenders if x.call], number, seconds)
        profile = bench.profile()
    ours = contenders[-1]
    result = {
        "model": model.text,
        "engine": options.engine,
        "threads": torch.get_num_threads(),
        "contenders": [x.as_dict() for x in contenders],
        "overhead": profile.as_dict()["overhead"],
        "operators": profile.as_dict()["operators"],
        "dominates": _dominant_cost(profile),
    }
    print_result(
        result,
        as_json,
        _table(contenders, ours),
        *[f"{x.name} failed: {x.failed}" for x in contenders if x.failed],
        "",
        *_profile_lines(profile),
        *_uncertainty(contenders),
    )
    ctx.exit(int(bool(ours.failed)))


def _names(model: Source, against: str | None) -> list[str]:
    """Return the names of the contenders besides sardonyx."""
    installed = [engine.name for engine in engines() if engine.installed]
    available = [*(_IN_TORCH if model.kind != "onnx" else ()), *installed]
    if against is None:
        return [name for name in _USUAL if name in available]
    chosen = [name.strip() for name in against.split(",") if name.strip()]
    for name in chosen:
        if name in {engine.name for engine in engines()}:
            require(name)
        elif name not in available:
            hint = f"use some of {', '.join(available)}; `sardonyx engines` says why others cannot be used"
            raise OptionError(f"{name!r} cannot run {model.text} here", hint=hint)
    return chosen


class _Bench:
    """A model with its inputs, and how to run it by each contender."""

    def __init__(self, model: Source, options: Options, inputs: Inputs) -> None:
        self._model, self._options = model, options
        self._others = Options.of(options, native=False, precision="float32")
        plain = Options.of(self._others, engine=_PLAIN, optimize="none")
        self._plain = model.model(plain) if model.kind == "onnx" else model.model(plain, domains=())
        self._feeds: dict[str, Array] = model.feeds(inputs, self._plain)
        self._args, self._kwargs = model.call(self._feeds)
        self._ours: Any = None

    def prepare(self, name: str) -> Contender:
        """Return a contender after its first call. Failures of others are reported with the results; ours raises."""
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
        """Profile sardonyx."""
        if self._model.kind == "onnx":
            return profile(self._ours, *self._args, calls=5)
        return profile(self._model.module(), *self._args, calls=5, options=self._options, **self._kwargs)

    def _call(self, name: str) -> TimedCall:
        if name == _PLAIN:
            return self._session()
        if name == OURS:
            self._ours = self._compiled()
            return self._bind(self._ours)
        if name == "eager":
            return self._bind(self._model.module())
        if name == "inductor":
            return self._bind(torch.compile(self._model.module()))
        return self._bind(self._model.program(Options.of(self._others, engine=name)))

    def _compiled(self) -> Any:
        if self._model.kind == "onnx":
            calibration = [] if self._options.precision == "float32" else [tensors(self._feeds)]
            return self._model.program(self._options, calibration=calibration)
        return torch.compile(self._model.module(), backend="sardonyx", options=option_keywords(self._options))

    def _bind(self, function: Callable[..., Any]) -> TimedCall:
        def call() -> list[torch.Tensor]:
            leaves = pytree.tree_leaves(function(*self._args, **self._kwargs))
            return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

        return call

    def _session(self) -> TimedCall:
        session = open_session(in_memory(self._plain), None)
        return lambda: [tensor(x) for x in session.run(None, self._feeds)]


def _check_results(contenders: Sequence[Contender], options: Options) -> None:
    """Compare each contender's results with those of the first one that ran; ours in lower precision has a bound."""
    working = [x for x in contenders if x.call]
    expected = working[0].call() if working[0].call else []
    for contender in working:
        results = contender.call() if contender.call else []
        if len(results) == len(expected):  # torch may return one tensor twice, which is one output of a file
            contender.difference = max(map(difference, results, expected), default=0.0)
            bound = options.max_drop if contender.name == OURS and options.precision != "float32" else 0.0
            if not all(close(x, y) or relative_error(x, y) <= bound for x, y in zip(results, expected, strict=True)):
                error = f"{contender.difference:.1e} of its magnitude"
                contender.failed = f"its result differs from {working[0].name}'s by {error}"


def _round(contenders: Sequence[Contender], number: int, seconds: float) -> None:
    """Time one turn of each contender, by the median of its calls; each round starts with another contender.

    The threads of the previous contender may still spin, so a turn begins with a pause and an uncounted call.
    """
    start = number % len(contenders)
    for contender in (*contenders[start:], *contenders[:start]):
        assert contender.call is not None
        time.sleep(_PAUSE_SECONDS)
        if not contender.rounds or contender.rounds[-1] < seconds:  # not needed before a long call
            contender.call()
        times = [timing.seconds(contender.call)]
        while sum(times) < seconds:
            times.append(timing.seconds(contender.call))
        contender.rounds.append(median(times))


def _table(contenders: Sequence[Contender], ours: Contender) -> Any:
    rows = []
    for x in contenders:
        if x.seconds is None or ours.seconds is None or x.first is None:
            continue
        error = "" if x.difference is None else f"{x.difference:.1e}"
        spread = "" if x.spread is None else f"±{x.spread / 2:.0%}"
        ratio = f"{x.seconds / ours.seconds:.2f}"
        rows.append((x.name, duration(x.seconds), spread, ratio, duration(x.first), error))
    headings = ["", "a call", "spread", "÷ sardonyx", "first call", "difference"]
    return table(headings, rows, right=headings[1:])


def _uncertainty(contenders: Sequence[Contender]) -> list[str]:
    """Return warnings about times with a large spread."""
    wide = [x.name for x in contenders if x.spread is not None and x.spread > _WIDE]
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    busy = f"; the load of this machine is {load:.1f} on {os.cpu_count()} cores" if load > (os.cpu_count() or 1) else ""
    return [f"times of {', '.join(wide)} vary by more than {_WIDE:.0%}{busy}"] if wide else []


def _dominant_cost(profile: Profile) -> str:
    """Return what takes most of a call: an operator, or "overhead" outside kernels."""
    spent = profile.overhead
    if not profile.operators or spent.outside > spent.kernels:
        return "overhead"
    return profile.operators[0].name


def _profile_lines(profile: Profile) -> list[str]:
    spent = profile.overhead
    total = spent.profiled or 1.0
    outside = {"the engine between kernels": spent.engine, "binding": spent.binding, "torch around it": spent.torch}
    parts = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in outside.items())
    shares = ", ".join(f"{row.name} {row.seconds / total:.0%}" for row in profile.operators[:_SHOWN])
    what = "overhead outside kernels" if _dominant_cost(profile) == "overhead" else f"{_dominant_cost(profile)} kernels"
    return [
        f"{what} dominate{'s' if what.startswith('overhead') else ''} a call of sardonyx",
        f"  in kernels      {spent.kernels / total:.0%}: {shares}",
        f"  outside kernels {spent.outside / total:.0%}: {parts}",
        *profile.remarks,
    ]
