"""Which nodes become kernels, and that what is around them stays right."""

from __future__ import annotations

import random

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from sardonyx import native
from sardonyx.native.partition import Library, plan_kernels
from sardonyx.native.select import select
from sardonyx.native.targets import TARGETS
from tests.native.running import Together, compare, model_of, operators_in, run, session_of

F = TensorProto.FLOAT
N = helper.make_node


def _x(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _groups(model: onnx.ModelProto, choice: object = "auto") -> list[list[str]]:
    return plan_kernels(ir.from_proto(model), choice=choice).groups


CHAIN = [
    N("Exp", ["x"], ["a"], name="first"),
    N("Neg", ["a"], ["b"], name="second"),
    N("Abs", ["b"], ["y"], name="third"),
]


# By hand


def test_auto_leaves_a_single_operator_alone_and_all_takes_it() -> None:
    model = model_of([N("Exp", ["x"], ["y"])], {"x": (F, [4, 5])}, ["y"])
    assert _groups(model) == []
    assert _groups(model, "all") == [["Exp"]]


def test_nodes_are_chosen_by_name_or_by_a_function() -> None:
    model = model_of(CHAIN, {"x": (F, [4, 5])}, ["y"])
    assert _groups(model, ["first", "second"]) == [["Exp", "Neg"]]
    assert _groups(model, ["first", "third"]) == [["Exp"], ["Abs"]]
    assert _groups(model, lambda node: node.op_type in ("Neg", "Abs")) == [["Neg", "Abs"]]
    with pytest.raises(ValueError, match="no node 'fourth'"):
        _groups(model, ["fourth"])


def test_a_node_that_was_wanted_and_is_refused_says_why() -> None:
    nodes = [
        N("Exp", ["x"], ["a"], name="e"),
        N("Det", ["a"], ["b"], name="d"),
        N("Abs", ["b"], ["y"], name="f"),
    ]
    found = plan_kernels(ir.from_proto(model_of(nodes, {"x": (F, [3, 4, 4])}, ["y"])), choice="all")
    assert found.groups == [["Exp"], ["Abs"]]
    assert {node.name: why for node, why in found.rejected.items()} == {"d": "Det has no lowering"}


def test_old_opsets_are_refused() -> None:
    model = model_of([N("Softmax", ["x"], ["y"], axis=1)], {"x": (F, [2, 3, 4])}, ["y"], opset=11)
    (why,) = select(ir.from_proto(model).graph, "all").rejected.values()
    assert "opset 11" in why


# What is around a kernel


def test_outputs_used_outside_are_kept() -> None:
    nodes = [
        *(N("Exp", ["x"], ["a"]), N("Neg", ["a"], ["b"]), N("Abs", ["b"], ["c"]), N("MatMul", ["b", "w"], ["d"])),
        *(N("Add", ["c", "d"], ["e"]), N("Tanh", ["e"], ["y"])),
    ]
    model = model_of(nodes, {"x": (F, [5, 5]), "w": (F, [5, 5])}, ["y", "a", "c"])
    compare(model, {"x": _x(5, 5), "w": _x(5, 5, seed=1)}, choice="auto")


def test_a_graph_output_in_the_middle_and_one_used_twice() -> None:
    nodes = [
        N("Exp", ["x"], ["a"]),
        N("Mul", ["a", "a"], ["b"]),
        N("Add", ["b", "a"], ["y"]),
        N("Identity", ["b"], ["z"]),
    ]
    compare(model_of(nodes, {"x": (F, ["n", 7])}, ["b", "y", "z", "a"]), {"x": _x(9, 7)})


def test_an_input_that_is_also_an_output() -> None:
    nodes = [N("Exp", ["x"], ["a"]), N("Neg", ["a"], ["y"])]
    compare(model_of(nodes, {"x": (F, [6])}, ["y", "x"]), {"x": _x(6)})


def test_a_result_that_is_only_a_view_of_an_input() -> None:
    nodes = [N("Transpose", ["x"], ["t"], perm=[1, 0]), N("Identity", ["t"], ["y"]), N("Exp", ["t"], ["z"])]
    compare(model_of(nodes, {"x": (F, [6, 35])}, ["y", "z"]), {"x": _x(6, 35)})


def test_the_same_result_twice() -> None:
    nodes = [
        N("Exp", ["x"], ["a"]),
        N("Identity", ["a"], ["y"]),
        N("Identity", ["a"], ["z"]),
        N("Softmax", ["a"], ["s"]),
    ]
    compare(model_of(nodes, {"x": (F, [6, 35])}, ["y", "z", "s"]), {"x": _x(6, 35)})


def test_constants_larger_than_one_number_stay_initializers() -> None:
    model = model_of([*CHAIN[:2], N("Mul", ["b", "w"], ["y"])], {"x": (F, [4, 5])}, ["y"], {"w": _x(5)})
    compare(model, {"x": _x(4, 5)})


def test_an_initializer_that_is_an_input_may_be_given_another_value() -> None:
    model = model_of([*CHAIN[:2], N("Mul", ["b", "w"], ["y"])], {"x": (F, [4]), "w": (F, [1])}, ["y"])
    model.graph.initializer.append(numpy_helper.from_array(np.array([2.0], np.float32), "w"))
    compare(model, {"x": _x(4), "w": np.array([3.0], np.float32)})


def test_a_constant_node_is_a_constant() -> None:
    axes = N("Constant", [], ["axes"], value=numpy_helper.from_array(np.array([1])))
    half = N("Constant", [], ["half"], value=numpy_helper.from_array(np.array(0.5, np.float32)))
    nodes = [axes, half, N("Mul", ["x", "half"], ["a"]), N("ReduceSum", ["a", "axes"], ["y"])]
    model = model_of(nodes, {"x": (F, [4, 5])}, ["y"])
    assert _groups(model) == [["Mul", "ReduceSum"]]
    compare(model, {"x": _x(4, 5)}, choice="auto")


def test_minus_zero_is_not_zero() -> None:
    zeros = {"p": np.array(0.0, np.float32), "m": np.array(-0.0, np.float32)}
    nodes = [N("Div", ["x", "p"], ["y"]), N("Div", ["x", "m"], ["z"])]
    compare(model_of(nodes, {"x": (F, [4])}, ["y", "z"], zeros), {"x": np.ones(4, np.float32)})


@pytest.mark.parametrize("op", ["Div", "Mod"])
def test_integers_are_divided_in_a_kernel_only_by_constants_without_zeros(op: str) -> None:
    def model(**divisor: np.ndarray) -> onnx.ModelProto:
        kind = TensorProto.INT32
        inputs = {"x": (kind, [3]), **({} if divisor else {"by": (kind, [3])})}
        return model_of([N(op, ["x", "by"], ["y"])], inputs, ["y"], divisor)

    assert _groups(model(by=np.array([1, -2, 3], np.int32)), "all") == [[op]]
    for unsafe in (model(), model(by=np.array([1, 0, 3], np.int32))):
        assert _groups(unsafe, "all") == []
        on_cuda = plan_kernels(ir.from_proto(unsafe), choice="all", library=Library(TARGETS["cuda"]))
        assert on_cuda.groups == [[op]]  # as in torch, no error there


# Control flow


def test_nodes_in_branches_are_left_alone_and_may_use_what_kernels_compute() -> None:
    def branch(name: str, op: str) -> onnx.GraphProto:
        nodes = [N(op, ["b"], [f"{name}1"]), N("Neg", [f"{name}1"], [f"{name}2"])]
        return helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(f"{name}2", F, [4, 5])])

    nodes = [
        *(N("Exp", ["x"], ["a"]), N("Sqrt", ["a"], ["b"])),
        N("If", ["c"], ["d"], then_branch=branch("t", "Tanh"), else_branch=branch("e", "Abs")),
        *(N("Add", ["d", "a"], ["e"]), N("Sigmoid", ["e"], ["y"])),
    ]
    model = model_of(nodes, {"x": (F, [4, 5]), "c": (TensorProto.BOOL, [])}, ["y"])
    together = Together("auto")
    together.add("m", model)
    together.build(quickly=True)
    assert operators_in(together.model("m")) == ["kernel", "If", "kernel"]
    for given in (True, False):
        feeds = {"x": _x(4, 5), "c": np.array(given)}
        np.testing.assert_allclose(together.run("m", feeds)[0], run(session_of(model), feeds)[0], rtol=1e-5)


