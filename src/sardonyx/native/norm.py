"""Layer norm and RMS norm on the CPU as our own operator, which can return bfloat16; see norm.h."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from sardonyx.errors import OptionError
from sardonyx.native.partition import registration
from sardonyx.native.session import onnxruntime, register
from sardonyx.options import Options
from sardonyx.toolchain import compiler
from sardonyx.toolchain.headers import read_header

DOMAIN = "sardonyx.norm"
_SUFFIXES = {
    (ir.DataType.FLOAT, ir.DataType.FLOAT): "",
    (ir.DataType.FLOAT, ir.DataType.BFLOAT16): "ToBfloat16",
}
"""Of operators, by the types of x and of the result."""


def norm_node(x: ir.Value, scale: ir.Value, shift: ir.Value | None, *, epsilon: float, centered: bool) -> ir.Node:
    """Return a node that computes (x − mean) / √(variance + epsilon) · scale + shift over the last axis, in float32.

    If it is not centered, the mean counts as zero: an RMS norm.
    """
    attributes = [ir.AttrFloat32("epsilon", epsilon), ir.AttrInt64("centered", int(centered))]
    node = ir.Node(DOMAIN, "Norm", [x, scale, shift], attributes)
    node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    return node


def is_norm(node: ir.Node) -> bool:
    """Whether a node is one that `norm_node` made."""
    return node.domain == DOMAIN


def set_types(node: ir.Node, x: ir.DataType, result: ir.DataType) -> None:
    """Let a norm of float32 return float32 or bfloat16."""
    if (x, result) not in _SUFFIXES:
        raise OptionError(f"a norm cannot take {x} and return {result}")
    node.op_type = "Norm" + _SUFFIXES[x, result]
    node.outputs[0].type = ir.TensorType(result)


def build(options: Options) -> Path:
    """Return the library of the operators, checked to load."""
    library = compiler.build_library(_kernels(), options, common=_operators())
    register(onnxruntime().SessionOptions(), library)
    return library


def _kernels() -> str:
    toolchain = [read_header("sardonyx.toolchain", name) for name in ("ort.h", "narrow.h")]
    names = ("lanes.h", "arithmetic.h", "functions.h", "kernels.h", "norm_call.h", "norm.h")
    return "\n".join([*toolchain, *(read_header("sardonyx.native", name) for name in names)])


def _operators() -> str:
    headers = [
        "#include <mutex>",
        read_header("sardonyx.toolchain", "ort.h"),
        read_header("sardonyx.native", "norm_call.h"),
        read_header("sardonyx.native", "norm_operators.h"),
    ]
    return "\n".join([*headers, registration(DOMAIN, ["norm_float", "norm_to_bfloat"])])
