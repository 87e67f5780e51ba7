"""Choose the precision of a model's layers by what was measured of them, and guard the results."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import Any

import torch

from sardonyx.cache.machine import key_of
from sardonyx.engines import Engine
from sardonyx.errors import OptionError
from sardonyx.options import Options
from sardonyx.precision.metric import Difference, checked, differ
from sardonyx.precision.plan import Plan, Type
from sardonyx.precision.search import LayerTrials, Trial, search, worthwhile
from sardonyx.run.layer_trials import ROUND_SECONDS, ROUNDS
from sardonyx.run.precision_cache import Chosen, cache_choice, cached_choice
from sardonyx.run.precision_subject import Candidate, Subject, own_types
from sardonyx.telemetry.progress import show_progress
from sardonyx.telemetry.report import LayerPrecision, PrecisionChoice
from sardonyx.timing import in_turns

log = logging.getLogger(__name__)


def choose_for(
    subject: Subject, engine: Engine, options: Options, device: torch.device
) -> tuple[PrecisionChoice, Candidate]:
    """Return the choice, and the candidate to use."""
    _check_engine(engine, options, device)
    with show_progress(f"choosing the precision of layers, {options.precision}") as progress:
        return _Chooser(subject, engine, options, progress).choose()


def _check_engine(engine: Engine, options: Options, device: torch.device) -> None:
    supported = engine.takes_kernels(device) or own_types(engine, options)
    if device.type != "cpu" or not supported:
        raise OptionError(
            f"precision={options.precision!r} with the engine {engine.name!r} on the device {device.type!r}",
            hint="on the CPU 'onnxruntime' has all, 'openvino' bf16 and int8; on a GPU, convert the model with .half()",
        )


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
