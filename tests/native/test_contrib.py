"""Operators of onnxruntime's own domain, which onnx has no node tests of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.native.running import Together, difference, run, session_of

MICROSOFT = "com.microsoft"
CASES: dict[str, tuple[str, str, Mapping[str, Sequence[int]], Sequence[str], Mapping[str, object]]] = {
    "gelu": ("Gelu", MICROSOFT, {"x": [3, 37]}, ["y"], {}),
    "bias_gelu": ("BiasGelu", MICROSOFT, {"x": [3, 37], "b": [37]}, ["y"], {}),
    "fast_gelu": ("FastGelu", MICROSOFT, {"x": [3, 37]}, ["y"], {}),
    "fast_gelu_bias": ("FastGelu", MICROSOFT, {"x": [3, 37], "b": [37]}, ["y"], {}),
    "quick_gelu": ("QuickGelu", MICROSOFT, {"x": [3, 37]}, ["y"], {"alpha": 1.5}),
    "simplified": ("SimplifiedLayerNormalization", "", {"x": [3, 5, 37], "s": [37]}, ["y"], {"epsilon": 1e-3}),
    "fused_matmul": ("FusedMatMul", MICROSOFT, {"x": [37, 37], "w": [37, 37]}, ["y"], {"transB": 1, "alpha": 0.5}),
    "skip": ("SkipLayerNormalization", MICROSOFT, {"x": [2, 5, 37], "k": [2, 5, 37], "g": [37]}, ["y"], {}),
    "skip_all": (
        "SkipLayerNormalization",
        MICROSOFT,
        {"x": [2, 5, 37], "k": [2, 5, 37], "g": [37], "be": [37], "b": [37]},
        ["y", "", "", "s"],
        {"epsilon": 1e-3},
    ),
    "skip_simplified": (
        "SkipSimplifiedLayerNormalization",
        MICROSOFT,
        {"x": [2, 5, 37], "k": [2, 5, 37], "g": [37], "b": [37]},
        ["y", "", "", "s"],
        {"epsilon": 1e-3},
    ),
}


def _model(case: str) -> onnx.ModelProto:
    """The sizes of its outputs are those of its first input: onnx cannot infer them."""
    op, domain, inputs, outputs, attributes = CASES[case]
    dims = next(iter(inputs.values()))
    graph = helper.make_graph(
        [helper.make_node(op, list(inputs), outputs, domain=domain, **attributes)],
        "g",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name in outputs if name],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


@pytest.fixture(scope="module")
def together() -> Together:
    made = Together()
    for case in CASES:
        assert made.add(case, _model(case)) is None
    made.build(quickly=True)
    return made


@pytest.mark.parametrize("case", CASES)
def test_it_computes_what_onnxruntime_does(together: Together, case: str) -> None:
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in CASES[case][2].items()}
    for found, wanted in zip(together.run(case, feeds), run(session_of(_model(case)), feeds), strict=True):
        assert difference(found, wanted) is None
