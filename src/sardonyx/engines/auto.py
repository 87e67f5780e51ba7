"""`auto`: the installed engine that is fastest with the real inputs, measured at the first call and remembered."""

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
Call: TypeAlias = Callable[[], Sequence[Any]]
Prepare: TypeAlias = Callable[[], tuple[T, Call]]
"""Makes an engine ready: what is kept of it if it wins, and a call with the real inputs."""

_CANDIDATES = ("onnxruntime", "openvino", "iree")
_COMPILER = "onnx-mlir"
_FILE = "choice.json"
_SECONDS = 30.0
_ROUNDS = 15
_LEAST_ROUNDS = 3
_ROUND_SECONDS = 0.01
_MEASURING = 0.2
"""The share of the time that measuring may take: most of it is for compiling."""
_HOPELESS = 2.0
"""Who takes so many times as long as the fastest is not measured any further."""
_TIE = 1.01
"""Who is faster by less than this does not win against an engine before it."""


@dataclasses.dataclass(frozen=True)
class _Limits:
    """What `engine_options` says to `auto`."""

    seconds: float = _SECONDS
    engines: tuple[str, ...] | None = None


class Auto(EngineChoice):
    """Chooses among the other engines. A graph is cut, and its weights are held, as the first of them wants it."""

    name = "auto"
    custom_operators = True  # those that cannot load them are discarded

    def probe(self) -> Availability:
        """Whether there is any engine to choose."""
        names = [engine.name for engine in self.candidates(Options(engine=self.name))]
        reason = "" if names else 'none of the engines it knows is installed: pip install "sardonyx[cpu]"'
        return Availability(self.name, "of " + ", ".join(names) if names else None, reason)

    def kernels(self, device: torch.device) -> Any:
        """The first candidate's."""
        return self._first(device).kernels(device)

    def opset(self, device: torch.device, operators: Set[str]) -> int:
        """The first candidate's."""
        return self._first(device).opset(device, operators)

    def freezes(self, device: torch.device) -> bool:
        """As the first candidate."""
        return self._first(device).freezes(device)

    def _first(self, device: torch.device) -> Engine:
        found = self.candidates(Options(engine=self.name), device)
        if not found:
            raise EngineError("'auto' finds no engine to choose", hint='pip install "sardonyx[cpu]"')
        return found[0]

    def candidates(self, options: Options, device: torch.device | None = None) -> list[Engine]:
        """The installed engines to choose from, the preferred first; on an accelerator there is but one."""
        names = _limits(options).engines
        if names is None:
            configured = options.compiler_path or options.compiler_image
            names = (*_CANDIDATES, *([_COMPILER] if configured else ()))
        if device is not None and device.type != "cpu":
            names = names[:1]
        return [engine for engine in map(find, names) if engine.probe().installed or engine.name == _COMPILER]

    def options_for(self, engine: Engine, options: Options) -> Options:
        """The options with which a candidate is tried: with its own engine options, given under its name."""
        own = (options.engine_options or {}).get(engine.name)
        return dataclasses.replace(options, engine=engine.name, engine_options=own)

    def key(self, model: bytes, inputs: Sequence[Any], options: Options, device: torch.device) -> str:
        """What a choice holds for: the model without the values of its weights, sizes, engines, machine, threads."""
        return key_of(
            auto=repr(sorted((options.engine_options or {}).items())),
            model=hashlib.sha256(model).hexdigest(),
            inputs=repr([(str(x.dtype), tuple(x.shape)) if isinstance(x, torch.Tensor) else x for x in inputs]),
            engines=repr([engine.probe() for engine in self.candidates(options, device)]),
            options=repr(options.artifact_key()),
            threads=str(torch.get_num_threads()),
        )

    def choose(
        self, key: str, contenders: Mapping[str, Prepare[T]], expected: Call | None, options: Options
    ) -> tuple[Choice, T]:
        """The engine remembered for this key, or the one that is the fastest now; and what was prepared of it."""
        known = _recalled(key, options)
        if known is not None and known.engine in contenders:
            try:
                return known, contenders[known.engine]()[0]
            except Exception as error:
                log.warning("%s was the fastest before and does not work now: %s", known.engine, error)
        if len(contenders) == 1:
            name, prepare = next(iter(contenders.items()))
            return Choice(name, {}, {}), prepare()[0]
        contest = _Contest(contenders, expected, _limits(options).seconds)
        choice, winner = contest.decide()
        log.info("%s", choice)
        if contest.complete:
            _remember(key, choice, options)
        return choice, winner

    def load(self, job: Job, artifact: Path | None) -> AutoRunner:
        """A runner that chooses at its first call."""
        return AutoRunner(self, job)


