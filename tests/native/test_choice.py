"""Regions chosen by hand: what is legal becomes kernels, and what is not is an error that names what is in the way."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

import sardonyx
from sardonyx import native
from sardonyx.errors import OptionError
from tests.native.running import model_of, run, session_of

F = TensorProto.FLOAT
N = helper.make_node


def _model() -> onnx.ModelProto:
    """exp → neg → sums → tanh → join, which reads neg too."""
    nodes = [
        N("Exp", ["x"], ["e"], name="exp"),
        N("Neg", ["e"], ["n"], name="neg"),
        N("CumSum", ["n", "last"], ["p"], name="sums"),
        N("Tanh", ["p"], ["t"], name="tanh"),
        N("Add", ["t", "n"], ["j"], name="join"),
        N("Abs", ["j"], ["y"], name="abs"),
    ]
    return model_of(nodes, {"x": (F, ["n", 4])}, ["y"], {"last": np.array(1)})


def _groups(**choice: object) -> list[list[str]]:
    compiled = native.compile(_model(), **choice)
    feeds = {"x": np.random.default_rng(0).standard_normal((3, 4)).astype("f")}
    found, wanted = compiled.session().run(None, feeds)[0], run(session_of(_model()), feeds)[0]
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    return [list(taken.nodes) for taken in compiled.report.kernels]


def test_by_the_names_of_nodes() -> None:
    assert _groups(select=["tanh", "join"]) == [["tanh", "join"]]
    assert _groups(select={"exp", "abs"}) == [["exp"], ["abs"]]


def test_by_a_function_of_a_node() -> None:
    assert _groups(select=lambda node: node.op_type in ("Exp", "Neg", "CumSum")) == [["exp", "neg"]]


def test_all_takes_everything_that_can_be() -> None:
    assert sorted(name for group in _groups(select="all") for name in group) == ["abs", "exp", "join", "neg", "tanh"]


def test_by_the_values_that_bound_a_region() -> None:
    assert _groups(inputs=["p", "n"], outputs=["y"]) == [["tanh", "join", "abs"]]
    assert _groups(inputs=["x"], outputs=["n"]) == [["exp", "neg"]]


def test_by_the_module_that_nodes_were_exported_from() -> None:
    block = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Tanh())
    model = torch.nn.Sequential(block, torch.nn.Sigmoid(), torch.nn.LayerNorm(8)).eval()
    program = sardonyx.export(model, (torch.ones(2, 8),))
    for module, operators in (("0", ["LayerNormalization", "Tanh"]), ("0.1", ["Tanh"]), ("1", ["Sigmoid"])):
        report = native.compile(program, select=native.scope(module)).report
        assert [taken.operators for taken in report.kernels] == [operators]
        assert {left.why for left in report.left} == {"not selected"}


def _refused(what: str, **choice: object) -> str:
    with pytest.raises(OptionError, match=what) as caught:
        native.compile(_model(), **choice)
    assert caught.value.hint
    return caught.value.hint


def test_a_node_that_cannot_be_in_a_kernel_is_named() -> None:
    _refused("CumSum 'sums' cannot be in a kernel: CumSum has no lowering", select=["neg", "sums"])
    _refused("CumSum 'sums' cannot be in a kernel", inputs=["e"], outputs=["t"])


def test_a_node_that_stands_between_others_is_named() -> None:
    hint = _refused("'neg' and 'join' cannot be in one kernel: CumSum 'sums' is between them", select=["neg", "join"])
    assert hint == "select 'sums' too, or only one of the two"
    _refused("CumSum 'sums' is between them", inputs=["x", "t"], outputs=["j"])


def test_a_value_that_a_region_also_reads_is_named() -> None:
    _refused("also reads 'x'", inputs=["p"], outputs=["y"])


def test_names_that_are_not_there() -> None:
    assert _refused("no node 'tan'", select=["tan"]) == "did you mean 'tanh'?"
    _refused("no value 'z'", inputs=["z"], outputs=["y"])
    _refused("no node is between", inputs=["y"], outputs=["y"])


def test_wishes_that_contradict_each_other() -> None:
    _refused("both inputs= and outputs=", inputs=["x"])
    _refused("and no select=", select="all", inputs=["x"], outputs=["y"])
    _refused("select is 'tanh'", select="tanh")


def test_a_choice_of_nothing_is_an_error() -> None:
    _refused("no node of the graph is selected", select=lambda node: False)
    _refused("CumSum 'sums': CumSum has no lowering", select=lambda node: node.op_type == "CumSum")
