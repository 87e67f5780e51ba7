"""An operator in ONNX and in ONNX Runtime: checked, its shapes told, exported, run where there is no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

import sardonyx

from .operators import faulty, filled, mix, model, node, positive, run, scale, session, value, weigh

X = torch.linspace(-3, 3, 24).reshape(4, 6)
UNKNOWN = "unknown"


def shapes(proto: onnx.ModelProto) -> list[Any]:
    """What ONNX's own shape inference says of the results: sizes, names, None, or that it cannot tell."""
    told = onnx.shape_inference.infer_shapes(proto, strict_mode=True)
    return [_shape(output.type.tensor_type) for output in told.graph.output]


def _shape(kind: Any) -> Any:
    if not kind.HasField("shape"):
        return UNKNOWN
    return [dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None for dim in kind.shape.dim]


def scaling(shape: Any, dtype: int = TensorProto.FLOAT, **attributes: Any) -> onnx.ModelProto:
    nodes = [node(scale(), ["x"], ["y"], **attributes)]
    return model(nodes, [value("x", shape, dtype)], [value("y", None, dtype)])


# What is known of it


def test_onnx_has_its_schema() -> None:
    mix()
    assert onnx.defs.get_schema("Mix", 1, "tried").domain == "tried"
    assert [(i.name, i.option.name) for i in mix().schema.inputs] == [("bias", "Optional"), ("more", "Variadic")]
    assert {name: a.required for name, a in mix().schema.attributes.items()}["by"]
    assert mix().schema.attributes["offsets"].default_value.floats == [0.5]


@pytest.mark.parametrize(
    ("attributes", "inputs", "message"),
    [
        ({}, ["", "x"], "Required attribute 'by' is missing"),
        ({"by": 1.5}, ["", "x"], "Mismatched attribute type"),
        ({"by": 1, "unheard": 3}, ["", "x"], "Unrecognized attribute: unheard"),
        ({"by": 1}, [], "has input size 0"),
    ],
)
def test_the_checker_refuses_what_does_not_fit(attributes: Any, inputs: list[str], message: str) -> None:
    nodes = [node(mix(), inputs, ["a", "b", "c"], **attributes)]
    with pytest.raises(onnx.checker.ValidationError, match=message):
        onnx.checker.check_model(model(nodes, [value("x", [3])], [value("a", [3])]))


@pytest.mark.parametrize(
    ("shape", "told", "in_session"),
    [
        ([2, 3], [2, 3], [2, 3]),
        (["n", 3], ["n", 3], ["n", 3]),
        (["n", "m", "n"], ["n", "m", "n"], ["n", "m", "n"]),
        ([], [], []),
        (None, UNKNOWN, []),  # which is also how a session shows that it does not know
    ],
)
def test_sizes_are_told_by_their_names_and_never_made_up(shape: Any, told: Any, in_session: Any) -> None:
    proto = scaling(shape)
    assert shapes(proto) == [told]
    assert session(proto).get_outputs()[0].shape == in_session


def test_a_tensor_of_unknown_rank_runs_with_any() -> None:
    made = session(scaling(None))
    for x in (X, X[0], X[None], torch.tensor(3.0)):
        assert np.array_equal(made.run(None, {"x": x.numpy()})[0], x.numpy() * 2)


def test_a_size_that_only_the_kernel_knows_has_no_number() -> None:
    proto = model([node(positive(), ["x"], ["y"])], [value("x", [5])], [value("y")])
    [told] = shapes(proto)
    assert len(told) == 1
    assert not isinstance(told[0], int)
    assert isinstance(session(proto).get_outputs()[0].shape[0], str)


def test_what_the_rule_refuses_shape_inference_refuses() -> None:
    proto = model([node(faulty(), ["x"], ["y", "z"], how="", size=-2)], [value("x", [5])], [value("y"), value("z")])
    with pytest.raises(onnx.shape_inference.InferenceError, match="tried::Faulty: its shape rule gives y the size -2"):
        onnx.shape_inference.infer_shapes(proto, strict_mode=True)


def test_tensors_of_a_wrong_type_are_refused_by_shape_inference() -> None:
    proto = model([node(weigh(), ["x", "w"], ["y"])], [value("x", [2]), value("w", [2], 11)], [value("y")])
    with pytest.raises(onnx.shape_inference.InferenceError, match="float"):
        onnx.shape_inference.infer_shapes(proto, strict_mode=True)