def _limits(options: Options) -> _Limits:
    given = dict(options.engine_options or {})
    known = {field.name for field in dataclasses.fields(_Limits)}
    for name in given:
        if name not in known:
            find(name)  # an engine's own options; an unknown name is an error with a suggestion
    limits = {name: value for name, value in given.items() if name in known}
    _check_limits(limits)
    return _Limits(**{**limits, **({"engines": tuple(limits["engines"])} if limits.get("engines") else {})})


def _check_limits(limits: Mapping[str, Any]) -> None:
    names, seconds = limits.get("engines", [""]), limits.get("seconds", _SECONDS)
    if names is not None and not (
        isinstance(names, (list, tuple)) and names and all(isinstance(x, str) for x in names)
    ):
        raise OptionError(f"engines is {names!r}", hint="use a list of names")
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < math.inf:
        raise OptionError(f"seconds is {seconds!r}", hint="use a number of seconds")


class _Contest:
    """Prepares candidates, drops those whose results differ, and measures the rest in turns."""

    def __init__(self, contenders: Mapping[str, Prepare[Any]], expected: Call | None, seconds: float) -> None:
        self._contenders, self._expected = contenders, expected
        self._seconds, self._ends = seconds, time.monotonic() + seconds
        self._ready: dict[str, tuple[Any, Call]] = {}
        self._doubtful: dict[str, tuple[Any, Call]] = {}
        self._times: dict[str, float] = {}
        self._discarded: dict[str, str] = {}
        self.complete = True
        """Whether every candidate had its turn."""

    def decide(self) -> tuple[Choice, Any]:
        """The fastest; a tie goes to whoever comes first."""
        wanted = self._torchs()
        for name, prepare in self._contenders.items():
            if self._ready and time.monotonic() > self._ends:
                self._discarded[name], self.complete = "no time was left to try it", False
                continue
            results = self._prepare(name, prepare, wanted)
            wanted = results if wanted is None else wanted
        if not self._ready:
            self._ready = self._least_doubtful()
        if len(self._ready) > 1:
            self._measure()
        winner = self._winner()
        times = dict(sorted(self._times.items(), key=lambda item: item[1]))
        return Choice(winner, times, self._discarded), self._ready[winner][0]

    def _torchs(self) -> Sequence[Any] | None:
        """Torch's own results, where it can be asked."""
        try:
            return self._expected() if self._expected is not None else None
        except Exception as error:
            log.info("torch's own results are not known: %s", error)
            return None

    def _prepare(self, name: str, prepare: Prepare[Any], wanted: Sequence[Any] | None) -> Sequence[Any] | None:
        """Make an engine ready; its results, if it has any."""
        try:
            prepared, call = prepare()
            results = call()
        except Exception as error:  # whatever an engine raises, the others are there
            self._discarded[name] = str(error).partition("\n")[0]
            log.info("not %s: %s", name, error)
            return None
        if wanted is None or _agree(results, wanted):
            self._ready[name] = (prepared, call)
        else:
            log.warning("%s is not chosen: its results differ from %s", name, self._standard())
            self._doubtful[name], self._discarded[name] = (prepared, call), "its results differ"
        return results

    def _standard(self) -> str:
        return "torch's" if self._expected is not None else f"those of {next(iter(self._ready))}"

    def _least_doubtful(self) -> dict[str, tuple[Any, Call]]:
        """Where all differ from torch, as they may where rounding decides, the first is as good as without a choice."""
        for name, entry in self._doubtful.items():
            log.warning("no engine gives torch's results; %s is used", name)
            return {name: entry}
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self._discarded.items())
        raise EngineError(f"no engine can run the model: {reasons}")

    def _measure(self) -> None:
        """The shortest time of each counts."""
        with show_progress("choosing an engine, measuring " + ", ".join(self._ready)):
            taken = in_turns(
                [call for _, call in self._ready.values()],
                rounds=_ROUNDS,
                least=_LEAST_ROUNDS,
                limit=self._seconds * _MEASURING,
                round_seconds=_ROUND_SECONDS,
                hopeless=_HOPELESS,
            )
        self._times = dict(zip(self._ready, map(min, taken), strict=True))

    def _winner(self) -> str:
        if not self._times:
            return next(iter(self._ready))
        best = min(self._times.values())
        return next(name for name in self._ready if self._times[name] <= best * _TIE)


