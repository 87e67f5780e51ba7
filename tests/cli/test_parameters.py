"""What is given on a command line: models in three forms, inputs of files or made up."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

from sardonyx.cli import _feeds
from sardonyx.cli._parameters import options_from
from sardonyx.cli._source import Inputs, find_source
from sardonyx.errors import MissingDependency, OptionError, SardonyxError
from sardonyx.options import Options

FACTORIES = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, x, scale=1.0):
        return self.layer(x) * scale

def alone(): return Net().eval()
def given(): return Net().eval(), (torch.ones(3, 4),)
def named(): return Net().eval(), (), {"x": torch.ones(3, 4), "scale": torch.tensor(2.0)}
def several(size): return Net()
def failing(): raise ValueError("no such weights")
def leaving(): raise SystemExit(7)
def surplus(): return Net().eval(), (torch.ones(3, 4), 2.0, 3.0)
def talking():
    print("weights are loaded")
    return given()
def lacking(): import a_package_that_is_not_there
instance = Net().eval()
pair = (instance, (torch.ones(2, 4),))
number = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "factories_of_a_test.py").write_text(FACTORIES)
    return str(tmp_path / "factories_of_a_test.py")


@pytest.mark.parametrize(("name", "args", "kwargs"), [("given", 1, []), ("named", 0, ["x", "scale"]), ("pair", 1, [])])
def test_a_factory_gives_a_module_and_its_arguments(file: str, name: str, args: int, kwargs: list[str]) -> None:
    found = find_source(f"{file}:{name}")
    assert (found.kind, found.name) == ("module", name)
    call = found.example()
    assert call is not None
    assert (len(call[0]), list(call[1])) == (args, kwargs)
    assert isinstance(found.module(), torch.nn.Module)


def test_the_weights_of_a_factory_are_the_same_each_time(file: str) -> None:
    weights = [find_source(f"{file}:given").module().layer.weight for _ in range(2)]
    assert torch.equal(*weights)


def test_the_working_directory_can_be_imported_from(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert find_source("factories_of_a_test:instance").example() is None


def test_the_inputs_of_a_factory_are_its_arguments(file: str) -> None:
    found = find_source(f"{file}:named")
    feeds = found.feeds(Inputs(), found.model(Options.of()))
    assert {name: (x.shape, x.max()) for name, x in feeds.items()} == {"x": ((3, 4), 1.0), "scale": ((), 2.0)}
    args, kwargs = found.call({"x": np.zeros((3, 4), "f"), "scale": np.float32(5)[None].reshape(())})
    assert (args, kwargs["x"].sum(), kwargs["scale"]) == ((), 0.0, 5.0)


@pytest.mark.parametrize(
    ("name", "what", "hint"),
    [
        ("givn", "has no 'givn'", "did you mean"),
        ("several", "needs the argument 'size'", "without arguments"),
        ("number", "is a int, not a module or a factory", "(module, args)"),
        ("failing", "failed: ValueError: no such weights", "--debug"),
        ("leaving", "failed: SystemExit: 7", "--debug"),
        ("surplus", "does not accept: too many positional arguments", "(module, args)"),
    ],
)
def test_a_factory_that_cannot_be_used_is_an_error(file: str, name: str, what: str, hint: str) -> None:
    with pytest.raises(SardonyxError) as caught:
        find_source(f"{file}:{name}").module()
    assert what in caught.value.what
    assert hint in str(caught.value.hint)


def test_what_a_factory_prints_is_not_on_stdout(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    find_source(f"{file}:talking").module()
    assert capsys.readouterr() == ("", "weights are loaded\n")


def test_a_mistake_in_a_file_is_told_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "mistaken.py").write_text("a = 1\ndef (:\n")
    with pytest.raises(SardonyxError) as caught:
        find_source(f"{tmp_path}/mistaken.py:model").module()
    assert caught.value.where == f"{tmp_path}/mistaken.py:2, code: def (:"


@pytest.mark.parametrize(("content", "said"), [(b"", "it is empty"), (b"no model", "cannot be read")])
def test_a_file_that_is_no_model_is_an_error(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "model.onnx").write_bytes(content)
    with pytest.raises(SardonyxError, match=said):
        find_source(str(tmp_path / "model.onnx")).model(Options.of())


def test_a_file_in_which_a_value_comes_from_nowhere_is_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2]) for name in "xy")
    graph = onnx.helper.make_graph([onnx.helper.make_node("Add", ["x", "z"], ["y"])], "part", [x], [y])
    onnx.save(onnx.helper.make_model(graph), str(tmp_path / "model.onnx"))
    with pytest.raises(SardonyxError, match="Add reads 'z', which no node produces"):
        find_source(str(tmp_path / "model.onnx")).model(Options.of())
    assert not caplog.records


def test_a_folder_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").mkdir()
    with pytest.raises(SardonyxError, match=r"model\.onnx is a folder"):
        find_source(str(tmp_path / "model.onnx"))


def test_a_factory_that_needs_a_package_says_which(file: str) -> None:
    with pytest.raises(MissingDependency, match="next: pip install a_package_that_is_not_there"):
        find_source(f"{file}:lacking").module()


def test_a_module_without_arguments_cannot_be_exported(file: str) -> None:
    with pytest.raises(SardonyxError, match=r"let it return \(module, args\)"):
        find_source(f"{file}:alone").model(Options.of())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nowhere.onnx", "there is no file nowhere.onnx"),
        ("nowhere.py:model", "there is no file nowhere.py"),
        ("no.such.package:model", "there is no module 'no'"),
        ("weights.pt", "weights without code"),
        ("model.py", "name the factory in it: model.py:factory"),
        ("model", "names no model"),
    ],
)
def test_a_text_that_names_no_model_is_an_error(text: str, said: str) -> None:
    with pytest.raises(SardonyxError) as caught:
        find_source(text).module()
    assert said in caught.value.what or said in str(caught.value.hint)
    assert caught.value.where is None


def test_a_saved_export_keeps_what_is_dynamic(file: str, tmp_path: Path) -> None:
    module, (args, _) = find_source(f"{file}:given").module(), find_source(f"{file}:given").example() or ((), {})
    program = torch.export.export(module, args, dynamic_shapes=({0: torch.export.Dim("batch")}, None)[:1])
    torch.export.save(program, tmp_path / "net.pt2")
    found = find_source(str(tmp_path / "net.pt2"))
    model = found.model(Options.of())
    (dim, width) = model.graph.inputs[0].shape or (0, 0)
    assert (found.kind, isinstance(dim, ir.SymbolicDim), width) == ("pt2", True, 4)
    assert found.feeds(Inputs(sizes={str(dim): 5}), model)["x"].shape == (5, 4)
    torch.testing.assert_close(found.module()(*args), module(*args))


def test_a_file_that_is_no_export_is_an_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "net.pt2").write_bytes(b"no zip")
    with pytest.raises(SardonyxError, match=r"cannot be read by torch.export.load"):
        find_source(str(tmp_path / "net.pt2")).module()
    assert capfd.readouterr().err == ""


# Inputs


def model_of(*inputs: tuple[str, str, list[Any]], nodes: str = "") -> ir.Model:
    """A model that takes these, and does with them what the text says."""
    listed = ", ".join(f"{dtype}[{','.join(map(str, dims))}] {name}" for name, dtype, dims in inputs)
    body = nodes or f"y = Identity({inputs[0][0]})"
    return ir.from_onnx_text(f'<ir_version: 10, opset_import: ["" : 21]> g ({listed}) => (float[N] y) {{ {body} }}')


def test_sizes_are_those_that_are_told_and_else_one() -> None:
    model = model_of(("x", "float", ["batch", "tokens", 3]), ("m", "bool", ["batch"]), ("p", "int64", ["tokens"]))
    feeds = _feeds.random_inputs(model, {"batch": 4}, 0)
    assert {name: x.shape for name, x in feeds.items()} == {"x": (4, 1, 3), "m": (4,), "p": (1,)}
    assert feeds["m"].all()


def test_a_size_that_is_computed_follows_from_its_names() -> None:
    model = model_of(("x", "float", ["N"]))
    model.graph.inputs[0].shape = ir.Shape(["2*tokens + 1", "batch"])
    assert _feeds.random_inputs(model, {"tokens": 3}, 0)["x"].shape == (7, 1)


def test_the_same_seed_draws_the_same_inputs() -> None:
    model = model_of(("x", "float", [100]))
    first, same, other = (_feeds.random_inputs(model, {}, seed)["x"] for seed in (1, 1, 2))
    assert (first == same).all()
    assert (first != other).any()


def test_token_ids_stay_below_the_vocabulary() -> None:
    nodes = "c = Cast<to=7>(ids)\n e = Gather(table, c)\n y = Identity(e)"
    model = model_of(("ids", "int32", [500]), nodes=nodes.replace("table", "w"))
    table = ir.Value(name="w", shape=ir.Shape([7, 2]), const_value=ir.tensor(np.ones((7, 2), "f")))
    gather = next(node for node in model.graph if node.op_type == "Gather")
    gather.replace_input_with(0, table)
    model.graph.register_initializer(table)
    assert set(_feeds.random_inputs(model, {}, 0)["ids"]) == set(range(7))


def test_a_name_of_a_size_that_is_not_there_is_an_error() -> None:
    with pytest.raises(OptionError, match="did you mean 'batch'"):
        _feeds.random_inputs(model_of(("x", "float", ["batch"])), {"bach": 2}, 0)


@pytest.mark.parametrize("size", [10**17, 0])
def test_sizes_of_which_nothing_can_be_made_are_an_error(size: int) -> None:
    model = model_of(("x", "float", ["N"]))
    model.graph.inputs[0].shape = ir.Shape(["batch - 1", "batch", 1000])
    with pytest.raises(OptionError, match="inputs of these sizes cannot be created"):
        _feeds.random_inputs(model, {"batch": size}, 0)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_a_file_of_inputs_is_read_as_it_was_written(tmp_path: Path, suffix: str) -> None:
    if suffix == ".safetensors":
        pytest.importorskip("safetensors", reason="needs the package safetensors")
    model = model_of(("x", "float", ["batch", 2]), ("n", "int64", ["batch"]))
    given = {"n": torch.arange(3), "x": torch.randn(3, 2)}
    _feeds.write_arrays(tmp_path / f"inputs{suffix}", given)
    found = _feeds.read_inputs(tmp_path / f"inputs{suffix}", model)
    assert list(found) == ["x", "n"]
    assert all((found[name] == given[name].numpy()).all() for name in given)


def test_half_precision_that_numpy_lacks_goes_to_safetensors(tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="needs the package safetensors")
    given = {"x": torch.randn(3).bfloat16()}
    with pytest.raises(SardonyxError, match=r"next: use \.safetensors"):
        _feeds.write_arrays(tmp_path / "x.npz", given)
    _feeds.write_arrays(tmp_path / "x.safetensors", given)
    found = _feeds.read_inputs(tmp_path / "x.safetensors", model_of(("x", "bfloat16", [3])))["x"]
    assert found.dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"x": np.ones((2, 2), "d")}, "x is float64 in inputs.npz, but the model takes float32"),
        ({"x": np.ones((2, 3), "f")}, r"x is \[2, 3\] in inputs.npz, but the model takes \[batch, 2\]"),
        ({"x": np.ones((2, 3), "f")}, "makes a fixed size dynamic"),
        ({"x": np.ones(2, "f")}, "change the number of dimensions"),
        ({"x": np.ones((2, 2), "f"), "n": np.ones(3, "q")}, "sizes with the same name must be equal"),
        ({"X": np.ones((2, 2), "f")}, "which is not an input of the model"),
        ({}, "lacks the input 'x'"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(tmp_path: Path, arrays: dict[str, Any], said: str) -> None:
    np.savez("inputs.npz", **{"n": np.ones(2, "q"), **arrays})
    with pytest.raises(SardonyxError, match=said):
        _feeds.read_inputs(Path("inputs.npz"), model_of(("x", "float", ["batch", 2]), ("n", "int64", ["batch"])))


def test_a_missing_package_is_told_with_the_line_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(MissingDependency, match="next: pip install safetensors"):
        _feeds.read_inputs(tmp_path / "x.safetensors", model_of(("x", "float", [1])))


def test_options_are_read_as_what_they_are() -> None:
    found = options_from("reference", {"opset": "21", "native": "false", "optimize": "none", "cache_dir": "12"})
    assert (found.engine, found.opset, found.native, found.optimize, found.cache_dir) == (
        "reference",
        21,
        False,
        "none",
        "12",
    )
    with pytest.raises(OptionError, match="did you mean 'opset'"):
        options_from(None, {"opsett": "21"})
