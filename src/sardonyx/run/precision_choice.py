"""Choose the precision of a model's layers by the arguments of calls: measure layers, and guard the results."""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import onnx_ir as ir
import torch

from sardonyx.cache.disk import default_cache
from sardonyx.cache.machine import key_of
from sardonyx.engines import Engine, Job
from sardonyx.errors import OptionError
from sardonyx.options import Options
from sardonyx.precision.layers import Layer, layers_of
from sardonyx.precision.metric import Difference, checked, differ
from sardonyx.precision.plan import FLOAT32, Plan, Type
from sardonyx.precision.search import Found, LayerTrials, Trial, search, worthwhile
from sardonyx.run.builds import Built
from sardonyx.run.layer_trials import ROUND_SECONDS, ROUNDS, measure_layers
from sardonyx.telemetry.progress import show_progress
from sardonyx.telemetry.report import LayerPrecision, PrecisionChoice
from sardonyx.timing import in_turns

log = logging.getLogger(__name__)

WANTED: Mapping[str, Sequence[Type]] = {
    "bf16": ("bf16",),
    "int8": ("int8", "bf16"),
    "int4": ("int4", "int8", "bf16"),
    "auto": ("int8", "bf16"),
}
"""The precisions that layers may have, by the value of the option."""
_FILE = "precision.json"


@dataclass(frozen=True)
class Candidate:
    """A model with a plan: what is built for it, and its calls with calibration inputs and fixed random numbers."""

    model: Any
    calls: Sequence[Callable[[], Sequence[Any]]]

    def results(self) -> Sequence[Sequence[Any]]:
        """Return the results of each call."""
        return [call() for call in self.calls]


class Subject(ABC):
    """The model that precisions are chosen for: how it is built, measured and recognized."""

    wanted: Sequence[Type]
    """The precisions that layers may have."""
    in_order = False
    """Whether layers start in the first of these, instead of the fastest."""
    share = 1.0
    """The share of its time in float32 that a call may take."""
    why_no_trials = "this processor has no instructions for it, or weights are not finite"

    @abstractmethod
    def candidate(self, plan: Plan) -> Candidate:
        """Return the model with a plan."""

    @abstractmethod
    def trials(self, float32: Candidate) -> Sequence[LayerTrials]:
        """Return what is measured of each layer by itself."""

    @abstractmethod
    def logits(self, float32: Candidate) -> frozenset[int]:
        """Return the results that are scores of classes or words."""

    @abstractmethod
    def key(self, float32: Candidate) -> Mapping[str, str]:
        """Return what the choice depends on besides options and the machine: the model, its weights and inputs."""


Build: TypeAlias = Callable[[Plan], Candidate]


@dataclass(frozen=True)
class RegionSubject(Subject):
    """A region of a compiled model, in a call with these arguments."""

    build: Build
    engine: Engine
    args: Sequence[Any]
    options: Options
    wanted: Sequence[Type]

    def candidate(self, plan: Plan) -> Candidate:
        """Return the region with a plan."""
        return self.build(plan)

    def trials(self, float32: Candidate) -> Sequence[LayerTrials]:
        """Return what is measured of each layer by itself."""
        return measure_layers(self.engine, float32.model.built, self.args, self.wanted, self.options)

    def logits(self, float32: Candidate) -> frozenset[int]:
        """Return the results that a layer computes."""
        built: Built = float32.model.built
        scores = scores_of(built.graph, layers_of(built.graph))
        return frozenset(i for i, result in enumerate(built.binding.results) if result.output in scores)

    def key(self, float32: Candidate) -> Mapping[str, str]:
        """Return the model with its weights, and the arguments' shapes."""
        built: Built = float32.model.built
        job = Job.of(built.model, built.graph, self.options, weights=built.binding.constants(self.args))
        shapes = [(str(x.dtype), tuple(x.shape)) if isinstance(x, torch.Tensor) else x for x in self.args]
        return {"model": job.digest(), "inputs": repr(shapes)}


def choose_precision(
    build: Build, engine: Engine, args: Sequence[Any], options: Options, device: torch.device
) -> tuple[PrecisionChoice, Candidate]:
    """Return the choice for a region, and the candidate to use."""
    subject = RegionSubject(build, engine, args, options, WANTED[options.precision])
    return choose_for(subject, engine, options, device)


