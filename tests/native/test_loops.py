"""How regions become loops: what is computed in one sweep, and what needs memory."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper

from sardonyx.native.cpp import Kernel
from sardonyx.native.partition import plan_kernels
from tests.native.running import compare, model_of

FLOAT = TensorProto.FLOAT


def _kernel(model: onnx.ModelProto) -> Kernel:
    (part,) = plan_kernels(ir.from_proto(model), choice="all").parts
    return part.kernel


def _group_norm(batch: int | str) -> onnx.ModelProto:
    """As exporters write it: groups are normalised as instances, and each channel is scaled after that."""
    nodes = [
        helper.make_node("Reshape", ["x", "grouped"], ["groups"]),
        helper.make_node("InstanceNormalization", ["groups", "ones", "zeros"], ["normal"]),
        helper.make_node("Reshape", ["normal", "whole"], ["image"]),
        helper.make_node("Mul", ["image", "gain"], ["scaled"]),
        helper.make_node("Sigmoid", ["scaled"], ["y"]),
    ]
    constants = {
        "grouped": np.array([0, 4, -1]),
        "whole": np.array([0, 12, 5, 7]),
        "ones": np.ones(4, np.float32),
        "zeros": np.zeros(4, np.float32),
        "gain": np.linspace(-2, 2, 12, dtype=np.float32).reshape(12, 1, 1),
    }
    return model_of(nodes, {"x": (FLOAT, [batch, 12, 5, 7])}, ["y"], constants)


def test_rows_that_are_seen_in_another_shape_stay_in_one_nest() -> None:
    assert len(_kernel(_group_norm(2)).nests) == 1


def test_rows_in_another_shape_have_the_same_numbers() -> None:
    x = np.random.default_rng(0).standard_normal((3, 12, 5, 7)).astype(np.float32)
    compare(_group_norm(3), {"x": x})


def _rotated(size: int | str) -> onnx.ModelProto:
    nodes = [
        helper.make_node("Split", ["x"], ["a", "b"], axis=-1, num_outputs=2),
        helper.make_node("Neg", ["b"], ["c"]),
        helper.make_node("Concat", ["c", "a"], ["r"], axis=-1),
        helper.make_node("Mul", ["r", "sine"], ["across"]),
        helper.make_node("Add", ["x", "across"], ["y"]),
    ]
    return model_of(nodes, {"x": (FLOAT, [size, 5, 38]), "sine": (FLOAT, [5, 38])}, ["y"])


def test_joined_pieces_that_are_read_in_place_need_no_memory() -> None:
    kernel = _kernel(_rotated("n"))
    assert {step.root.buffer.kind for nest in kernel.nests for step in nest.steps} == {"output"}


def test_joined_pieces_have_the_same_numbers() -> None:
    rng = np.random.default_rng(0)
    x, sine = (rng.standard_normal(shape).astype(np.float32) for shape in ((3, 5, 38), (5, 38)))
    compare(_rotated("n"), {"x": x, "sine": sine})


def test_a_reduction_that_two_operators_need_is_computed_once() -> None:
    nodes = [
        helper.make_node("Mul", ["x", "two"], ["scaled"]),
        helper.make_node("Add", ["scaled", "x"], ["scores"]),
        helper.make_node("ReduceMax", ["scores", "axes"], ["most"]),
        helper.make_node("Softmax", ["scores"], ["shares"]),
        helper.make_node("Mul", ["shares", "most"], ["y"]),
    ]
    constants = {"two": np.array(2.0, np.float32), "axes": np.array([-1])}
    kernel = _kernel(model_of(nodes, {"x": (FLOAT, ["n", 9])}, ["y"], constants))
    steps = [step for nest in kernel.nests for step in nest.steps]
    assert [step.root.reduction for step in steps if step.root.reduction] == ["Largest", "Sum"]
