"""Operators of com.microsoft that transformers consist of, Einsum and ConvTranspose, beside onnxruntime's own kernels.

onnx has node tests of Attention, Einsum and ConvTranspose, which test_node_tests.py runs; here are the cases it lacks.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

from sardonyx import native
from sardonyx.native.load_model import load_inferred_model
from sardonyx.native.partition import plan_kernels
from tests.native.running import Together, difference, run, session_of
from tests.native.transformer_cases import (
    CASES,
    CROSS,
    HEADS,
    HIDDEN,
    MICROSOFT,
    PAST,
    SELF,
    Inputs,
    integers,
    model_of_case,
    reals,
)

_OTHERS: dict[str, type] = {"float64": np.float64, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
_RETYPED = [
    *(("attention_past", kind) for kind in _OTHERS),
    ("multi_head_mask", "float16"),
    ("embed_sum", "bfloat16"),
    ("einsum ij,jk,kl->il", "float64"),
    ("transposed groups", "bfloat16"),
]


@pytest.fixture(scope="module")
def together() -> Together:
    """All cases in one library; types and sizes of results are inferred, as nothing in the models tells them."""
    made = Together()
    for case in CASES:
        assert made.add(case, ir.to_proto(load_inferred_model(model_of_case(case)[0]))) is None, case
    for case, kind in _RETYPED:
        proto = ir.to_proto(load_inferred_model(model_of_case(case, _OTHERS[kind])[0]))
        assert made.add(f"{case} of {kind}", proto) is None, (case, kind)
    assert made.add("bert", ir.to_proto(load_inferred_model(_bert()))) is None
    made.build(quickly=True)
    return made


@pytest.mark.parametrize("case", CASES)
def test_it_computes_what_onnxruntime_does(together: Together, case: str) -> None:
    model, feeds = model_of_case(case)
    for found, wanted in zip(together.run(case, feeds), run(session_of(model), feeds), strict=True):
        assert difference(found, wanted) is None


@pytest.mark.parametrize(("case", "kind"), _RETYPED)
def test_other_real_numbers_give_what_float32_does(together: Together, case: str, kind: str) -> None:
    _, feeds = model_of_case(case, _OTHERS[kind])
    rounded = {name: x.astype(np.float32) if x.dtype.kind in "fV" else x for name, x in feeds.items()}
    expected = run(session_of(model_of_case(case)[0]), rounded)
    for found, wanted in zip(together.run(f"{case} of {kind}", feeds), expected, strict=True):
        coarse = {"float64": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}[kind]
        assert difference(found, wanted.astype(found.dtype), tolerance=coarse) is None


def test_a_word_below_zero_is_an_error_as_it_is_in_onnxruntime(together: Together) -> None:
    _, feeds = model_of_case("embed")
    with pytest.raises(Exception, match="an index is out of range"):
        together.run("embed", {**feeds, "ids": feeds["ids"] - 9})


# What cannot be a kernel says why


@pytest.mark.parametrize(
    ("case", "inputs", "why"),
    [
        ("multi_head", {"q": reals(2, 5, 3, 3, 8)}, "packed"),
        ("attention_mask", {**SELF, "m": integers(4)}, "a mask of sizes"),
        ("multi_head", {**CROSS, **dict.fromkeys(("b", "m", "a")), **PAST, "n": integers(1)}, "shared buffer"),
    ],
)
def test_what_has_no_lowering_is_refused_with_a_reason(case: str, inputs: Inputs, why: str) -> None:
    op, _, outputs, attributes = CASES[case]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CASES, "refused", (op, inputs, outputs, attributes))
        refused = plan_kernels(load_inferred_model(model_of_case("refused")[0]), choice="all").rejected
    assert any(why in reason for reason in refused.values()), refused


# A BERT of onnxruntime's fused operators


def _bert(layers: int = 1) -> onnx.ModelProto:
    """As onnxruntime's transformer optimiser writes it, without a type or a size of anything inside."""
    nodes, weights = [], []
    draw = np.random.default_rng(1)

    def weight(name: str, *shape: int) -> str:
        weights.append(numpy_helper.from_array((draw.standard_normal(shape) * 0.2).astype(np.float32), name))
        return name

    def node(op: str, inputs: list[str], outputs: list[str], **attributes: object) -> None:
        domain = "" if op == "MatMul" else MICROSOFT
        nodes.append(helper.make_node(op, inputs, outputs, f"{op}_{len(nodes)}", domain=domain, **attributes))

    tables = [weight(n, rows, HIDDEN) for n, rows in (("words", 9), ("places", 16), ("kinds", 2))]
    norm = [weight("g0", HIDDEN), weight("b0", HIDDEN)]
    node("EmbedLayerNormalization", ["ids", "segments", *tables, *norm, "mask"], ["h0", "lengths"])
    for i in range(layers):
        joint = [weight(f"qkv{i}", HIDDEN, 3 * HIDDEN), weight(f"qkv_bias{i}", 3 * HIDDEN)]
        node("Attention", [f"h{i}", *joint, "lengths"], [f"a{i}"], num_heads=HEADS)
        node("MatMul", [f"a{i}", weight(f"o{i}", HIDDEN, HIDDEN)], [f"p{i}"])
        norm = [weight(f"{n}1{i}", HIDDEN) for n in ("gamma", "beta", "bias")]
        node("SkipLayerNormalization", [f"p{i}", f"h{i}", *norm], [f"n{i}"])
        node("MatMul", [f"n{i}", weight(f"up{i}", HIDDEN, 4 * HIDDEN)], [f"u{i}"])
        node("BiasGelu", [f"u{i}", weight(f"up_bias{i}", 4 * HIDDEN)], [f"v{i}"])
        node("MatMul", [f"v{i}", weight(f"down{i}", 4 * HIDDEN, HIDDEN)], [f"d{i}"])
        norm = [weight(f"{n}2{i}", HIDDEN) for n in ("gamma", "beta", "bias")]
        node("SkipLayerNormalization", [f"d{i}", f"n{i}", *norm], [f"h{i + 1}"])
    inputs = [helper.make_tensor_value_info(n, onnx.TensorProto.INT32, ["b", "s"]) for n in ("ids", "segments", "mask")]
    output = helper.make_tensor_value_info(f"h{layers}", onnx.TensorProto.FLOAT, ["b", "s", HIDDEN])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(
        helper.make_graph(nodes, "bert", inputs, [output], weights), opset_imports=opsets, ir_version=10
    )


