"""`sardonyx optimize`: files rewritten by the rules."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from .calling import BERT, assert_snapshot, run, told


@pytest.fixture
def plain(files: Path) -> Path:
    """BERT as it is translated."""
    path = files / "plain.onnx"
    if not path.exists():
        assert run("export", BERT, "-o", path, "--option", "optimize=none").exit_code == 0
    return path


def test_rules_leave_fewer_nodes(plain: Path) -> None:
    found = told("optimize", plain, "-o", "faster.onnx")
    assert_snapshot("optimize", found)
    assert found["nodes_after"] < found["nodes_before"]
    assert found["rules"]["JoinReshapes"] > 0
    assert len(onnx.load("faster.onnx").graph.node) == found["nodes_after"]


def test_a_rule_can_be_left_out(plain: Path) -> None:
    found = told("optimize", plain, "-o", "faster.onnx", "--option", "optimize=default-JoinReshapes")
    assert "JoinReshapes" not in found["rules"]


def test_the_file_is_written_beside_the_model(resnet: Path) -> None:
    done = run("optimize", resnet)
    assert done.exit_code == 0, done.output
    assert resnet.with_suffix(".optimized.onnx").exists()
    assert "none applies" in done.stdout


def test_a_broken_file_is_an_error(broken: Path) -> None:
    done = run("optimize", broken)
    assert done.exit_code == 3
    assert done.stderr.startswith(f"error: {broken} cannot be read as an ONNX model")
    assert "next: " in done.stderr


def test_a_module_is_for_export(resnet: Path) -> None:
    done = run("optimize", BERT)
    assert (done.exit_code, "use sardonyx export" in done.stderr) == (3, True)
    assert "name another file with -o FILE" in run("optimize", resnet, "-o", resnet).stderr