def choose_for(
    subject: Subject, engine: Engine, options: Options, device: torch.device
) -> tuple[PrecisionChoice, Candidate]:
    """Return the choice, and the candidate to use."""
    if device.type != "cpu" or not engine.takes_kernels(device):
        raise OptionError(
            f"precision={options.precision!r} with the engine {engine.name!r} on the device {device.type!r}",
            hint="it is for the engine 'onnxruntime' on the CPU; on a GPU, convert the model, as by model.half()",
        )
    with show_progress(f"choosing the precision of layers, {options.precision}"):
        return _Chooser(subject, engine, options).choose()


@dataclass
class _Chooser:
    subject: Subject
    engine: Engine
    options: Options
    candidates: dict[str, Candidate] = field(default_factory=dict)

    def choose(self) -> tuple[PrecisionChoice, Candidate]:
        key = self._key() if self.options.metric is None else None
        cached = None if key is None else _cached_choice(key, self.options)
        if cached is not None:
            return cached, self._candidate(Plan({row.layer: row.precision for row in cached.layers}))
        for references in self._references:
            _check_results(references)
        trials = self.subject.trials(self._float32)
        found = search(
            trials,
            self.subject.wanted,
            lambda plan: self._difference(plan).drop,
            self._bound,
            in_order=self.subject.in_order,
        )
        choice, chosen = self._checked(found, trials)
        if key is not None:
            _cache_choice(key, choice, self.options)
        return choice, chosen

    @property
    def _bound(self) -> float:
        return self.options.max_drop

    @cached_property
    def _float32(self) -> Candidate:
        return self._candidate(Plan())

    @cached_property
    def _references(self) -> Sequence[Sequence[Any]]:
        return self._float32.results()

    @cached_property
    def _logits(self) -> frozenset[int]:
        return self.subject.logits(self._float32)

    def _candidate(self, plan: Plan) -> Candidate:
        key = plan.to_json()
        if key not in self.candidates:
            self.candidates[key] = self.subject.candidate(plan)
        return self.candidates[key]

    def _difference(self, plan: Plan) -> Difference:
        """Return the largest difference of any call."""
        pairs = zip(self._candidate(plan).results(), self._references, strict=True)
        return max((self._difference_of(*pair) for pair in pairs), key=lambda difference: difference.drop)

    def _difference_of(self, results: Sequence[Any], references: Sequence[Any]) -> Difference:
        if self.options.metric is not None:
            return Difference(checked(self.options.metric)(results, references))
        return differ(results, references, self._logits)

    def _checked(self, found: Found, trials: Sequence[LayerTrials]) -> tuple[PrecisionChoice, Candidate]:
        """Return the plan that was found if the model is faster with it, else float32."""
        plan = found.plan
        if plan.is_float32:
            return self._in_float32(self._why_float32(trials), trials)
        plans = [plan, *self._without_chain(plan, trials)]
        candidates = [self._float32, *map(self._candidate, plans)]
        times = in_turns([x.calls[0] for x in candidates], rounds=ROUNDS, round_seconds=ROUND_SECONDS)
        before, *afters = (median(taken) for taken in times)
        fast = min(afters) * self.subject.share
        after, plan = next(pair for pair in zip(afters, plans, strict=True) if pair[0] <= fast)
        chosen = self._candidate(plan)
        if after > before * self.subject.share:
            reason = f"it takes {after * 1e3:.3g} ms with {_counted(plan)}, and {before * 1e3:.3g} ms in float32"
            return self._in_float32(reason, trials, before)
        difference = self._difference(plan)
        rows = tuple(_row(layer, plan) for layer in trials)
        details = "" if self.options.metric is not None else _details(difference, self._logits)
        return PrecisionChoice(
            self.options.precision, self._bound, difference.drop, rows, after, before, details
        ), chosen

    def _without_chain(self, plan: Plan, trials: Sequence[LayerTrials]) -> Sequence[Plan]:
        """Return the plan with its chain in float32, if that leaves layers and keeps the bound."""
        chained = {layer.layer for layer in trials if layer.chained}
        others = Plan({name: FLOAT32 if name in chained else precision for name, precision in plan.layers.items()})
        if others.is_float32 or others == plan or self._difference(others).drop > self._bound:
            return []
        return [others]

    def _in_float32(
        self, reason: str, trials: Sequence[LayerTrials], seconds: float | None = None
    ) -> tuple[PrecisionChoice, Candidate]:
        log.warning("precision %s: the model runs in float32: %s", self.options.precision, reason)
        if seconds is None:
            (times,) = in_turns([self._float32.calls[0]], rounds=ROUNDS, round_seconds=ROUND_SECONDS)
            seconds = median(times)
        rows = tuple(_row(layer, Plan()) for layer in trials)
        wanted, remark = self.options.precision, f"the model runs in float32: {reason}"
        return PrecisionChoice(wanted, self._bound, 0.0, rows, seconds, seconds, remark=remark), self._float32

    def _why_float32(self, trials: Sequence[LayerTrials]) -> str:
        if not trials:
            return "it has no linear layers or convolutions with constant weights"
        if not any(trial.trials for trial in trials):
            return self.subject.why_no_trials
        if not any(worthwhile(trials, self.subject.wanted).values()):
            return "no layer is faster in lower precision"
        return f"no layer in lower precision keeps the drop within max_drop={self.options.max_drop}"

    def _key(self) -> str:
        """Return the key of a choice: the model with its weights, its inputs, and what else it depends on."""
        return key_of(
            precision=self.options.precision,
            max_drop=repr(self._bound),
            engine=repr(self.engine.probe()),
            options=repr(self.options.artifact_key()),
            threads=str(torch.get_num_threads()),
            **self.subject.key(self._float32),
        )


