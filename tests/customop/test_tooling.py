"""Projects of operators: written, imported, tried and packed for processes that have only onnxruntime and numpy."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import helper

from sardonyx.customop import op_check, pack, project
from sardonyx.customop.project import Project
from sardonyx.errors import CompilerError, DeclarationError

OPERATORS = '''
import torch

import sardonyx

group_norm = sardonyx.custom_op(
    "packed::GroupNorm(Tensor x, Tensor<T, 1> weight, Tensor<T, 1> bias, *, int groups, float epsilon=1e-5) -> Tensor",
    cpp="""
template <class T>
void GroupNorm(In<T> x, In<T> weight, In<T> bias, Out<T> y, int64_t groups, double epsilon, Parallel parallel) {
  check(groups > 0 && x.dim(1) % groups == 0, "the channels must be a multiple of groups");
  const int64_t each = x.dim(1) / groups, area = x.size() / std::max<int64_t>(1, x.dim(0) * x.dim(1));
  const int64_t count = each * area;
  parallel(x.dim(0) * groups, [&](int64_t begin, int64_t end) {
    for (int64_t g = begin; g < end; ++g) {
      const T* in = x.data() + g * count;
      double mean = 0, square = 0;
      for (int64_t i = 0; i < count; ++i) mean += double(in[i]) / count;
      for (int64_t i = 0; i < count; ++i) square += (double(in[i]) - mean) * (double(in[i]) - mean) / count;
      for (int64_t i = 0; i < count; ++i) {
        const int64_t c = g % groups * each + i / area;
        y[g * count + i] = (double(in[i]) - mean) / std::sqrt(square + epsilon) * double(weight[c]) + double(bias[c]);
      }
    }
  });
}
""",
    shape=lambda x: x,
    dtypes=["float32"],
)
positive = sardonyx.custom_op(
    "picked::Positive(Tensor<T, 1> x) -> (Tensor<T, 1> values, Tensor<int64, 1> places)",
    cpp="""
template <class T>
void Positive(In<T> x, Out<T> values, Out<int64_t> places, Parallel) {
  const int64_t count = std::count_if(x.begin(), x.end(), [](T v) { return v > 0; });
  values.resize({count});
  places.resize({count});
  for (int64_t i = 0, at = 0; i < x.size(); ++i) {
    if (x[i] > 0) values[at] = x[i], places[at++] = i;
  }
}
""",
    shape=lambda x: ((None,), (None,)),
    dtypes=["float32", "int64"],
)
total = sardonyx.custom_op(
    "picked::Total(Tensor scale, Tensor? shift, Tensor[] xs, *, int[] of=[1, 2], str mode='add') -> Tensor",
    cpp="""
template <class T>
void Total(In<T> scale, In<T> shift, Ins<T> xs, Out<T> y, List<int64_t> of, std::string_view mode, Parallel) {
  for (int64_t i = 0; i < y.size(); ++i) {
    T sum = shift ? shift[0] : T(0);
    for (int64_t k = 0; k < xs.size(); ++k) sum += xs[k][i] * (mode == "add" ? of[k % of.size()] : 1);
    y[i] = sum * scale[0];
  }
}
""",
    shape=lambda xs: xs[0],
    dtypes=["float32"],
)


def examples_group_norm():
    return [((torch.randn(2, 6, 5), torch.randn(6), torch.randn(6)), {"groups": 3})]


def reference_group_norm(x, weight, bias, groups, epsilon):
    return torch.nn.functional.group_norm(x, groups, weight, bias, epsilon)


def reference_positive(x):
    return x[x > 0], torch.nonzero(x > 0)[:, 0]
'''


@pytest.fixture(scope="module")
def operators(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    file = tmp_path_factory.mktemp("declared") / "three_operators.py"
    file.write_text(OPERATORS)
    loaded = project.load(str(file))
    yield loaded
    for op in loaded.operators:
        op.close()


@pytest.fixture(scope="module")
def packed(operators: Project, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack.pack(operators, tmp_path_factory.mktemp("dist"))


def declared(folder: Path, name: str, text: str) -> Project:
    (folder / f"{name}.py").write_text(f"import torch\nimport sardonyx\n{text}")
    return project.load(str(folder / f"{name}.py"))


# A process with onnxruntime and numpy

RUN = """
import sys
for name in ("torch", "sardonyx", "onnx", "onnxscript"):
    sys.modules[name] = None
