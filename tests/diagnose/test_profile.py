"""Where the time of a call goes: by module, line and operator, for every kind of model."""

from __future__ import annotations

import glob
import json
import tempfile
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import nn

import sardonyx
from sardonyx import OptionError
from sardonyx.diagnose import Profile, profile
from sardonyx.diagnose.profiling.events import read
from sardonyx.diagnose.profiling.result import FUSED
from sardonyx.telemetry.graph_snapshot import GraphSnapshot, NodeSnapshot


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


MODEL, X = nn.Sequential(Block(), Block()).eval(), torch.randn(4, 16)


def agrees_with_itself(found: Profile) -> None:
    """Everything that is told adds up."""
    kernels = found.overhead.kernels
    assert kernels > 0
    for parts in (found.operators, found.lines, found.nodes):
        assert sum(part.seconds for part in parts) == pytest.approx(kernels)
    assert found.tree.seconds == pytest.approx(kernels)
    parts_of_a_call = kernels + found.overhead.outside
    assert parts_of_a_call == pytest.approx(found.overhead.profiled, rel=1e-2)


def modules_of(found: Profile) -> set[str]:
    def paths(scope: Any) -> set[str]:
        return {scope.path} | {path for child in scope.children.values() for path in paths(child)}

    return paths(found.tree)


def test_a_module_is_told_by_its_modules_operators_and_lines() -> None:
    found = profile(MODEL, X, calls=3)
    agrees_with_itself(found)
    assert {"0", "1", "0.norm", "0.up", "1.down"} <= modules_of(found)
    assert found.tree.children["0"].kind == "Block"
    assert {row.name for row in found.operators} >= {"Gemm"}
    assert any("self.down(nn.functional.gelu" in row.name for row in found.lines)
    assert found.calls == 3


def test_what_is_compiled_already_is_profiled_with_its_options() -> None:
    level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options = {"optimize": "none", "session_options": {"graph_optimization_level": level}}
    found = profile(torch.compile(MODEL, backend="sardonyx", options=options), X, calls=1)
    plain = profile(torch.compile(MODEL, backend="sardonyx"), X, calls=1)
    assert sum(row.count for row in found.operators) > sum(row.count for row in plain.operators)


def test_a_compiled_function_is_profiled() -> None:
    found = profile(torch.compile(lambda x: x.sin() + 1, backend="sardonyx"), X, calls=1)
    assert {row.name for row in found.operators} == {"Sin", "Add"}


def test_a_model_of_another_backend_is_refused() -> None:
    with pytest.raises(OptionError, match="'eager'"):
        profile(torch.compile(MODEL, backend="eager"), X)


def test_the_wrapper_is_profiled_and_keeps_its_sessions() -> None:
    model = sardonyx.compile(MODEL, cache_dir="")
    agrees_with_itself(profile(model, X, calls=2))
    assert model.cache_info().built == 0


def test_a_program_a_file_and_a_native_model_are_profiled(tmp_path: Path) -> None:
    program = sardonyx.export(MODEL, (X,), input_names=["x"])
    path = program.save(tmp_path / "model.onnx")
    for model in (program, path, str(path), program.proto(), program.model):
        found = profile(model, X, calls=2)
        agrees_with_itself(found)
        assert {"0", "1.up"} <= modules_of(found)
    agrees_with_itself(profile(path, x=X.numpy(), calls=1))


def test_the_inputs_of_a_file_are_checked(tmp_path: Path) -> None:
    path = sardonyx.export(MODEL, (X,), input_names=["x"]).save(tmp_path / "model.onnx")
    with pytest.raises(OptionError, match="lacks the inputs"):
        profile(path)
    with pytest.raises(OptionError, match=r"has no inputs \['y'\]"):
        profile(path, X, y=X)


def test_nodes_that_onnxruntime_fuses_are_told_by_their_results() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(16)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.norm(x + y)

    found = profile(Residual().eval(), X[None], X[None], calls=1)
    fused = [node for node in found.nodes if node.operator == "SkipLayerNormalization"]
    assert [node.origin.scope for node in fused if node.origin] == ["norm"]
    assert all(node.is_fused for node in fused)


