"""The engine `auto`: measures the installed engines with the inputs of the first call, and remembers the fastest."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch

from sardonyx.cache.disk import default_cache
from sardonyx.cache.machine import key_of
from sardonyx.engines import artifacts
from sardonyx.engines.engine import Availability, Engine, EngineChoice, Job, Runner
from sardonyx.engines.registry import find
from sardonyx.errors import EngineError, OptionError
from sardonyx.options import Options
from sardonyx.telemetry.progress import show_progress
from sardonyx.telemetry.report import Choice
from sardonyx.telemetry.verify import close
from sardonyx.timing import in_turns

log = logging.getLogger(__name__)

T = TypeVar("T")
BoundCall: TypeAlias = Callable[[], Sequence[Any]]
Agree: TypeAlias = Callable[[Sequence[Any], Sequence[Any]], bool]
"""Whether results are near enough to the expected ones."""
Prepare: TypeAlias = Callable[[], tuple[T, BoundCall]]
"""Loads an engine; returns what to use if it wins, and a call of it with the real inputs."""

_CANDIDATES = ("onnxruntime", "openvino", "iree")
_COMPILER = "onnx-mlir"
_FILE = "choice.json"
_SECONDS = 30.0
_ROUNDS = 15
_LEAST_ROUNDS = 3
_ROUND_SECONDS = 0.01
_MEASURING_SHARE = 0.2
"""The share of the time limit for measuring; most of it is for compiling."""
_DROP_FACTOR = 2.0
"""An engine slower than the fastest by this factor is not measured further."""
_TIE_FACTOR = 1.01
"""An engine must be faster than a preferred one by this factor to win."""


@dataclasses.dataclass(frozen=True)
class _AutoOptions:
    """The keys of `engine_options` that `auto` itself reads."""

    seconds: float = _SECONDS
    engines: tuple[str, ...] | None = None


class Auto(EngineChoice):
    """Chooses among the other engines. Partitioning and the treatment of weights follow the first candidate."""

    name = "auto"
    custom_operators = True  # engines that cannot load them are discarded

    def probe(self) -> Availability:
        """Available if any candidate is installed."""
        names = [engine.name for engine in self.candidates(Options(engine=self.name))]
        reason = "" if names else 'no candidate engine is installed: pip install "sardonyx[cpu]"'
        return Availability(self.name, "of " + ", ".join(names) if names else None, reason)

    def kernels(self, device: torch.device) -> Any:
        """Return the first candidate's kernels."""
        return self._first(device).kernels(device)

    def opset(self, device: torch.device, operators: Set[str]) -> int:
        """Return the first candidate's opset."""
        return self._first(device).opset(device, operators)

    def freezes(self, device: torch.device) -> bool:
        """Return the first candidate's answer."""
        return self._first(device).freezes(device)

    def _first(self, device: torch.device) -> Engine:
        candidates = self.candidates(Options(engine=self.name), device)
        if not candidates:
            raise EngineError("engine 'auto' found no installed engine", hint='pip install "sardonyx[cpu]"')
        return candidates[0]

    def candidates(self, options: Options, device: torch.device | None = None) -> list[Engine]:
        """Return the installed engines to choose from, preferred first; on an accelerator only the first."""
        names = _auto_options(options).engines
        if names is None:
            configured = options.compiler_path or options.compiler_image
            names = (*_CANDIDATES, *([_COMPILER] if configured else ()))
        if device is not None and device.type != "cpu":
            names = names[:1]
        return [engine for engine in map(find, names) if engine.probe().installed or engine.name == _COMPILER]

    def options_for(self, engine: Engine, options: Options) -> Options:
        """Return the options for trying a candidate; its own engine options are under its name in `engine_options`."""
        own = (options.engine_options or {}).get(engine.name)
        return dataclasses.replace(options, engine=engine.name, engine_options=own)

    def key(self, model: bytes, inputs: Sequence[Any], options: Options, device: torch.device) -> str:
        """Return the key of a choice: the model without values of weights, input shapes, engines, machine, threads."""
        return key_of(
            auto=repr(sorted((options.engine_options or {}).items())),
            model=hashlib.sha256(model).hexdigest(),
            inputs=repr([(str(x.dtype), tuple(x.shape)) if isinstance(x, torch.Tensor) else x for x in inputs]),
            engines=repr([engine.probe() for engine in self.candidates(options, device)]),
            options=repr(options.artifact_key()),
            threads=str(torch.get_num_threads()),
        )

    def choose(
        self,
        key: str,
        contenders: Mapping[str, Prepare[T]],
        expected: BoundCall | None,
        options: Options,
        agree: Agree | None = None,
    ) -> tuple[Choice, T]:
        """Return the engine cached for this key, or measure which is fastest; and what its `Prepare` returned."""
        cached = _cached_choice(key, options)
        if cached is not None and cached.engine in contenders:
            try:
                return cached, contenders[cached.engine]()[0]
            except Exception as error:
                log.warning("%s, the cached choice, fails now: %s", cached.engine, error)
        if len(contenders) == 1:
            name, prepare = next(iter(contenders.items()))
            return Choice(name, {}, {}), prepare()[0]
        contest = _Contest(contenders, expected, _auto_options(options).seconds, agree or _agree)
        choice, winner = contest.decide()
        log.info("%s", choice)
        if contest.complete:
            _cache_choice(key, choice, options)
        return choice, winner

    def load(self, job: Job, artifact: Path | None) -> AutoRunner:
        """Return a runner that chooses at its first call."""
        return AutoRunner(self, job)


