"""Compiled models on disk: run by onnxruntime alone, and refused where they are damaged or for another machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from sardonyx import native
from sardonyx.errors import SardonyxError
from sardonyx.native import FolderError
from sardonyx.native.processor import LEVELS, processor
from tests.native.running import model_of, run, session_of

F = TensorProto.FLOAT
N = helper.make_node


def _model(op: str = "Tanh") -> onnx.ModelProto:
    """In a form that the oldest onnxruntime reads."""
    nodes = [
        N("MatMul", ["x", "w"], ["a"]),
        N(op, ["a"], ["b"]),
        N("Mul", ["b", "a"], ["c"]),
        N("Softmax", ["c"], ["y"]),
    ]
    return model_of(nodes, {"x": (F, ["n", 8])}, ["y"], {"w": np.eye(8, dtype="f")}, opset=18)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    level = "x86-64-v3" if processor().machine == "x86_64" else None
    return native.compile(_model(), processor=level).save(tmp_path_factory.mktemp("saved") / "model")


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def _edit(folder: Path, **changes: object) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# A process with onnxruntime and numpy

RUN = """
import json, os, sys
for name in ("torch", "sardonyx", "onnx", "onnx_ir", "onnxscript"):
    sys.modules[name] = None
import numpy
given = dict(numpy.load(sys.argv[2]))
os.chdir(sys.argv[1])
exec("\\n".join(json.load(open("manifest.json"))["readme"]))
numpy.save(sys.argv[3], session.run(None, given)[0])
"""
OTHERS = [path for path in os.environ.get("SARDONYX_ORT_PYTHONS", "").split(":") if path]
INTERPRETERS = [sys.executable, *OTHERS] + [
    pytest.param("", marks=pytest.mark.skip("SARDONYX_ORT_PYTHONS lists no interpreters: make native-versions"))
] * (not OTHERS)


@pytest.mark.parametrize("python", INTERPRETERS)
def test_the_lines_in_the_manifest_run_it_with_only_onnxruntime(python: str, saved: Path, tmp_path: Path) -> None:
    feeds = {"x": np.random.default_rng(0).standard_normal((5, 8)).astype("f")}
    np.savez(tmp_path / "in.npz", **feeds)
    command = [python, "-I", "-c", RUN, str(saved), str(tmp_path / "in.npz"), str(tmp_path / "out.npy")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), run(session_of(_model()), feeds)[0], rtol=1e-5)


def test_the_lines_are_three_and_an_import(saved: Path) -> None:
    lines = json.loads((saved / "manifest.json").read_text())["readme"]
    assert [line.split("(")[0] for line in lines] == [
        "import onnxruntime",
        "options = onnxruntime.SessionOptions",
        "options.register_custom_ops_library",
        "session = onnxruntime.InferenceSession",
    ]


# What is in a folder


def test_a_folder_has_the_model_the_library_its_source_and_a_manifest(saved: Path) -> None:
    assert {path.name for path in saved.iterdir()} == {"model.onnx", "kernels.so", "kernels.cpp", "manifest.json"}
    told = json.loads((saved / "manifest.json").read_text())
    assert told["files"].keys() == {"model.onnx", "kernels.so", "kernels.cpp"}
    assert told["built_with"].keys() >= {"sardonyx", "onnx", "python", "compiler"}
    assert told["report"]["kernels"][0]["operators"] == ["Tanh", "Mul", "Softmax"]
    assert told["processor"]["machine"] == processor().machine


def test_what_is_loaded_is_what_was_saved(saved: Path) -> None:
    compiled = native.compile(_model())
    loaded = native.load(saved)
    assert str(loaded.report) == str(compiled.report)
    assert (loaded.source, loaded.compiler) == (compiled.source, compiled.compiler)
    feeds = {"x": np.random.default_rng(1).standard_normal((3, 8)).astype("f")}
    np.testing.assert_allclose(loaded.session().run(None, feeds)[0], run(session_of(_model()), feeds)[0], rtol=1e-5)


def test_saving_replaces_a_compiled_model_and_nothing_else(saved: Path, tmp_path: Path) -> None:
    compiled = native.load(saved)
    folder = compiled.save(tmp_path / "new" / "folder")
    (folder / "kernels.so").write_bytes(b"")
    assert native.load(compiled.save(folder)).library == folder / "kernels.so"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(FolderError, match="exists already and is not a compiled model"):
        compiled.save(tmp_path / "mine")
    assert (tmp_path / "mine" / "letter.txt").read_text() == "dear"


def test_a_loaded_model_can_be_saved_over_itself(copied: Path) -> None:
    native.load(copied).save(copied)
    assert native.load(copied).session().get_outputs()[0].name == "y"


# What is refused


@pytest.mark.parametrize("name", ["kernels.so", "model.onnx", "kernels.cpp"])
def test_one_damaged_byte_is_refused_by_name(copied: Path, name: str) -> None:
    content = bytearray((copied / name).read_bytes())
    content[len(content) // 2] ^= 1
    (copied / name).write_bytes(content)
    with pytest.raises(FolderError, match=f"{name} is not what manifest.json describes"):
        native.load(copied)


def test_a_missing_library_is_named(copied: Path) -> None:
    loaded = native.load(copied)
    (copied / "kernels.so").unlink()
    with pytest.raises(FolderError, match=r"kernels\.so is missing"):
        native.load(copied)
    with pytest.raises(FolderError, match=r"kernels\.so does not exist"):
        loaded.session()


def test_another_processor_is_refused_with_what_it_lacks(copied: Path) -> None:
    told = json.loads((copied / "manifest.json").read_text())["processor"]
    _edit(copied, processor={**told, "instructions": ["avx1024"]})
    with pytest.raises(FolderError, match="built for a processor with avx1024, which this one lacks") as caught:
        native.load(copied)
    assert "compile the model again on this machine" in str(caught.value.hint)
    _edit(copied, processor={**told, "machine": "sparc"})
    with pytest.raises(FolderError, match="built for sparc"):
        native.load(copied)


def test_a_folder_that_is_none(copied: Path, tmp_path: Path) -> None:
    with pytest.raises(FolderError, match=r"has no manifest\.json"):
        native.load(tmp_path)
    _edit(copied, format=99)
    with pytest.raises(FolderError, match="has format 99"):
        native.load(copied)
    (copied / "manifest.json").write_text("{")
    with pytest.raises(FolderError, match="is damaged"):
        native.load(copied)


@pytest.mark.skipif(processor().machine != "x86_64", reason="names processors of x86-64")
@pytest.mark.parametrize("level", ["x86-64", "x86-64-v2"])
def test_a_library_for_older_processors_computes_the_same(level: str) -> None:
    compiled = native.compile(_model(), processor=level)
    assert set(compiled.processor.instructions) == set(LEVELS[level])
    feeds = {"x": np.random.default_rng(2).standard_normal((7, 8)).astype("f")}
    np.testing.assert_allclose(compiled.session().run(None, feeds)[0], run(session_of(_model()), feeds)[0], rtol=1e-5)


@pytest.mark.parametrize("field", ["files", "processor", "built_with", "report"])
def test_a_manifest_without_a_field_is_refused_by_its_name(copied: Path, field: str) -> None:
    told = json.loads((copied / "manifest.json").read_text())
    del told[field]
    (copied / "manifest.json").write_text(json.dumps(told))
    with pytest.raises(FolderError, match=f"manifest.json lacks '{field}'"):
        native.load(copied)


@pytest.mark.parametrize(
    "change",
    [
        {"files": []},
        {"files": {"kernels.so": 3}},
        {"files": {"../outside": {}}},
        {"processor": {"name": "native"}},
        {"processor": None},
        {"report": {"kernels": [{"unknown": 1}], "put_back": [], "left": []}},
        {"built_with": []},
        {"target": "abacus"},
    ],
)
def test_a_manifest_with_other_fields_than_were_written_is_an_error_of_ours(
    copied: Path, change: dict[str, object]
) -> None:
    told = json.loads((copied / "manifest.json").read_text())
    (copied / "manifest.json").write_text(json.dumps({**told, **change}))
    with pytest.raises(SardonyxError):
        native.load(copied)


@pytest.mark.parametrize("text", ["[]", "3", "null", '{"format": 1}'])
def test_a_manifest_that_is_something_else_is_refused(copied: Path, text: str) -> None:
    (copied / "manifest.json").write_text(text)
    with pytest.raises(FolderError, match=r"manifest\.json"):
        native.load(copied)