def test_a_bert_of_fused_operators_is_one_kernel_where_all_is_asked_for(together: Together) -> None:
    model = _bert()
    assert together.groups("bert") == [[node.op_type for node in model.graph.node]]
    for length in (5, 3):
        feeds = {n: integers(2, length) for n in ("ids", "segments")} | {"mask": np.ones((2, length), np.int32)}
        feeds["mask"][0, -1] = 0
        (found,), (wanted,) = together.run("bert", feeds), run(session_of(model), feeds)
        assert difference(found, wanted) is None


def test_auto_leaves_products_of_a_bert_to_onnxruntime_and_knows_every_type() -> None:
    report = native.generate(_bert(2)).report
    assert [list(kernel.operators) for kernel in report.kernels] == [["SkipLayerNormalization"]] * 4
    assert not [left for left in report.left if "unknown" in left.why]


# Domains that nobody knows


def _with_foreign_operator() -> onnx.ModelProto:
    nodes = [
        helper.make_node("Tanh", ["x"], ["a"]),
        helper.make_node("Sigmoid", ["a"], ["b"]),
        helper.make_node("Mystery", ["b"], ["c"], domain="who.knows"),
        helper.make_node("Exp", ["c"], ["y"]),
    ]
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes, "g", [info("x", onnx.TensorProto.FLOAT, [3, 4])], [info("y", onnx.TensorProto.FLOAT, [3, 4])]
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("who.knows", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def test_an_operator_that_nobody_knows_stays_outside_of_kernels_and_the_report_says_why() -> None:
    report = native.generate(_with_foreign_operator()).report
    assert [list(kernel.operators) for kernel in report.kernels] == [["Tanh", "Sigmoid"]]
    why = {left.operator: left.why for left in report.left}
    assert why["Mystery"] == "who.knows::Mystery has no lowering"
    assert "depends on who.knows::Mystery, which onnxruntime does not know" in why["Exp"]


def test_where_nothing_can_be_a_kernel_the_hint_is_no_choice_that_was_made_already() -> None:
    model = _with_foreign_operator()
    del model.graph.node[:2]
    model.graph.node[0].input[0] = "x"
    with pytest.raises(native.compile_model.OptionError, match="no node becomes a kernel") as raised:
        native.generate(model, select="all")
    assert 'select="all"' not in raised.value.hint
