"""The one place that touches onnxscript's torchlib and torch's private exporter.

It translates the long tail of operators, and with the option `translator="torchlib"` all that it has. torchlib fakes
some outputs of some functions, so one of several outputs is used only if a numeric test admits it.
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

ADMITTED = frozenset({"aten::native_layer_norm", "aten::native_group_norm", "aten::max_pool2d_with_indices"})
"""Functions of several outputs that are right in each of them: `tests/translate/test_torchlib.py` has the proof."""

_NAN = "it passes over what is not a number"
_OVERFLOWS = "it overflows near the limits of integers, and rounds quotients of floating point otherwise"
_FUSED = "ONNX Runtime joins its product with a transpose wrongly"
WRONG = {
    **dict.fromkeys(("aten::amax", "aten::amin", "aten::max", "aten::min", "aten::max.dim", "aten::min.dim"), _NAN),
    **dict.fromkeys(("aten::argmax", "aten::argmin", "aten::sort", "aten::topk", "aten::sign"), _NAN),
    **dict.fromkeys(("aten::mv", "aten::addmv"), _FUSED),
    **dict.fromkeys(("aten::floor_divide", "aten::div.Tensor_mode", "aten::div.Scalar_mode"), _OVERFLOWS),
    **dict.fromkeys(("aten::remainder.Tensor", "aten::remainder.Scalar"), _OVERFLOWS),
    "aten::nll_loss_forward": "its total weight is faked",
    "aten::native_batch_norm": "in training it normalises by the running statistics",
    "aten::_native_batch_norm_legit": "it normalises by the running statistics",
    "aten::_native_batch_norm_legit.no_stats": "its statistics are faked",
    "aten::_native_batch_norm_legit_functional": "it normalises by the running statistics",
    "aten::_scaled_dot_product_flash_attention": "its logsumexp is faked",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "its logsumexp is faked",
    "aten::_scaled_dot_product_efficient_attention": "its logsumexp is faked",
    "aten::arange.start_step": "it rounds the count of fractions otherwise",
    "aten::atan2": "it has the wrong sign where y is zero",
    "aten::copy": "it does not broadcast",
    "aten::diagonal": "it sums a masked matrix, which carries NaN and infinities to the diagonal",
    "aten::grid_sampler_2d": "it is written for an older opset",
    "aten::linalg_vector_norm": "it passes over what is not a number, and over all axes forgets keepdim",
    "aten::logcumsumexp": "it overflows",
    "aten::pow.Tensor_Tensor": "its powers of integers are not exact",
    "aten::scatter.src": "it wants a source as large as the index",
    "aten::scatter_add": "it wants a source as large as the index",
    "aten::scatter_reduce.two": "its mean is a sum, and booleans have no order",
    "aten::signbit": "it does not know a negative zero",
    "aten::special_erfcx": "it loses its digits where x is large",
    "aten::squeeze.dim": "it takes every axis for one of size one",
    "aten::squeeze.dims": "it takes every axis for one of size one",
    "aten::_upsample_bilinear2d_aa": "it ignores the scales",
    "aten::_upsample_bicubic2d_aa": "it ignores the scales",
}
"""Functions that give wrong numbers without a word, or models that do not run."""

_WRONG_WHERE: Mapping[str, tuple[Callable[[Mapping[str, Any]], Any], str]] = {
    "aten::avg_pool2d": (lambda given: given.get("divisor_override"), "it ignores divisor_override"),
    "aten::avg_pool3d": (lambda given: given.get("divisor_override"), "it ignores divisor_override"),
    "aten::convolution": (lambda given: given.get("transposed"), "transposed, it can ask for sizes that ONNX refuses"),
    "aten::index_put": (lambda given: given.get("accumulate"), "ONNX Runtime's threads lose some of its sums"),
    "aten::linear": (lambda given: len(given["input"].meta["dims"]) == 1, _FUSED),
    "aten::matmul": (lambda given: 1 in (len(given[name].meta["dims"]) for name in ("self", "other")), _FUSED),
    "aten::replication_pad1d": (lambda given: _crops(given["padding"]), "it pads before it crops"),
    "aten::replication_pad2d": (lambda given: _crops(given["padding"]), "it pads before it crops"),
    "aten::replication_pad3d": (lambda given: _crops(given["padding"]), "it pads before it crops"),
}
"""Functions that do so for some arguments."""

_WRONG_IN_HALF = frozenset({"aten::index_put"})
"""Functions that compute in half precision what torch computes in single, or ONNX Runtime not at all."""

_SUMS = frozenset({"aten::sum", "aten::mean", "aten::prod", "aten::cumsum", "aten::cumprod", "aten::logsumexp"})
"""Reductions that torch computes in the dtype of the result."""

_NO_NUMBERS = ("condition", "mask")
"""Operands that choose, and are not computed with."""


@cache
def registry() -> Any:
    """torchlib's functions by operator, as torch's exporter finds them."""
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


def translate(
    g: Builder, node: torch.fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any], *, first: bool = False
) -> Any:
    """Translate a call through torchlib; the nodes it makes are appended to the builder's graph.

    `first` says that our own table has its turn after it: torchlib is then given symbolic sizes too, which nothing has
    tested, and nothing that it is known to get wrong.
    """
    from onnxscript import evaluator
    from torch.onnx._internal.exporter import _building

    names = [argument.name for argument in _schema(node).arguments]
    given: Mapping[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
    function = _function(node, first)
    if first:
        _check_arguments(node, given)
    elif any(isinstance(x, sympy.Expr) for x in tree_leaves(list(given.values()))):
        raise Unsupported("torchlib's translation takes no symbolic size here")
    given = _promoted(g, node, given)
    recorder: Any = _building.OpRecorder(  # type: ignore[abstract]  # its base has bodies, which mypy reads as empty
        _opset(g.opset), {}
    )
    try:
        with evaluator.default_as(recorder):
            result = _call(g, function, [given[name] for name in names[: len(args)]], {k: given[k] for k in kwargs})
        _check_count(node, result)
        for made in _inlined(recorder):
            _adopt(g, made)
    except BaseException:
        for made in recorder.nodes:
            made.resize_inputs(0)  # or its operands would seem to have a reader
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
        raise Unsupported("no translation")  # those that are admitted are in our own table
    function, _ = _dispatching.dispatch(node, registry())
    if function is None:
        raise Unsupported("torchlib has no translation" if first else "no translation")
    if several and name not in ADMITTED:
        raise Unsupported("torchlib's translation has several outputs, and no test admits it")
    return function


def _schema(node: torch.fx.Node) -> Any:
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        raise Unsupported("no translation")
    return schema


def _check_arguments(node: torch.fx.Node, given: Mapping[str, Any]) -> None:
    """Refuse what torchlib does not think of: tensors without elements, or without dimensions that it counts on."""
    wrong, reason = _WRONG_WHERE.get(name_of(node.target), (lambda given: False, ""))
    if wrong(given):
        raise Unsupported(f"torchlib's translation is wrong: {reason}")
    if name_of(node.target) in _WRONG_IN_HALF and _is_half(given.get("self")):
        raise Unsupported("torchlib's translation is wrong in half precision")
    dims = [x.meta.get("dims") for x in given.values() if isinstance(x, ir.Value)]
    if any(0 in known for known in dims if known):
        raise Unsupported("torchlib's translation is not for empty tensors")
    if dims and dims[0] == () and torch.Tag.pointwise not in getattr(node.target, "tags", ()):
        raise Unsupported("torchlib's translation is not for tensors without dimensions")


def _crops(padding: Sequence[Any]) -> bool:
    return not all(isinstance(size, int) and size >= 0 for size in padding)


def _is_half(x: Any) -> bool:
    return isinstance(x, ir.Value) and x.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def _call(g: Builder, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    try:
        return function(*(_plain(g, x) for x in args), **{k: _plain(g, x) for k, x in kwargs.items()})
    except Unsupported:
        raise
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise Unsupported(f"torchlib's translation failed: {cause}") from error


def _plain(g: Builder, arg: Any) -> Any:
    """An argument as torchlib takes it: dtypes as ONNX's numbers, symbolic sizes as tensors."""
    if isinstance(arg, sympy.Expr):
        return g.scalar(arg, torch.int64)
    if isinstance(arg, torch.dtype):
        return int(dtypes.to_onnx(arg))
    if isinstance(arg, (torch.device, torch.layout, torch.memory_format)):
        return str(arg)
    return [_plain(g, x) for x in arg] if isinstance(arg, (list, tuple)) else arg


