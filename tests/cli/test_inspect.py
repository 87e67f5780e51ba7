"""`sardonyx inspect` and `sardonyx view`: what is in a model."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import onnx
import pytest

from .calling import BERT, assert_snapshot, run, told


def test_what_is_told_of_bert(bert: Path) -> None:
    found = told("inspect", bert)
    assert_snapshot("inspect", found)
    assert found["largest"][0]["name"] == "embeddings.word_embeddings.weight"
    assert found["largest"][0]["bytes"] == 1000 * 64 * 4
    assert found["operators"]["Attention"] == 2


def test_resnet_is_told_to_people(resnet: Path) -> None:
    lines = run("inspect", resnet).stdout.splitlines()
    assert lines[0].startswith("opset      ai.onnx 23; IR version 10; by sardonyx")
    assert lines[1:3] == ["inputs     pixel_values: float32[1, 3, 64, 64]", "outputs    output: float32[1, 1000]"]
    assert "Conv ×53" in lines[3]


def test_nodes_are_listed_in_order(resnet: Path) -> None:
    nodes = told("inspect", resnet, "--nodes")["node_list"]
    assert (nodes[0]["operator"], nodes[0]["inputs"][0]) == ("Conv", "pixel_values")
    assert nodes[0]["attributes"]["strides"] == [2, 2]
    assert nodes[-1]["outputs"] == [{"name": "output", "dtype": "float32", "shape": [1, 1000]}]
    assert run("inspect", resnet, "--nodes").stdout.splitlines()[-1].startswith("output: float32[1, 1000] = Gemm(")


def test_functions_are_told() -> None:
    text = '<ir_version: 10, opset_import: ["" : 21, "mine" : 1]> g (float[N] x) => (float[N] y) { y = mine.twice(x) } '
    text += '<domain: "mine", opset_import: ["" : 21]> twice (x) => (y) { y = Add(x, x) }'
    onnx.save(onnx.parser.parse_model(text), "model.onnx")
    found = told("inspect", "model.onnx")
    assert found["functions"] == {"twice": {"domain": "mine", "nodes": 1}}
    assert found["operators"] == {"mine.twice": 1, "Add": 1}
    assert found["domains"] == {"ai.onnx": 21, "mine": 1}


def test_a_broken_file_is_an_error(broken: Path) -> None:
    for command in ("inspect", "view"):
        done = run(command, broken)
        assert (done.exit_code, "cannot be read as an ONNX model" in done.stderr) == (3, True)


def test_without_netron_the_outline_is_printed(resnet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sardonyx.cli.view.find_spec", lambda name: None)
    done = run("view", resnet)
    assert done.exit_code == 0
    assert "next: pip install netron" in done.stderr
    assert done.stdout.splitlines()[-1].startswith("output: float32[1, 1000] = Gemm(")
    assert run("view", resnet, "--outline").stderr == ""


def test_netron_is_given_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[bool] = []
    netron = SimpleNamespace(start=lambda path: shown.append(Path(path).is_file()), wait=lambda: None)
    monkeypatch.setattr("sardonyx.cli.view.find_spec", lambda name: True)
    monkeypatch.setitem(sys.modules, "netron", netron)
    assert run("view", BERT).exit_code == 0
    assert shown == [True]
