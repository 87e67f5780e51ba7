"""The one place that touches onnxscript's torchlib and torch's private exporter: the long tail of operators.

torchlib fakes some outputs of some functions (facts: nll_loss's total weight, batch norm's statistics, attention's
logsumexp), so a function of several outputs is used only if it stands in `_CHECKED`, after a numeric test.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import onnx_ir as ir
import torch

from sardonyx.translate.builder import Builder
from sardonyx.translate.errors import Unsupported

log = logging.getLogger(__name__)

_CHECKED: frozenset[str] = frozenset({"aten.topk.default", "aten.sort.default", "aten.max.dim", "aten.min.dim"})


@cache
def _registry() -> Any:
    from torch.onnx._internal.exporter import _registration

    log.debug("building the torchlib registry")
    chatter = logging.getLogger(_registration.__name__)
    level = chatter.level
    chatter.setLevel(logging.ERROR)  # it warns of every operator of packages that are not installed
    try:
        return _registration.ONNXRegistry.from_torchlib()
    finally:
        chatter.setLevel(level)


@cache
def _opset(version: int) -> Any:
    from onnxscript import values

    return values.Opset("", version)


def has(target: Any) -> bool:
    """Whether torchlib knows the operator at all."""
    return bool(_registry().get_decomps(target))


def translate(g: Builder, node: torch.fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Translate a call through torchlib; the nodes it makes are appended to the builder's graph."""
    from onnxscript import evaluator
    from torch.onnx._internal.exporter import _building, _dispatching

    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        raise Unsupported("random numbers come from torch's generator")
    if len(_returns(node)) > 1 and str(node.target) not in _CHECKED:
        raise Unsupported("no translation of ours, and torchlib's is not checked for several outputs")
    function, reason = _dispatching.dispatch(node, _registry())
    if function is None:
        raise Unsupported(f"no translation: {reason.splitlines()[0] if reason else 'unknown operator'}")
    recorder = _building.OpRecorder(_opset(g.opset), {})
    with evaluator.default_as(recorder):
        try:
            result = function(*map(_plain, args), **{k: _plain(v) for k, v in kwargs.items()})
        except Exception as error:
            raise Unsupported(f"torchlib's translation failed: {error}") from error
    if recorder.functions:
        raise Unsupported("torchlib's translation needs a local function")
    for made in recorder.nodes:
        _adopt(g, made)
    return result


def _returns(node: torch.fx.Node) -> Sequence[Any]:
    return getattr(getattr(node.target, "_schema", None), "returns", ())


def _plain(arg: Any) -> Any:
    import sympy

    if isinstance(arg, sympy.Expr):
        raise Unsupported("torchlib's translation takes no symbolic size here")
    if isinstance(arg, torch.dtype):
        from sardonyx.translate import dtypes

        return int(dtypes.to_onnx(arg))
    if isinstance(arg, (torch.device, torch.layout, torch.memory_format)):
        return str(arg)
    return list(map(_plain, arg)) if isinstance(arg, (list, tuple)) else arg


def _adopt(g: Builder, made: ir.Node) -> None:
    for value in made.outputs:
        value.name = g.fresh(made.op_type.lower())
    if made.op_type == "Constant" and made.outputs[0].const_value is None:
        made.outputs[0].const_value = made.attributes["value"].as_tensor() if "value" in made.attributes else None
    made.meta["fx"] = g._origin
    g.nodes.append(made)