sys.path.insert(0, sys.argv[1])
import numpy
import three_operators_ort
given = dict(numpy.load(sys.argv[3]))
session = three_operators_ort.session(sys.argv[2], providers=["CPUExecutionProvider"])
results = session.run(None, {x.name: given[x.name] for x in session.get_inputs()})
numpy.savez(sys.argv[4], **{x.name: result for x, result in zip(session.get_outputs(), results)})
try:
    session.run(None, {**given, "w": given["w"][None]})
except Exception as error:
    print(error)
"""


def model() -> onnx.ModelProto:
    """All three operators, the optional tensor both given and absent, in a file that the oldest onnxruntime reads."""
    nodes = [
        helper.make_node("GroupNorm", ["x", "w", "b"], ["normed"], domain="packed", groups=3),
        helper.make_node("Positive", ["flat"], ["values", "places"], domain="picked"),
        helper.make_node("Total", ["w", "", "w", "b", "w"], ["without"], domain="picked"),
        helper.make_node("Total", ["w", "b", "w", "b"], ["with"], domain="picked", of=[3, 4], mode="add"),
    ]
    inputs = {"x": ["n", 6, "m"], "w": None, "b": [6], "flat": ["k"]}
    outputs = {"normed": 1, "values": 1, "places": 7, "without": 1, "with": 1}
    graph = helper.make_graph(
        nodes,
        "packed",
        [helper.make_tensor_value_info(name, 1, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, kind, None) for name, kind in outputs.items()],
    )
    opsets = [helper.make_opsetid(domain, version) for domain, version in (("", 17), ("packed", 1), ("picked", 1))]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


OTHERS = [path for path in os.environ.get("SARDONYX_ORT_PYTHONS", "").split(":") if path]
INTERPRETERS = [sys.executable, *OTHERS] + [
    pytest.param("", marks=pytest.mark.skip("SARDONYX_ORT_PYTHONS lists no interpreters: make customop-versions"))
] * (not OTHERS)


@pytest.mark.parametrize("python", INTERPRETERS)
def test_packed_operators_need_only_onnxruntime_and_numpy(
    python: str, operators: Project, packed: Path, tmp_path: Path
) -> None:
    x, w, b, flat = torch.randn(2, 6, 5), torch.randn(6), torch.randn(6), torch.randn(9)
    onnx.save(model(), str(tmp_path / "model.onnx"))
    np.savez(tmp_path / "in.npz", x=x.numpy(), w=w.numpy(), b=b.numpy(), flat=flat.numpy())
    places = [str(packed.parent), *(str(tmp_path / name) for name in ("model.onnx", "in.npz", "out.npz"))]
    done = subprocess.run([python, "-I", "-c", RUN, *places], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = {name: torch.from_numpy(array) for name, array in np.load(tmp_path / "out.npz").items()}
    group_norm, positive, total = operators.operators
    torch.testing.assert_close(found["normed"], group_norm(x, w, b, groups=3), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close((found["values"], found["places"]), positive(flat), rtol=0, atol=0)
    torch.testing.assert_close(found["without"], total(w, None, [w, b, w]), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found["with"], total(w, b, [w, b], of=[3, 4]), rtol=1e-6, atol=1e-6)
    assert "packed::GroupNorm: weight has 2 dimensions, and must have 1" in done.stdout


def imported(package: Path, code: str = "") -> subprocess.CompletedProcess[str]:
    text = f"import sys; sys.path.insert(0, {str(package.parent)!r}); import {package.name} as packed; {code}"
    return subprocess.run([sys.executable, "-I", "-c", text], capture_output=True, text=True, check=False)


# What is packed


def test_the_manifest_says_what_is_in_the_library(packed: Path) -> None:
    told = json.loads((packed / "manifest.json").read_text())
    assert [(op["domain"], op["name"]) for op in told["operators"]] == [
        ("packed", "GroupNorm"),
        ("picked", "Positive"),
        ("picked", "Total"),
    ]
    assert told["operators"][0]["attributes"] == [
        {"name": "groups", "type": "int", "required": True},
        {"name": "epsilon", "type": "float", "required": False, "default": 1e-5},
    ]
    assert told["operators"][1]["types"] == [{"T": "float32"}, {"T": "int64"}]
    assert [t["kind"] for t in told["operators"][2]["inputs"]] == ["required", "optional", "variadic"]
    assert told["library"]["sha256"] == hashlib.sha256((packed / "operators.so").read_bytes()).hexdigest()


def test_a_library_that_was_changed_is_refused(packed: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(packed, tmp_path / "changed"))
    with (copied / "operators.so").open("ab") as library:
        library.write(b"\0")
    assert "is not the library that manifest.json describes" in imported(copied).stderr


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="names instructions of x86-64")
def test_a_processor_that_lacks_instructions_is_told_so(tmp_path: Path) -> None:
    made = declared(tmp_path, "for_bulldozer", SMALL.format("old::Twice"))
    folder = pack.pack(made, tmp_path, march="bdver4")  # FMA4, which processors of today do not have
    made.operators[0].close()
    done = imported(folder, "packed.session(b'')")
    assert "these operators are compiled for processors with FMA4, which this processor lacks" in done.stderr


@pytest.mark.skipif(shutil.which("objdump") is None, reason="there is no objdump")
def test_loading_a_library_runs_nothing_that_the_processor_may_lack(packed: Path) -> None:
    command = [
        "objdump",
        "--disassemble=_GLOBAL__sub_I_kernels.cpp",
        "--no-show-raw-insn",
        str(packed / "operators.so"),
    ]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "EntryRegistrar" in shown
    assert not re.search(r"[xyz]mm\d", shown), shown


def test_a_wheel_is_what_the_folder_is(packed: Path) -> None:
    made = pack.wheel(packed)
    assert made.name.startswith("three_operators_ort-0.1.0-py3-none-")
    with zipfile.ZipFile(made) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    record = files.pop("three_operators_ort-0.1.0.dist-info/RECORD").decode().splitlines()
    hashes = {line.split(",")[0]: line.split(",")[1].removeprefix("sha256=") for line in record[:-1]}
    assert hashes == {
        name: base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
        for name, content in files.items()
    }
    for path in packed.iterdir():
        if path.is_file():
            assert files[f"three_operators_ort/{path.name}"] == path.read_bytes()


def test_pip_installs_the_wheel(packed: Path, tmp_path: Path) -> None:
    pytest.importorskip("pip")
    command = ["pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(tmp_path / "site")]
    subprocess.run([sys.executable, "-m", *command, str(pack.wheel(packed))], check=True)
    done = imported(tmp_path / "site" / "three_operators_ort", "print(packed.library)")
    assert Path(done.stdout.strip()) == tmp_path / "site" / "three_operators_ort" / "operators.so"


def test_packing_again_replaces_the_pack_and_nothing_else(operators: Project, tmp_path: Path) -> None:
    (tmp_path / "three_operators_ort").mkdir()
    with pytest.raises(DeclarationError, match="exists already and is not a pack"):
        pack.pack(operators, tmp_path)


def test_a_python_function_cannot_be_packed(tmp_path: Path) -> None:
    made = declared(
        tmp_path, "of_python", 'x = sardonyx.custom_op("py::X(Tensor x) -> Tensor", python=lambda x: x * 2)'
    )
    with pytest.raises(DeclarationError, match="py::X is computed by a Python function, which cannot be packed"):
        pack.pack(made, tmp_path)
    made.operators[0].close()


def test_kernels_that_define_the_same_function_cannot_be_packed_together(tmp_path: Path) -> None:
    text = """
