"""Files and folders of others: what is in them is data, and never runs or reaches the terminal as it is."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from sardonyx.cli import doctor
from sardonyx.cli._dims import DimExpression
from sardonyx.cli._source import find_source
from sardonyx.diagnose.reduction.worker import Worker
from sardonyx.errors import SardonyxError
from sardonyx.options import Options

from .calling import ROOT, run


def saved(path: Path, dim: str, name: str = "x", node: str = "") -> Path:
    x, y = (helper.make_tensor_value_info(x, TensorProto.FLOAT, [dim, 2]) for x in (name, "y"))
    graph = helper.make_graph([helper.make_node("Neg", [name], ["y"], node)], "g", [x], [y])
    opsets = [helper.make_opsetid("", 21)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return path


# Sizes

ATTACK = "x.subs.__globals__['__builtins__']['__import__']('pathlib').Path('ran').touch()"


@pytest.mark.parametrize(
    "words", [("run",), ("profile", "--calls", 1), ("report", "-o", "out.html"), ("compare",), ("bisect",)]
)
def test_the_name_of_a_size_is_never_executed(words: tuple[str, ...], tmp_path: Path) -> None:
    done = run(words[0], saved(tmp_path / "model.onnx", ATTACK), *words[1:])
    assert done.exit_code == 0, done.output
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "text",
    [
        ATTACK,
        "__import__('os')",
        "[x for x in y]",
        "(lambda: 1)()",
        "x.y",
        "x[0]",
        "'a'*3",
        "f(x)",
        "x if y else z",
        "x := 1",
        "-" * 1000 + "x",
        "(" * 90 + "x",
        "batch\nsize",
        "batch size",
    ],
)
def test_what_is_no_arithmetic_is_a_name(text: str) -> None:
    assert DimExpression(text).names == {text}
    assert DimExpression(text).value({text: 7}) == 7


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("batch", 6),
        ("2*batch + 1", 13),
        ("batch//4", 1),
        ("floor(batch/4)", 1),
        ("ceiling(batch/4)", 2),
        ("CeilDiv(batch, 4)", 2),
        ("Max(batch, 9) % 5", 4),
        ("batch**2 - unknown", 35),
    ],
)
def test_arithmetic_of_sizes_is_computed(text: str, expected: int) -> None:
    assert DimExpression(text).value({"batch": 6}) == expected


@pytest.mark.parametrize("text", ["9**9**9", "10**30", "x//0", "x % 0", "2**-1", "floor(1, 2)"])
def test_a_size_that_cannot_be_computed_is_an_error(text: str, tmp_path: Path) -> None:
    done = run("run", saved(tmp_path / "model.onnx", text))
    assert done.exit_code == 3
    assert "cannot be computed" in done.output


# Files of torch.export


class Touches:
    """Unpickling it leaves a file."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("ran"),)


