"""Choose the precision of a region's layers by the arguments of a call: measure layers, and guard the results."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from operator import itemgetter
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
from sardonyx.precision.layers import layers_of
from sardonyx.precision.metric import Difference, checked, differ
from sardonyx.precision.plan import FLOAT32, Plan, Type
from sardonyx.precision.search import Found, LayerTrials, Trial, search, worthwhile
from sardonyx.run.attention_trials import measure_attention
from sardonyx.run.builds import Built
from sardonyx.run.layer_trials import ROUND_SECONDS, ROUNDS, measure_layers
from sardonyx.telemetry.progress import show_progress
from sardonyx.telemetry.report import LayerPrecision, PrecisionChoice
from sardonyx.timing import in_turns

log = logging.getLogger(__name__)

WANTED: Mapping[str, Sequence[Type]] = {"bf16": ("bf16",), "int8": ("int8", "bf16"), "auto": ("int8", "bf16")}
"""The precisions that layers may have, by the value of the option."""
_FILE = "precision.json"


@dataclass(frozen=True)
class Candidate:
    """A region with a plan: what is built for it, and a call with the arguments and fixed random numbers."""

    region: Any
    built: Built
    call: Callable[[], Sequence[Any]]


Build: TypeAlias = Callable[[Plan], Candidate]


def choose_precision(
    build: Build, engine: Engine, args: Sequence[Any], options: Options, device: torch.device
) -> tuple[PrecisionChoice, Candidate]:
    """Return the choice, and the candidate to use."""
    if device.type != "cpu" or not engine.takes_kernels(device):
        raise OptionError(
            f"precision={options.precision!r} with the engine {engine.name!r} on the device {device.type!r}",
            hint="it is for the engine 'onnxruntime' on the CPU; on a GPU, convert the model, as by model.half()",
        )
    with show_progress(f"choosing the precision of layers, {options.precision}"):
        return _Chooser(build, engine, args, options).choose()


@dataclass
class _Chooser:
    build: Build
    engine: Engine
    args: Sequence[Any]
    options: Options
    candidates: dict[str, Candidate] = field(default_factory=dict)

    def choose(self) -> tuple[PrecisionChoice, Candidate]:
        key = self._key() if self.options.metric is None else None
        cached = None if key is None else _cached_choice(key, self.options)
        if cached is not None:
            return cached, self._candidate(Plan({row.layer: row.precision for row in cached.layers}))
        _check_results(self._references)
        measured = (self.engine, self._float32.built, self.args, WANTED[self.options.precision], self.options)
        trials = [*measure_layers(*measured), *measure_attention(*measured)]
        found = search(trials, WANTED[self.options.precision], lambda plan: self._difference(plan).drop, self._bound)
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
    def _references(self) -> Sequence[Any]:
        return self._float32.call()

    @cached_property
    def _logits(self) -> frozenset[int]:
        return _logits(self._float32.built)

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

    def _checked(self, found: Found, trials: Sequence[LayerTrials]) -> tuple[PrecisionChoice, Candidate]:
        """Return the plan that was found if the model is faster with it, else float32."""
        plan = found.plan
        if plan.is_float32:
            return self._in_float32(_why_float32(trials, self.options), trials)
        plans = [plan, *self._without_chain(plan, trials)]
        calls = [self._float32.call, *(self._candidate(contender).call for contender in plans)]
        times = in_turns(calls, rounds=ROUNDS, round_seconds=ROUND_SECONDS)
        before, *afters = (median(taken) for taken in times)
        after, plan = min(zip(afters, plans, strict=True), key=itemgetter(0))
        chosen = self._candidate(plan)
        if after > before:
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
            (times,) = in_turns([self._float32.call], rounds=ROUNDS, round_seconds=ROUND_SECONDS)
            seconds = median(times)
        rows = tuple(_row(layer, Plan()) for layer in trials)
        wanted, remark = self.options.precision, f"the model runs in float32: {reason}"
        return PrecisionChoice(wanted, self._bound, 0.0, rows, seconds, seconds, remark=remark), self._float32

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
        return "it has no linear layers or convolutions with constant weights"
    if not any(trial.trials for trial in trials):
        return "this processor has no instructions for it, or weights are not finite"
    if not any(worthwhile(trials, WANTED[options.precision]).values()):
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
    return LayerPrecision(trials.layer, precision, trial.error, trial.seconds, trials.float32_seconds)


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
