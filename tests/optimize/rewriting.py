"""Write a small ONNX model as text, rewrite it, and run both versions on the same numbers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime

from sardonyx.optimize import optimize

HEADER = '<ir_version: 10, opset_import: ["": 23, "com.microsoft": 1]>\n'


def model_of(text: str) -> ir.Model:
    """The model, with every shape that inference finds where rules look for it."""
    proto = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(HEADER + text), data_prop=True)
    model = ir.from_proto(proto)
    values = [*model.graph.inputs, *model.graph.initializers.values(), *(o for n in model.graph for o in n.outputs)]
    for value in values:
        if value.shape is not None and all(isinstance(dim, int) for dim in value.shape):
            value.meta["dims"] = tuple(value.shape)
    return model


def rewritten(text: str) -> tuple[Counter[str], list[str]]:
    """Which rules applied and which operators remain; the results are checked to be the same."""
    before, after = model_of(text), model_of(text)
    hits = optimize(after, domains={"com.microsoft"})
    feeds = {str(x.name): _numbers(x) for x in before.graph.inputs}
    for expected, result in zip(_run(before, feeds), _run(after, feeds), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)
    return hits, [node.op_type for node in after.graph]


def _numbers(value: ir.Value) -> Any:
    shape = tuple(int(dim) for dim in value.shape or ())
    generator = np.random.default_rng(0)
    if value.dtype == ir.DataType.INT64:
        return generator.integers(0, 2, shape)
    assert value.dtype is not None
    return generator.normal(size=shape).astype(value.dtype.numpy())


def _run(model: ir.Model, feeds: dict[str, Any]) -> Any:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options)
    return session.run(None, feeds)
