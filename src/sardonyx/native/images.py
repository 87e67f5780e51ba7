"""Pooling and depthwise convolutions of images with channels last, as our own operators for the CPU."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from sardonyx.native.partition import registration
from sardonyx.native.session import onnxruntime, register
from sardonyx.optimize.rules.images import IMAGES
from sardonyx.options import Options
from sardonyx.toolchain import compiler
from sardonyx.toolchain.headers import read_header

_HEADERS = ("lanes.h", "arithmetic.h", "functions.h", "kernels.h", "windows.h", "images.h")
_NARROW = "Bfloat16"
_VARIABLES = [f"{kind}_{dtype}" for kind in ("maximum", "average", "depthwise") for dtype in ("float", "bfloat")]


def is_image_operator(node: ir.Node) -> bool:
    """Whether a node is one of these operators."""
    return node.domain == IMAGES


def set_types(node: ir.Node, x: ir.DataType, result: ir.DataType) -> None:
    """Let a node take and return images of another type."""
    assert x == result
    node.op_type = node.op_type.removesuffix(_NARROW) + (_NARROW if x == ir.DataType.BFLOAT16 else "")
    node.outputs[0].dtype = result


def build(options: Options) -> Path:
    """Return the library of the operators, checked to load."""
    toolchain = [read_header("sardonyx.toolchain", name) for name in ("ort.h", "narrow.h")]
    headers = [read_header("sardonyx.native", name) for name in _HEADERS]
    source = "\n".join([*toolchain, *headers, registration(IMAGES, _VARIABLES)])
    library = compiler.build_library(source, options)
    register(onnxruntime().SessionOptions(), library)
    return library
