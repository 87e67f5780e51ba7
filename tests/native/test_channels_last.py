"""Batch norm with channels last, as rules for CUDA write it: one kernel with what follows."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from sardonyx.optimize.rules.cuda_channels_last import INTERNAL
from tests.native.running import Together

SHAPE = (2, 5, 3, 7)
TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}


def model(dtype: str) -> onnx.ModelProto:
    nodes = [
        helper.make_node("BatchNormalization", ["x", "s", "b", "m", "v"], ["n"], domain=INTERNAL, epsilon=0.01),
        helper.make_node("Add", ["n", "z"], ["a"]),
        helper.make_node("Relu", ["a"], ["y"]),
    ]
    kind = TYPES[dtype]
    rows = [helper.make_tensor_value_info(name, kind, SHAPE[-1:]) for name in "sbmv"]
    images = [helper.make_tensor_value_info(name, kind, SHAPE) for name in "xz"]
    middle = [helper.make_tensor_value_info(name, kind, SHAPE) for name in "na"]
    graph = helper.make_graph(
        nodes, "g", [*images, *rows], [helper.make_tensor_value_info("y", kind, SHAPE)], value_info=middle
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(INTERNAL, 15)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


@pytest.mark.parametrize("dtype", TYPES)
def test_it_is_one_kernel_with_what_follows(dtype: str) -> None:
    together = Together()
    assert together.add(dtype, model(dtype)) is None
    assert [len(group) for group in together.groups(dtype)] == [3]
    together.build(quickly=True)
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal(SHAPE).astype(dtype) for name in "xz"}
    feeds |= {name: rng.uniform(0.5, 2, SHAPE[-1:]).astype(dtype) for name in "sbmv"}
    x, z, s, b, m, v = (feeds[name].astype(np.float64) for name in "xzsbmv")
    expected = np.maximum((x - m) / np.sqrt(v + 0.01) * s + b + z, 0)
    (found,) = together.run(dtype, feeds)
    tolerance = 4e-3 if dtype == "float16" else 1e-5
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance * np.abs(expected).max())