def _auto_options(options: Options) -> _AutoOptions:
    engine_options = dict(options.engine_options or {})
    fields = {field.name for field in dataclasses.fields(_AutoOptions)}
    for name in engine_options:
        if name not in fields:
            find(name)  # options of that engine; raises if the name is unknown
    own = {name: value for name, value in engine_options.items() if name in fields}
    _check_auto_options(own)
    return _AutoOptions(**{**own, **({"engines": tuple(own["engines"])} if own.get("engines") else {})})


def _check_auto_options(options: Mapping[str, Any]) -> None:
    names, seconds = options.get("engines", [""]), options.get("seconds", _SECONDS)
    if names is not None and not (
        isinstance(names, (list, tuple)) and names and all(isinstance(x, str) for x in names)
    ):
        raise OptionError(f"engine option 'engines' is {names!r}", hint="use a list of engine names")
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < math.inf:
        raise OptionError(f"engine option 'seconds' is {seconds!r}", hint="use a number of seconds")


class _Contest:
    """Loads candidates, drops those whose results differ, and measures the rest by turns."""

    def __init__(
        self, contenders: Mapping[str, Prepare[Any]], expected: BoundCall | None, seconds: float, agree: Agree
    ) -> None:
        self._contenders, self._expected, self._agree = contenders, expected, agree
        self._seconds, self._deadline = seconds, time.monotonic() + seconds
        self._ready: dict[str, tuple[Any, BoundCall]] = {}
        self._differing: dict[str, tuple[Any, BoundCall]] = {}
        self._times: dict[str, float] = {}
        self._discarded: dict[str, str] = {}
        self.complete = True
        """Whether every candidate was tried."""

    def decide(self) -> tuple[Choice, Any]:
        """Return the fastest; in a tie, the first candidate."""
        expected = self._torch_results()
        for name, prepare in self._contenders.items():
            if self._ready and time.monotonic() > self._deadline:
                self._discarded[name], self.complete = "time limit reached before it was tried", False
                continue
            results = self._prepare(name, prepare, expected)
            expected = results if expected is None else expected
        if not self._ready:
            self._ready = self._first_differing()
        if len(self._ready) > 1:
            self._measure()
        winner = self._winner()
        times = dict(sorted(self._times.items(), key=lambda item: item[1]))
        return Choice(winner, times, self._discarded), self._ready[winner][0]

    def _torch_results(self) -> Sequence[Any] | None:
        """Return the results of torch itself, if available."""
        try:
            return self._expected() if self._expected is not None else None
        except Exception as error:
            log.info("no reference results from torch: %s", error)
            return None

    def _prepare(self, name: str, prepare: Prepare[Any], expected: Sequence[Any] | None) -> Sequence[Any] | None:
        """Load an engine and run it once; return its results, or None if it failed."""
        try:
            prepared, call = prepare()
            results = call()
        except Exception as error:  # an engine may raise anything; the others remain
            self._discarded[name] = str(error).partition("\n")[0]
            log.info("discarding %s: %s", name, error)
            return None
        if expected is None or self._agree(results, expected):
            self._ready[name] = (prepared, call)
        else:
            log.warning("%s is not chosen: its results differ from %s", name, self._reference_name())
            self._differing[name], self._discarded[name] = (prepared, call), "its results differ"
        return results

    def _reference_name(self) -> str:
        return "torch's" if self._expected is not None else f"those of {next(iter(self._ready))}"

    def _first_differing(self) -> dict[str, tuple[Any, BoundCall]]:
        """Return the first engine that differs from torch, for when all do, as happens where rounding decides."""
        for name, entry in self._differing.items():
            log.warning("the results of all engines differ from torch's; using %s", name)
            return {name: entry}
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self._discarded.items())
        raise EngineError(f"no engine can run the model: {reasons}")

    def _measure(self) -> None:
        """Time each candidate; its shortest time counts."""
        with show_progress("choosing an engine, measuring " + ", ".join(self._ready)):
            times = in_turns(
                [call for _, call in self._ready.values()],
                rounds=_ROUNDS,
                least=_LEAST_ROUNDS,
                limit=self._seconds * _MEASURING_SHARE,
                round_seconds=_ROUND_SECONDS,
                hopeless=_DROP_FACTOR,
            )
        self._times = dict(zip(self._ready, map(min, times), strict=True))

    def _winner(self) -> str:
        if not self._times:
            return next(iter(self._ready))
        best = min(self._times.values())
        return next(name for name in self._ready if self._times[name] <= best * _TIE_FACTOR)


