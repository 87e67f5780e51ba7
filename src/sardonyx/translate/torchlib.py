"""The one place that touches onnxscript's torchlib and torch's private exporter: the long tail of operators.

torchlib fakes some outputs of some functions (nll_loss's total weight, batch norm's statistics, attention's logsumexp),
so functions of several outputs are not used: those we need are in our own table.
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
from sardonyx.translate.schemas import signature

log = logging.getLogger(__name__)


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


def translate(g: Builder, node: torch.fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Translate a call through torchlib; the nodes it makes are appended to the builder's graph."""
    from onnxscript import evaluator
    from torch.onnx._internal.exporter import _building, _dispatching

    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        raise Unsupported("random numbers come from torch's generator")
    if len(_returns(node)) > 1:
        raise Unsupported("no translation")
    function, _ = _dispatching.dispatch(node, _registry())
    if function is None:
        raise Unsupported("no translation")
    recorder: Any = _building.OpRecorder(  # type: ignore[abstract]  # its base has bodies, which mypy reads as empty
        _opset(g.opset), {}
    )
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
    if made.op_type == "Constant" and "value" in made.attributes:
        held = made.attributes["value"].as_tensor()
        made.outputs[0].const_value, made.outputs[0].type = held, ir.TensorType(held.dtype)
    made.meta["fx"] = g._origin
    _state_dtypes(made, g.opset)
    g.nodes.append(made)


def _state_dtypes(made: ir.Node, opset: int) -> None:
    """The dtypes that follow from ONNX's schema, without which nothing later could tell that an engine lacks one."""
    formal = signature(made.op_type, opset) if not made.domain else None
    if formal is None:
        return
    if made.op_type == "Cast":
        made.outputs[0].type = ir.TensorType(ir.DataType(made.attributes["to"].as_int()))
        return
    known = {formal.of_input(i): x.dtype for i, x in enumerate(made.inputs) if x is not None and x.dtype is not None}
    for i, output in enumerate(made.outputs):
        constraint = formal.of_output(i)
        dtype = known.get(constraint) or _FIXED.get(formal.only(constraint) or "")
        if output.dtype is None and dtype is not None:
            output.type = ir.TensorType(dtype)


_FIXED = {"tensor(bool)": ir.DataType.BOOL, "tensor(int64)": ir.DataType.INT64}
