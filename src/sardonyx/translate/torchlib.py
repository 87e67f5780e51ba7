"""The adapter to onnxscript's torchlib and torch's private exporter; no other module uses them.

It translates operators that our table lacks, and with the option `translator="torchlib"` all that it supports. Some
functions of torchlib fake outputs, so one with several outputs is used only after a numeric test.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import onnx_ir as ir
import sympy
import torch
from torch.utils._pytree import tree_leaves

from sardonyx import dtypes
from sardonyx.errors import Unsupported
from sardonyx.translate.builder import Builder
from sardonyx.translate.schemas import signature
from sardonyx.translate.table import name_of

log = logging.getLogger(__name__)

VERIFIED = frozenset({"aten::native_layer_norm", "aten::native_group_norm", "aten::max_pool2d_with_indices"})
"""Functions whose outputs are all correct, as `tests/translate/test_torchlib.py` tests."""

_NAN = "it ignores NaN"
_OVERFLOWS = "it overflows near the limits of integers, and rounds floating-point quotients differently"
_FUSED = "ONNX Runtime wrongly fuses its product with a transpose"
WRONG = {
    **dict.fromkeys(("aten::amax", "aten::amin", "aten::max", "aten::min", "aten::max.dim", "aten::min.dim"), _NAN),
    **dict.fromkeys(("aten::argmax", "aten::argmin", "aten::sort", "aten::topk", "aten::sign"), _NAN),
    **dict.fromkeys(("aten::mv", "aten::addmv"), _FUSED),
    **dict.fromkeys(("aten::floor_divide", "aten::div.Tensor_mode", "aten::div.Scalar_mode"), _OVERFLOWS),
    **dict.fromkeys(("aten::remainder.Tensor", "aten::remainder.Scalar"), _OVERFLOWS),
    "aten::nll_loss_forward": "its total weight is faked",
    "aten::native_batch_norm": "in training it normalizes by the running statistics",
    "aten::_native_batch_norm_legit": "it normalizes by the running statistics",
    "aten::_native_batch_norm_legit.no_stats": "its statistics are faked",
    "aten::_native_batch_norm_legit_functional": "it normalizes by the running statistics",
    "aten::_scaled_dot_product_flash_attention": "its logsumexp is faked",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "its logsumexp is faked",
    "aten::_scaled_dot_product_efficient_attention": "its logsumexp is faked",
    "aten::arange.start_step": "it rounds the number of elements differently",
    "aten::atan2": "its sign is wrong where y is zero",
    "aten::copy": "it does not broadcast",
    "aten::diagonal": "it sums a masked matrix, which propagates NaN and infinities to the diagonal",
    "aten::grid_sampler_2d": "it is written for an older opset",
    "aten::linalg_vector_norm": "it ignores NaN, and keepdim over all axes",
    "aten::logcumsumexp": "it overflows",
    "aten::pow.Tensor_Tensor": "its powers of integers are not exact",
    "aten::scatter.src": "it needs a source as large as the index",
    "aten::scatter_add": "it needs a source as large as the index",
    "aten::scatter_reduce.two": "its mean is a sum, and booleans have no order",
    "aten::signbit": "it ignores the sign of zero",
    "aten::special_erfcx": "it is inaccurate for large x",
    "aten::squeeze.dim": "it assumes that every axis has size one",
    "aten::squeeze.dims": "it assumes that every axis has size one",
    "aten::_upsample_bilinear2d_aa": "it ignores the scales",
    "aten::_upsample_bicubic2d_aa": "it ignores the scales",
}
"""Functions that silently return wrong numbers, or models that do not run."""

_WRONG_FOR: Mapping[str, tuple[Callable[[Mapping[str, Any]], Any], str]] = {
    "aten::avg_pool2d": (lambda args: args.get("divisor_override"), "it ignores divisor_override"),
    "aten::avg_pool3d": (lambda args: args.get("divisor_override"), "it ignores divisor_override"),
    "aten::convolution": (lambda args: args.get("transposed"), "when transposed, it can need sizes that ONNX refuses"),
    "aten::index_put": (lambda args: args.get("accumulate"), "ONNX Runtime's threads race in its sums"),
    "aten::linear": (lambda args: len(args["input"].meta["dims"]) == 1, _FUSED),
    "aten::matmul": (lambda args: 1 in (len(args[name].meta["dims"]) for name in ("self", "other")), _FUSED),
    "aten::replication_pad1d": (lambda args: _crops(args["padding"]), "it pads before it crops"),
    "aten::replication_pad2d": (lambda args: _crops(args["padding"]), "it pads before it crops"),
    "aten::replication_pad3d": (lambda args: _crops(args["padding"]), "it pads before it crops"),
}
"""Functions that are wrong for some arguments."""

_WRONG_IN_HALF = frozenset({"aten::index_put"})
"""Functions that compute in half precision where torch uses single, or that ONNX Runtime cannot run."""

_SUMS = frozenset({"aten::sum", "aten::mean", "aten::prod", "aten::cumsum", "aten::cumprod", "aten::logsumexp"})
"""Reductions that torch computes in the dtype of the result."""

_SELECTORS = ("condition", "mask")
"""Operands that select, and do not take part in type promotion."""


@cache
def registry() -> Any:
    """Return torchlib's functions by operator, as in torch's exporter."""
    from torch.onnx._internal.exporter import _registration

    log.debug("building the torchlib registry")
    chatter = logging.getLogger(_registration.__name__)
    level = chatter.level
    chatter.setLevel(logging.ERROR)  # it warns about operators of packages that are not installed
    try:
        return _registration.ONNXRegistry.from_torchlib()
    finally:
        chatter.setLevel(level)


@cache
def _opset(version: int) -> Any:
    from onnxscript import values

    return values.Opset("", version)


def translate(
    g: Builder, node: torch.fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any], *, first: bool = False
) -> Any:
    """Translate a call with torchlib; append its nodes to the builder's graph.

    With `first`, our own table is tried after it: torchlib then also receives symbolic sizes, which are untested, and
    no arguments that it is known to get wrong.
    """
    from onnxscript import evaluator
    from torch.onnx._internal.exporter import _building

    names = [argument.name for argument in _schema(node).arguments]
    bound: Mapping[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
    function = _function(node, first)
    if first:
        _check_arguments(node, bound)
    elif any(isinstance(x, sympy.Expr) for x in tree_leaves(list(bound.values()))):
        raise Unsupported("torchlib's translation does not support a symbolic size here")
    bound = _promote(g, node, bound)
    recorder: Any = _building.OpRecorder(  # type: ignore[abstract]  # mypy takes the bodies in its base class for empty
        _opset(g.opset), {}
    )
    try:
        with evaluator.default_as(recorder):
            result = _call(g, function, [bound[name] for name in names[: len(args)]], {k: bound[k] for k in kwargs})
        _check_count(node, result)
        for appended in _inline_calls(recorder):
            _adopt(g, appended)
    except BaseException:
        for appended in recorder.nodes:
            appended.resize_inputs(0)  # else its operands would appear to be used
        raise
    return result


def _function(node: torch.fx.Node, first: bool) -> Any:
    from torch.onnx._internal.exporter import _dispatching

    name = name_of(node.target)
    if name in WRONG:
        raise Unsupported(f"torchlib's translation is wrong: {WRONG[name]}")
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        raise Unsupported("random numbers come from torch's generator")
    several = len(_schema(node).returns) > 1
    if several and not first:
        raise Unsupported("no translation")  # the verified ones are in our own table
    function, _ = _dispatching.dispatch(node, registry())
    if function is None:
        raise Unsupported("torchlib has no translation" if first else "no translation")
    if several and name not in VERIFIED:
        raise Unsupported("torchlib's translation has several outputs and is not verified")
    return function


def _schema(node: torch.fx.Node) -> Any:
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        raise Unsupported("no translation")
    return schema


def _check_arguments(node: torch.fx.Node, arguments: Mapping[str, Any]) -> None:
    """Refuse empty tensors, scalars, and arguments for which torchlib is wrong."""
    wrong, reason = _WRONG_FOR.get(name_of(node.target), (lambda args: False, ""))
    if wrong(arguments):
        raise Unsupported(f"torchlib's translation is wrong: {reason}")
    if name_of(node.target) in _WRONG_IN_HALF and _is_half(arguments.get("self")):
        raise Unsupported("torchlib's translation is wrong in half precision")
    dims = [x.meta.get("dims") for x in arguments.values() if isinstance(x, ir.Value)]
    if any(0 in known for known in dims if known):
        raise Unsupported("torchlib's translation does not support empty tensors")
    if dims and dims[0] == () and torch.Tag.pointwise not in getattr(node.target, "tags", ()):
        raise Unsupported("torchlib's translation does not support scalar tensors")


def _crops(padding: Sequence[Any]) -> bool:
    return not all(isinstance(size, int) and size >= 0 for size in padding)


def _is_half(x: Any) -> bool:
    return isinstance(x, ir.Value) and x.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def _call(g: Builder, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    try:
        return function(*(_to_torchlib(g, x) for x in args), **{k: _to_torchlib(g, x) for k, x in kwargs.items()})
    except Unsupported:
        raise
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise Unsupported(f"torchlib's translation failed: {cause}") from error


def _to_torchlib(g: Builder, arg: Any) -> Any:
    """Convert an argument for torchlib: dtypes to ONNX's numbers, symbolic sizes to tensors."""
    if isinstance(arg, sympy.Expr):
        return g.scalar(arg, torch.int64)
    if isinstance(arg, torch.dtype):
        return int(dtypes.to_onnx(arg))
    if isinstance(arg, (torch.device, torch.layout, torch.memory_format)):
        return str(arg)
    return [_to_torchlib(g, x) for x in arg] if isinstance(arg, (list, tuple)) else arg


