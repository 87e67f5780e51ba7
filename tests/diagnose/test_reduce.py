"""`reduce` cuts a failing model down to the few nodes that fail, and a crash ends no one but the candidate."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

import sardonyx
from sardonyx import OptionError, SardonyxError, diagnose
from sardonyx.diagnose import RunConfig
from sardonyx.diagnose.reduction import child, reducing
from sardonyx.diagnose.reduction.case import Case
from sardonyx.diagnose.reduction.failing import normalize_message
from sardonyx.diagnose.reduction.worker import Outcome, Request, Worker
from sardonyx.options import Options
from sardonyx.toolchain import compiler
from sardonyx.translate import table
from tests.clock import Clock

from .models import GELU, N, X, approximated, chain, out_of_bounds

reduce = partial(diagnose.reduce, minutes=60)  # searches end by themselves, however slow the machine is


class Lent:
    """A worker that serves one search after the other: to load torch for each would take longer than the searches."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def __call__(self, request: Request) -> Outcome:
        return self._worker(request)

    def close(self) -> None:
        """The next search has need of it."""


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    made = Worker(["onnxruntime", "reference"])
    yield made
    made.close()


@pytest.fixture(autouse=True)
def lent(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reducing, "Worker", lambda engines: Lent(worker))


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
    way = RunConfig.of({"optimize": "none", "session_options": {"custom_ops": [str(aborting.library)]}})
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


def test_a_command_that_is_not_there_is_no_failure_of_the_model() -> None:
    with pytest.raises(SardonyxError, match="the shell cannot run 'no-such-program "):
        reduce(approximated(5), X, command="no-such-program {model}")


def test_an_engine_that_is_not_there_is_no_failure_of_the_model() -> None:
    with pytest.raises(OptionError, match="unknown engine 'nobody'"):
        reduce(approximated(5), X, way="nobody")


def test_a_model_that_does_not_fail_is_an_error() -> None:
    with pytest.raises(SardonyxError, match="does not crash, raise or give wrong results"):
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


def endless() -> onnx.ModelProto:
    """A loop whose condition always holds."""
    body = helper.make_graph(
        [N("Identity", ["going"], ["goes_on"]), N("Neg", ["value"], ["next"])],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("going", TensorProto.BOOL, []),
            helper.make_tensor_value_info("value", TensorProto.FLOAT, [4, 8]),
        ],
        [
            helper.make_tensor_value_info("goes_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("next", TensorProto.FLOAT, [4, 8]),
        ],
    )
    return chain(1, [N("Loop", ["", "true", "in"], ["out"], body=body)], {"true": np.array(True)})


def test_a_candidate_that_takes_too_long_is_ended(worker: Worker) -> None:
    options = RunConfig.of("onnxruntime:optimize=none").options
    assert options is not None
    slow, quick = endless().SerializeToString(), approximated(5).SerializeToString()
    assert worker(Request(slow, {"x": X}, options, limit=0.1)).kind == "timeout"
    assert worker(Request(quick, {"x": X}, options)).kind == "ran"


def test_a_process_that_died_is_replaced() -> None:
    options = RunConfig.of("onnxruntime:optimize=none").options
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
    assert normalize_message("Name:'a' idx=7 of [-4,3]") == normalize_message("Name:'b' idx=12 of [-1,0]")
    assert normalize_message("out of bounds") != normalize_message("no such operator")


class InProcess(Worker):
    """Runs candidates here, where a test can slow them down."""

    def __call__(self, request: Request) -> Outcome:
        return child._evaluate(request)


