"""Layers of a model that is in bfloat16 already: they run in it, without a measurement or a bound."""

from __future__ import annotations

import logging
from collections.abc import Set
from functools import cache

import onnx_ir as ir

from sardonyx.errors import SardonyxError
from sardonyx.native import attention, linear
from sardonyx.options import Options
from sardonyx.precision.attention import AttentionLayer, attention_layers_of
from sardonyx.precision.layers import layers_of
from sardonyx.precision.lower import unsupported_reason
from sardonyx.precision.plan import Plan
from sardonyx.precision.sizes import dims

log = logging.getLogger(__name__)

_BFLOAT16 = attention.BFLOAT16
_LEAST_QUERIES = 12
"""A tile of queries: with fewer, packing the keys and values costs more than their products save. One packs nothing."""


def plan_in_bfloat16(graph: ir.Graph, factors: Set[str], options: Options) -> Plan:
    """Return a plan with the layers in bf16 whose weights are among these, and with attention; none without kernels."""
    layers = [layer for layer in layers_of(graph) if str(layer.weight.name) in factors and not layer.convolves]
    layers = [layer for layer in layers if unsupported_reason(layer, _BFLOAT16.name) is None]
    if not layers or not _has_kernels(options):
        return Plan()
    names = [layer.name for layer in layers]
    names += [layer.name for layer in attention_layers_of(graph) if _is_worthwhile(layer)]
    return Plan(dict.fromkeys(names, _BFLOAT16.name))


def _is_worthwhile(layer: AttentionLayer) -> bool:
    queries = dims(layer.operands[0])[-2]
    return not isinstance(queries, int) or queries == 1 or queries >= _LEAST_QUERIES


def _has_kernels(options: Options) -> bool:
    """Whether the kernels can be built; nobody asked for them, so it is no error if not."""
    try:
        linear.build(_BFLOAT16, options)
        attention.build(options)
    except SardonyxError as error:
        _warn_once(str(error))
        return False
    return True


@cache
def _warn_once(reason: str) -> None:
    log.warning("a model in bfloat16 computes in float32; its results remain bfloat16: %s", reason)
