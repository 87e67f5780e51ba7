"""Run the layers of a model by themselves, in float32 and in lower precision, on the values of a call."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import onnx
import onnx_ir as ir
import torch

from sardonyx.engines import Engine, Job, Runner
from sardonyx.options import Options
from sardonyx.precision.calibration import calibrated
from sardonyx.precision.layers import PRODUCTS, Layer, alone, dims, layers_of
from sardonyx.precision.lower import lower, unsupported_reason
from sardonyx.precision.metric import relative_error
from sardonyx.precision.plan import FLOAT32, INTEGERS, Plan, Type
from sardonyx.precision.search import LayerTrials, Trial, Wanted
from sardonyx.precision.storage import Storage, contents_of
from sardonyx.run.builds import Built
from sardonyx.timing import in_turns

ROUNDS, ROUND_SECONDS = 7, 0.004


def measure_layers(
    engine: Engine,
    built: Built,
    args: Sequence[Any],
    wanted: Wanted,
    options: Options,
    progress: Callable[[str], None] = lambda remark: None,
) -> list[LayerTrials]:
    """Return the error and time of each layer in these precisions, as far as this machine has them."""
    layers = layers_of(built.graph)
    if not layers:
        return []
    bench = _Bench(engine, built.binding.constants(args), wanted, options)
    names = sorted({str(layer.x.name) for layer in layers})
    values = _values(engine, built, args, names, options)
    trials = []
    for number, layer in enumerate(layers, 1):
        progress(f"layer {number} of {len(layers)}, {layer.name}")
        trials.append(bench.trials(layer, values[str(layer.x.name)]))
    return trials


def _values(
    engine: Engine, built: Built, args: Sequence[Any], names: Sequence[str], options: Options
) -> Mapping[str, torch.Tensor]:
    """Return values of a model in a call, by name."""
    model = ir.from_proto(onnx.load_from_string(built.model))
    computed = {str(x.name): x for node in model.graph for x in node.outputs if x.name in names}
    feeds = built.binding.feeds(args)
    values = {str(x.name): feed for x, feed in zip(model.graph.inputs, feeds, strict=True) if x.name in names}
    if computed:
        model.graph.outputs[:] = list(computed.values())
        runner = _load(engine, model, built.binding.constants(args), built.libraries, options)
        values |= dict(zip(computed, runner(feeds), strict=True))
    return values


def _load(
    engine: Engine, model: ir.Model, weights: Mapping[str, torch.Tensor], libraries: Sequence[str], options: Options
) -> Runner:
    data = ir.to_proto(model).SerializeToString()
    return engine.load(Job.of(data, model.graph, options, weights=weights, libraries=libraries), None)


class _Bench:
    """Runs layers; those of one shape are timed once."""

    def __init__(self, engine: Engine, weights: Mapping[str, torch.Tensor], wanted: Wanted, options: Options) -> None:
        self._engine, self._weights, self._wanted, self._options = engine, weights, wanted, options
        self._times: dict[Hashable, Mapping[Type, float]] = {}

    def trials(self, layer: Layer, x: torch.Tensor) -> LayerTrials:
        """Return the error and time of a layer in each precision."""
        types = [t for t in self._wanted.types if unsupported_reason(layer, t) is None and self._fits(layer, t)]
        calls = {precision: self._call(layer, x, precision) for precision in (FLOAT32, *types)}
        results = {precision: call() for precision, call in calls.items()}
        seconds, reference = self._seconds(layer, x, calls), results[FLOAT32]
        plain = {t: Trial(relative_error(results[t], reference), seconds[t]) for t in types}
        found = LayerTrials(layer.name, seconds[FLOAT32], {t: trial for t, trial in plain.items() if _is_usable(trial)})
        used = [t for t in found.path(self._wanted) if t != FLOAT32]
        better = {t: self._calibrated(layer, x, t, found.trials[t], reference) for t in used}
        return replace(found, trials={**found.trials, **better})

    def _fits(self, layer: Layer, precision: Type) -> bool:
        """Whether the weight can be stored: integers have no NaN and no infinity."""
        return precision not in INTEGERS or bool(self._weights[str(layer.weight.name)].isfinite().all())

    def _calibrated(
        self, layer: Layer, x: torch.Tensor, precision: Type, plain: Trial, reference: torch.Tensor
    ) -> Trial:
        """Return the trial of a layer whose weight is stored as its activations ask for, if that has less error."""
        if layer.node.op_type not in PRODUCTS:
            return plain
        weight = self._weights[str(layer.weight.name)]
        matrix = weight.t() if layer.transposed else weight
        storage = calibrated(precision, matrix, x, contents_of(weight))
        if storage is None:
            return plain
        error = relative_error(self._call(layer, x, precision, storage)(), reference)
        return Trial(error, plain.seconds, storage) if error < plain.error else plain

    def _seconds(self, layer: Layer, x: torch.Tensor, calls: Mapping[Type, Callable[[], Any]]) -> Mapping[Type, float]:
        key = (x.shape, dims(layer.weight), layer.transposed, layer.bias is None, *calls)
        if key not in self._times:
            taken = in_turns([*calls.values()], rounds=ROUNDS, round_seconds=ROUND_SECONDS)
            self._times[key] = {precision: min(times) for precision, times in zip(calls, taken, strict=True)}
        return self._times[key]

    def _call(
        self, layer: Layer, x: torch.Tensor, precision: Type, storage: Storage | None = None
    ) -> Callable[[], torch.Tensor]:
        """Return a call of a layer in a precision."""
        model = alone(layer, tuple(x.shape))
        names = [name for name in model.graph.initializers if name in self._weights]
        data = [self._weights[name] for name in names]
        (only,) = layers_of(model.graph)
        plan = Plan({only.name: precision}, {} if storage is None else {(only.name, precision): storage})
        packings, libraries = lower(model, plan, {name: i for i, name in enumerate(names)}, self._options)
        weights = {name: x for name, x in zip(names, data, strict=True) if name in model.graph.initializers}
        for packing in packings:
            weights |= packing.pack(data[packing.argument])
        runner = _load(self._engine, model, weights, [str(library) for library in libraries], self._options)
        return lambda: runner([x])[0]


def _is_usable(trial: Trial) -> bool:
    return trial.error < math.inf
