"""What precisions are chosen for: a model that can be built, measured and recognized."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir

from sardonyx.engines import Engine
from sardonyx.options import Options
from sardonyx.precision.layers import Layer
from sardonyx.precision.plan import FLOAT32, Plan, Type
from sardonyx.precision.search import LayerTrials

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


def own_types(engine: Engine, options: Options) -> Sequence[Type]:
    """Return the precisions in which an engine computes whole models; none if it lacks the one that is asked for."""
    wanted = WANTED[options.precision]
    own = [precision for precision in wanted if engine.in_precision(precision, options) is not None]
    return own if options.precision in (*own[:1], "auto") else []


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
