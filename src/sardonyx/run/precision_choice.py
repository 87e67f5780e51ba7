"""Choose the precision of a model's layers by the arguments of calls: measure layers, and guard the results."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median
from typing import Any, Protocol

import onnx_ir as ir
import torch

from sardonyx.cache.machine import key_of
from sardonyx.engines import Engine, Job
from sardonyx.errors import OptionError
from sardonyx.options import Options
from sardonyx.precision.layers import Layer, layers_of
from sardonyx.precision.metric import Difference, checked, differ
from sardonyx.precision.plan import FLOAT32, INTEGERS, MODEL, Plan, Type
from sardonyx.precision.search import LayerTrials, Trial, search, worthwhile
from sardonyx.run.attention_trials import measure_attention
from sardonyx.run.builds import Built
from sardonyx.run.layer_trials import ROUND_SECONDS, ROUNDS, measure_layers
from sardonyx.run.precision_cache import Chosen, cache_choice, cached_choice
from sardonyx.run.quantized_trials import measure_quantized_layers
from sardonyx.telemetry.progress import show_progress
from sardonyx.telemetry.report import LayerPrecision, PrecisionChoice
from sardonyx.timing import in_turns

log = logging.getLogger(__name__)

WANTED: Mapping[str, Sequence[Type]] = {
    "bf16": ("bf16",),
    "int8": ("int8", "bf16"),
    "int4": ("int4", "int8", "bf16"),
    "auto": ("int4", "int8", "bf16"),
}
"""The precisions that layers may have, by the value of the option."""


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
    def trials(self, float32: Candidate, progress: Callable[[str], None]) -> Sequence[LayerTrials]:
        """Return what is measured of each layer by itself; `progress` takes how far it is."""

    def computed(self, plan: Plan) -> Plan:
        """Return the plan with the precisions that layers are computed in, which may depend on those of others."""
        return plan

    def alternatives(self, plan: Plan, trials: Sequence[LayerTrials]) -> Sequence[Plan]:
        """Return other plans that may be faster: without the chain."""
        chained = {layer.layer for layer in trials if layer.chained}
        layers = {name: FLOAT32 if name in chained else precision for name, precision in plan.layers.items()}
        return [replace(plan, layers=layers)]

    @abstractmethod
    def logits(self, float32: Candidate) -> frozenset[int]:
        """Return the results that are scores of classes or words."""

    @abstractmethod
    def key(self, float32: Candidate) -> Mapping[str, str]:
        """Return what the choice depends on besides options and the machine: the model, its weights and inputs."""


class Build(Protocol):
    """Builds a region with a plan, with native kernels if the options ask for them and they are not left out."""

    def __call__(self, plan: Plan, *, native: bool = True) -> Candidate:
        """Return the region with a plan."""


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

    @property
    def in_order(self) -> bool:  # type: ignore[override]  # as the options say
        """Whether layers start in the precision that was asked for: int4 pays in later calls, of one row."""
        return self.options.precision == "int4"

    def trials(self, float32: Candidate, progress: Callable[[str], None]) -> Sequence[LayerTrials]:
        """Return what is measured of each layer by itself."""
        built = (self._with_layers or float32).model.built
        arguments = (self.engine, built, self.args, self.wanted, self.options)
        layers = measure_layers(*arguments, in_order=self.in_order, progress=progress)
        return [*layers, *measure_attention(*arguments)]

    @cached_property
    def _with_layers(self) -> Candidate | None:
        """The region in float32 without native kernels, which layers would be parts of; None if it has none anyway."""
        return self.build(Plan(), native=False) if self.options.native is True else None

    def logits(self, float32: Candidate) -> frozenset[int]:
        """Return the results that a layer computes."""
        built: Built = (self._with_layers or float32).model.built
        scores = scores_of(built.graph, layers_of(built.graph))
        return frozenset(i for i, result in enumerate(built.binding.results) if result.output in scores)

    def key(self, float32: Candidate) -> Mapping[str, str]:
        """Return the model with its weights, and the arguments' shapes."""
        built: Built = float32.model.built
        job = Job.of(built.model, built.graph, self.options, weights=built.binding.constants(self.args))
        shapes = [(str(x.dtype), tuple(x.shape)) if isinstance(x, torch.Tensor) else x for x in self.args]
        return {"model": job.digest(), "inputs": repr(shapes)}


