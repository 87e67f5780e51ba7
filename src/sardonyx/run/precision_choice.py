"""Choose the precision of a region's layers by the arguments of a call: measure layers, and guard the results."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import Any, Protocol

import onnx_ir as ir
import torch

from sardonyx.cache.machine import key_of
from sardonyx.engines import Engine, Job
from sardonyx.errors import OptionError
from sardonyx.options import Options
from sardonyx.precision.layers import layers_of
from sardonyx.precision.metric import Difference, checked, differ
from sardonyx.precision.plan import Plan
from sardonyx.precision.search import LayerTrials, Trial, Wanted, search
from sardonyx.run.builds import Built
from sardonyx.run.layer_trials import ROUND_SECONDS, ROUNDS, measure_layers
from sardonyx.run.precision_cache import Chosen, cache_choice, cached_choice
from sardonyx.telemetry.progress import show_progress
from sardonyx.telemetry.report import LayerPrecision, PrecisionChoice
from sardonyx.timing import in_turns

log = logging.getLogger(__name__)

WANTED: Mapping[str, Wanted] = {
    "bf16": Wanted(("bf16",)),
    "int8": Wanted(("int8", "bf16")),
    "int4": Wanted(("int4", "int8", "bf16"), first="int4"),
    "auto": Wanted(("int4", "int8", "bf16")),
}
"""The precisions that layers may have, by the value of the option."""


@dataclass(frozen=True)
class Candidate:
    """A region with a plan: what is built for it, and a call with the arguments and fixed random numbers."""

    region: Any
    built: Built
    call: Callable[[], Sequence[Any]]


class Build(Protocol):
    """Builds a region with a plan, by default with native kernels if the options ask for them."""

    def __call__(self, plan: Plan, *, native: bool = True) -> Candidate: ...


def choose_precision(
    build: Build, engine: Engine, args: Sequence[Any], options: Options, device: torch.device
) -> tuple[PrecisionChoice, Candidate]:
    """Return the choice, and the candidate to use."""
    if device.type != "cpu" or not engine.takes_kernels(device):
        raise OptionError(
            f"precision={options.precision!r} with the engine {engine.name!r} on the device {device.type!r}",
            hint="it is for the engine 'onnxruntime' on the CPU; on a GPU, convert the model, as by model.half()",
        )
    with show_progress(f"choosing the precision of layers, {options.precision}") as progress:
        return _Chooser(build, engine, args, options, progress).choose()


@dataclass
class _Chooser:
    build: Build
    engine: Engine
    args: Sequence[Any]
    options: Options
    progress: Callable[[str], None]
    candidates: dict[str, Candidate] = field(default_factory=dict)

    def choose(self) -> tuple[PrecisionChoice, Candidate]:
        key = self._key() if self.options.metric is None else None
        cached = None if key is None else cached_choice(key, self.options)
        if cached is not None:
            return cached.choice, self._candidate(cached.plan)
        _check_results(self._references)
        wanted = WANTED[self.options.precision]
        trials = measure_layers(self.engine, self._layered.built, self.args, wanted, self.options, self.progress)
        self.progress("the whole model")
        choice, plan = self._choose(trials, wanted)
        if key is not None:
            cache_choice(key, Chosen(choice, plan), self.options)
        return choice, self._candidate(plan)

    @property
    def _bound(self) -> float:
        return self.options.max_drop

    @cached_property
    def _float32(self) -> Candidate:
        return self._candidate(Plan())

    @cached_property
    def _layered(self) -> Candidate:
        """The model in float32 whose layers are nodes, not parts of native kernels."""
        return self.build(Plan(), native=False) if self.options.native is True else self._float32

    @cached_property
    def _references(self) -> Sequence[Any]:
        return self._float32.call()

    @cached_property
    def _logits(self) -> frozenset[int]:
        return _logits(self._layered.built)

    def _candidate(self, plan: Plan) -> Candidate:
        key = plan.to_json()
        if key not in self.candidates:
            self.candidates[key] = self.build(plan)
        return self.candidates[key]

    def _difference(self, plan: Plan) -> Difference:
        results = self._candidate(plan).call()
        if self.options.metric is not None:
            return Difference(checked(self.options.metric)(results, self._references))
        return differ(results, self._references, self._logits)

    def _choose(self, trials: Sequence[LayerTrials], wanted: Wanted) -> tuple[PrecisionChoice, Plan]:
        """Return the plan that is found, if the model is faster with it; else one without the lowest precision."""
        reason, seconds = _why_float32(trials, self.options), None
        while wanted.types:
            plan = search(trials, wanted, lambda plan: self._difference(plan).drop, self._bound).plan
            if plan.is_float32:
                break
            seconds, after = self._seconds(plan)
            if after <= seconds:
                return self._choice(plan, trials, after, seconds), plan
            reason = f"it takes {after * 1e3:.3g} ms with {_counted(plan)}, and {seconds * 1e3:.3g} ms in float32"
            log.info("precision %s: %s", self.options.precision, reason)
            wanted = wanted.without(plan.lowest)
        return self._in_float32(reason, trials, seconds), Plan()

    def _seconds(self, plan: Plan) -> tuple[float, float]:
        """Return the seconds of a call in float32 and with a plan."""
        calls = [self._float32.call, self._candidate(plan).call]
        before, after = (median(taken) for taken in in_turns(calls, rounds=ROUNDS, round_seconds=ROUND_SECONDS))
        return before, after

    def _choice(self, plan: Plan, trials: Sequence[LayerTrials], after: float, before: float) -> PrecisionChoice:
        difference = self._difference(plan)
        rows = tuple(_row(layer, plan) for layer in trials)
        details = "" if self.options.metric is not None else _details(difference, self._logits)
        return PrecisionChoice(self.options.precision, self._bound, difference.drop, rows, after, before, details)

    def _in_float32(self, reason: str, trials: Sequence[LayerTrials], seconds: float | None) -> PrecisionChoice:
        log.warning("precision %s: the model runs in float32: %s", self.options.precision, reason)
        if seconds is None:
            (times,) = in_turns([self._float32.call], rounds=ROUNDS, round_seconds=ROUND_SECONDS)
            seconds = median(times)
        rows = tuple(_row(layer, Plan()) for layer in trials)
        remark = f"the model runs in float32: {reason}"
        return PrecisionChoice(self.options.precision, self._bound, 0.0, rows, seconds, seconds, remark=remark)

    def _key(self) -> str:
        """Return the key of a choice: the model with its weights, the arguments' shapes, and what it depends on."""
        built = self._float32.built
        job = Job.of(built.model, built.graph, self.options, weights=built.binding.constants(self.args))
        return key_of(
            precision=self.options.precision,
            max_drop=repr(self._bound),
            model=job.digest(),
            inputs=repr([(str(x.dtype), tuple(x.shape)) if isinstance(x, torch.Tensor) else x for x in self.args]),
            engine=repr(self.engine.probe()),
            options=repr(self.options.artifact_key()),
            threads=str(torch.get_num_threads()),
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


def _why_float32(trials: Sequence[LayerTrials], options: Options) -> str:
    if not trials:
        return "it has no linear layers with constant weights"
    if not any(trial.trials for trial in trials):
        return "this processor has no instructions for it, or weights are not finite"
    if not any(trial.worthwhile(WANTED[options.precision].types) for trial in trials):
        return "no layer is faster in lower precision"
    return f"no layer in lower precision keeps the drop within max_drop={options.max_drop}"


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


def _logits(built: Built) -> frozenset[int]:
    """Return the results that a layer computes, up to Reshapes: scores of classes or words."""
    outputs = [_before_reshapes(output) for output in built.graph.outputs]
    of_layers = {layer.result for layer in layers_of(built.graph)}
    scores = {i for i, x in enumerate(outputs) if x in of_layers}
    return frozenset(i for i, result in enumerate(built.binding.results) if result.output in scores)


def _before_reshapes(x: ir.Value) -> ir.Value:
    node = x.producer()
    while node is not None and node.op_type == "Reshape" and node.inputs[0] is not None:
        x = node.inputs[0]
        node = x.producer()
    return x
