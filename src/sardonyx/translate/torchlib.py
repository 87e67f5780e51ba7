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
    formals = _formals(made.op_type, opset) if not made.domain else None
    if formals is None or made.op_type == "Cast":
        if formals is not None and "to" in made.attributes:
            made.outputs[0].type = ir.TensorType(ir.DataType(made.attributes["to"].as_int()))
        return
    known = {_at(formals[0], i): x.dtype for i, x in enumerate(made.inputs) if x is not None and x.dtype is not None}
    for i, output in enumerate(made.outputs):
        dtype = known.get(_at(formals[1], i)) or _FIXED.get(_at(formals[1], i))
        if output.dtype is None and dtype is not None:
            output.type = ir.TensorType(dtype)


_FIXED = {"tensor(bool)": ir.DataType.BOOL, "tensor(int64)": ir.DataType.INT64}


def _at(formals: Sequence[str], index: int) -> str:
    return formals[min(index, len(formals) - 1)]


@cache
def _formals(op_type: str, opset: int) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """The type of each input and output: a constraint's name, or the one type that is allowed."""
    import onnx

    try:
        schema = onnx.defs.get_schema(op_type, opset)
    except onnx.defs.SchemaError:
        return None
    single = {
        c.type_param_str: c.allowed_type_strs[0] for c in schema.type_constraints if len(c.allowed_type_strs) == 1
    }
    names = ([single.get(v.type_str, v.type_str) for v in values] for values in (schema.inputs, schema.outputs))
    inputs, outputs = names
    return tuple(inputs), tuple(outputs)
