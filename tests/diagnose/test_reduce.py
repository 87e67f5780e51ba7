"""`reduce` cuts a failing model down to the few nodes that fail, and a crash ends no one but the candidate."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import sardonyx
from sardonyx import SardonyxError
from sardonyx.diagnose import Way, reduce
from sardonyx.diagnose.reduce.case import Case
from sardonyx.diagnose.reduce.reducing import alike
from sardonyx.diagnose.reduce.worker import Request, Worker
from sardonyx.toolchain import compiler

N = helper.make_node
GELU = "onnxruntime:optimize=none,config.optimization.enable_gelu_approximation=1"
X = np.random.default_rng(0).standard_normal((4, 8)).astype("f") * 2


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


def operators(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def test_a_wrong_result_of_fused_nodes_is_cut_to_these() -> None:
    found = reduce(approximated(1000), X, way=GELU, tolerance=1e-5)
    assert found.kind == "wrong"
    assert found.complete
    assert found.before == 1005
    assert operators(found.model) == ["Div", "Erf", "Add", "Mul", "Mul"]


def test_an_exception_is_cut_to_the_node_that_raises(tmp_path: Path) -> None:
    found = reduce(out_of_bounds(1000), X)
    assert found.kind == "exception"
    assert operators(found.model) == ["Gather"]
    assert "out of data bounds" in found.text
    assert found.feeds == {}
    folder = found.save(tmp_path / "smaller")
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "inputs.npz", "model.onnx", "reproduce.py"]
    done = subprocess.run([sys.executable, folder / "reproduce.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "out of data bounds" in done.stderr


@pytest.fixture(scope="module")
def aborting() -> Any:
    """An operator whose kernel ends the process."""
    try:
        compiler.find()
    except sardonyx.MissingDependency as error:
        pytest.skip(str(error))
    return sardonyx.custom_op(
        "reduced::Abort(Tensor x) -> Tensor",
        cpp="template <class T> void Abort(In<T> x, Out<T> y, Parallel) { std::abort(); }",
        dtypes=["float32"],
    )


def test_a_crash_is_cut_to_the_node_that_crashes(aborting: Any, tmp_path: Path) -> None:
    model = chain(1000, [N("Abort", ["in"], ["out"], domain="reduced")], domain="reduced")
    way = Way.of({"optimize": "none", "session_options": {"custom_ops": [str(aborting.library)]}})
    found = reduce(model, X, way=way)
    assert (found.kind, found.text) == ("crash", "SIGABRT")
    assert operators(found.model) == ["Abort"]
    folder = found.save(tmp_path)
    done = subprocess.run([sys.executable, folder / "reproduce.py"], capture_output=True, check=False)
    assert done.returncode == -6


def test_sizes_numbers_and_attributes_become_as_plain_as_they_can(tmp_path: Path) -> None:
    found = reduce(approximated(20), X, way=GELU, tolerance=1e-5)
    (array,) = found.feeds.values()
    assert array.size < X.size
    done = subprocess.run([sys.executable, found.save(tmp_path) / "reproduce.py"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "results differ by" in done.stdout
    assert "import sardonyx" not in (tmp_path / "reproduce.py").read_text()


def test_a_predicate_says_what_fails() -> None:
    found = reduce(approximated(30), X, fails=lambda proto, feeds: {"Erf", "Add"} <= set(operators(proto)))
    assert operators(found.model) == ["Erf", "Add"]
    assert found.kind == "predicate"


def test_a_command_says_what_fails(tmp_path: Path) -> None:
    check = tmp_path / "check.py"
    check.write_text("import sys, pathlib; sys.exit(b'Erf' in pathlib.Path(sys.argv[1]).read_bytes())")
    found = reduce(approximated(10), X, command=f"{sys.executable} {check} {{model}}")
    assert operators(found.model) == ["Erf"]


def test_a_model_that_does_not_fail_is_an_error() -> None:
    with pytest.raises(SardonyxError, match="does not crash, raise or differ"):
        reduce(approximated(10), X)


def test_the_best_so_far_is_kept_when_time_is_over() -> None:
    found = reduce(approximated(30), X, fails=lambda proto, feeds: True, minutes=0.0)
    assert not found.complete
    assert found.nodes == 35


def test_the_best_so_far_is_kept_at_an_interrupt() -> None:
    asked = []

    def fails(proto: onnx.ModelProto, feeds: Any) -> bool:
        asked.append(len(proto.graph.node))
        if len(asked) == 4:
            raise KeyboardInterrupt
        return True

    found = reduce(approximated(30), X, fails=fails)
    assert not found.complete
    assert found.nodes == asked[2] < 35


def test_a_candidate_that_takes_too_long_is_ended() -> None:
    options = Way.of("onnxruntime:optimize=none").options
    assert options is not None
    worker = Worker(["onnxruntime"])
    try:
        case = Case.of(approximated(300), {"x": X})
        request = Request(case.model().SerializeToString(), case.feeds(), options, limit=1e-4)
        assert worker(request).kind == "timeout"
        assert worker(Request(request.model, request.feeds, options)).kind == "ran"
    finally:
        worker.close()


def test_a_process_that_died_is_replaced() -> None:
    options = Way.of("onnxruntime:optimize=none").options
    assert options is not None
    worker = Worker(["onnxruntime"])
    case = Case.of(approximated(5), {"x": X})
    request = Request(case.model().SerializeToString(), case.feeds(), options)
    try:
        assert worker(request).kind == "ran"
        assert worker._process is not None
        worker._process.kill()
        assert worker(request).kind == "crash"
        assert worker(request).kind == "ran"
    finally:
        worker.close()


def test_messages_of_the_same_failure_are_alike_whatever_names_and_numbers_they_have() -> None:
    assert alike("Name:'a' idx=7 of [-4,3]") == alike("Name:'b' idx=12 of [-1,0]")
    assert alike("out of bounds") != alike("no such operator")
