"""`sardonyx export`: modules become files that give the same numbers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from sardonyx import native
from sardonyx.cli._source import find_source
from sardonyx.options import Options

from .calling import BERT, assert_snapshot, run, told

DYNAMIC = """
import torch

class Add(torch.nn.Module):
    def forward(self, x, others):
        return x + others[0]

def add(): return Add().eval(), (torch.ones(3, 4), [torch.ones(4)])
"""


@pytest.fixture
def add(tmp_path: Path) -> str:
    (tmp_path / "adding.py").write_text(DYNAMIC)
    return f"{tmp_path}/adding.py:add"


def test_resnet_and_bert_are_files_that_onnx_accepts(bert: Path, resnet: Path) -> None:
    for path in (bert, resnet):
        onnx.checker.check_model(str(path), full_check=True)


def test_a_file_of_bert_gives_berts_numbers_for_other_sizes(bert: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs the package onnxruntime")
    ids = torch.randint(0, 1000, (5, 16))
    feeds = {"input_ids": ids.numpy(), "attention_mask": np.ones((5, 16), np.int64)}
    (got, *_) = onnxruntime.InferenceSession(str(bert)).run(["last_hidden_state"], feeds)
    want = find_source(BERT).module().double()(ids).last_hidden_state
    np.testing.assert_allclose(got, want.numpy(), atol=1e-5)


def test_what_is_told_of_an_export(add: str) -> None:
    found = told("export", add, "--verify", "--dynamic", "x.-2=rows", "--opset", "21", "-o", "out.onnx")
    assert_snapshot("export", found)
    assert Path("out.onnx").stat().st_size == found["bytes"]


def test_an_export_is_told_to_people_too(add: str) -> None:
    lines = run("export", add, "--verify").stdout.splitlines()
    assert lines[1].split(maxsplit=1) == ["inputs", "x: float32[3, 4]"]
    assert lines[-1].startswith("add.onnx")
    assert lines[-1].endswith("verified against PyTorch")


def test_sizes_are_told_as_json(add: str) -> None:
    found = told("export", add, "--dynamic-shapes", '{"x": {"0": "rows"}, "others": [null]}')
    assert found["inputs"][0]["shape"] == ["rows", 4]


def test_an_export_with_native_kernels_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "gelus.py").write_text(
        "import torch\nmodel = (torch.nn.Sequential(torch.nn.Tanh(), torch.nn.GELU()).eval(), (torch.ones(64, 64),))"
    )
    found = told("export", f"{tmp_path}/gelus.py:model", "--native", "-o", "compiled")
    assert found["native"]["nodes_before"] >= found["native"]["nodes_after"]
    assert native.load("compiled").report.as_dict() == found["native"]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--dynamic", "y.0=rows"], 3, "the model has no argument 'y'"),
        (["--dynamic", "x.7=rows"], 3, "'x' has 2 dimensions, but no axis 7"),
        (["--dynamic", "others.0=rows"], 3, "the argument 'others' is not a tensor"),
        (["--dynamic", "x=rows"], 2, "is not of the form NAME.AXIS=SIZE"),
        (["--dynamic", "x.--1=rows"], 2, "is not of the form NAME.AXIS=SIZE"),
        (["--dynamic-shapes", "{"], 2, "is not JSON"),
        (["--dynamic-shapes", "5"], 2, "not an object or a list"),
        (["--dynamic-shapes", "{}", "--dynamic", "x.0=rows"], 2, "cannot be combined"),
        (["--opset", "99"], 3, "opset is 99"),
        (["--option", "fallbak=error"], 3, "did you mean 'fallback'?"),
        (["-o", "no/such/folder/x.onnx"], 3, "mkdir -p no/such/folder"),
        (["--engine", "openvin"], 3, "did you mean 'openvino'?"),
    ],
)
def test_a_wish_that_cannot_be_is_told_with_the_next_step(add: str, words: list[str], code: int, said: str) -> None:
    done = run("export", add, *words)
    assert done.exit_code == code, done.output
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_that_torch_cannot_trace_is_told_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "branching.py").write_text(
        "import torch\n\ndef branch(x):\n    return x if x.sum() > 0 else -x\n\n"
        "def model(): return branch, (torch.ones(3),)\n"
    )
    done = run("export", f"{tmp_path}/branching.py:model")
    assert done.exit_code == 3
    assert "error: torch.export cannot capture the model" in done.stderr
    assert "branching.py:4" in done.stderr
    assert "next: control flow depends on a tensor's value" in done.stderr


def test_a_file_is_exported_already(bert: Path) -> None:
    done = run("export", bert)
    assert (done.exit_code, done.stderr.splitlines()[1]) == (3, "  next: sardonyx optimize rewrites it")


def test_no_file_is_left_where_the_export_fails(add: str) -> None:
    run("export", add, "-o", "out.onnx", "--dynamic", "y.0=rows")
    assert not Path("out.onnx").exists()


def test_weights_are_not_copied_to_inspect_a_module() -> None:
    found = find_source(BERT)
    held = found.model(Options.of()).graph.initializers["embeddings.word_embeddings.weight"].const_value
    assert held is not None
    assert held.raw.data_ptr() == found.module().embeddings.word_embeddings.weight.data_ptr()


def test_json_alone_is_on_stdout(add: str) -> None:
    assert json.loads(run("export", add, "--json").stdout)["model"] == add