def _agree(results: Sequence[Any], wanted: Sequence[Any]) -> bool:
    pairs = zip(results, wanted, strict=True)
    return all(close(got, want) for got, want in pairs if isinstance(want, torch.Tensor))


def _recalled(key: str, options: Options) -> Choice | None:
    cache = default_cache(options)
    folder = cache.get(key) if cache is not None else None
    if folder is None:
        return None
    try:
        return Choice(**json.loads((folder / _FILE).read_text(encoding="utf-8")), remembered=True)
    except (OSError, ValueError, TypeError) as error:
        log.warning("the engine chosen before cannot be read, so they are measured again: %s", error)
        return None


def _remember(key: str, choice: Choice, options: Options) -> None:
    cache = default_cache(options)
    if cache is None:
        return
    written = {"engine": choice.engine, "seconds": dict(choice.seconds), "discarded": dict(choice.discarded)}
    about = {"what": "choice", "engine": choice.engine}
    cache.drop(key)  # one that was remembered and did not work
    cache.put(key, lambda folder: _write(folder / _FILE, written), about)


def _write(path: Path, written: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(written), encoding="utf-8")


class AutoRunner(Runner):
    """Runs one model, the same for every candidate but for casts, in the one chosen at the first call."""

    def __init__(self, auto: Auto, job: Job) -> None:
        self._auto, self._job = auto, job
        self._chosen: Runner | None = None
        self._lock = threading.Lock()
        self._made: list[Runner] = []
        self.choice: Choice | None = None

    def __call__(self, inputs: Sequence[torch.Tensor | int]) -> list[torch.Tensor]:
        """Run once."""
        return (self._chosen or self._choose(inputs))(inputs)

    def into(self, inputs: Sequence[torch.Tensor | int], outputs: Sequence[torch.Tensor]) -> None:
        """Run once, as the chosen engine does it."""
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
            contenders = {engine.name: partial(self._prepared, engine, inputs) for engine in engines}
            key = auto.key(job.model, inputs, job.options, job.device)
            self.choice, chosen = auto.choose(key, contenders, None, job.options)
            for loser in self._made:
                if loser is not chosen:
                    loser.close()
            self._made.clear()
            self._chosen = chosen
            return chosen

    def _prepared(self, engine: Engine, inputs: Sequence[torch.Tensor | int]) -> tuple[Runner, Call]:
        job, options = self._job, self._auto.options_for(engine, self._job.options)
        refitted = job.refit(job, engine, options) if job.refit else dataclasses.replace(job, options=options)
        runner = artifacts.load(engine, refitted)
        self._made.append(runner)
        return runner, lambda: runner(inputs)
