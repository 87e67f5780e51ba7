"""The options --precision, --max-drop and --calibration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx
import pytest
from click.testing import CliRunner

from sardonyx.cli._parameters import engine_options, precision_options
from sardonyx.options import Options
from sardonyx.run import layer_trials, precision_choice

from .calling import BERT, run, told


@pytest.fixture(autouse=True)
def lower_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure every precision, and the model with it, as faster than float32."""

    def in_turns(calls: Sequence[Callable[[], Any]], **_: Any) -> list[list[float]]:
        return [[1.0], *[[0.5]] * (len(calls) - 1)]

    monkeypatch.setattr(layer_trials, "in_turns", in_turns)
    monkeypatch.setattr(precision_choice, "in_turns", in_turns)
    monkeypatch.setenv("SARDONYX_CACHE_DIR", "")


def operators(path: Path | str) -> set[str]:
    return {node.op_type for node in onnx.load(path).graph.node}


@pytest.fixture(scope="module")
def calibration(files: Path) -> Path:
    path = files / "calibration.npz"
    tokens = np.random.default_rng(0).integers(0, 1000, (2, 16))
    np.savez(path, input_ids=tokens, attention_mask=np.ones_like(tokens))
    return path


@pytest.mark.parametrize(
    ("precision", "operator"), [("bf16", "Cast"), ("int8", "MatMulInteger"), ("int4", "MatMulNBits")]
)
def test_an_export_has_layers_in_lower_precision(precision: str, operator: str, tmp_path: Path) -> None:
    path = tmp_path / "low.onnx"
    found = told("export", BERT, "-o", path, "--precision", precision, "--max-drop", 0.5)
    assert {layer["precision"] for layer in found["precision"]["layers"]} == {precision}
    assert operator in operators(path)
    onnx.checker.check_model(path, full_check=True)


def test_an_export_shows_each_layer_and_runs(tmp_path: Path, calibration: Path) -> None:
    path = tmp_path / "low.onnx"
    words = ("--precision", "int8", "--max-drop", 0.1, "--calibration", calibration)
    done = run("export", BERT, "-o", path, *words)
    assert done.exit_code == 0, done.output
    assert "precision int8: int8 ×" in done.stdout
    assert "encoder.layer.0.attention.self.query: int8, error" in done.stdout
    assert run("run", path).exit_code == 0


def test_a_file_is_optimized_by_given_inputs(bert: Path, calibration: Path, tmp_path: Path) -> None:
    path = tmp_path / "low.onnx"
    words = ("--precision", "int8", "--max-drop", 0.1, "--calibration", calibration, "--calibration", calibration)
    done = run("optimize", bert, "-o", path, *words)
    assert done.exit_code == 0, done.output
    assert "random" not in done.stderr
    assert "MatMulInteger" in operators(path)


def test_a_bound_on_random_inputs_is_warned_of(bert: Path, tmp_path: Path) -> None:
    done = run("optimize", bert, "-o", tmp_path / "low.onnx", "--precision", "int8", "--max-drop", 0.1)
    assert done.exit_code == 0, done.output
    assert "the precision is chosen by random inputs, for which a bound says little" in done.stderr


def test_native_kernels_are_compiled_around_lower_precision(bert: Path, calibration: Path, tmp_path: Path) -> None:
    words = ("--precision", "int8", "--max-drop", 0.1, "--calibration", calibration)
    done = run("native", "compile", bert, "-o", tmp_path / "compiled", *words)
    assert done.exit_code == 0, done.output
    assert "MatMulInteger" in operators(tmp_path / "compiled" / "model.onnx")


def test_a_run_is_in_lower_precision(bert: Path, calibration: Path, tmp_path: Path) -> None:
    words = ("--inputs", calibration, "--precision", "int8", "--max-drop", 0.1)
    exact, low = tmp_path / "exact.npz", tmp_path / "low.npz"
    assert run("run", bert, "--inputs", calibration, "-o", exact).exit_code == 0
    done = run("run", bert, *words, "-o", low)
    assert done.exit_code == 0, done.output
    first, second = (np.load(path)["last_hidden_state"] for path in (exact, low))
    assert 0 < np.linalg.norm(first - second) / np.linalg.norm(first) < 0.1


def test_a_benchmark_accepts_results_within_the_bound(bert: Path, calibration: Path) -> None:
    words = ("--seconds", 0.001, "--rounds", 1, "--precision", "int8", "--max-drop", 0.1, "--against", "onnxruntime")
    done = run("bench", bert, "--inputs", calibration, *words)
    assert done.exit_code == 0, done.output


def test_calibration_inputs_that_do_not_match_are_an_error(bert: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "wrong.npz", tokens=np.ones((2, 16), np.int64))
    done = run("optimize", bert, "--precision", "int8", "--calibration", tmp_path / "wrong.npz")
    assert (done.exit_code, "has 'tokens', which is not an input of the model" in done.stderr) == (3, True)


def test_a_bound_that_is_no_share_is_an_error(bert: Path) -> None:
    assert run("optimize", bert, "--precision", "int8", "--max-drop", -1).exit_code == 2
    assert run("optimize", bert, "--precision", "int3").exit_code == 2


@pytest.mark.parametrize(
    "words",
    [
        "export MODULE --max-drop 0.1",
        "export MODULE --option int4_block=32",
        "export MODULE --calibration FILE",
        "optimize MODEL --max-drop 0.1",
        "optimize MODEL --option int4_block=32",
        "optimize MODEL --calibration FILE",
        "native compile MODEL --max-drop 0.1",
        "native compile MODEL --calibration FILE",
    ],
)
def test_what_needs_a_precision_is_an_error_without_one(
    words: str, bert: Path, calibration: Path, tmp_path: Path
) -> None:
    given: dict[str, object] = {"MODULE": BERT, "MODEL": bert, "FILE": calibration}
    done = run(*[given.get(word, word) for word in words.split()], "-o", tmp_path / "out.onnx")
    assert done.exit_code == 3
    assert "without a precision" in done.stderr


@click.command()
@engine_options
@precision_options
def show_options(options: Options) -> None:
    click.echo(f"{options.precision} {options.max_drop} {options.int4_block}")


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("", "float32 0.01 64"),
        ("--precision int4", "int4 0.01 128"),
        ("--option max_drop=0.5 --precision int4", "int4 0.5 128"),
        ("--max-drop 0.5 --option precision=int8 --option int4_block=32", "int8 0.5 32"),
    ],
)
def test_options_of_a_precision_are_given_either_way(words: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SARDONYX_INT4_BLOCK", "128")
    assert CliRunner().invoke(show_options, words.split()).stdout.strip() == found
