"""Operators of com.microsoft that transformers consist of, Einsum and ConvTranspose, beside onnxruntime's own kernels.

onnx has node tests of Attention, Einsum and ConvTranspose, which test_node_tests.py runs; here are the cases it lacks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

from sardonyx import native
from sardonyx.native.load_model import load_inferred_model
from sardonyx.native.partition import plan_kernels
from tests.native.running import Feeds, Together, difference, run, session_of

MICROSOFT = "com.microsoft"
_BATCH, _LENGTH, _HEADS, _SIZE = 2, 5, 3, 8
_HIDDEN = _HEADS * _SIZE
_KEYS = 7
_DRAW = np.random.default_rng(0)


def _reals(*shape: int, by: float = 1.0) -> np.ndarray:
    return (_DRAW.standard_normal(shape) * by).astype(np.float32)


def _integers(*shape: int, below: int = 2) -> np.ndarray:
    return _DRAW.integers(0, below, shape).astype(np.int32)


_SELF = {"x": _reals(_BATCH, _LENGTH, _HIDDEN), "w": _reals(_HIDDEN, 3 * _HIDDEN, by=0.2), "b": _reals(3 * _HIDDEN)}
_APART = {name: _reals(_BATCH, _LENGTH, _HIDDEN) for name in "qkv"}
_CROSS = {"q": _APART["q"], "k": _reals(_BATCH, _KEYS, _HIDDEN), "v": _reals(_BATCH, _KEYS, 12)}
_PAST = {"pk": _reals(_BATCH, _HEADS, 4, _SIZE), "pv": _reals(_BATCH, _HEADS, 4, _SIZE)}
_EMBEDDED = {
    "ids": _integers(_BATCH, _LENGTH, below=9),
    "segments": _integers(_BATCH, _LENGTH),
    "words": _reals(9, _HIDDEN),
    "places": _reals(11, _HIDDEN),
    "kinds": _reals(2, _HIDDEN),
    "gamma": _reals(_HIDDEN),
    "beta": _reals(_HIDDEN),
}
_LENGTHS, _LEFT_PADDED = np.array([3, 5], np.int32), np.array([[0, 0, 1, 1, 1], [1, 2, 1, 0, 0]], np.int32)

Inputs = Mapping[str, np.ndarray | None]
CASES: dict[str, tuple[str, Inputs, Sequence[str], dict[str, Any]]] = {
    "attention_lengths": ("Attention", {**_SELF, "m": _LENGTHS}, ["y"], {"scale": 0.7}),
    "attention_mask": ("Attention", {**_SELF, "m": _LEFT_PADDED}, ["y"], {"unidirectional": 1}),
    "attention_matrix": (
        "Attention",
        {**_SELF, "m": _integers(2, 5, 5), "past": None, "a": _reals(1, 3, 5, 5)},
        ["y"],
        {"mask_filter_value": -5.0},
    ),
    "attention_past": (
        "Attention",
        {**_SELF, "m": _integers(2, 9), "past": _reals(2, _BATCH, _HEADS, 4, _SIZE)},
        ["y", "present"],
        {"unidirectional": 1},
    ),
    "attention_sizes": (
        "Attention",
        {"x": _SELF["x"], "w": _reals(_HIDDEN, 2 * _HIDDEN + 6, by=0.2), "b": _reals(2 * _HIDDEN + 6)},
        ["y"],
        {"qkv_hidden_sizes": [_HIDDEN, _HIDDEN, 6]},
    ),
    "multi_head": (
        "MultiHeadAttention",
        {**_CROSS, "b": _reals(2 * _HIDDEN + 12), "m": np.array([3, 7], np.int32)},
        ["y"],
        {"scale": 0.3},
    ),
    "multi_head_mask": (
        "MultiHeadAttention",
        {**_CROSS, "b": None, "m": _integers(2, 7), "a": _reals(1, 1, 5, 7)},
        ["y"],
        {},
    ),
    "multi_head_past": (
        "MultiHeadAttention",
        {**_APART, "b": _reals(3 * _HIDDEN), "m": None, "a": None, **_PAST},
        ["y", "ok", "ov"],
        {"unidirectional": 1},
    ),
    "multi_head_by_heads": (
        "MultiHeadAttention",
        {"q": _APART["q"], "k": _reals(2, 3, 7, 8), "v": _reals(2, 3, 7, 8)},
        ["y"],
        {},
    ),
    "embed": ("EmbedLayerNormalization", {**_EMBEDDED, "m": _integers(2, 5, below=3)}, ["y", "i"], {"epsilon": 1e-5}),
    "embed_sum": ("EmbedLayerNormalization", _EMBEDDED, ["y", "i", "s"], {}),
    "embed_places": (
        "EmbedLayerNormalization",
        {**_EMBEDDED, "segments": None, "kinds": None, "m": None, "p": _integers(1, 5, below=11)},
        ["y", "i"],
        {},
    ),
}
for _equation, *_shapes in (
    ("ii", (4, 4)), ("iji,jk->ik", (3, 4, 3), (4, 2)), ("ij,jk,kl->il", (2, 3), (3, 4), (4, 5)),
    ("ij,ij->i", (3, 1), (3, 4)), ("ij,k->i", (3, 4), (5,)),
    ("...ij,...jk->...ik", (2, 1, 3, 4), (2, 5, 4, 2)), ("b...,b...->b...", (2, 3, 4), (2, 1, 4)),
    ("Ab,bC->CA", (2, 3), (3, 4)),
):  # fmt: skip
    _operands = {f"x{i}": _reals(*shape) for i, shape in enumerate(_shapes)}
    CASES[f"einsum {_equation}"] = ("Einsum", _operands, ["y"], {"equation": _equation})
for _name, _image, _weights, _attributes in (
    ("pads", (2, 3, 5, 6), (3, 4, 3, 2), {"strides": [2, 3], "pads": [1, 0, 1, 1]}),
    ("groups", (2, 4, 5, 6), (4, 3, 3, 2),
     {"group": 2, "strides": [2, 2], "dilations": [2, 1], "output_padding": [1, 0]}),
    ("lower", (2, 3, 5, 6), (3, 4, 3, 4), {"auto_pad": "SAME_LOWER", "strides": [2, 3]}),
    ("shape", (1, 3, 5, 6), (3, 4, 4, 4), {"strides": [2, 2], "output_shape": [11, 12]}),
    ("cut", (2, 3, 9), (3, 2, 3), {"pads": [2, 3]}),
):  # fmt: skip
    _filled = {"x": _reals(*_image), "w": _reals(*_weights), "b": _reals(_weights[1] * _attributes.get("group", 1))}
    CASES[f"transposed {_name}"] = ("ConvTranspose", _filled, ["y"], _attributes)

_OF_ONNX = {"Einsum", "ConvTranspose"}


def _model(case: str, dtype: type = np.float32) -> tuple[onnx.ModelProto, Feeds]:
    op, inputs, outputs, attributes = CASES[case]
    if op in ("Attention", "MultiHeadAttention"):
        attributes = {"num_heads": _HEADS, **attributes}
    feeds = {name: x.astype(dtype) if x.dtype.kind == "f" else x for name, x in inputs.items() if x is not None}
    names = [name if x is not None else "" for name, x in inputs.items()]
    graph = helper.make_graph(
        [helper.make_node(op, names, outputs, domain="" if op in _OF_ONNX else MICROSOFT, **attributes)],
        "g",
        [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape) for n, x in feeds.items()],
        [onnx.ValueInfoProto(name=name) for name in outputs],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10), feeds


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
        assert made.add(case, ir.to_proto(load_inferred_model(_model(case)[0]))) is None, case
    for case, kind in _RETYPED:
        assert (
            made.add(f"{case} of {kind}", ir.to_proto(load_inferred_model(_model(case, _OTHERS[kind])[0]))) is None
        ), (case, kind)
    assert made.add("bert", ir.to_proto(load_inferred_model(_bert()))) is None
    made.build(quickly=True)
    return made


@pytest.mark.parametrize("case", CASES)
def test_it_computes_what_onnxruntime_does(together: Together, case: str) -> None:
    model, feeds = _model(case)
    for found, wanted in zip(together.run(case, feeds), run(session_of(model), feeds), strict=True):
        assert difference(found, wanted) is None


@pytest.mark.parametrize(("case", "kind"), _RETYPED)
def test_other_real_numbers_give_what_float32_does(together: Together, case: str, kind: str) -> None:
    _, feeds = _model(case, _OTHERS[kind])
    rounded = {name: x.astype(np.float32) if x.dtype.kind in "fV" else x for name, x in feeds.items()}
    expected = run(session_of(_model(case)[0]), rounded)
    for found, wanted in zip(together.run(f"{case} of {kind}", feeds), expected, strict=True):
        coarse = {"float64": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}[kind]
        assert difference(found, wanted.astype(found.dtype), tolerance=coarse) is None


def test_a_word_below_zero_is_an_error_as_it_is_in_onnxruntime(together: Together) -> None:
    _, feeds = _model("embed")
    with pytest.raises(Exception, match="an index is out of range"):
        together.run("embed", {**feeds, "ids": feeds["ids"] - 9})


# What cannot be a kernel says why


@pytest.mark.parametrize(
    ("case", "inputs", "why"),
    [
        ("multi_head", {"q": _reals(2, 5, 3, 3, 8)}, "packed"),
        ("attention_mask", {**_SELF, "m": _integers(4)}, "a mask of sizes"),
        ("multi_head", {**_CROSS, **dict.fromkeys(("b", "m", "a")), **_PAST, "n": _integers(1)}, "shared buffer"),
    ],
)
def test_what_has_no_lowering_is_refused_with_a_reason(case: str, inputs: Inputs, why: str) -> None:
    op, _, outputs, attributes = CASES[case]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CASES, "refused", (op, inputs, outputs, attributes))
        refused = plan_kernels(load_inferred_model(_model("refused")[0]), choice="all").rejected
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

    tables = [weight(n, rows, _HIDDEN) for n, rows in (("words", 9), ("places", 16), ("kinds", 2))]
    norm = [weight("g0", _HIDDEN), weight("b0", _HIDDEN)]
    node("EmbedLayerNormalization", ["ids", "segments", *tables, *norm, "mask"], ["h0", "lengths"])
    for i in range(layers):
        joint = [weight(f"qkv{i}", _HIDDEN, 3 * _HIDDEN), weight(f"qkv_bias{i}", 3 * _HIDDEN)]
        node("Attention", [f"h{i}", *joint, "lengths"], [f"a{i}"], num_heads=_HEADS)
        node("MatMul", [f"a{i}", weight(f"o{i}", _HIDDEN, _HIDDEN)], [f"p{i}"])
        norm = [weight(f"{n}1{i}", _HIDDEN) for n in ("gamma", "beta", "bias")]
        node("SkipLayerNormalization", [f"p{i}", f"h{i}", *norm], [f"n{i}"])
        node("MatMul", [f"n{i}", weight(f"up{i}", _HIDDEN, 4 * _HIDDEN)], [f"u{i}"])
        node("BiasGelu", [f"u{i}", weight(f"up_bias{i}", 4 * _HIDDEN)], [f"v{i}"])
        node("MatMul", [f"v{i}", weight(f"down{i}", 4 * _HIDDEN, _HIDDEN)], [f"d{i}"])
        norm = [weight(f"{n}2{i}", _HIDDEN) for n in ("gamma", "beta", "bias")]
        node("SkipLayerNormalization", [f"d{i}", f"n{i}", *norm], [f"h{i + 1}"])
    inputs = [helper.make_tensor_value_info(n, onnx.TensorProto.INT32, ["b", "s"]) for n in ("ids", "segments", "mask")]
    output = helper.make_tensor_value_info(f"h{layers}", onnx.TensorProto.FLOAT, ["b", "s", _HIDDEN])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(
        helper.make_graph(nodes, "bert", inputs, [output], weights), opset_imports=opsets, ir_version=10
    )


def test_a_bert_of_fused_operators_is_one_kernel_where_all_is_asked_for(together: Together) -> None:
    model = _bert()
    assert together.groups("bert") == [[node.op_type for node in model.graph.node]]
    for length in (5, 3):
        feeds = {n: _integers(2, length) for n in ("ids", "segments")} | {"mask": np.ones((2, length), np.int32)}
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
