"""ONNX's own evaluator as an engine: what it cannot do is told by operator, with what to do next."""

from __future__ import annotations

import onnx
import pytest
import torch
from onnx import TensorProto, helper

import sardonyx
from sardonyx import EngineError


def model(node: onnx.NodeProto) -> onnx.ModelProto:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [100, 2]) for name in "xy")
    index = helper.make_tensor("index", TensorProto.INT64, [100, 2], [0] * 200)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(helper.make_graph([node], "one", [x], [y], [index]), opset_imports=opsets, ir_version=10)


def test_a_step_that_fails_is_named() -> None:
    """It picks by a function of numpy that takes no more than some tens of arrays."""
    gather = helper.make_node("GatherElements", ["x", "index"], ["y"], name="picked", axis=0)
    program = sardonyx.optimize(model(gather), engine="reference", optimize="none")
    with pytest.raises(EngineError, match=r"failed at GatherElements \(picked\): \w+Error: ") as caught:
        program(torch.ones(100, 2))
    assert caught.value.hint is not None
    assert "onnxruntime" in caught.value.hint


def test_an_operator_of_another_domain_is_named() -> None:
    program = sardonyx.optimize(
        model(helper.make_node("QuickGelu", ["x"], ["y"], domain="com.microsoft")), engine="reference", optimize="none"
    )
    with pytest.raises(EngineError, match=r"com\.microsoft::QuickGelu"):
        program(torch.ones(100, 2))
