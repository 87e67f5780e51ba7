"""Operators of onnxruntime's own domain, which onnx has no node tests of."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

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
