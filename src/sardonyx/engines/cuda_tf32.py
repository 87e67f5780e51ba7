"""Whether a CUDA session may use TF32.

Without it, ONNX Runtime's CUDA provider excludes every cuDNN kernel for tensor cores, those of half precision too, and
uses them only where cuDNN has no other. So it is allowed if no product is in single precision, where it would cost
digits.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx
import torch

_PRODUCTS = frozenset(
    {"Conv", "ConvTranspose", "DeformConv", "MatMul", "Gemm", "Einsum", "Attention", "RNN", "LSTM", "GRU"}
)
_NHWC = "com.ms.internal.nhwc"


def allows_tf32(model: bytes) -> bool:
    """Whether torch's flag or the products of a serialized model allow it."""
    if torch.backends.cuda.matmul.allow_tf32:
        return True
    return not _has_single_products(list(_graphs(onnx.load_from_string(model).graph)))


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for body in (attribute.g, *attribute.graphs):
                yield from _graphs(body)


def _has_single_products(graphs: list[onnx.GraphProto]) -> bool:
    """Whether a product, or an operator of another domain that may be one, reads single precision or unknown types."""
    dtypes: dict[str, int] = {}
    for graph in graphs:
        values = (*graph.input, *graph.value_info, *graph.output)
        dtypes |= {value.name: value.type.tensor_type.elem_type for value in values}
        dtypes |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    unknown, single = onnx.TensorProto.UNDEFINED, onnx.TensorProto.FLOAT
    return any(
        dtypes.get(name, unknown) in (unknown, single)
        for graph in graphs
        for node in graph.node
        if node.op_type in _PRODUCTS or node.domain not in ("", _NHWC)
        for name in node.input
        if name
    )
