"""Choose the precision of a compiled model's layers, by the arguments of its first call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch

from sardonyx.engines import Engine, Job
from sardonyx.options import Options
from sardonyx.precision.layers import layers_of
from sardonyx.precision.metric import differ
from sardonyx.precision.plan import FLOAT32, INTEGERS, MODEL, Plan, Type
from sardonyx.precision.search import LayerTrials, Trial
from sardonyx.run.attention_trials import measure_attention
from sardonyx.run.builds import Built
from sardonyx.run.layer_trials import ROUND_SECONDS, ROUNDS, measure_layers
from sardonyx.run.precision_choice import choose_for
from sardonyx.run.precision_subject import WANTED, Candidate, Subject, own_types, scores_of
from sardonyx.run.quantized_trials import measure_quantized_layers
from sardonyx.telemetry.report import PrecisionChoice
from sardonyx.timing import in_turns


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
    own = engine.in_precision(plan.lowest, options) if own_types(engine, options) else None
    return own or options


def _subject_for(engine: Engine, options: Options) -> type[RegionSubject]:
    own = own_types(engine, options)
    if "int8" in own and engine.takes_quantized_layers:
        return QuantizedSubject
    return EngineSubject if own else RegionSubject


def choose_precision(
    build: Build, engine: Engine, args: Sequence[Any], options: Options, device: torch.device
) -> tuple[PrecisionChoice, Candidate]:
    """Return the choice for a region, and the candidate to use."""
    wanted = own_types(engine, options) or WANTED[options.precision]
    subject = _subject_for(engine, options)(build, engine, args, options, wanted)
    return choose_for(subject, engine, options, device)
