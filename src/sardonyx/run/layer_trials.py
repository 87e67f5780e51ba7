"""Run the layers of a model by themselves, in float32 and in lower precision, on the values of a call."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import torch

from sardonyx.engines import Engine, Job, Runner
from sardonyx.options import Options
from sardonyx.precision.calibration import calibrated
from sardonyx.precision.convolutions import to_first, to_last, window_of
from sardonyx.precision.layers import Layer, alone, layers_of
from sardonyx.precision.lower import lower, unsupported_reason
from sardonyx.precision.metric import relative_error
from sardonyx.precision.packing import Packing
from sardonyx.precision.plan import FLOAT32, INTEGERS, Plan, Type
from sardonyx.precision.search import LayerTrials, Trial, path
from sardonyx.precision.sizes import dims
from sardonyx.precision.storage import Nearest, Storage, contents_of
from sardonyx.run.builds import Built
from sardonyx.run.random_inputs import fixed_seed
from sardonyx.timing import in_turns

ROUNDS, ROUND_SECONDS = 7, 0.004
_CHANCE = 1.1
"""The share of its usual error that a layer may have in this call with a storage that has less error in general."""


def measure_layers(
    engine: Engine,
    built: Built,
    args: Sequence[Any],
    wanted: Sequence[Type],
    options: Options,
    *,
    in_order: bool = False,
    progress: Callable[[str], None] = lambda remark: None,
) -> list[LayerTrials]:
    """Return the error and time of each layer in these precisions, as far as this machine has them."""
    layers = layers_of(built.graph)
    if not layers:
        return []
    runs = LayerBench(engine, built.binding.constants(args), wanted, options, in_order=in_order)
    values = values_in_call(engine, built, args, sorted({str(layer.x.name) for layer in layers}), options)
    readers = defaultdict(list)
    for layer in layers:
        readers[layer.x.name, layer.convolves].append(layer)
    found = []
    for number, layer in enumerate(layers, 1):
        progress(f"layer {number} of {len(layers)}, {layer.name}")
        x = values[str(layer.x.name)]
        trials = runs.trials(layer, x)
        used = path(trials, trials.worthwhile(wanted), in_order=in_order)
        found.append(runs.calibrated(layer, x, trials, used, readers[layer.x.name, layer.convolves]))
    return found


def values_in_call(
    engine: Engine, built: Built, args: Sequence[Any], names: Sequence[str], options: Options
) -> Mapping[str, torch.Tensor]:
    """Return values of a model in a call, by name."""
    model = ir.from_proto(onnx.load_from_string(built.model))
    computed = {str(x.name): x for node in model.graph for x in node.outputs if x.name in names}
    with fixed_seed():
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


class LayerBench:
    """Runs layers; those of one shape are timed once, with weights that are rounded to the nearest."""

    def __init__(
        self,
        engine: Engine,
        weights: Mapping[str, torch.Tensor],
        wanted: Sequence[Type],
        options: Options,
        *,
        in_order: bool = False,
    ) -> None:
        self._engine, self._weights, self._wanted, self._options = engine, weights, wanted, options
        self._in_order = in_order
        self._times: dict[Hashable, Mapping[Type, float]] = {}
        self._smoothed: dict[str, Storage | None] = {}
        """How the layers of an x, by its name, are stored in int8."""

    def trials(self, layer: Layer, x: torch.Tensor) -> LayerTrials:
        """Return the error and time of a layer in each precision that it may start in or go back to."""
        calls = self._calls(layer, x, self._useful(layer, x))
        results = {precision: call() for precision, call in calls.items()}
        seconds, reference = self._seconds(layer, x, calls), results.pop(FLOAT32)
        trials = {
            precision: Trial(relative_error(result, reference), seconds[precision], self._usual(precision))
            for precision, result in results.items()
        }
        finite = {precision: trial for precision, trial in trials.items() if trial.error < math.inf}
        return LayerTrials(layer.name, seconds[FLOAT32], finite, chained=layer.convolves)

    def _useful(self, layer: Layer, x: torch.Tensor) -> Sequence[Type]:
        """Return the wanted precisions but those below the fastest of its shape: it starts there and goes back up."""
        times = self._times.get(_shape_key(layer, x), {})
        if self._in_order or layer.convolves or not self._is_timed(layer, x, self._wanted):
            return self._wanted
        return self._wanted[self._wanted.index(min(self._wanted, key=lambda precision: times[precision])) :]

    def calibrated(
        self, layer: Layer, x: torch.Tensor, trials: LayerTrials, used: Sequence[Type], readers: Sequence[Layer]
    ) -> LayerTrials:
        """Return the trials of a layer whose weight is stored as its activations, which these layers read, ask for."""
        types = [] if layer.convolves else [t for t in used if t in INTEGERS]
        if not types:
            return trials
        reference = self._call(layer, x, FLOAT32)()
        stored = {t: self._in_int8(x, readers) if t == "int8" else self._calibrated(layer, x, t) for t in types}
        better = {t: self._better(layer, x, t, trials.trials[t], stored[t], reference) for t in types}
        return replace(trials, trials={**trials.trials, **better})

    def _in_int8(self, x: torch.Tensor, readers: Sequence[Layer]) -> Storage | None:
        """Return one storage for all layers of an x, so that one node can compute them."""
        name = str(readers[0].x.name)
        if name not in self._smoothed:
            matrices = [self._matrix(layer) for layer in readers if self._fits(layer, "int8")]
            self._smoothed[name] = calibrated("int8", torch.cat(matrices, 1), x, "", self._options.int4_block)
        return self._smoothed[name]

    def _calibrated(self, layer: Layer, x: torch.Tensor, precision: Type) -> Storage | None:
        contents = contents_of(self._weights[str(layer.weight.name)])
        return calibrated(precision, self._matrix(layer), x, contents, self._options.int4_block)

    def _matrix(self, layer: Layer) -> torch.Tensor:
        return layer.form.matrix(self._weights[str(layer.weight.name)].detach())

    def _better(
        self,
        layer: Layer,
        x: torch.Tensor,
        precision: Type,
        plain: Trial,
        storage: Storage | None,
        reference: torch.Tensor,
    ) -> Trial:
        """Return the trial with a storage, if its error is not larger than without."""
        if storage is None:
            return plain
        error = relative_error(self._call_with(layer, x, precision, storage)(), reference)
        return replace(plain, error=error, storage=storage) if error < plain.error * _CHANCE else plain

    def _fits(self, layer: Layer, precision: Type) -> bool:
        """Whether the weight can be stored: integers have no NaN and no infinity."""
        return precision not in INTEGERS or bool(self._weights[str(layer.weight.name)].isfinite().all())

    def _calls(self, layer: Layer, x: torch.Tensor, types: Sequence[Type]) -> Mapping[Type, Callable[[], torch.Tensor]]:
        """Return calls of a layer in float32, and in those of these precisions that it can have."""
        able = [t for t in types if unsupported_reason(layer, t) is None and self._fits(layer, t)]
        return {precision: self._call(layer, x, precision) for precision in (FLOAT32, *able)}

    def _seconds(self, layer: Layer, x: torch.Tensor, calls: Mapping[Type, Callable[[], Any]]) -> Mapping[Type, float]:
        """Return the seconds of these calls, if a layer of this shape was not timed in these precisions before."""
        key = _shape_key(layer, x)
        if not self._is_timed(layer, x, list(calls)):
            times = in_turns(list(calls.values()), rounds=ROUNDS, round_seconds=ROUND_SECONDS)
            self._times[key] = {precision: min(taken) for precision, taken in zip(calls, times, strict=True)}
        return self._times[key]

    def _is_timed(self, layer: Layer, x: torch.Tensor, types: Sequence[Type]) -> bool:
        return set(types) <= set(self._times.get(_shape_key(layer, x), {}))

    def _call(self, layer: Layer, x: torch.Tensor, precision: Type) -> Callable[[], torch.Tensor]:
        """Return a call of a layer in a precision, with its weight stored as usual."""
        return self._call_with(layer, x, precision, self._usual(precision))

    def _usual(self, precision: Type) -> Storage | None:
        return Nearest(self._options.int4_block) if precision == "int4" else None

    def _call_with(
        self, layer: Layer, x: torch.Tensor, precision: Type, storage: Storage | None
    ) -> Callable[[], torch.Tensor]:
        """Return a call of a layer in a precision; a lowered convolution has channels last, as in a chain."""
        channels_last = layer.convolves and precision != FLOAT32
        model = alone(layer, tuple(x.shape), channels_last=channels_last)
        runner = self._loaded(model, precision, storage)
        if not channels_last:
            return lambda: runner([x])[0]
        image, first = x.permute(*to_last(x.dim())).contiguous(), to_first(x.dim())
        return lambda: runner([image])[0].permute(*first)

    def _loaded(self, model: ir.Model, precision: Type, storage: Storage | None) -> Runner:
        """Return a model of a layer, ready to run in a precision."""
        (only,) = layers_of(model.graph)
        return self._load(
            model, Plan({only.name: precision}, {} if storage is None else {(only.name, precision): storage})
        )

    def _load(self, model: ir.Model, plan: Plan) -> Runner:
        """Return a model of layers, ready to run with a plan."""
        names = [name for name in model.graph.initializers if name in self._weights]
        data = [self._weights[name] for name in names]
        packings, libraries = self._lower(model, plan, {name: i for i, name in enumerate(names)})
        weights = {name: x for name, x in zip(names, data, strict=True) if name in model.graph.initializers}
        for packing in packings:
            weights |= packing.pack(data)
        return load_alone(self._engine, model, weights, [str(library) for library in libraries], self._in(plan))

    def _lower(
        self, model: ir.Model, plan: Plan, weights: Mapping[str, int]
    ) -> tuple[Sequence[Packing], Sequence[Path]]:
        """Replace the layers of a model as planned, in place; return their packings and libraries."""
        return lower(model, plan, weights, self._options)

    def _in(self, plan: Plan) -> Options:
        """Return the options of a session with a plan."""
        return self._options


def _shape_key(layer: Layer, x: torch.Tensor) -> Hashable:
    """Return what the time of a layer depends on."""
    window = window_of(layer.node) if layer.convolves else None
    return (x.shape, dims(layer.weight), layer.transposed, layer.bias is None, layer.scale is None, window)