def events(*kernels: tuple[str, int, int]) -> list[dict[str, Any]]:
    run = {"cat": "Session", "name": "model_run", "tid": 1, "ts": 0, "dur": 1000}
    told = {"op_name": "Op", "thread_scheduling_stats": {"sub_threads": {"7": {"num_run": 2, "core": 1}}}}
    common = {"cat": "Node", "tid": 1}
    return [run] + [
        {**common, "name": f"{name}_kernel_time", "ts": ts, "dur": dur, "args": {**told, "node_index": name}}
        for name, ts, dur in kernels
    ]


def test_what_runs_inside_a_loop_is_not_counted_twice(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(events(("loop", 10, 100), ("inner", 20, 30), ("inner", 60, 30), ("after", 120, 5))))
    snapshot = GraphSnapshot((NodeSnapshot("loop", "Loop", "", (), ("y",), scope="layers"),), {}, {})
    found = {node.name: node for node in read(file, None, snapshot, skip=0, calls=1).nodes}
    assert {name: round(node.seconds * 1e6) for name, node in found.items()} == {"loop": 40, "inner": 60, "after": 5}
    assert found["inner"].origin is found["loop"].origin
    assert (found["inner"].count, found["inner"].threads) == (2, 2)


def test_a_node_that_cannot_be_placed_is_said_to_be_fused(tmp_path: Path) -> None:
    from sardonyx.diagnose.profiling.result import Measurement, profile_of

    file = tmp_path / "profile.json"
    file.write_text(json.dumps(events(("invented", 10, 100))))
    told = profile_of(Measurement([read(file, None, GraphSnapshot((), {}, {}), skip=0, calls=1)], 0, 1e-3, 1e-3, 1e-3))
    assert list(told.tree.children) == [FUSED]
    assert told.lines[0].name == FUSED


def test_the_profile_is_plain_data_and_text() -> None:
    found = profile(MODEL, X, calls=1)
    told = json.loads(json.dumps(found.as_dict()))
    assert told["tree"]["children"][0]["kind"] == "Block"
    assert told["overhead"]["outside"] == pytest.approx(found.overhead.outside)
    assert all(title in str(found) for title in ("by module", "by operator", "by source line", "threads:", "memory:"))


def test_the_trace_is_kept_where_it_is_wanted_and_nothing_else_is(tmp_path: Path) -> None:
    before = set(glob.glob(f"{tempfile.gettempdir()}/sardonyx-profile-*"))
    profile(MODEL, X, calls=1, trace=tmp_path / "trace.json")
    assert {event["name"] for event in json.loads((tmp_path / "trace.json").read_text())} >= {"model_run"}
    assert set(glob.glob(f"{tempfile.gettempdir()}/sardonyx-profile-*")) <= before


def test_an_engine_that_tells_no_times_is_named() -> None:
    found = profile(nn.ReLU(), X, calls=1, options={"engine": "reference"})
    assert "'reference'" in found.remarks[0]
    assert found.overhead.call > 0


def test_the_command_line_profiles_a_module_and_a_file(tmp_path: Path) -> None:
    program = pytest.importorskip("sardonyx.cli._program", reason="the extra 'cli' is not installed").program
    testing = pytest.importorskip("click.testing")
    source = tmp_path / "profiled.py"
    source.write_text("import torch\ndef net():\n    return torch.nn.Linear(4, 2).eval(), (torch.ones(3, 4),)\n")
    file = sardonyx.export(nn.Linear(4, 2).eval(), (torch.ones(3, 4),)).save(tmp_path / "linear.onnx")
    for model in (f"{source}:net", str(file)):
        done = testing.CliRunner().invoke(program, ["profile", model, "--calls", "2", "--json"])
        assert done.exit_code == 0, done.output
        assert [row["name"] for row in json.loads(done.stdout)["operators"]] == ["Gemm"]
    assert "by operator" in testing.CliRunner().invoke(program, ["profile", str(file), "--calls", "1"]).output


def test_it_is_a_function_of_the_package() -> None:
    assert sardonyx.diagnose.profile(nn.Linear(4, 2).eval(), torch.ones(3, 4), calls=1).operators[0].name == "Gemm"
