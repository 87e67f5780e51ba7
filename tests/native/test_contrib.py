"""Operators of onnxruntime's own domain, which onnx has no node tests of."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from sardonyx import native
from sardonyx.optimize.rules.cuda_channels_last import INTERNAL
from tests.native.contrib_cases import CASES, MICROSOFT
from tests.native.running import Together, difference, run, session_of


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


def test_batch_norm_with_channels_last() -> None:
    """As CUDA's convolutional networks have it; onnxruntime has no kernel of it on the CPU."""
    sizes, vectors = [2, 5, 7, 16], ("scale", "shift", "mean", "variance")
    nodes = [
        helper.make_node("BatchNormalization", ["x", *vectors], ["n"], domain=INTERNAL, epsilon=1e-3),
        helper.make_node("Relu", ["n"], ["y"]),
    ]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, sizes)]
    inputs += [helper.make_tensor_value_info(name, TensorProto.FLOAT, sizes[-1:]) for name in vectors]
    inner, output = (helper.make_tensor_value_info(name, TensorProto.FLOAT, sizes) for name in ("n", "y"))
    graph = helper.make_graph(nodes, "g", inputs, [output], value_info=[inner])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(INTERNAL, 15)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    rng = np.random.default_rng(0)
    feeds = {x.name: rng.uniform(0.5, 2, [d.dim_value for d in x.type.tensor_type.shape.dim]) for x in inputs}
    scale, shift, mean, variance = (feeds[name] for name in vectors)
    expected = np.maximum((feeds["x"] - mean) / np.sqrt(variance + 1e-3) * scale + shift, 0)
    compiled = native.compile(model)
    (result,) = compiled.session().run(None, {name: value.astype(np.float32) for name, value in feeds.items()})
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)