def _check_count(node: torch.fx.Node, result: Any) -> None:
    """Refuse a list of tensors that torchlib returns as one ONNX sequence, which translations do not support."""
    expected = node.meta.get("val")
    if isinstance(expected, (tuple, list)) and not (isinstance(result, (tuple, list)) and len(result) == len(expected)):
        raise Unsupported("torchlib's translation returns other outputs than torch's operator")


# Type promotion: torch's operators do it, torchlib's functions expect promoted operands


def _promote(g: Builder, node: torch.fx.Node, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    dtype = _promotion_dtype(g, node, arguments)
    return arguments if dtype is None else {name: _cast(g, name, x, dtype) for name, x in arguments.items()}


def _promotion_dtype(g: Builder, node: torch.fx.Node, arguments: Mapping[str, Any]) -> torch.dtype | None:
    """Return the dtype that torch first promotes all operands to; None if each keeps its own."""
    if not isinstance(g.out, torch.Tensor) or g.out.dtype.is_complex:
        return None
    if name_of(node.target).partition(".")[0] in _SUMS:
        return g.out.dtype
    if torch.Tag.pointwise not in getattr(node.target, "tags", ()):
        return None
    if g.out.dtype != torch.bool:
        return g.out.dtype
    operands = [x for name, x in arguments.items() if isinstance(x, (ir.Value, int, float)) and name not in _SELECTORS]
    return g.result_type(operands[0], operands[1]) if len(operands) == 2 else None


def _cast(g: Builder, name: str, x: Any, dtype: torch.dtype) -> Any:
    return g.cast(x, dtype) if isinstance(x, ir.Value) and name not in _SELECTORS else x


# Adding torchlib's nodes to our graph


def _inline_calls(recorder: Any) -> Iterator[ir.Node]:
    """Yield the recorded nodes, with the body of a torchlib function before each call of it."""
    for node in recorder.nodes:
        if node.domain:
            yield from _inline_call(node, recorder.functions)
        yield node


def _inline_call(call: ir.Node, functions: Mapping[Any, Any]) -> Iterator[ir.Node]:
    function = functions[call.op_identifier()].function_ir
    values = dict(zip(function.inputs, call.inputs, strict=True))
    for node in function:
        if node.domain or any(x.type == ir.AttributeType.GRAPH for x in node.attributes.values()):
            raise Unsupported("torchlib's translation needs a local function")
        attributes = [_resolve_attribute(x, call, function) for x in node.attributes.values()]
        operands = [None if x is None else values[x] for x in node.inputs]
        copy = ir.Node("", node.op_type, operands, [x for x in attributes if x], num_outputs=len(node.outputs))
        values.update(zip(node.outputs, copy.outputs, strict=True))
        yield copy
    call.domain, call.op_type = "", "Identity"
    call.attributes.clear()
    call.resize_inputs(1)
    call.replace_input_with(0, values[function.outputs[0]])


def _resolve_attribute(attribute: ir.Attr, call: ir.Node, function: ir.Function) -> ir.Attr | None:
    """Resolve an attribute of a function's node that refers to one of the call, or its default."""
    name = attribute.ref_attr_name
    if name is None:
        return attribute
    value = call.attributes.get(name) or function.attributes.get(name)
    return None if value is None or value.value is None else ir.Attr(attribute.name, attribute.type, value.value)


def _adopt(g: Builder, node: ir.Node) -> None:
    for value in node.outputs:
        value.name = g.fresh(node.op_type.lower())
    constant = ir.convenience.get_const_tensor(node.outputs[0]) if node.op_type == "Constant" else None
    if constant is not None:
        node.outputs[0].const_value, node.outputs[0].type = constant, ir.TensorType(constant.dtype)
    node.meta["fx"] = g._origin
    _state_dtypes(node, g.opset)
    _check_exact(node)
    g.nodes.append(node)


_INEXACT_OF_INTEGERS = frozenset({"ReduceSum", "ReduceProd", "ReduceSumSquare", "ReduceL1", "Einsum", "Pow"})


def _check_exact(node: ir.Node) -> None:
    """Refuse operators on integers that ONNX Runtime computes in double precision."""
    fmod = node.op_type == "Mod" and "fmod" in node.attributes and node.attributes["fmod"].as_int()
    dtype = node.inputs[0].dtype if node.inputs and node.inputs[0] is not None else None
    if (fmod or node.op_type in _INEXACT_OF_INTEGERS) and dtype is not None and not dtype.is_floating_point():
        raise Unsupported("torchlib's translation computes integers in double precision")


def _state_dtypes(node: ir.Node, opset: int) -> None:
    """Set the dtypes that follow from ONNX's schema, from which later passes see which kernels are missing."""
    formal = signature(node.op_type, opset) if not node.domain else None
    if formal is None:
        return
    if node.op_type == "Cast":
        node.outputs[0].type = ir.TensorType(ir.DataType(node.attributes["to"].as_int()))
        return
    known: dict[str, ir.DataType] = {}
    for i, x in enumerate(node.inputs):
        if x is not None and x.dtype is not None and known.setdefault(formal.of_input(i), x.dtype) != x.dtype:
            raise Unsupported(f"torchlib's translation mixes dtypes in {node.op_type}")
    for i, output in enumerate(node.outputs):
        constraint = formal.of_output(i)
        dtype = known.get(constraint) or _FIXED.get(formal.only(constraint) or "")
        if output.dtype is None and dtype is not None:
            output.type = ir.TensorType(dtype)


_FIXED = {"tensor(bool)": ir.DataType.BOOL, "tensor(int64)": ir.DataType.INT64}