def _agree(results: Sequence[Any], expected: Sequence[Any]) -> bool:
    pairs = zip(results, expected, strict=True)
    return all(close(got, want) for got, want in pairs if isinstance(want, torch.Tensor))


def _cached_choice(key: str, options: Options) -> Choice | None:
    cache = default_cache(options)
    folder = cache.get(key) if cache is not None else None
    if folder is None:
        return None
    try:
        return Choice(**json.loads((folder / _FILE).read_text(encoding="utf-8")), remembered=True)
    except (OSError, ValueError, TypeError) as error:
        log.warning("the cached choice of an engine cannot be read; measuring again: %s", error)
        return None


def _cache_choice(key: str, choice: Choice, options: Options) -> None:
    cache = default_cache(options)
    if cache is None:
        return
    content = {"engine": choice.engine, "seconds": dict(choice.seconds), "discarded": dict(choice.discarded)}
    about = {"what": "choice", "engine": choice.engine}
    cache.drop(key)  # the entry may be of an engine that fails now
    cache.put(key, lambda folder: _write(folder / _FILE, content), about)


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


class AutoRunner(Runner):
    """Runs one model in the engine chosen at the first call; models for candidates differ only in casts."""

    def __init__(self, auto: Auto, job: Job) -> None:
        self._auto, self._job = auto, job
        self._chosen: Runner | None = None
        self._lock = threading.Lock()
        self._runners: list[Runner] = []
        self.choice: Choice | None = None

    def __call__(self, inputs: Sequence[torch.Tensor | int]) -> list[torch.Tensor]:
        """Run once."""
        return (self._chosen or self._choose(inputs))(inputs)

    def into(self, inputs: Sequence[torch.Tensor | int], outputs: Sequence[torch.Tensor]) -> None:
        """Run the chosen engine into `outputs`."""
        (self._chosen or self._choose(inputs)).into(inputs, outputs)

    def close(self) -> None:
        """Close the chosen engine."""
        if self._chosen is not None:
            self._chosen.close()

    def _choose(self, inputs: Sequence[torch.Tensor | int]) -> Runner:
        with self._lock:
            if self._chosen is not None:
                return self._chosen
            job, auto = self._job, self._auto
            engines = auto.candidates(job.options, job.device)
            contenders = {engine.name: partial(self._prepare_runner, engine, inputs) for engine in engines}
            key = auto.key(job.model, inputs, job.options, job.device)
            self.choice, chosen = auto.choose(key, contenders, None, job.options)
            for loser in self._runners:
                if loser is not chosen:
                    loser.close()
            self._runners.clear()
            self._chosen = chosen
            return chosen

    def _prepare_runner(self, engine: Engine, inputs: Sequence[torch.Tensor | int]) -> tuple[Runner, BoundCall]:
        job, options = self._job, self._auto.options_for(engine, self._job.options)
        refitted = job.refit(job, engine, options) if job.refit else dataclasses.replace(job, options=options)
        runner = artifacts.load(engine, refitted)
        self._runners.append(runner)
        return runner, lambda: runner(inputs)
