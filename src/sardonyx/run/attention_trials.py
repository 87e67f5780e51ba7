"""Run the attention of a model by itself, in float32 and in lower precision, on the values of a call."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sardonyx.engines import Engine
from sardonyx.native.attention import BFLOAT16
from sardonyx.options import Options
from sardonyx.precision.attention import (
    PRECISION,
    AttentionLayer,
    alone,
    attention_layers_of,
    is_between_layers,
    lower_attention,
    take_bfloat16,
)
from sardonyx.precision.metric import relative_error
from sardonyx.precision.plan import Plan, Type
from sardonyx.precision.search import LayerTrials, Trial
from sardonyx.run.builds import Built
from sardonyx.run.layer_trials import ROUND_SECONDS, ROUNDS, load_alone, values_in_call
from sardonyx.timing import in_turns


def measure_attention(
    engine: Engine, built: Built, args: Sequence[Any], wanted: Sequence[Type], options: Options
) -> list[LayerTrials]:
    """Return the error and time of each attention in bf16, if that is wanted and this machine has it."""
    layers = attention_layers_of(built.graph)
    if not layers or PRECISION not in wanted or BFLOAT16.missing():
        return []
    names = sorted({str(x.name) for layer in layers for x in layer.operands})
    values = values_in_call(engine, built, args, names, options)
    times: dict[str, Sequence[float]] = {}
    return [_trials(engine, layer, [values[str(x.name)] for x in layer.operands], options, times) for layer in layers]


def _trials(
    engine: Engine,
    layer: AttentionLayer,
    operands: Sequence[torch.Tensor],
    options: Options,
    times: dict[str, Sequence[float]],
) -> LayerTrials:
    """Return the trials of one attention; of several of one shape, one is timed."""
    chained = is_between_layers(layer)
    calls = [_call(engine, layer, operands, options), _lowered_call(engine, layer, operands, options, chained=chained)]
    reference, result = [call() for call in calls]
    key = repr(([tuple(x.shape) for x in operands], layer.heads, layer.is_causal, chained))
    if key not in times:
        times[key] = [min(taken) for taken in in_turns(calls, rounds=ROUNDS, round_seconds=ROUND_SECONDS)]
    before, after = times[key]
    error = relative_error(result.float(), reference)
    return LayerTrials(layer.name, before, {PRECISION: Trial(error, after)} if error < math.inf else {})


def _call(
    engine: Engine, layer: AttentionLayer, operands: Sequence[torch.Tensor], options: Options
) -> Callable[[], torch.Tensor]:
    """Return a call of an attention in float32."""
    runner = load_alone(engine, alone(layer, [tuple(x.shape) for x in operands]), {}, [], options)
    return lambda: runner(operands)[0]


def _lowered_call(
    engine: Engine, layer: AttentionLayer, operands: Sequence[torch.Tensor], options: Options, *, chained: bool
) -> Callable[[], torch.Tensor]:
    """Return a call of an attention in bf16; between layers its operands and its result are so, too."""
    model = alone(layer, [tuple(x.shape) for x in operands])
    (only,) = attention_layers_of(model.graph)
    libraries = lower_attention(model, Plan({only.name: PRECISION}), options)
    if chained:
        take_bfloat16(model)
        operands = [*(x.bfloat16() for x in operands[:3]), *operands[3:]]
    runner = load_alone(engine, model, {}, [str(library) for library in libraries], options)
    return lambda: runner(operands)[0]