def _check_results(references: Sequence[Any]) -> None:
    floats = [x for x in references if isinstance(x, torch.Tensor) and x.dtype.is_floating_point and x.numel()]
    if not floats:
        raise OptionError(
            "the precision cannot be chosen by a call whose results are integers or empty",
            hint="let the first call be one with results of floating point, or use precision='float32'",
        )
    if not all(bool(x.isfinite().any()) for x in floats):
        raise OptionError(
            "the precision cannot be chosen by a call with a result that is NaN or infinite throughout, in float32 too",
            hint="let the first call be one with inputs as in use",
        )


def _counted(plan: Plan) -> str:
    return ", ".join(f"{count} layers in {precision}" for precision, count in plan.counts().items())


def _details(difference: Difference, logits: frozenset[int]) -> str:
    details = f" (relative error {difference.relative_error:.1e}"
    if logits:
        details += f", divergence {difference.divergence:.1e}, first choice agrees in {difference.agreement:.1%}"
    return details + ")"


def _row(trials: LayerTrials, plan: Plan) -> LayerPrecision:
    precision = plan.type_of(trials.layer)
    trial = trials.trials.get(precision, Trial(0.0, trials.float32_seconds))
    return LayerPrecision(trials.layer, precision, trial.error, trial.seconds, trials.float32_seconds)


def scores_of(graph: ir.Graph, layers: Sequence[Layer]) -> frozenset[int]:
    """Return the outputs of a graph that a layer computes, up to Reshapes: scores of classes or words."""
    results = {layer.result for layer in layers}
    return frozenset(i for i, output in enumerate(graph.outputs) if _before_reshapes(output) in results)


def _before_reshapes(x: ir.Value) -> ir.Value:
    node = x.producer()
    while node is not None and node.op_type == "Reshape" and node.inputs[0] is not None:
        x = node.inputs[0]
        node = x.producer()
    return x


# The disk cache


def _cached_choice(key: str, options: Options) -> PrecisionChoice | None:
    cache = default_cache(options)
    folder = cache.get(key) if cache is not None else None
    if folder is None:
        return None
    try:
        content = json.loads((folder / _FILE).read_text(encoding="utf-8"))
        rows = tuple(LayerPrecision(**row) for row in content.pop("layers"))
        return replace(PrecisionChoice(**content, layers=rows), remembered=True)
    except (OSError, ValueError, TypeError, KeyError) as error:
        log.warning("the cached choice of a precision cannot be read; measuring again: %s", error)
        return None


def _cache_choice(key: str, choice: PrecisionChoice, options: Options) -> None:
    cache = default_cache(options)
    if cache is None:
        return

    def write(folder: Path) -> None:
        (folder / _FILE).write_text(json.dumps(asdict(choice)), encoding="utf-8")

    cache.put(key, write, {"what": "choice", "precision": choice.wanted})