@dataclass(frozen=True)
class EngineSubject(RegionSubject):
    """A region for an engine that has lower precisions for whole models."""

    def trials(self, float32: Candidate, progress: Callable[[str], None]) -> Sequence[LayerTrials]:
        """Return what is measured of the model in each precision, as of its only layer."""
        calls = [x.calls[0] for x in (float32, *(self.candidate(Plan({MODEL: t})) for t in self.wanted))]
        reference, *results = [call() for call in calls]
        before, *seconds = (min(taken) for taken in in_turns(calls, rounds=ROUNDS, round_seconds=ROUND_SECONDS))
        trials = [Trial(differ(result, reference).drop, s) for result, s in zip(results, seconds, strict=True)]
        return [LayerTrials(MODEL, before, dict(zip(self.wanted, trials, strict=True)))]


@dataclass(frozen=True)
class QuantizedSubject(EngineSubject):
    """A region for an engine that takes quantized layers, and computes what is between them in bf16."""

    @property
    def in_order(self) -> bool:  # type: ignore[override]  # whatever the options say
        """Layers start in int8: by themselves they take longer, as what is before them does not round for them."""
        return True

    def trials(self, float32: Candidate, progress: Callable[[str], None]) -> Sequence[LayerTrials]:
        """Return what is measured of each layer by itself; of a model without layers, of it as a whole."""
        built = float32.model.built
        layers = measure_quantized_layers(self.engine, built, self.args, self.wanted, self.options, progress)
        if layers:
            return layers
        floats = [precision for precision in self.wanted if precision not in INTEGERS]
        return EngineSubject(self.build, self.engine, self.args, self.options, floats).trials(float32, progress)

    def computed(self, plan: Plan) -> Plan:
        """Return the plan with layers in bf16 that are not in int8: the engine computes all of the model in it."""
        return plan if plan.is_float32 else self._with_types(plan, [])

    def alternatives(self, plan: Plan, trials: Sequence[LayerTrials]) -> Sequence[Plan]:
        """Return plans with the layers in bf16 that are faster so by themselves, and with all of them."""
        slower = [layer.layer for layer in trials if layer.possible(["int8"]) and layer.fastest(self.wanted) != "int8"]
        return [self._with_types(plan, slower), self._with_types(plan, list(plan.layers))]

    def _with_types(self, plan: Plan, back: Sequence[str]) -> Plan:
        """Return a plan with these layers, and those in float32, in what the engine computes the rest in."""
        rest = next((precision for precision in self.wanted if precision not in INTEGERS), FLOAT32)
        layers = {name: rest if t == FLOAT32 or name in back else t for name, t in plan.layers.items()}
        return replace(plan, layers=layers)


def options_with(plan: Plan, engine: Engine, options: Options) -> Options:
    """Return the options with which an engine computes a model with a plan."""
    own = engine.in_precision(plan.lowest, options) if _own_types(engine, options) else None
    return own or options


def _subject_for(engine: Engine, options: Options) -> type[RegionSubject]:
    own = _own_types(engine, options)
    if "int8" in own and engine.takes_quantized_layers:
        return QuantizedSubject
    return EngineSubject if own else RegionSubject


def choose_precision(
    build: Build, engine: Engine, args: Sequence[Any], options: Options, device: torch.device
) -> tuple[PrecisionChoice, Candidate]:
    """Return the choice for a region, and the candidate to use."""
    wanted = _own_types(engine, options) or WANTED[options.precision]
    subject = _subject_for(engine, options)(build, engine, args, options, wanted)
    return choose_for(subject, engine, options, device)


def choose_for(
    subject: Subject, engine: Engine, options: Options, device: torch.device
) -> tuple[PrecisionChoice, Candidate]:
    """Return the choice, and the candidate to use."""
    _check_engine(engine, options, device)
    with show_progress(f"choosing the precision of layers, {options.precision}") as progress:
        return _Chooser(subject, engine, options, progress).choose()


def _check_engine(engine: Engine, options: Options, device: torch.device) -> None:
    supported = engine.takes_kernels(device) or _own_types(engine, options)
    if device.type != "cpu" or not supported:
        raise OptionError(
            f"precision={options.precision!r} with the engine {engine.name!r} on the device {device.type!r}",
            hint="on the CPU 'onnxruntime' has all, 'openvino' bf16 and int8; on a GPU, convert the model with .half()",
        )


def _own_types(engine: Engine, options: Options) -> Sequence[Type]:
    """Return the precisions in which an engine computes whole models; none if it lacks the one that is asked for."""
    wanted = WANTED[options.precision]
    own = [precision for precision in wanted if engine.in_precision(precision, options) is not None]
    return own if options.precision in (*own[:1], "auto") else []


