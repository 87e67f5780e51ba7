"""`sardonyx native`: a model compiled and shown from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from onnx import TensorProto, helper

from sardonyx import native
from sardonyx.cli._program import program
from tests.native.running import model_of

N = helper.make_node


def run(*words: str) -> Result:
    return CliRunner().invoke(program, ["native", *words])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    nodes = [
        N("Exp", ["x"], ["a"], name="exp"),
        N("Neg", ["a"], ["b"], name="neg"),
        N("CumSum", ["b", "last"], ["c"], name="sums"),
        N("Abs", ["c"], ["y"], name="abs"),
    ]
    made = model_of(nodes, {"x": (TensorProto.FLOAT, ["n", 4])}, ["y"], {"last": np.array(1)})
    onnx.save(made, str(tmp_path / "model.onnx"))
    return tmp_path / "model.onnx"


def test_compile_writes_a_folder_and_says_what_is_in_it(model: Path) -> None:
    folder = model.parent / "out"
    done = run("compile", str(model), "-o", str(folder))
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[:3] == [
        "4 nodes → 3: 1 kernel in the place of 2 nodes",
        "kernels",
        "   1 × Kernel0: Exp Neg",
    ]
    x = np.ones((2, 4), "f")
    np.testing.assert_allclose(native.load(folder).session().run(None, {"x": x})[0], np.exp(x).cumsum(1), rtol=1e-5)


@pytest.mark.parametrize(
    ("words", "nodes"),
    [
        (["--select", "abs, neg"], [["neg"], ["abs"]]),
        (["--select", "all"], [["exp", "neg"], ["abs"]]),
        (["--inputs", "c", "--outputs", "y"], [["abs"]]),
        (["--optimize"], [["exp", "neg"]]),
    ],
)
def test_compile_selects_by_what_it_is_told(model: Path, words: list[str], nodes: list[list[str]]) -> None:
    done = run("compile", str(model), "-o", str(model.parent / "out"), "--json", *words)
    assert done.exit_code == 0, done.output
    assert [taken["nodes"] for taken in json.loads(done.stdout)["kernels"]] == nodes


def test_compile_measures_with_inputs_from_a_file(model: Path) -> None:
    np.savez(model.parent / "in.npz", x=np.ones((3, 4), "f"))
    done = run("compile", str(model), "-o", str(model.parent / "out"), "--feed", str(model.parent / "in.npz"), "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    (taken,) = [*told["kernels"], *told["put_back"]]
    assert taken["seconds_before"] > 0
    assert taken["seconds_after"] > 0


@pytest.mark.parametrize(
    ("content", "said"), [({"x": np.ones((3, 4), "d")}, "x is float64"), (None, "in.npz cannot be read")]
)
def test_a_file_of_other_inputs_is_refused(model: Path, content: dict[str, Any] | None, said: str) -> None:
    path = model.parent / "in.npz"
    path.touch()
    if content is not None:
        np.savez(path, **content)
    done = run("compile", str(model), "-o", str(model.parent / "out"), "--feed", str(path))
    assert (done.exit_code, said in done.stderr, (model.parent / "out").exists()) == (3, True, False)


def test_a_wish_that_cannot_be_is_an_error_with_the_next_step(model: Path) -> None:
    done = run("compile", str(model), "-o", str(model.parent / "out"), "--select", "sums")
    assert done.exit_code == 3
    assert "CumSum 'sums' cannot be in a kernel: CumSum has no lowering" in done.output
    assert "next: " in done.output
    assert not (model.parent / "out").exists()


def test_what_is_no_onnx_file_is_for_another_command(model: Path) -> None:
    done = run("compile", "torch.nn:ReLU", "-o", "out")
    assert (done.exit_code, "next: use sardonyx compile --native" in done.output) == (3, True)


def test_show_checks_a_folder(model: Path) -> None:
    folder = model.parent / "out"
    run("compile", str(model), "-o", str(folder))
    assert "1 × Kernel0: Exp Neg" in run("show", str(folder)).stdout
    (folder / "kernels.so").unlink()
    done = run("show", str(folder))
    assert done.exit_code == 3
    assert "kernels.so is missing" in done.output