class Twice(torch.nn.Module):
    """A module whose sizes are expressions in the file."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x]) + 1


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exported") / "net.pt2"
    shapes = ({0: torch.export.Dim("batch")},)
    torch.export.save(torch.export.export(Twice(), (torch.ones(8, 2),), dynamic_shapes=shapes), path)
    return path


def edited(path: Path, into: Path, edit: Callable[[str, bytes], bytes], **more: bytes) -> Path:
    with zipfile.ZipFile(path) as before, zipfile.ZipFile(into, "w") as after:
        for name in before.namelist():
            after.writestr(name, edit(name, before.read(name)))
        for name, content in more.items():
            after.writestr(f"{before.namelist()[0].partition('/')[0]}/{name}", content)
    return into


def torch_saved(held: Any) -> bytes:
    file = io.BytesIO()
    torch.save(held, file)
    return file.getvalue()


def test_an_exported_program_is_read(exported: Path) -> None:
    found = find_source(str(exported))
    torch.testing.assert_close(found.module()(torch.ones(8, 2)), torch.full((16, 2), 2.0))
    assert found.model(Options.of()).graph.inputs[0].shape is not None


def test_a_pickle_in_an_exported_program_does_not_run(exported: Path, tmp_path: Path) -> None:
    hostile = torch_saved(Touches())
    path = edited(exported, tmp_path / "x.pt2", lambda name, old: hostile if "sample_inputs" in name else old)
    done = run("inspect", path)
    assert (done.exit_code, (tmp_path / "ran").exists()) == (3, False), done.output
    assert "would run as code" in done.output


@pytest.mark.parametrize("member", ["data/constants/opaque_obj_0", "data/aotinductor/model/a.so"])
def test_objects_and_libraries_in_an_exported_program_are_refused(member: str, exported: Path, tmp_path: Path) -> None:
    path = edited(exported, tmp_path / "x.pt2", lambda name, old: old, **{member: pickle.dumps(Touches())})
    done = run("inspect", path)
    assert (done.exit_code, "would run as code" in done.output) == (3, True), done.output


def replaced(old: bytes, key: str, value: str) -> bytes:
    """JSON with another text wherever a key is."""

    def hook(held: dict[str, Any]) -> dict[str, Any]:
        return {**held, key: value} if key in held else held

    return json.dumps(json.loads(old, object_hook=hook)).encode()


def test_a_size_in_an_exported_program_does_not_run(exported: Path, tmp_path: Path) -> None:
    path = edited(
        exported,
        tmp_path / "x.pt2",
        lambda name, old: replaced(old, "expr_str", ATTACK) if name.endswith(".json") else old,
    )
    done = run("inspect", path)
    assert (done.exit_code, (tmp_path / "ran").exists()) == (3, False), done.output
    assert "instead of a size" in done.output


def test_an_exported_program_imports_no_module_by_name(exported: Path, tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("import pathlib; pathlib.Path('ran').touch()")
    factory = {"default_factory_module": "evil", "default_factory_name": "list", "dict_context": []}
    spec = json.dumps([1, {"type": "collections.defaultdict", "context": json.dumps(factory), "children_spec": []}])
    path = edited(
        exported,
        tmp_path / "x.pt2",
        lambda name, old: replaced(old, "in_spec", spec) if name.endswith(".json") else old,
    )
    done = run("inspect", path)
    assert (done.exit_code, (tmp_path / "ran").exists()) == (3, False), done.output


# The working folder


def test_processes_of_our_own_import_nothing_from_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("import pathlib; pathlib.Path('ran').touch()")
    assert doctor._python("import json; print(json.dumps([1]))").stdout == "[1]\n"
    assert not (tmp_path / "ran").exists()
    seen: list[list[str]] = []

    def popen(command: list[str], **how: Any) -> Any:
        seen.append(command)
        raise NotADirectoryError

    monkeypatch.setattr(subprocess, "Popen", popen)
    with pytest.raises(NotADirectoryError):
        Worker(["onnxruntime"])._start()
    assert "-P" in seen[0][: seen[0].index("-m")]


def test_a_factory_is_needed_for_what_a_trusted_exported_program_runs(exported: Path, tmp_path: Path) -> None:
    hostile = torch_saved(Touches())
    path = edited(exported, tmp_path / "x.pt2", lambda name, old: hostile if "sample_inputs" in name else old)
    with pytest.raises(SardonyxError) as caught:
        find_source(str(path)).module()
    assert "file.py:factory" in str(caught.value.hint)


# The terminal


@pytest.mark.parametrize(
    "words",
    [
        ("inspect", "--nodes"),
        ("inspect", "--nodes", "--json"),
        ("view", "--outline"),
        ("run",),
        ("run", "--size", "batch=2"),
        ("profile", "--calls", "1"),
        ("compare", "--all"),
        ("optimize", "-o", "out.onnx"),
        ("report", "-o", "out.html"),
    ],
)
def test_names_in_a_model_do_not_steer_the_terminal(words: tuple[str, ...], tmp_path: Path) -> None:
    path = saved(tmp_path / "model.onnx", "\x1b]0;title\x07", name="x\x1b[31m\x9b2J\u202e", node="n\x1b[2J\rhidden")
    done = run(words[0], path, *words[1:])
    assert not set("\x1b\x07\x9b\r\u202e") & set(done.output)


def test_a_name_is_told_with_its_escape_sequences_written_out(tmp_path: Path) -> None:
    done = run("inspect", saved(tmp_path / "model.onnx", "\x1b[31m"))
    assert r"\x1b[31m" in done.output
    assert json.loads(run("inspect", "model.onnx", "--json").stdout)["inputs"][0]["shape"] == ["\x1b[31m", 2]


def test_a_warning_does_not_steer_the_terminal(tmp_path: Path) -> None:
    path = saved(tmp_path / "model.onnx", "n", name="x\x1b[31m")
    model = onnx.load(str(path))
    model.graph.initializer.append(helper.make_tensor("x\x1b[31m", TensorProto.FLOAT, [1, 2], [0, 0]))
    onnx.save(model, str(path))
    done = run("optimize", path, "-o", tmp_path / "out.onnx")
    assert "used as a constant" in done.output
    assert "\x1b" not in done.output


# What is written, and what is typed


@pytest.mark.parametrize(
    ("words", "target"), [(("report", "-o"), "out.html"), (("profile", "--calls", "1", "--trace"), "out.json")]
)
def test_a_link_in_the_place_of_an_output_is_replaced(words: tuple[str, ...], target: str, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / target).symlink_to(precious)
    done = run(words[0], saved(tmp_path / "model.onnx", "n"), *words[1:], tmp_path / target)
    assert done.exit_code == 0, done.output
    assert precious.read_text() == "mine"
    assert (tmp_path / target).is_file()
    assert not (tmp_path / target).is_symlink()


def test_a_link_under_the_name_of_a_temporary_file_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / f".out.html.{os.getpid()}").symlink_to(precious)
    done = run("report", saved(tmp_path / "model.onnx", "n"), "-o", tmp_path / "out.html")
    assert (done.exit_code, precious.read_text()) == (0, "mine"), done.output


@pytest.mark.parametrize(
    "words", [("bench", "--seconds"), ("compare", "--tolerance"), ("bisect", "--tolerance"), ("reduce", "--tolerance")]
)
@pytest.mark.parametrize("number", ["nan", "inf", "-inf", "-1"])
def test_what_is_no_number_is_a_wrong_use_of_the_command_line(
    words: tuple[str, str], number: str, tmp_path: Path
) -> None:
    output = ("-o", "out") if words[0] == "reduce" else ()
    done = run(words[0], saved(tmp_path / "model.onnx", "n"), *output, words[1], number)
    assert done.exit_code == 2, done.output


@pytest.mark.parametrize("edit", ["truncated", "flipped", "objects", "empty"])
def test_an_edited_file_of_inputs_is_an_error(edit: str, tmp_path: Path) -> None:
    path = tmp_path / "inputs.npz"
    np.savez(path, x=np.array([{}]) if edit == "objects" else np.zeros((1, 2), np.float32), allow_pickle=True)
    content = path.read_bytes()
    if edit == "truncated":
        path.write_bytes(content[:-30])
    elif edit == "flipped":
        at = content.index(b"descr")
        path.write_bytes(content[:at] + b"XXXXX" + content[at + 5 :])
    elif edit == "empty":
        path.write_bytes(b"")
    done = run("run", saved(tmp_path / "model.onnx", "n"), "--inputs", path)
    assert done.exit_code == 3, done.output


def test_every_text_file_names_its_encoding() -> None:
    """Else it is that of the locale, which may be ASCII."""
    plain = re.compile(r"\.read_text\(\)|\.write_text\((?!$)(?!.*encoding=)")
    lines = [
        (path.name, line)
        for path in (ROOT / "src").rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if plain.search(line) and "/proc/" not in line and not line.lstrip().startswith((">>>", "..."))
    ]
    assert lines == []