@dataclass
class _Chooser:
    subject: Subject
    engine: Engine
    options: Options
    progress: Callable[[str], None]
    candidates: dict[str, Candidate] = field(default_factory=dict)

    def choose(self) -> tuple[PrecisionChoice, Candidate]:
        key = self._key() if self.options.metric is None else None
        cached = None if key is None else cached_choice(key, self.options)
        if cached is not None and self._keeps_bound(cached.plan):
            return cached.choice, self._candidate(cached.plan)
        trials = self.subject.trials(self._float32, self.progress)
        if trials and self.options.metric is None:
            for references in self._references:
                _check_results(references)
        self.progress("the whole model")
        choice, plan = self._choose(trials)
        if key is not None:
            cache_choice(key, Chosen(choice, plan), self.options)
        return choice, self._candidate(plan)

    def _keeps_bound(self, plan: Plan) -> bool:
        """Whether a plan that was chosen by other inputs keeps the bound for these."""
        return plan.is_float32 or self._difference(plan).drop <= self._bound

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

    def _choose(self, trials: Sequence[LayerTrials]) -> tuple[PrecisionChoice, Plan]:
        """Return the plan that is found, if the model is faster with it; else one without its lowest precision."""
        wanted, reason, before = list(self.subject.wanted), self._why_float32(trials), None
        while wanted:
            plan = self._found(trials, wanted)
            if plan.is_float32:
                break
            plan, after, before = self._fastest([plan, *self._alternatives(plan, trials)])
            if after <= before * self.subject.share:
                return self._choice(plan, trials, after, before), plan
            reason = f"it takes {after * 1e3:.3g} ms with {_counted(plan)}, and {before * 1e3:.3g} ms in float32"
            log.info("precision %s: %s", self.options.precision, reason)
            wanted = wanted[wanted.index(plan.lowest) + 1 :]
        return self._in_float32(reason, trials, before), Plan()

    def _found(self, trials: Sequence[LayerTrials], wanted: Sequence[Type]) -> Plan:
        """Return the plan within the bound of these precisions."""
        in_order, computed = self.subject.in_order, self.subject.computed

        def drop(plan: Plan) -> float:
            return self._difference(computed(plan)).drop

        return computed(search(trials, wanted, drop, self._bound, in_order=in_order).plan)

    def _fastest(self, plans: Sequence[Plan]) -> tuple[Plan, float, float]:
        """Return the plan with which a call is the fastest, and its seconds with it and in float32."""
        candidates = [self._float32, *map(self._candidate, plans)]
        times = in_turns([x.calls[0] for x in candidates], rounds=ROUNDS, round_seconds=ROUND_SECONDS)
        before, *afters = (median(taken) for taken in times)
        fast = min(afters) * self.subject.share
        after, plan = next(pair for pair in zip(afters, plans, strict=True) if pair[0] <= fast)
        return plan, after, before

    def _choice(self, plan: Plan, trials: Sequence[LayerTrials], after: float, before: float) -> PrecisionChoice:
        difference = self._difference(plan)
        rows = tuple(_row(layer, plan) for layer in trials)
        details = "" if self.options.metric is not None else _details(difference, self._logits)
        return PrecisionChoice(self.options.precision, self._bound, difference.drop, rows, after, before, details)

    def _alternatives(self, plan: Plan, trials: Sequence[LayerTrials]) -> Sequence[Plan]:
        """Return other plans that may be faster, and keep the bound."""
        found = {other.to_json(): other for other in self.subject.alternatives(plan, trials) if other != plan}
        others = [other for other in found.values() if not other.is_float32]
        return [other for other in others if self._difference(other).drop <= self._bound]

    def _in_float32(self, reason: str, trials: Sequence[LayerTrials], seconds: float | None) -> PrecisionChoice:
        log.warning("precision %s: the model runs in float32: %s", self.options.precision, reason)
        if seconds is None:
            (times,) = in_turns([self._float32.calls[0]], rounds=ROUNDS, round_seconds=ROUND_SECONDS)
            seconds = median(times)
        rows = tuple(_row(layer, Plan()) for layer in trials)
        remark = f"the model runs in float32: {reason}"
        return PrecisionChoice(self.options.precision, self._bound, 0.0, rows, seconds, seconds, remark=remark)

    def _why_float32(self, trials: Sequence[LayerTrials]) -> str:
        if not trials:
            return "it has no linear layers or convolutions of float32 that have kernels, see docs/precision.md"
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
            hint="let the first call be one with results of floating point, or give a metric of your own",
        )
    if not any(bool(x.isfinite().any()) for x in floats):
        raise OptionError(
            "the precision cannot be chosen by a call whose results are NaN or infinite throughout, in float32 too",
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
    method = "" if trial.storage is None else trial.storage.method
    return LayerPrecision(trials.layer, precision, trial.error, trial.seconds, trials.float32_seconds, method)


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
