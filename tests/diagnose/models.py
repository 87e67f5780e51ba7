"""Models and settings that differ from what is right in one known place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

N = helper.make_node
PLAIN = "onnxruntime:optimize=none,level=none"
GELU = "onnxruntime:optimize=none,config.optimization.enable_gelu_approximation=1"
FLAGS = {
    "optimization.enable_gelu_approximation": "1",
    "session.intra_op.allow_spinning": "0",
    "session.use_env_allocators": "0",
}
"""Settings of a session of which the first one alone changes results."""
X = np.random.default_rng(0).standard_normal((4, 8)).astype("f") * 2


class Wave(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wave = self.into(x).sin()  # here
        return self.out(wave).softmax(-1)


def gelu() -> onnx.ModelProto:
    """GELU by its formula, between two operators."""
    nodes = [
        helper.make_node("Neg", ["x"], ["a"]),
        helper.make_node("Div", ["a", "root"], ["b"]),
        helper.make_node("Erf", ["b"], ["c"]),
        helper.make_node("Add", ["c", "one"], ["d"]),
        helper.make_node("Mul", ["a", "d"], ["e"]),
        helper.make_node("Mul", ["e", "half"], ["f"]),
        helper.make_node("Abs", ["f"], ["y"]),
    ]
    numbers = {"root": 2**0.5, "one": 1.0, "half": 0.5}
    held = [helper.make_tensor(name, TensorProto.FLOAT, [], [value]) for name, value in numbers.items()]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 8]) for name in "xy")
    graph = helper.make_graph(nodes, "gelu", [x], [y], held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def chain(
    count: int,
    fault: Sequence[onnx.NodeProto],
    weights: Mapping[str, Any] | None = None,
    *,
    domain: str | None = None,
) -> onnx.ModelProto:
    """Many operators, one after the other, and nodes from `in` to `out` in the middle of them."""
    nodes, last = [], "x"
    for i in range(count):
        if i == count * 3 // 5:
            for node in fault:
                fresh = onnx.NodeProto()
                fresh.CopyFrom(node)
                fresh.input[:] = [last if name == "in" else name for name in node.input]
                nodes.append(fresh)
            last = "out"
        pair = [last, f"v{i - 2}"] if i % 7 == 3 and i > 5 and f"v{i - 2}" in {n.output[0] for n in nodes} else [last]
        nodes.append(N("Max" if len(pair) == 2 else ("Neg", "Abs", "Identity")[i % 3], pair, [f"v{i}"], name=f"n{i}"))
        last = f"v{i}"
    held = [numpy_helper.from_array(np.asarray(array), name) for name, array in (weights or {}).items()]
    x, y = helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 8]), onnx.ValueInfoProto(name=last)
    y.type.tensor_type.elem_type = TensorProto.FLOAT
    opsets = [helper.make_opsetid("", 18), *([helper.make_opsetid(domain, 1)] if domain else [])]
    return helper.make_model(helper.make_graph(nodes, "chain", [x], [y], held), opset_imports=opsets, ir_version=10)


def approximated(count: int) -> onnx.ModelProto:
    """GELU by its formula, which onnxruntime fuses, and with a flag computes less exactly."""
    fault = [
        N("Div", ["in", "root"], ["b"]),
        N("Erf", ["b"], ["c"]),
        N("Add", ["c", "one"], ["d"]),
        N("Mul", ["in", "d"], ["e"]),
        N("Mul", ["e", "half"], ["out"]),
    ]
    return chain(count, fault, {"root": np.float32(2**0.5), "one": np.float32(1), "half": np.float32(0.5)})


def out_of_bounds(count: int) -> onnx.ModelProto:
    fault = [N("Gather", ["table", "index"], ["row"], axis=0), N("Add", ["in", "row"], ["out"])]
    return chain(count, fault, {"table": np.ones((4, 8), "f"), "index": np.array([7], "i8")})
