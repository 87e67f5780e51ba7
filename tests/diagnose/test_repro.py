"""A failure as a folder with a program that fails in the same way."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sardonyx
from sardonyx import CaptureError, EngineError, OptionError, UnsupportedOperator, VerificationError
from sardonyx.capture import aot
from sardonyx.diagnose.repro import Tensor, _Unpickler, reproduce, traced, values_in
from sardonyx.telemetry import repro
from sardonyx.telemetry.repro_code import class_source

NONSENSE = {"session_options": {"graph_optimization_level": "nonsense"}}
"""What onnxruntime itself refuses: a failure of the engine, wherever it is reached."""


def failing(
    model: Callable[..., Any], *args: Any, folder: Path, dynamic: bool | None = None, **options: Any
) -> Exception:
    run = torch.compile(model, backend="sardonyx", dynamic=dynamic, options={"repro": str(folder), **options})
    with pytest.raises(Exception) as caught:  # noqa: PT011  # dynamo wraps what happens while it compiles
        run(*args)
    return caught.value


def again(folder: Path) -> Any:
    """Run a written program in this process: its error, or what it gives."""
    namespace: dict[str, Any] = {"__file__": str(folder / "repro.py"), "__name__": "__main__"}
    exec(compile((folder / "repro.py").read_text(), "repro.py", "exec"), namespace)
    return namespace


def only(folder: Path) -> Path:
    (made,) = folder.iterdir()
    return made


def test_a_translation_that_fails_is_written_and_fails_alone(tmp_path: Path) -> None:
    error = failing(lambda x: torch.linalg.eigvalsh(x @ x.T), torch.randn(3, 3), folder=tmp_path, fallback="error")
    made = only(tmp_path)
    assert f"repro: python {made / 'repro.py'}" in str(error)
    done = subprocess.run([sys.executable, str(made / "repro.py")], capture_output=True, text=True)
    assert done.returncode == 1
    assert "UnsupportedOperator: ONNX cannot express aten._linalg_eigh.default" in done.stderr
    assert {path.name for path in made.iterdir()} == {"repro.py", "error.txt", "versions.json"}
    assert "UnsupportedOperator" in (made / "error.txt").read_text()


def test_a_call_that_fails_is_written_with_its_values(tmp_path: Path) -> None:
    error = failing(lambda x, i: x[i].sin(), torch.randn(4, 4), torch.tensor([7]), folder=tmp_path)
    assert isinstance(error, EngineError)
    assert "repro:" in str(error)
    with pytest.raises(EngineError, match="idx=7"):
        again(only(tmp_path))


def test_an_engine_that_refuses_a_model_is_written(tmp_path: Path) -> None:
    error = failing(torch.sin, torch.ones(3), folder=tmp_path, **NONSENSE)
    with pytest.raises(type(error)):
        again(only(tmp_path))


def test_a_difference_is_written_and_options_that_are_no_text_are_named(tmp_path: Path) -> None:
    def spoil(proto: Any) -> None:
        proto.graph.node[0].op_type = "Cos"

    error = failing(torch.sin, torch.ones(3), folder=tmp_path, verify=True, transforms=[spoil])
    assert isinstance(error, VerificationError)
    text = (only(tmp_path) / "repro.py").read_text()
    assert "the option 'transforms'" in text
    assert "'verify': True" in text


def test_weights_constants_and_sizes_that_change_are_written(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).reshape(x.shape[0] * 2) * torch.tensor([2.0])

    failing(Model().eval(), torch.randn(5, 4), folder=tmp_path, dynamic=True, **NONSENSE)
    made = only(tmp_path)
    assert "dynamic=(0,)" in (made / "repro.py").read_text()
    with pytest.raises(Exception, match="nonsense"):
        again(made)


def test_branches_are_written(tmp_path: Path) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))

    failing(model, torch.ones(3), folder=tmp_path, **NONSENSE)
    with pytest.raises(Exception, match="nonsense"):
        again(only(tmp_path))


def test_training_is_written(tmp_path: Path) -> None:
    with torch.enable_grad():
        failing(nn.Linear(4, 2), torch.randn(3, 4), folder=tmp_path, **NONSENSE)
    assert only(tmp_path).name == "000_forward"
    with pytest.raises(Exception, match="nonsense"):
        again(only(tmp_path))


def test_an_export_that_fails_is_written(tmp_path: Path) -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.eigvalsh(x @ x.T)

    with pytest.raises(UnsupportedOperator, match="repro:"):
        sardonyx.export(Model(), (torch.randn(3, 3),), repro=str(tmp_path))
    with pytest.raises(UnsupportedOperator, match="_linalg_eigh"):
        again(only(tmp_path))


def test_a_capture_that_fails_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("no such capture")

    monkeypatch.setattr(aot, "lower", refuse)
    failing(lambda x: torch.nn.functional.gelu(x) @ x, torch.randn(3, 3), folder=tmp_path)
    assert only(tmp_path).name == "000_captured"
    assert "no such capture" in (only(tmp_path) / "error.txt").read_text()
    with pytest.raises(Exception, match="no such capture"):
        again(only(tmp_path))
    monkeypatch.undo()
    again(only(tmp_path))  # the graph itself is sound


def test_failures_are_numbered(tmp_path: Path) -> None:
    for _ in range(2):
        torch._dynamo.reset()
        failing(torch.sin, torch.ones(3), folder=tmp_path, **NONSENSE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000_inference", "001_inference"]


def test_a_repro_that_cannot_be_written_hides_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, logger="sardonyx"):
        error = failing(lambda x, i: x[i].sin(), torch.randn(4), torch.tensor([7]), folder=tmp_path / "file")
    assert isinstance(error, EngineError)
    assert "repro:" not in str(error)


def test_nothing_is_written_where_nothing_fails(tmp_path: Path) -> None:
    torch.compile(torch.sin, backend="sardonyx", options={"repro": str(tmp_path)})(torch.ones(3))
    assert not list(tmp_path.iterdir())


def test_a_graph_that_does_not_fail_gives_its_results(tmp_path: Path) -> None:
    class Graph(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return (torch.ops.aten.sin.default(x),)

    known = [Tensor((2, 3), (1, 2), torch.float32)]
    (result,) = reproduce(Graph(), known, values_in(tmp_path), {}, door="graph", kind="inference", weights=[])
    torch.testing.assert_close(result, known[0].make(0).sin())


def test_made_up_values_are_the_same_each_time_and_laid_out_alike() -> None:
    known = Tensor((2, 3), (1, 2), torch.float16)
    assert torch.equal(known.make(1), known.make(1))
    assert known.make(1).stride() == (1, 2)
    assert Tensor((2,), (1,), torch.int64).make(0).tolist() == [0, 0]
    assert Tensor((2,), (1,), torch.bool).make(0).tolist() == [True, True]


def test_a_graph_written_and_read_is_the_same_node_for_node() -> None:
    graph = torch.fx.symbolic_trace(lambda x: (torch.ops.aten.add.Tensor(x, 1), torch.ops.aten.sin.default(x)))
    imports, source = class_source(graph)
    namespace: dict[str, Any] = {}
    exec(f"{imports}\n{source}", namespace)
    read = traced(namespace["Graph"](), [Tensor((2,), (1,), torch.float32)], [torch.ones(2)])
    assert [str(node.target) for node in read.graph.nodes] == [str(node.target) for node in graph.graph.nodes]
    assert all("val" in node.meta for node in read.graph.nodes)


# What torch.export cannot capture

SCALE = 2.0
LIMITS = {"low": -SCALE, "high": SCALE}


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE


class Layer(nn.Module):
    """What a module of a user's program is made of: another one, a function, constants."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        self.tied = self.linear.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(scaled(self.linear(x))).clamp(LIMITS["low"], LIMITS["high"])


