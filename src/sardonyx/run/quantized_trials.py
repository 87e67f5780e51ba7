"""Run layers by themselves between QuantizeLinear and DequantizeLinear, in engines that compute them in integers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir
import torch

from sardonyx.engines import Engine
from sardonyx.errors import OptionError
from sardonyx.options import Options
from sardonyx.precision.layers import Layer, alone
from sardonyx.precision.packing import Packing
from sardonyx.precision.plan import FLOAT32, Plan, Type
from sardonyx.precision.quantize import quantize_layers
from sardonyx.precision.search import LayerTrials
from sardonyx.precision.static_scales import activated, range_of
from sardonyx.precision.storage import Static, Storage
from sardonyx.run.layer_trials import LayerBench


class QuantizedBench(LayerBench):
    """Runs layers with the ranges that their values have in the call."""

    def __init__(
        self,
        engine: Engine,
        weights: Mapping[str, torch.Tensor],
        wanted: Sequence[Type],
        options: Options,
        *,
        in_order: bool = False,
    ) -> None:
        super().__init__(engine, weights, wanted, options, in_order=in_order)
        self._ranges: dict[str, Static] = {}

    def calibrated(self, layer: Layer, x: torch.Tensor, trials: LayerTrials, used: Sequence[Type]) -> LayerTrials:
        """Return the trials of a layer with its ranges; all layers are a chain, as each rounds what others compute."""
        ranges = self._ranges[layer.name]
        stored = {t: replace(x, storage=ranges) if t == "int8" else x for t, x in trials.trials.items()}
        return replace(trials, trials=stored, chained=True)

    def _calls(self, layer: Layer, x: torch.Tensor, types: Sequence[Type]) -> Mapping[Type, Callable[[], torch.Tensor]]:
        calls = {FLOAT32: self._call(layer, x, FLOAT32)}
        ranges = self._ranges[layer.name] = _ranges(layer, x, calls[FLOAT32]())
        for precision in types:
            if self._fits(layer, precision):
                with suppress(OptionError):  # sums that overflow
                    calls[precision] = self._call_with(layer, x, precision, ranges if precision == "int8" else None)
        return calls

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


def _ranges(layer: Layer, x: torch.Tensor, result: torch.Tensor) -> Static:
    """Return the ranges of a layer's activations, and of its result after an activation that it computes."""
    low, high = range_of(result)
    computed = activated(layer)
    return Static(range_of(x), (low, high) if computed is layer.result else (max(low, 0.0), max(high, 0.0)))