def _check_count(node: torch.fx.Node, result: Any) -> None:
    """A list of tensors that torchlib gives as one value, a sequence of ONNX, is nothing that translations take."""
    expected = node.meta.get("val")
    if isinstance(expected, (tuple, list)) and not (isinstance(result, (tuple, list)) and len(result) == len(expected)):
        raise Unsupported("torchlib's translation gives other outputs than torch's operator")


# Type promotion: torch's operators do it, torchlib's functions expect it done


def _promoted(g: Builder, node: torch.fx.Node, given: Mapping[str, Any]) -> Mapping[str, Any]:
    dtype = _computed_in(g, node, given)
    return given if dtype is None else {name: _cast(g, name, x, dtype) for name, x in given.items()}


def _computed_in(g: Builder, node: torch.fx.Node, given: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype that torch brings all operands to first; None where each keeps its own."""
    if not isinstance(g.out, torch.Tensor) or g.out.dtype.is_complex:
        return None
    if name_of(node.target).partition(".")[0] in _SUMS:
        return g.out.dtype
    if torch.Tag.pointwise not in getattr(node.target, "tags", ()):
        return None
    if g.out.dtype != torch.bool:
        return g.out.dtype
    operands = [x for name, x in given.items() if isinstance(x, (ir.Value, int, float)) and name not in _NO_NUMBERS]
    return g.result_type(operands[0], operands[1]) if len(operands) == 2 else None


def _cast(g: Builder, name: str, x: Any, dtype: torch.dtype) -> Any:
    return g.cast(x, dtype) if isinstance(x, ir.Value) and name not in _NO_NUMBERS else x


# What torchlib made, as nodes of our graph


def _inlined(recorder: Any) -> Iterator[ir.Node]:
    """The nodes that were recorded, each call of a function of torchlib's own after the function's body."""
    for made in recorder.nodes:
        if made.domain:
            yield from _body(made, recorder.functions)
        yield made


def _body(call: ir.Node, functions: Mapping[Any, Any]) -> Iterator[ir.Node]:
    function = functions[call.op_identifier()].function_ir
    values = dict(zip(function.inputs, call.inputs, strict=True))
    for node in function:
        if node.domain or any(x.type == ir.AttributeType.GRAPH for x in node.attributes.values()):
            raise Unsupported("torchlib's translation needs a local function")
        attributes = [_resolved(x, call, function) for x in node.attributes.values()]
        operands = [None if x is None else values[x] for x in node.inputs]
        made = ir.Node("", node.op_type, operands, [x for x in attributes if x], num_outputs=len(node.outputs))
        values.update(zip(node.outputs, made.outputs, strict=True))
        yield made
    call.domain, call.op_type = "", "Identity"
    call.attributes.clear()
    call.resize_inputs(1)
    call.replace_input_with(0, values[function.outputs[0]])


def _resolved(attribute: ir.Attr, call: ir.Node, function: ir.Function) -> ir.Attr | None:
    """An attribute of a function's node; one that stands for the call's is that, or its default."""
    name = attribute.ref_attr_name
    if name is None:
        return attribute
    given = call.attributes.get(name) or function.attributes.get(name)
    return None if given is None or given.value is None else ir.Attr(attribute.name, attribute.type, given.value)


def _adopt(g: Builder, made: ir.Node) -> None:
    for value in made.outputs:
        value.name = g.fresh(made.op_type.lower())
    held = ir.convenience.get_const_tensor(made.outputs[0]) if made.op_type == "Constant" else None
    if held is not None:
        made.outputs[0].const_value, made.outputs[0].type = held, ir.TensorType(held.dtype)
    made.meta["fx"] = g._origin
    _state_dtypes(made, g.opset)
    _check_exact(made)
    g.nodes.append(made)


_INEXACT_OF_INTEGERS = frozenset({"ReduceSum", "ReduceProd", "ReduceSumSquare", "ReduceL1", "Einsum", "Pow"})


def _check_exact(made: ir.Node) -> None:
    """Refuse operators of integers that ONNX Runtime computes in double precision."""
    fmod = made.op_type == "Mod" and "fmod" in made.attributes and made.attributes["fmod"].as_int()
    dtype = made.inputs[0].dtype if made.inputs and made.inputs[0] is not None else None
    if (fmod or made.op_type in _INEXACT_OF_INTEGERS) and dtype is not None and not dtype.is_floating_point():
        raise Unsupported("torchlib's translation computes integers in double precision")


def _state_dtypes(made: ir.Node, opset: int) -> None:
    """The dtypes that follow from ONNX's schema, without which nothing later could tell that an engine lacks one."""
    formal = signature(made.op_type, opset) if not made.domain else None
    if formal is None:
        return
    if made.op_type == "Cast":
        made.outputs[0].type = ir.TensorType(ir.DataType(made.attributes["to"].as_int()))
        return
    known: dict[str, ir.DataType] = {}
    for i, x in enumerate(made.inputs):
        if x is not None and x.dtype is not None and known.setdefault(formal.of_input(i), x.dtype) != x.dtype:
            raise Unsupported(f"torchlib's translation mixes dtypes in {made.op_type}")
    for i, output in enumerate(made.outputs):
        constraint = formal.of_output(i)
        dtype = known.get(constraint) or _FIXED.get(formal.only(constraint) or "")
        if output.dtype is None and dtype is not None:
            output.type = ir.TensorType(dtype)


_FIXED = {"tensor(bool)": ir.DataType.BOOL, "tensor(int64)": ir.DataType.INT64}