KERNEL = "static int twice(int x) {{ return 2 * x; }} template <class T> void {0}(In<T> x, Out<T> y, Parallel) {{}}"
for name in ("A", "B"):
    sardonyx.custom_op(f"same::{name}(Tensor x) -> Tensor", cpp=KERNEL.format(name) + f"// {name}", dtypes=["int64"])
"""
    made = declared(tmp_path, "same_helper", text)
    with pytest.raises(CompilerError, match=r"error: redefinition of (.|\n)*next: they share one library"):
        pack.pack(made, tmp_path)
    for op in made.operators:
        op.close()


# Trials

SMALL = """
op = sardonyx.custom_op(
    "{}(Tensor x) -> Tensor",
    cpp="template <class T> void Twice(In<T> x, Out<T> y, Parallel) {{ y[0] = x[0] * 2; }}",
    dtypes=["float32"],
)
"""


def results(made: Project) -> dict[tuple[str, str], op_check.CheckResult]:
    found = list(op_check.check_project(made))
    for op in made.operators:
        op.close()
    return {(outcome.check, outcome.types): outcome for outcome in found}


def test_trials_of_operators_that_are_right(operators: Project) -> None:
    found = list(op_check.check_project(operators))
    assert {outcome.result for outcome in found} == {"passed"}, found
    checks = {(x.operator, x.check, x.types) for x in found}
    for check in ("reference", "onnxruntime", "strides", "dynamic shapes", "opcheck"):
        assert ("packed::GroupNorm", check, "float32") in checks
    assert ("picked::Positive", "onnxruntime", "int64") in checks
    made_up = {outcome.operator: outcome.detail for outcome in found if outcome.check == "inputs"}
    assert made_up == {
        "picked::Positive": "random: x (4,)",
        "picked::Total": "random: scale (4, 4), shift (4, 4), xs [(4, 4), (4, 4)], of [1, 2], mode add",
    }


def test_trials_find_a_wrong_number_and_a_wrong_gradient(tmp_path: Path) -> None:
    text = """
