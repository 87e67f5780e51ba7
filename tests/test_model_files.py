"""Where a user's model is read: nothing outside its folder, and an error that says what is wrong."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import sardonyx
from sardonyx.diagnose.bisection import bisect
from sardonyx.diagnose.comparison import compare
from sardonyx.diagnose.profiling import profile
from sardonyx.diagnose.reduction import reduce
from sardonyx.errors import SardonyxError
from sardonyx.model_files import load_model

from .cli.calling import run

WEIGHT = np.arange(4, dtype=np.float32)


def graph_of(*nodes: onnx.NodeProto, constants: tuple[onnx.TensorProto, ...] = (), dim: int | str = 4) -> Any:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [dim]) for name in "xy")
    return helper.make_graph(nodes, "g", [x], [y], constants)


def model_of(*nodes: onnx.NodeProto, constants: tuple[onnx.TensorProto, ...] = (), dim: int | str = 4) -> Any:
    opsets = [helper.make_opsetid("", 21)]
    return helper.make_model(graph_of(*nodes, constants=constants, dim=dim), opset_imports=opsets, ir_version=10)


def external(location: str, name: str = "w", length: int = 16) -> onnx.TensorProto:
    tensor = numpy_helper.from_array(WEIGHT, name)
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, "offset": "0", "length": str(length)}.items():
        tensor.external_data.add(key=key, value=value)
    return tensor


def with_weight_at(location: str) -> onnx.ModelProto:
    return model_of(helper.make_node("Add", ["x", "w"], ["y"]), constants=(external(location),))


def secret_outside(tmp_path: Path, kind: str) -> Path:
    """A model whose weight is a file outside its folder."""
    folder = tmp_path / "model"
    folder.mkdir()
    secret = tmp_path / "secret.bin"
    secret.write_bytes(WEIGHT.tobytes())
    (folder / "link.bin").symlink_to(secret)
    (folder / "sub").symlink_to(tmp_path)
    places = {"parent": "../secret.bin", "absolute": str(secret), "link": "link.bin", "linked folder": "sub/secret.bin"}
    path = folder / "model.onnx"
    path.write_bytes(with_weight_at(places[kind]).SerializeToString())
    return path


KINDS = ("parent", "absolute", "link", "linked folder")
COMMANDS: dict[str, tuple[str, ...]] = {
    "run": ("run", "{model}"),
    "inspect": ("inspect", "{model}"),
    "view": ("view", "{model}", "--outline"),
    "optimize": ("optimize", "{model}", "-o", "{out}.onnx"),
    "native": ("native", "compile", "{model}", "-o", "{out}"),
    "compile": ("compile", "{model}", "-o", "{out}", "--native"),
    "export": ("export", "{model}", "-o", "{out}.onnx"),
    "compare": ("compare", "{model}"),
    "bisect": ("bisect", "{model}"),
    "reduce": ("reduce", "{model}", "-o", "{out}"),
    "report": ("report", "{model}", "-o", "{out}.html"),
    "profile": ("profile", "{model}"),
    "bench": ("bench", "{model}"),
}
READERS: dict[str, Callable[[Any], object]] = {
    "optimize": sardonyx.optimize,
    "native": sardonyx.native.compile,
    "profile": lambda model: profile(model, torch.zeros(4)),
    "compare": lambda model: compare(model, torch.zeros(4)),
    "bisect": lambda model: bisect(model, torch.zeros(4)),
    "reduce": lambda model: reduce(model, torch.zeros(4)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_reads_weights_outside_the_folder_of_a_model(command: str, kind: str, tmp_path: Path) -> None:
    model, out = secret_outside(tmp_path, kind), tmp_path / "out"
    done = run(*(word.format(model=model, out=out) for word in COMMANDS[command]))
    assert done.exit_code == 3, done.output
    refused = "is already exported" if command == "export" else "outside the model's folder"
    assert refused in done.output
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reader", READERS)
def test_no_function_reads_weights_outside_the_folder_of_a_model(reader: str, kind: str, tmp_path: Path) -> None:
    model = secret_outside(tmp_path, kind)
    with pytest.raises(SardonyxError, match="outside the model's folder"):
        READERS[reader](model)
    with pytest.raises(SardonyxError, match="outside the model's folder"):
        READERS[reader](ir.load(model))


def test_weights_outside_the_folder_are_found_in_attributes_branches_and_functions(tmp_path: Path) -> None:
    hidden = external("../secret.bin", name="c")
    constant = helper.make_node("Constant", [], ["c"], value=hidden)
    add = helper.make_node("Add", ["x", "c"], ["y"])
    yes = numpy_helper.from_array(np.array(True), "yes")
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [4])
    branch = helper.make_graph([helper.make_node("Add", ["x", "c"], ["y"])], "b", [], [y], [hidden])
    choice = helper.make_node("If", ["yes"], ["y"], then_branch=branch, else_branch=branch)
    opset = [helper.make_opsetid("", 21)]
    called = model_of(helper.make_node("F", ["x"], ["y"], domain="f"))
    called.functions.append(helper.make_function("f", "F", ["x"], ["y"], [constant, add], opset))
    called.opset_import.append(helper.make_opsetid("f", 1))
    for model in (model_of(constant, add), model_of(choice, constants=(yes,)), called):
        (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
        with pytest.raises(SardonyxError, match="outside the model's folder"):
            load_model(tmp_path / "model.onnx")


def test_constants_of_functions_are_read_in_the_folder_of_the_model_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    Path("weights.bin").write_bytes((WEIGHT + 100).tobytes())
    constant = helper.make_node("Constant", [], ["c"], value=external("weights.bin"))
    body = [constant, helper.make_node("Add", ["x", "c"], ["y"])]
    model = model_of(helper.make_node("F", ["x"], ["y"], domain="f"))
    model.functions.append(helper.make_function("f", "F", ["x"], ["y"], body, [helper.make_opsetid("", 21)]))
    model.opset_import.append(helper.make_opsetid("f", 1))
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(SardonyxError, match="does not exist"):
        load_model(folder / "model.onnx")
    (folder / "weights.bin").write_bytes(WEIGHT.tobytes())
    optimized = sardonyx.optimize(folder / "model.onnx")
    torch.testing.assert_close(optimized(torch.ones(4)), torch.from_numpy(WEIGHT) + 1)
    saved = onnx.load(optimized.save(tmp_path / "saved.onnx"), load_external_data=False)
    assert not any(x.external_data for f in saved.functions for node in f.node for a in node.attribute for x in [a.t])


def test_weights_beside_a_model_are_read_also_through_a_link_within_its_folder(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "1").write_bytes(WEIGHT.tobytes())
    (tmp_path / "w.bin").symlink_to("blobs/1")
    (tmp_path / "model.onnx").write_bytes(with_weight_at("w.bin").SerializeToString())
    torch.testing.assert_close(sardonyx.optimize(tmp_path / "model.onnx")(torch.ones(4)), torch.arange(4.0) + 1)


@pytest.mark.parametrize(
    ("location", "said"), [("none.bin", "does not exist"), ("short.bin", "too short"), ("*/_ORT_MEM_ADDR_/*", "exist")]
)
def test_a_weight_that_is_missing_or_cut_off_is_an_error(location: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "short.bin").write_bytes(WEIGHT.tobytes()[:-1])
    (tmp_path / "model.onnx").write_bytes(with_weight_at(location).SerializeToString())
    with pytest.raises(SardonyxError, match=said):
        load_model(tmp_path / "model.onnx")


# Order


def test_a_file_that_is_not_sorted_is_sorted_and_said_to_be(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    second, first = helper.make_node("Neg", ["h"], ["y"]), helper.make_node("Exp", ["x"], ["h"])
    (tmp_path / "model.onnx").write_bytes(model_of(second, first).SerializeToString())
    with caplog.at_level(logging.WARNING):
        program = sardonyx.optimize(tmp_path / "model.onnx")
    torch.testing.assert_close(program(torch.ones(4)), -torch.ones(4).exp())
    assert "not sorted topologically" in caplog.text
    assert [node.op_type for node in load_model(model_of(second, first)).graph] == ["Exp", "Neg"]


def test_a_branch_that_reads_what_comes_later_is_sorted() -> None:
    y = helper.make_tensor_value_info("z", TensorProto.FLOAT, [4])
    branch = helper.make_graph([helper.make_node("Neg", ["h"], ["z"])], "b", [], [y])
    choice = helper.make_node("If", ["yes"], ["y"], then_branch=branch, else_branch=branch)
    yes = numpy_helper.from_array(np.array(True), "yes")
    model = model_of(choice, helper.make_node("Exp", ["x"], ["h"]), constants=(yes,))
    assert [node.op_type for node in load_model(model).graph] == ["Exp", "If"]


def test_nodes_in_a_cycle_are_an_error() -> None:
    model = model_of(helper.make_node("Add", ["x", "b"], ["y"]), helper.make_node("Neg", ["y"], ["b"]))
    with pytest.raises(SardonyxError, match="cycle"):
        load_model(model)


# Inputs with a value


@pytest.mark.parametrize("version", [3, 10])
def test_an_input_that_has_a_value_is_a_constant(version: int, tmp_path: Path) -> None:
    model = model_of(helper.make_node("Add", ["x", "w"], ["y"]), constants=(numpy_helper.from_array(WEIGHT, "w"),))
    model.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [4]))
    model.ir_version = version
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    program = sardonyx.optimize(tmp_path / "model.onnx")
    assert list(program.inputs) == ["x"]
    torch.testing.assert_close(program(torch.ones(4)), torch.arange(4.0) + 1)
    done = run("run", tmp_path / "model.onnx")
    assert done.exit_code == 0, done.output


# Operators


@pytest.mark.parametrize(("domain", "op_type"), [("", "Unheard"), ("com.microsoft", "Unheard"), ("x.y", "Own")])
@pytest.mark.parametrize("words", [("optimize", "-o", "{out}.onnx"), ("native", "compile", "-o", "{out}")])
def test_an_operator_that_nobody_knows_is_told(
    words: tuple[str, ...], domain: str, op_type: str, tmp_path: Path
) -> None:
    nodes = helper.make_node(op_type, ["x"], ["h"], domain=domain), helper.make_node("Neg", ["h"], ["y"])
    model = model_of(*nodes)
    if domain:
        model.opset_import.append(helper.make_opsetid(domain, 1))
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    done = run(*(word.format(out=tmp_path / "out") for word in words), tmp_path / "model.onnx")
    assert "unknown operators" in done.output
    assert ".".join(filter(None, (domain, op_type))) in done.output
    assert done.output.count("unknown operators") == 1


def test_operators_of_onnx_of_onnxruntime_and_of_the_model_are_known(caplog: pytest.LogCaptureFixture) -> None:
    model = model_of(
        helper.make_node("Gelu", ["x"], ["h"], domain="com.microsoft"), helper.make_node("F", ["h"], ["y"], domain="f")
    )
    opset = [helper.make_opsetid("", 21)]
    model.functions.append(helper.make_function("f", "F", ["a"], ["b"], [helper.make_node("Neg", ["a"], ["b"])], opset))
    model.opset_import.extend([helper.make_opsetid("f", 1), helper.make_opsetid("com.microsoft", 1)])
    load_model(model)
    assert caplog.text == ""
