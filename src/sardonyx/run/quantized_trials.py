"""Run layers between QuantizeLinear and DequantizeLinear, in engines that compute them in integers.

Such an engine compiles a model in much more time than a call takes. So all layers are in one model for each precision,
which gives their errors, and only one layer of each shape is compiled by itself, which gives the times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from sardonyx.engines import Engine
from sardonyx.native.linear import MAX_INT8_DEPTH
from sardonyx.options import Options
from sardonyx.precision.layers import Layer, alone, layers_of, side_by_side
from sardonyx.precision.metric import relative_error
from sardonyx.precision.packing import Packing
from sardonyx.precision.plan import FLOAT32, Plan, Type
from sardonyx.precision.quantize import quantize_layers
from sardonyx.precision.search import LayerTrials, Trial
from sardonyx.precision.static_scales import activated, range_of
from sardonyx.precision.storage import Static, Storage
from sardonyx.run.builds import Built
from sardonyx.run.layer_trials import LayerBench, values_in_call


@dataclass(frozen=True, eq=False)
class Sample:
    """A layer, with its activations and its result in the call, in float32."""

    layer: Layer
    x: torch.Tensor
    result: torch.Tensor

    @property
    def ranges(self) -> Static:
        """The ranges of the activations, and of the result after an activation that the layer computes."""
        low, high = range_of(self.result)
        computed = activated(self.layer)
        return Static(
            range_of(self.x), (low, high) if computed is self.layer.result else (max(low, 0.0), max(high, 0.0))
        )


def measure_quantized_layers(
    engine: Engine,
    built: Built,
    args: Sequence[Any],
    wanted: Sequence[Type],
    options: Options,
    progress: Callable[[str], None] = lambda remark: None,
) -> list[LayerTrials]:
    """Return the error and time of each layer in these precisions, with the ranges that its values have in the call."""
    layers = layers_of(built.graph)
    if not layers:
        return []
    names = {str(value.name) for layer in layers for value in (layer.x, layer.result)}
    values = values_in_call(engine, built, args, sorted(names), options)
    samples = [Sample(layer, values[str(layer.x.name)], values[str(layer.result.name)]) for layer in layers]
    return QuantizedBench(engine, built.binding.constants(args), wanted, options).measure(samples, progress)


class QuantizedBench(LayerBench):
    """Runs layers with the ranges that their values have in the call."""

    def measure(self, samples: Sequence[Sample], progress: Callable[[str], None]) -> list[LayerTrials]:
        """Return the trials of layers, which are a chain, as each rounds what others compute."""
        errors = {}
        for precision in self._wanted:
            progress(f"{len(samples)} layers, {precision}")
            errors[precision] = self._errors(samples, precision)
        found = []
        for number, sample in enumerate(samples, 1):
            progress(f"layer {number} of {len(samples)}, {sample.layer.name}")
            found.append(self._trials(sample, {t: of[sample] for t, of in errors.items() if sample in of}))
        return found

    def _errors(self, samples: Sequence[Sample], precision: Type) -> Mapping[Sample, float]:
        """Return the errors of the layers that can have a precision."""
        able = [sample for sample in samples if self._fits(sample.layer, precision)]
        if not able:
            return {}
        model = side_by_side([sample.layer for sample in able], [tuple(sample.x.shape) for sample in able])
        stored = {
            (copy.name, precision): sample.ranges
            for copy, sample in zip(layers_of(model.graph), able, strict=True)
            if precision == "int8"
        }
        plan = Plan({layer.name: precision for layer in layers_of(model.graph)}, stored)
        results = self._load(model, plan)([sample.x for sample in able])
        return {s: relative_error(result, s.result) for s, result in zip(able, results, strict=True)}

    def _trials(self, sample: Sample, errors: Mapping[Type, float]) -> LayerTrials:
        seconds = self._seconds_of(sample, list(errors))
        trials = {
            precision: Trial(error, seconds[precision], sample.ranges if precision == "int8" else None)
            for precision, error in errors.items()
            if error < math.inf
        }
        return LayerTrials(sample.layer.name, seconds[FLOAT32], trials, chained=True)

    def _seconds_of(self, sample: Sample, types: Sequence[Type]) -> Mapping[Type, float]:
        calls = {}
        if not self._is_timed(sample.layer, sample.x, [FLOAT32, *types]):
            stored = {"int8": sample.ranges}
            calls = {t: self._call_with(sample.layer, sample.x, t, stored.get(t)) for t in (FLOAT32, *types)}
        return self._seconds(sample.layer, sample.x, calls)

    def _fits(self, layer: Layer, precision: Type) -> bool:
        """Whether the weight can be stored, and sums do not overflow."""
        return super()._fits(layer, precision) and (precision != "int8" or layer.matrix_sizes[0] <= MAX_INT8_DEPTH)

    def _call_with(
        self, layer: Layer, x: torch.Tensor, precision: Type, storage: Storage | None
    ) -> Callable[[], torch.Tensor]:
        runner = self._loaded(alone(layer, tuple(x.shape)), precision, storage)
        return lambda: runner([x])[0]

    def _lower(
        self, model: ir.Model, plan: Plan, weights: Mapping[str, int]
    ) -> tuple[Sequence[Packing], Sequence[Path]]:
        return quantize_layers(model, plan, weights), []

    def _in(self, plan: Plan) -> Options:
        return self._engine.in_precision(plan.lowest, self._options) or self._options