op = sardonyx.custom_op(
    "wrong::Square(Tensor x, *, float factor) -> Tensor", python=lambda x, factor: x * x * factor,
    backward=lambda grad, x, factor: grad * x * factor, dtypes=["float64"],
)
def reference(x, factor):
    return x * x * factor + 1e-3
"""
    found = results(declared(tmp_path, "wrong_numbers", text))
    assert found["reference", "float64"].result == "failed"
    assert "not close" in found["reference", "float64"].detail
    assert found["gradcheck", "float64"].result == "failed"
    assert found["onnxruntime", "float64"].result == "passed"


def test_a_gradient_that_cannot_be_checked_and_a_size_that_cannot_change_are_skipped(tmp_path: Path) -> None:
    text = """
def rule(x):
    if x[0] != 4:
        raise ValueError("there must be four")
    return x
op = sardonyx.custom_op(
    "skips::Four(Tensor x) -> Tensor", python=lambda x: x.clone(), shape=rule, backward=lambda grad: grad,
    dtypes=["float32"],
)
"""
    found = results(declared(tmp_path, "only_four", text))
    assert (found["gradcheck", ""].result, found["gradcheck", ""].detail) == (
        "skipped",
        "it has no float64 kernels, which finite differences need",
    )
    assert found["dynamic shapes", "float32"].result == "skipped"
    assert "there must be four" in found["dynamic shapes", "float32"].detail


def test_where_no_inputs_can_be_made_up_it_says_how_to_give_them(tmp_path: Path) -> None:
    text = 'op = sardonyx.custom_op("refuses::All(Tensor x, *, str mode) -> Tensor", python=lambda x, mode: x.clone())'
    outcome = results(declared(tmp_path, "needs_a_mode", text))["inputs", ""]
    assert outcome.result == "failed"
    assert "write a function examples_all()" in outcome.detail


def test_examples_of_several_operators_have_their_names(tmp_path: Path) -> None:
    twice = 'sardonyx.custom_op("several::{}(Tensor x) -> Tensor", python=lambda x: x.clone())\n'
    made = declared(tmp_path, "two_of_them", twice.format("A") + twice.format("B") + "def examples(): return []\n")
    assert "call it examples_b" in results(made)["inputs", ""].detail


def test_examples_that_are_no_calls_are_refused(tmp_path: Path) -> None:
    text = 'sardonyx.custom_op("odd::A(Tensor x) -> Tensor", python=lambda x: x.clone())\ndef examples(): return [1]\n'
    assert "are not a list of calls" in results(declared(tmp_path, "odd_examples", text))["inputs", ""].detail


# Projects


def test_a_new_project_has_a_declaration_a_kernel_a_test_and_a_readme(tmp_path: Path) -> None:
    made = project.create("RMSNorm2d", domain="mine", folder=tmp_path / "here")
    assert [str(path.relative_to(tmp_path / "here")) for path in made] == [
        "pyproject.toml",
        "README.md",
        "rms_norm2d/__init__.py",
        "rms_norm2d/kernel.cpp",
        "tests/test_rms_norm2d.py",
    ]
    assert "mine::RMSNorm2d(Tensor x" in made[2].read_text()


def test_a_new_project_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("mine")
    with pytest.raises(DeclarationError, match="exists already"):
        project.create("Scale", folder=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


@pytest.mark.parametrize(("name", "domain"), [("Two Words", None), ("9lives", None), ("Json", None), ("Scale", "a.b")])
def test_names_that_are_none_are_refused(name: str, domain: str | None, tmp_path: Path) -> None:
    with pytest.raises(DeclarationError):
        project.create(name, domain=domain, folder=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_operators_are_found_in_folders_files_and_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "found_here"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "ops.py").write_text(
        'import sardonyx\nsardonyx.custom_op("found::X(Tensor x) -> Tensor", python=lambda x: x.clone())\n'
    )
    monkeypatch.chdir(tmp_path)
    for where in ("found_here/ops.py", "found_here.ops"):
        (op,) = project.load(where).operators
        assert op.signature.qualified == "found::X"
    (package / "__init__.py").write_text("from found_here import ops\n")
    for where in (".", "found_here"):
        (op,) = project.load(where).operators
        assert op.signature.qualified == "found::X"
    op.close()


def test_a_module_of_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    (tmp_path / "json.py").touch()
    with pytest.raises(DeclarationError, match=r"json is in .* has its name"):
        project.load(str(tmp_path / "json.py"))
    assert sys.modules["json"] is json
