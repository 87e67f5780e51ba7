"""Long chains of operators: expressions of bounded depth, kernels of bounded length."""

from __future__ import annotations

import sys

import numpy as np
import onnx
from onnx import TensorProto, helper

from sardonyx import native
from tests.native.running import compare, model_of


def _chain(count: int, size: int = 64) -> onnx.ModelProto:
    """x ← sin(x · w), over and over."""
    nodes = []
    for i in range(count):
        nodes.append(helper.make_node("Mul", [f"x{i}", "w"], [f"m{i}"]))
        nodes.append(helper.make_node("Sin", [f"m{i}"], [f"x{i + 1}"]))
    inputs = {"x0": (TensorProto.FLOAT, [8, size]), "w": (TensorProto.FLOAT, [size])}
    return model_of(nodes, inputs, [f"x{count}"])


def test_a_long_chain_is_several_kernels_of_bounded_size() -> None:
    made = native.generate(_chain(300))
    sizes = [len(kernel.nodes) for kernel in made.report.kernels]
    assert sum(sizes) == 600
    assert max(sizes) <= 128


def test_a_chain_asked_for_by_name_is_one_kernel_however_long() -> None:
    model = _chain(300)
    names = [f"n{i}" for i in range(600)]
    for node, name in zip(model.graph.node, names, strict=True):
        node.name = name
    assert len(native.generate(model, select=names).report.kernels) == 1


def test_the_depth_of_a_chain_needs_no_deep_stack() -> None:
    """What walks over expressions calls itself for each operator in them, up to a bound."""
    limit = sys.getrecursionlimit()
    try:
        sys.setrecursionlimit(_frames() + 400)
        assert len(native.generate(_chain(60)).report.kernels) == 1
    finally:
        sys.setrecursionlimit(limit)


def _frames() -> int:
    frame, count = sys._getframe(), 0
    while frame is not None:
        frame, count = frame.f_back, count + 1
    return count


def test_what_is_cut_at_the_bound_of_depth_is_computed_as_before() -> None:
    x, w = np.random.default_rng(0).uniform(0.5, 1, (2, 8, 67)).astype(np.float32)
    compare(_chain(60, 67), {"x0": x, "w": w[0]})


def test_a_function_that_is_called_often_is_compiled_once() -> None:
    nodes = [helper.make_node("Tanh", [f"x{i}"], [f"x{i + 1}"]) for i in range(20)]
    model = model_of(nodes, {"x0": (TensorProto.FLOAT, [3, 37])}, ["x20"])
    assert native.generate(model).source.count("hyperbolic_tangent(x)") == 1