# Running it

NUMPY = {"float32": 1, "float64": 11, "float16": 10, "int64": 7, "bool": 9}


@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("shape", [(4, 3), (0, 3), ()])
def test_a_session_gives_what_torch_gives(dtype: str, shape: tuple[int, ...]) -> None:
    x = torch.randint(-3, 4, shape).to(getattr(torch, dtype))
    [result] = run(scaling(None, NUMPY[dtype], factor=3.0), x)
    assert torch.equal(result, scale()(x, factor=3.0))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("count", [1, 2, 40])
def test_optional_tensors_lists_and_attributes(bias: bool, count: int) -> None:
    names = [f"m{i}" for i in range(count)]
    attributes = {"by": 3, "flip": 1, "axes": [4, 9], "offsets": [1.0, 0.25], "mode": "sum"}
    nodes = [node(mix(), ["b" if bias else "", *names], ["s", "f", "c"], **attributes)]
    inputs = [value(name, ["n"]) for name in ["b", *names]]
    proto = model(nodes, inputs, [value("s"), value("f"), value("c", None, 7)])
    given = [torch.randn(5) for _ in range(count + 1)]
    more = {"flip": True, "axes": [4, 9], "offsets": [1.0, 0.25]}
    expected = mix()(given[0] if bias else None, 3, given[1:], **more)
    torch.testing.assert_close(run(proto, *given), list(expected))


@pytest.mark.parametrize("offsets", [[], [2.0]])
def test_an_empty_list_is_not_its_default(offsets: list[float]) -> None:
    listed = onnx.AttributeProto(name="offsets", type=onnx.AttributeProto.FLOATS, floats=offsets)
    nodes = [node(mix(), ["", "x"], ["s", "f", "c"], by=1, offsets=listed)]
    found = run(model(nodes, [value("x", [2])], [value("s")]), torch.zeros(2))
    assert found[0].tolist() == [sum(offsets)] * 2


def test_without_any_tensor() -> None:
    proto = model([node(filled(), [], ["y"], sizes=[2, 2])], [], [value("y")])
    assert shapes(proto) == [[2, 2]]
    assert run(proto)[0].tolist() == [[0.0, 1.0], [2.0, 3.0]]


def branch(name: str, factor: float) -> onnx.GraphProto:
    nodes = [node(scale(), ["x"], [name], factor=factor), node(weigh(), [name, "w"], [f"{name}w"])]
    return helper.make_graph(nodes, name, [], [value(f"{name}w")])


def test_inside_of_the_branches_of_a_condition() -> None:
    chosen = helper.make_node("If", ["c"], ["y"], then_branch=branch("a", 2.0), else_branch=branch("b", -1.0))
    proto = model([chosen], [value("c", [], 9), value("x", [2, 3]), value("w", [3])], [value("y")])
    x, w = torch.randn(2, 3), torch.randn(3)
    for condition, factor in ((True, 2.0), (False, -1.0)):
        torch.testing.assert_close(run(proto, torch.tensor(condition), x, w), [x * factor * w])


def test_inside_of_a_loop() -> None:
    body = helper.make_graph(
        [node(scale(), ["v"], ["twice"]), helper.make_node("Identity", ["go"], ["on"])],
        "body",
        [value("i", [], 7), value("go", [], 9), value("v", ["n"])],
        [value("on", [], 9), value("twice", ["n"])],
    )
    loop = helper.make_node("Loop", ["times", "", "x"], ["y"], body=body)
    proto = model([loop], [value("times", [], 7), value("x", ["n"])], [value("y")])
    assert run(proto, torch.tensor(5), torch.ones(2))[0].tolist() == [32.0, 32.0]


