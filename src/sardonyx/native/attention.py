"""Attention on the CPU in bfloat16 with sums and softmax in float32, as our own operator; see attention_bfloat16.h."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from sardonyx.errors import EngineError, OptionError
from sardonyx.native.linear import PRECISIONS
from sardonyx.native.partition import registration
from sardonyx.native.session import onnxruntime, register
from sardonyx.options import Options
from sardonyx.toolchain import compiler
from sardonyx.toolchain.headers import read_header

DOMAIN = "sardonyx.attention"
PAST = 4
"""The input of a node that is its past keys, before the past values."""
BFLOAT16 = PRECISIONS["bf16"]
"""The precision of linear layers with the same instructions, whose loops it uses."""
_SUFFIXES = {
    (ir.DataType.FLOAT, ir.DataType.FLOAT): "",
    (ir.DataType.FLOAT, ir.DataType.BFLOAT16): "ToBfloat16",
    (ir.DataType.BFLOAT16, ir.DataType.FLOAT): "ToFloat32",
    (ir.DataType.BFLOAT16, ir.DataType.BFLOAT16): "Bfloat16",
}
"""Of operators, by the types of the operands and of the result."""
_VARIABLES = [f"attention_{types}" for types in ("float", "to_bfloat", "to_float", "bfloat")]


def attention_node(
    q: ir.Value,
    k: ir.Value,
    v: ir.Value,
    bias: ir.Value | None = None,
    past: tuple[ir.Value, ir.Value] | None = None,
    *,
    scale: float,
    causal: bool = False,
    heads: int = 0,
    key_heads: int = 0,
    result: ir.DataType = ir.DataType.FLOAT,
) -> ir.Node:
    """Return a node that computes softmax(scale · q · kᵀ + bias) · v, for each head.

    Operands are (batch, heads, length, size); or (batch, length, heads · size) with the numbers of heads. They are all
    in float32 or all in bfloat16, and the bias is in float32. `past` are keys and values before `k` and `v`, in the
    first of these orders.
    """
    attributes = [
        ir.AttrFloat32("scale", scale),
        ir.AttrInt64("causal", int(causal)),
        ir.AttrInt64("heads", heads),
        ir.AttrInt64("key_heads", key_heads),
    ]
    node = ir.Node(DOMAIN, "Attention", [q, k, v, bias, *(past or (None, None))], attributes)
    assert q.dtype is not None
    set_types(node, q.dtype, result)
    return node


def is_attention(node: ir.Node) -> bool:
    """Whether a node is one that `attention_node` made."""
    return node.domain == DOMAIN


def has_past(node: ir.Node) -> bool:
    """Whether a node of attention has keys and values in two parts."""
    return node.inputs[PAST] is not None


def set_types(node: ir.Node, x: ir.DataType, result: ir.DataType) -> None:
    """Let a node of attention take and return other types."""
    if (x, result) not in _SUFFIXES:
        raise OptionError(f"attention in bfloat16 cannot take {x} and return {result}")
    node.op_type = "Attention" + _SUFFIXES[x, result]
    node.outputs[0].type = ir.TensorType(result)


def build(options: Options) -> Path:
    """Return the library of the operators, checked to load."""
    missing = BFLOAT16.missing()
    if missing:
        raise EngineError(f"attention in bf16 needs a processor with {', '.join(missing)}", hint="use float32")
    flags = tuple(f"-m{name}" for name in BFLOAT16.instructions.values())
    library = compiler.build_library(_kernels(), options, flags=flags, common=_operators())
    register(onnxruntime().SessionOptions(), library)
    return library


def _kernels() -> str:
    """Return the source of the kernels, which need the instructions."""
    toolchain = [read_header("sardonyx.toolchain", name) for name in ("ort.h", "narrow.h")]
    shared = ("lanes.h", "arithmetic.h", "functions.h", "kernels.h", "windows.h", "linear_call.h", "linear.h")
    names = (*shared, *BFLOAT16.headers, "attention_call.h", "attention_bfloat16.h")
    return "\n".join([*toolchain, *(read_header("sardonyx.native", name) for name in names)])


def _operators() -> str:
    """Return the source of the operators, which run on any processor."""
    headers = [
        "#include <mutex>",
        read_header("sardonyx.toolchain", "ort.h"),
        read_header("sardonyx.native", "attention_call.h"),
        read_header("sardonyx.native", "attention_operators.h"),
    ]
    return "\n".join([*headers, registration(DOMAIN, _VARIABLES)])
