"""`sardonyx run`: models called with inputs of files, of factories, or made up."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from sardonyx.cli._source import find_source

from .calling import BERT, RESNET, assert_snapshot, run, told


def test_a_module_gives_torchs_numbers() -> None:
    assert run("run", BERT, "-o", "out.npz").exit_code == 0
    found = find_source(BERT)
    args, kwargs = found.example() or ((), {})
    want = found.module().double()(*args, **kwargs).last_hidden_state
    np.testing.assert_allclose(np.load("out.npz")["last_hidden_state"], want.numpy(), atol=1e-5)


def test_a_file_runs_with_the_inputs_of_a_file(resnet: Path) -> None:
    image = torch.randn(1, 3, 64, 64)
    np.savez("in.npz", pixel_values=image.numpy())
    found = told("run", resnet, "--inputs", "in.npz", "-o", "out.npz", "--repeat", "2")
    assert len(found["seconds"]) == 2
    want = find_source(RESNET).module()(image)
    np.testing.assert_allclose(np.load("out.npz")["output"], want.numpy(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("command", ["run", "compile"])
def test_kernels_are_compiled_once_and_run(command: str) -> None:
    words = ["-o", "out.npz"] if command == "run" else []
    done = run(command, BERT, "--option", "native=true", *words)
    assert done.exit_code == 0, done.output
    if words:
        assert run("run", BERT, "-o", "plain.npz").exit_code == 0
        names = ("last_hidden_state", "pooler_output")
        for name in names:
            np.testing.assert_allclose(np.load("out.npz")[name], np.load("plain.npz")[name], atol=1e-5)


@pytest.mark.parametrize("words", [("run",), ("profile", "--calls", "1"), ("report", "-o", "page.html")])
def test_an_option_of_the_session_is_not_passed_over(bert: Path, words: tuple[str, ...]) -> None:
    done = run(words[0], bert, *words[1:], "--option", 'session_options={"nonsense": 1}')
    assert (done.exit_code, "has no attribute 'nonsense'" in done.stderr) == (3, True), done.output
    assert not Path("page.html").exists()


def test_what_is_told_of_a_run(bert: Path) -> None:
    assert_snapshot("run", told("run", bert, "--size", "batch=3"))


def test_a_run_is_told_to_people_too(bert: Path) -> None:
    lines = run("run", bert, "--repeat", "3").stdout.splitlines()
    assert lines[1].startswith("input_ids       int64[1, 16] cpu, ")
    assert lines[-1].startswith("onnxruntime: ")


def test_weights_in_a_file_of_their_own_are_found(
    resnet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "apart").mkdir()
    held = onnx.load(str(resnet))
    onnx.save(held, str(tmp_path / "apart" / "model.onnx"), save_as_external_data=True, location="model.data")
    first, second = (
        told("run", path, "-o", f"{path.stem}.npz") for path in (resnet, tmp_path / "apart" / "model.onnx")
    )
    assert first["outputs"] == second["outputs"]
    assert (np.load("resnet50.npz")["output"] == np.load("model.npz")["output"]).all()
    (tmp_path / "apart" / "model.data").unlink()
    done = run("run", tmp_path / "apart" / "model.onnx")
    assert done.exit_code == 3
    assert "model.data, which does not exist" in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--size", "batches=2"], 3, "did you mean 'batch'?"),
        (["--size", "batch"], 2, "is not of the form NAME=N"),
        (["--size", "batch=2", "--inputs", __file__], 3, "leave out --size, or --inputs"),
        (["--size", "batch=many"], 2, "which is not a size"),
        (["--size", "batch=²"], 2, "which is not a size"),
        (["--seed", "-1"], 2, "is not in the range"),
        (["--inputs", "nowhere.npz"], 2, "does not exist"),
        (["--inputs", __file__], 3, "use .npz"),
        (["--engine", "onnxrunti"], 3, "did you mean 'onnxruntime'?"),
        (["-o", "out.txt"], 3, "use .npz or .safetensors"),
    ],
)
def test_a_wish_that_cannot_be_is_told_with_the_next_step(bert: Path, words: list[str], code: int, said: str) -> None:
    done = run("run", bert, *words)
    assert (done.exit_code, said in done.stderr) == (code, True), done.output


def test_an_engine_that_is_not_there_is_a_missing_package(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    done = run("run", bert, "--engine", "onnx-mlir")
    assert done.exit_code == 4, done.output
    assert "next: " in done.stderr
