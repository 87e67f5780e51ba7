"""What `reduce` records of a model takes bounded memory, however large the values between its nodes are."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from sardonyx.diagnose import RunConfig, reduce
from sardonyx.diagnose.reduction import recording
from sardonyx.diagnose.reduction.case import Case
from sardonyx.diagnose.reduction.recording import Bounds, record_values
from sardonyx.diagnose.reduction.worker import Outcome, Request, Worker

WAY = RunConfig.of("onnxruntime:optimize=none")
X = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
"""Of 16 KB, as every value of the chain."""


def chain(count: int = 16, kind: str = "Neg") -> onnx.ModelProto:
    nodes = [helper.make_node(kind, [f"v{i}"], [f"v{i + 1}"]) for i in range(count)]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [64, 64]) for name in ("v0", f"v{count}")]
    graph = helper.make_graph(nodes, "chain", ends[:1], ends[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


class Counting(Worker):
    """Remembers how many bytes each answer has."""

    def __init__(self) -> None:
        super().__init__(["onnxruntime"])
        self.answered: list[int] = []

    def __call__(self, request: Request) -> Outcome:
        outcome = super().__call__(request)
        self.answered.append(sum(x.nbytes for x in outcome.values))
        return outcome


@pytest.fixture
def worker() -> Iterator[Counting]:
    made = Counting()
    yield made
    made.close()


def in_file(array: np.ndarray) -> bool:
    return isinstance(array.base, mmap.mmap)


def test_values_are_asked_for_in_portions_and_lie_in_files_once_they_are_many(worker: Counting) -> None:
    bounds = Bounds(asked=3 * X.nbytes, in_memory=6 * X.nbytes)
    recorded = record_values(Case.of(chain(), {"v0": X}), worker, WAY, bounds).recorded
    assert worker.answered == [2 * X.nbytes] * 8
    assert [in_file(recorded[f"v{i + 1}"]) for i in range(16)] == [False] * 6 + [True] * 10
    for i in range(17):
        np.testing.assert_array_equal(recorded[f"v{i}"], X if i % 2 == 0 else -X)


def test_few_values_are_asked_for_at_once_and_stay_in_memory(worker: Counting) -> None:
    recorded = record_values(Case.of(chain(), {"v0": X}), worker, WAY).recorded
    assert worker.answered == [16 * X.nbytes]
    assert not any(in_file(array) for array in recorded.values())


def test_a_value_that_is_too_large_is_left_out_and_told(worker: Counting, caplog: pytest.LogCaptureFixture) -> None:
    model = chain(4)
    model.graph.node[1].CopyFrom(helper.make_node("Concat", ["v1"] * 8, ["v2"], axis=0))
    with caplog.at_level(logging.WARNING, logger="sardonyx"):
        found = record_values(Case.of(model, {"v0": X}), worker, WAY, Bounds(asked=4 * X.nbytes, largest=6 * X.nbytes))
    assert set(found.recorded) == {"v0", "v1"}
    assert "Concat" in caplog.text
    assert not found.of_nodes(found.nodes[2:]).runs_alone


def test_a_model_is_reduced_with_values_in_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "Bounds", lambda: Bounds(asked=2 * X.nbytes, in_memory=0))
    model = chain(24)
    model.graph.node[17].op_type = "Abs"

    def fails(proto: onnx.ModelProto, feeds: Mapping[str, Any]) -> bool:
        """Where the node is, and has the numbers that it is given in the whole model."""
        return "Abs" in [node.op_type for node in proto.graph.node] and any(x.min() == -X.max() for x in feeds.values())

    model.graph.node.insert(0, helper.make_node("Neg", ["x"], ["v0"]))
    model.graph.input[0].name = "x"
    found = reduce(model, -X, fails=fails)
    assert [node.op_type for node in found.model.graph.node] == ["Abs"]
    np.testing.assert_array_equal(found.feeds["v17"], -X)