def test_what_is_slow_is_cut_to_the_node_that_is(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """By a made-up clock, a model with one kernel in it takes a hundred times as long."""
    real = child._call

    def slowed(model: bytes, options: Options, feeds: Any) -> Any:
        found = real(model, options, feeds)()
        seconds = 1.0 if options.engine == "onnxruntime" and b"Erf" in model else 0.01
        return lambda: clock.sleep(seconds) or found

    monkeypatch.setattr(child, "_call", slowed)
    monkeypatch.setattr(reducing, "Worker", InProcess)
    found = reduce(approximated(12), X, fails="slow", slower=30.0)
    assert found.kind == "slow"
    assert operators(found.model) == ["Erf"]
    assert "times as long" in found.text


# Against torch


class Layers(nn.Module):
    """Products, norms, results that are taken apart, and a branch, around a sine."""

    def __init__(self, count: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh()) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == len(self.layers) // 2:
                left, right = x.split(4, -1)
                x = torch.cat([right.sin(), left], -1)
        return torch.cond(x.sum() > 0, lambda x: x.softmax(-1), lambda x: x * 2, (x,))


@pytest.fixture
def wrong_sine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A translation that every engine agrees on, and torch does not."""
    right = table.find
    wrong = {torch.ops.aten.sin.default: lambda g, x: g.Cos(x)}
    monkeypatch.setattr(table, "find", lambda target: wrong.get(target) or right(target))


def same_module() -> nn.Module:
    torch.manual_seed(0)
    return Layers().eval()


@pytest.mark.usefixtures("wrong_sine")
@pytest.mark.parametrize("against", ["torch", "torch:float64"])
def test_a_wrong_translation_is_cut_to_its_call_in_torchs_graph(against: str, tmp_path: Path) -> None:
    found = reduce(same_module(), torch.randn(3, 8), against=against)
    assert (found.kind, found.complete) == ("wrong", True)
    assert found.before == 24
    assert found.as_dict()["operators"] == ["aten.sin.default"]
    assert operators(found.model) == ["Cos"]
    folder = found.save(tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "model.onnx", "reproduce.py", "values.pt"]
    assert "torch.ops.aten.sin.default(" in (folder / "reproduce.py").read_text()
    assert f"from what {against} computes" in (folder / "reproduce.py").read_text()
    assert "zip(errors, [0.0001], strict=True)" in (folder / "reproduce.py").read_text()


def test_what_has_no_translation_is_cut_to_its_call(tmp_path: Path) -> None:
    found = reduce(lambda x: torch.linalg.eigvalsh(x.sin() @ x.T).exp(), torch.randn(4, 4), against="torch")
    assert found.kind == "exception"
    assert found.as_dict()["operators"] == ["aten._linalg_eigh.default"]
    done = subprocess.run([sys.executable, found.save(tmp_path) / "reproduce.py"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "ONNX cannot express aten._linalg_eigh.default" in done.stderr


def test_a_fused_result_of_the_engine_is_cut_in_torchs_graph_too(tmp_path: Path) -> None:
    def formula(x: torch.Tensor) -> torch.Tensor:
        y = -x
        return (y * ((y / 2**0.5).erf() + 1) * 0.5).abs()

    found = reduce(formula, torch.from_numpy(X), way=f"{GELU},opset=18", against="torch", tolerance=1e-5)
    called = [name.split(".")[1] for name in found.as_dict()["operators"]]
    assert called == ["div", "erf", "add", "mul", "mul"]
    done = subprocess.run([sys.executable, found.save(tmp_path) / "reproduce.py"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "results differ by" in done.stdout


def test_a_module_that_is_exported_rightly_does_not_fail_against_torch() -> None:
    with pytest.raises(SardonyxError, match="does not crash, raise or give wrong results"):
        reduce(same_module(), torch.randn(3, 8), against="torch")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"way": "torch"}, "torch is not an engine"),
        ({"against": "torch"}, "torch needs the module"),
    ],
)
def test_torch_has_no_part_in_an_onnx_model(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        reduce(approximated(5), X, **asked)


def test_torch_does_not_say_how_long_a_call_may_take() -> None:
    with pytest.raises(OptionError, match="reference for fails"):
        reduce(same_module(), torch.randn(3, 8), against="torch", fails="slow")


def test_a_failure_of_what_counts_as_right_is_not_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """onnx's evaluator has no such operator, and onnxruntime has."""
    nodes = [helper.make_node("QuickGelu", ["x"], ["y"], domain="com.microsoft")]
    value = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [3]) for name in "xy"]
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph(nodes, "g", value[:1], value[1:])
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    with pytest.raises(SardonyxError, match="the reference, fails with the model itself") as found:
        reduce(model, {"x": np.ones(3, np.float32)})
    assert "choose another" in str(found.value)
    with pytest.raises(SardonyxError, match="does not give wrong results: it ran"):
        reduce(model, {"x": np.ones(3, np.float32)}, fails="wrong", against="onnxruntime:optimize=none")
