"""Run the layers of a model by themselves, in float32 and in lower precision, on the values of a call."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir
import torch

from sardonyx.engines import Engine, Job, Runner
from sardonyx.options import Options
from sardonyx.precision.convolutions import to_first, to_last, window_of
from sardonyx.precision.layers import Layer, alone, layers_of
from sardonyx.precision.lower import lower, unsupported_reason
from sardonyx.precision.metric import relative_error
from sardonyx.precision.plan import FLOAT32, Plan, Type
from sardonyx.precision.search import LayerTrials, Trial
from sardonyx.precision.sizes import dims
from sardonyx.run.builds import Built
from sardonyx.timing import in_turns

ROUNDS, ROUND_SECONDS = 7, 0.004


def measure_layers(
    engine: Engine, built: Built, args: Sequence[Any], wanted: Sequence[Type], options: Options
) -> list[LayerTrials]:
    """Return the error and time of each layer in these precisions, as far as this machine has them."""
    layers = layers_of(built.graph)
    if not layers:
        return []
    bench = _Bench(engine, built.binding.constants(args), wanted, options)
    names = sorted({str(layer.x.name) for layer in layers})
    values = values_in_call(engine, built, args, names, options)
    return [bench.trials(layer, values[str(layer.x.name)]) for layer in layers]


def values_in_call(
    engine: Engine, built: Built, args: Sequence[Any], names: Sequence[str], options: Options
) -> Mapping[str, torch.Tensor]:
    """Return values of a model in a call, by name."""
    model = ir.from_proto(onnx.load_from_string(built.model))
    computed = {str(x.name): x for node in model.graph for x in node.outputs if x.name in names}
    feeds = built.binding.feeds(args)
    values = {str(x.name): feed for x, feed in zip(model.graph.inputs, feeds, strict=True) if x.name in names}
    if computed:
        model.graph.outputs[:] = list(computed.values())
        runner = load_alone(engine, model, built.binding.constants(args), built.libraries, options)
        values |= dict(zip(computed, runner(feeds), strict=True))
    return values


def load_alone(
    engine: Engine, model: ir.Model, weights: Mapping[str, torch.Tensor], libraries: Sequence[str], options: Options
) -> Runner:
    """Return a model of a layer, ready to run."""
    data = ir.to_proto(model).SerializeToString()
    return engine.load(Job.of(data, model.graph, options, weights=weights, libraries=libraries), None)


class _Bench:
    """Runs layers; those of one shape are timed once."""

    def __init__(
        self, engine: Engine, weights: Mapping[str, torch.Tensor], wanted: Sequence[Type], options: Options
    ) -> None:
        self._engine, self._weights, self._wanted, self._options = engine, weights, wanted, options
        self._times: dict[Hashable, Sequence[float]] = {}

    def trials(self, layer: Layer, x: torch.Tensor) -> LayerTrials:
        """Return the error and time of a layer in each precision."""
        types = [precision for precision in self._wanted if unsupported_reason(layer, precision) is None]
        calls = [self._call(layer, x, precision) for precision in (FLOAT32, *types)]
        reference, *results = [call() for call in calls]
        float32, *seconds = self._seconds(layer, x, calls)
        errors = [relative_error(result, reference) for result in results]
        trials = {t: Trial(error, s) for t, error, s in zip(types, errors, seconds, strict=True) if error < math.inf}
        return LayerTrials(layer.name, float32, trials, chained=layer.convolves)

    def _seconds(self, layer: Layer, x: torch.Tensor, calls: Sequence[Callable[[], Any]]) -> Sequence[float]:
        key = _shape_key(layer, x)
        if key not in self._times:
            self._times[key] = [min(times) for times in in_turns(calls, rounds=ROUNDS, round_seconds=ROUND_SECONDS)]
        return self._times[key]

    def _call(self, layer: Layer, x: torch.Tensor, precision: Type) -> Callable[[], torch.Tensor]:
        """Return a call of a layer in a precision; a lowered convolution has channels last, as in a chain."""
        channels_last = layer.convolves and precision != FLOAT32
        model = alone(layer, tuple(x.shape), channels_last=channels_last)
        names = [name for name in model.graph.initializers if name in self._weights]
        data = [self._weights[name] for name in names]
        (only,) = layers_of(model.graph)
        plan = Plan({only.name: precision})
        packings, libraries = lower(model, plan, {name: i for i, name in enumerate(names)}, self._options)
        weights = {name: x for name, x in zip(names, data, strict=True) if name in model.graph.initializers}
        for packing in packings:
            weights |= packing.pack(data)
        runner = load_alone(self._engine, model, weights, [str(library) for library in libraries], self._options)
        if not channels_last:
            return lambda: runner([x])[0]
        image, first = x.permute(*to_last(x.dim())).contiguous(), to_first(x.dim())
        return lambda: runner([image])[0].permute(*first)


def _shape_key(layer: Layer, x: torch.Tensor) -> Hashable:
    """Return what the time of a layer depends on."""
    window = window_of(layer.node) if layer.convolves else None
    return (x.shape, dims(layer.weight), layer.transposed, layer.bias is None, layer.scale is None, window)