# Cycles


def _tangle(seed: int) -> onnx.ModelProto:
    """A graph in which every third node cannot be in a kernel."""
    rng = random.Random(seed)
    names = ["x"]
    nodes = []
    for i in range(rng.randint(8, 20)):
        op = rng.choice(["Softsign", "Add", "Mul", "MatMul", "Sub"])
        count = 1 if op == "Softsign" else 2
        nodes.append(N(op, [rng.choice(names[-6:]) for _ in range(count)], [f"v{i}"], name=f"n{i}"))
        names.append(f"v{i}")
        if op in ("Add", "Sub", "Mul", "MatMul"):
            nodes.append(N("Softsign", [names[-1]], [f"t{i}"], name=f"m{i}"))
            names.append(f"t{i}")
    read = {name for node in nodes for name in node.input}
    outputs = [name for name in names[1:] if name not in read]
    return model_of(nodes, {"x": (F, [3, 3])}, outputs)


def test_groups_never_wait_for_each_other() -> None:
    together, models = Together("auto"), {}
    for seed in range(12):
        models[f"{seed}"] = _tangle(seed)
        if together.add(f"{seed}", models[f"{seed}"]) is not None:
            del models[f"{seed}"]
    together.build(quickly=True)
    assert len(models) > 8
    assert sum(len(together.groups(name)) > 2 for name in models) > 4
    for name, model in models.items():
        onnx.checker.check_model(together.model(name))
        feeds = {"x": _x(3, 3)}
        for a, b in zip(together.run(name, feeds), run(session_of(model), feeds), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_what_is_saved_is_told() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> g (float[n,100] x) => (float[n,100] z) {
        y = Exp(x) t = Transpose<perm = [0, 1]>(y) a = Add(t, y) z = Tanh(a) }"""
    )
    (kernel,) = native.generate(model).report.kernels
    assert kernel.launches_saved == 2, "moving elements is no launch that is saved"
    assert kernel.bytes_saved == (3 + 2) * 64 * 100 * 4, "y is written once and read twice, a once; n is taken for 64"


def test_a_lone_operator_saves_nothing_unless_onnxruntime_is_slow_at_it() -> None:
    alone = {
        "y = Softmax(x)": 0,
        "y = com.microsoft.SkipSimplifiedLayerNormalization(x, x, w)": 1,
        "y = MatMul(x, m)": 1,
    }
    for body, kernels in alone.items():
        model = onnx.parser.parse_model(
            f"""<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>
            g (float[1,32] x) => (float[1,32] y) {{ {body} }}"""
        )
        weights = {"w": np.ones(32, np.float32), "m": np.ones((32, 32), np.float32)}
        model.graph.initializer.extend(
            onnx.numpy_helper.from_array(array, name) for name, array in weights.items() if f"{name})" in body
        )
        assert len(native.generate(model).report.kernels) == kernels, body