def test_with_a_torch_that_is_not_there(tmp_path: Path) -> None:
    """A library needs onnxruntime and nothing else."""
    onnx.save(scaling(["n"], factor=4.0), tmp_path / "scale.onnx")
    program = f"""
import sys
sys.modules["torch"] = None
import numpy, onnxruntime
options = onnxruntime.SessionOptions()
options.register_custom_ops_library({str(scale().library)!r})
session = onnxruntime.InferenceSession({str(tmp_path / "scale.onnx")!r}, options)
print(session.run(None, {{"x": numpy.ones(3, numpy.float32)}})[0].tolist())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[4.0, 4.0, 4.0]", done.stderr


# From torch


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))
        self.scale, self.weigh, self.mix = scale(), weigh(), mix()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total, _, counts = self.mix(None, 2, [self.weigh(x, self.weight), self.scale(x, factor=0.25)], axes=[5])
        return total + 1, counts


def test_exported_it_is_one_node_and_runs_with_any_size(tmp_path: Path) -> None:
    module = Module()
    program = sardonyx.export(module, (X,), dynamic_shapes=({0: "n"},))
    operators = [n.op_type for n in program.model.graph if n.domain == "tried"]
    assert sorted(operators) == ["Mix", "Scale", "Weigh"]
    program.save(tmp_path / "module.onnx")
    proto = onnx.load(tmp_path / "module.onnx")
    onnx.checker.check_model(proto, full_check=True)
    for x in (X, torch.randn(9, 6)):
        torch.testing.assert_close(program(x), module(x))
        torch.testing.assert_close(tuple(run(proto, x)), module(x))


def test_torchs_exporter_takes_the_translations() -> None:
    module = Module()
    table = {**scale().translations, **weigh().translations, **mix().translations}
    made = torch.onnx.export(
        module, (X,), dynamo=True, custom_translation_table=table, dynamic_shapes=({0: "n"},), verbose=False
    )
    assert made is not None
    x = torch.randn(7, 6)
    torch.testing.assert_close(tuple(run(made.model_proto, x)), module(x))


def test_an_attribute_that_a_file_cannot_hold_is_refused() -> None:
    twice = scale()
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="overflows a float32 attribute of ONNX"):
        torch.compile(lambda x: twice(x, factor=1e200), backend="sardonyx", options={"fallback": "error"})(X)


def test_two_libraries_of_a_domain_cannot_be_in_one_plain_session() -> None:
    """Which is why sessions that sardonyx makes have one library for each domain."""
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(scale().library))
    options.register_custom_ops_library(str(weigh().library))
    with pytest.raises(Exception, match="Domain already set in registry"):
        onnxruntime.InferenceSession(scaling([2]).SerializeToString(), options)


# Declared anew


def test_declared_anew_the_new_one_counts_in_torch_in_onnx_and_in_sessions_made_afterwards() -> None:
    first = sardonyx.custom_op(
        "anew::Op(Tensor<float32> x) -> Tensor<float32>",
        cpp="void Op(In<float> x, Out<float> y, Parallel) { y[0] = x[0] + 1; }",
    )
    proto = model([node(first, ["x"], ["y"])], [value("x", [1])], [value("y")])
    before = session(proto)
    second = sardonyx.custom_op(
        "anew::Op(Tensor<float32> x, *, int by=10) -> Tensor<float32>",
        cpp="void Op(In<float> x, Out<float> y, int64_t by, Parallel) { y[0] = x[0] + by; }",
    )
    one = np.ones(1, np.float32)
    assert before.run(None, {"x": one})[0] == 2
    assert session(proto).run(None, {"x": one})[0] == 11
    assert second(torch.ones(1)) == torch.ops.anew.Op(torch.ones(1)) == 11
    assert onnx.defs.get_schema("Op", 1, "anew").attributes.keys() == {"by"}
    with pytest.raises(RuntimeError, match="anew::Op was closed or redeclared"):
        first(torch.ones(1))
    assert torch.compile(lambda x: second(x, by=4), backend="sardonyx")(torch.ones(1)) == 5
    second.close()
    assert not hasattr(torch.ops.anew, "Op")
    assert not onnx.defs.has("Op", "anew")


def test_a_declaration_that_fails_leaves_the_one_before() -> None:
    first = sardonyx.custom_op("anew::Kept(Tensor x) -> Tensor", python=lambda x: x + 1)
    with pytest.raises(sardonyx.SardonyxError):
        sardonyx.custom_op("anew::Kept(Tensor x) -> Tensor", cpp="this is no C++\n")
    assert first(torch.ones(1)) == torch.ops.anew.Kept(torch.ones(1)) == 2
    first.close()