class Decides(nn.Module):
    """Control flow that depends on numbers, which torch.export cannot trace."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.layer = Layer(size)

    def forward(self, x: torch.Tensor, *, flip: bool = False) -> torch.Tensor:
        return self.layer(-x if flip else x) if x.sum() > 0 else x


def test_a_module_that_cannot_be_captured_is_written_and_fails_alone(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="repro: python"):
        sardonyx.export(Decides().eval(), (torch.ones(3, 4),), {"flip": True}, repro=str(tmp_path))
    made = only(tmp_path)
    assert made.name == "000_uncaptured"
    assert {x.name for x in made.iterdir()} == {"repro.py", "call.pkl", "values.pt", "error.txt", "versions.json"}
    text = (made / "repro.py").read_text()
    assert "SCALE = 2.0" in text
    assert "NONSENSE" not in text  # no more of the file than is needed
    done = subprocess.run([sys.executable, "repro.py"], cwd=made, capture_output=True, text=True)
    assert done.returncode == 1
    assert "sardonyx.errors.CaptureError: torch.export cannot capture the model" in done.stderr
    assert "data-dependent" in (made / "error.txt").read_text()


def test_a_module_is_rebuilt_with_its_weights_and_called_alike(tmp_path: Path) -> None:
    model, x = Decides().eval(), torch.randn(3, 4)
    with pytest.raises(CaptureError):
        sardonyx.export(model, (x,), dynamic_shapes=({0: "rows"}, None), repro=str(tmp_path))
    made = only(tmp_path)
    with pytest.raises(CaptureError, match=r"torch\.export cannot capture"):
        again(made)
    held, values = (made / "call.pkl").read_bytes(), values_in(made)
    call = _Unpickler(held, globals(), values).load()
    torch.testing.assert_close(call.module(call.args[0]), model(x), rtol=0, atol=0)
    assert call.module.layer.tied is call.module.layer.linear.weight
    assert call.dynamic_shapes == ({0: "rows"}, None)


def test_weights_that_are_too_large_are_made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repro, "MAX_VALUE_BYTES", 100)
    with pytest.raises(CaptureError):
        sardonyx.export(Decides(8).eval(), (torch.ones(3, 8),), repro=str(tmp_path))
    assert [tuple(x.shape) for x in values_in(only(tmp_path)).values()] == [(3, 8)]  # the input
    with pytest.raises(CaptureError, match=r"torch\.export cannot capture"):
        again(only(tmp_path))


def test_a_function_that_cannot_be_captured_is_written(tmp_path: Path) -> None:
    def decides(x: torch.Tensor) -> torch.Tensor:
        return scaled(x) if x.sum() > 0 else x

    with pytest.raises(CaptureError, match="repro: python"):
        sardonyx.export(decides, (torch.ones(3),), repro=str(tmp_path))
    with pytest.raises(CaptureError, match=r"torch\.export cannot capture"):
        again(only(tmp_path))


def test_what_cannot_be_rebuilt_is_described_with_the_reason(tmp_path: Path) -> None:
    factor = torch.ones(3)

    class Closure(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * factor if x.sum() > 0 else x

    with pytest.raises(CaptureError, match=r"repro: .*README\.md"):
        sardonyx.export(Closure().eval(), (torch.ones(2, 3),), repro=str(tmp_path))
    text = (only(tmp_path) / "README.md").read_text()
    assert "Closure reads factor of the enclosing function" in text
    assert "torch.float32 (2, 3) on cpu" in text
    assert "return x * factor if x.sum() > 0 else x" in text
    assert not (only(tmp_path) / "repro.py").exists()


def test_a_lambda_and_what_pickle_refuses_are_described(tmp_path: Path) -> None:
    locked = Decides()
    locked.lock = threading.Lock()  # type: ignore[assignment]  # no module, which is the point
    for model in (lambda x: x if x.sum() > 0 else -x, locked):
        with pytest.raises(CaptureError, match=r"README\.md"):
            sardonyx.export(model, (torch.ones(2, 4),), repro=str(tmp_path))
    reasons = [path.read_text().splitlines()[2] for path in sorted(tmp_path.glob("*/README.md"))]
    assert "has no source of its own" in reasons[0]
    assert "cannot pickle '_thread.lock' object" in reasons[1]


def test_options_that_do_not_fit_are_no_failure_to_capture(tmp_path: Path) -> None:
    with pytest.raises(OptionError):
        sardonyx.export(Decides(), (torch.ones(3, 4),), dynamic_shapes={}, examples=[{}], repro=str(tmp_path))
    assert not list(tmp_path.iterdir())
