"""Cases of operators that transformers consist of, and of Einsum and ConvTranspose, that onnx has no node tests of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper

from tests.native.running import Feeds

MICROSOFT = "com.microsoft"
_BATCH, _LENGTH, HEADS, _SIZE = 2, 5, 3, 8
HIDDEN = HEADS * _SIZE
_KEYS = 7
_DRAW = np.random.default_rng(0)


def reals(*shape: int, by: float = 1.0) -> np.ndarray:
    return (_DRAW.standard_normal(shape) * by).astype(np.float32)


def integers(*shape: int, below: int = 2) -> np.ndarray:
    return _DRAW.integers(0, below, shape).astype(np.int32)


SELF = {"x": reals(_BATCH, _LENGTH, HIDDEN), "w": reals(HIDDEN, 3 * HIDDEN, by=0.2), "b": reals(3 * HIDDEN)}
_APART = {name: reals(_BATCH, _LENGTH, HIDDEN) for name in "qkv"}
CROSS = {"q": _APART["q"], "k": reals(_BATCH, _KEYS, HIDDEN), "v": reals(_BATCH, _KEYS, 12)}
PAST = {"pk": reals(_BATCH, HEADS, 4, _SIZE), "pv": reals(_BATCH, HEADS, 4, _SIZE)}
_EMBEDDED = {
    "ids": integers(_BATCH, _LENGTH, below=9),
    "segments": integers(_BATCH, _LENGTH),
    "words": reals(9, HIDDEN),
    "places": reals(11, HIDDEN),
    "kinds": reals(2, HIDDEN),
    "gamma": reals(HIDDEN),
    "beta": reals(HIDDEN),
}
_LENGTHS, _LEFT_PADDED = np.array([3, 5], np.int32), np.array([[0, 0, 1, 1, 1], [1, 2, 1, 0, 0]], np.int32)

Inputs = Mapping[str, np.ndarray | None]
CASES: dict[str, tuple[str, Inputs, Sequence[str], dict[str, Any]]] = {
    "attention_lengths": ("Attention", {**SELF, "m": _LENGTHS}, ["y"], {"scale": 0.7}),
    "attention_mask": ("Attention", {**SELF, "m": _LEFT_PADDED}, ["y"], {"unidirectional": 1}),
    "attention_matrix": (
        "Attention",
        {**SELF, "m": integers(2, 5, 5), "past": None, "a": reals(1, 3, 5, 5)},
        ["y"],
        {"mask_filter_value": -5.0},
    ),
    "attention_past": (
        "Attention",
        {**SELF, "m": integers(2, 9), "past": reals(2, _BATCH, HEADS, 4, _SIZE)},
        ["y", "present"],
        {"unidirectional": 1},
    ),
    "attention_sizes": (
        "Attention",
        {"x": SELF["x"], "w": reals(HIDDEN, 2 * HIDDEN + 6, by=0.2), "b": reals(2 * HIDDEN + 6)},
        ["y"],
        {"qkv_hidden_sizes": [HIDDEN, HIDDEN, 6]},
    ),
    "multi_head": (
        "MultiHeadAttention",
        {**CROSS, "b": reals(2 * HIDDEN + 12), "m": np.array([3, 7], np.int32)},
        ["y"],
        {"scale": 0.3},
    ),
    "multi_head_mask": (
        "MultiHeadAttention",
        {**CROSS, "b": None, "m": integers(2, 7), "a": reals(1, 1, 5, 7)},
        ["y"],
        {},
    ),
    "multi_head_past": (
        "MultiHeadAttention",
        {**_APART, "b": reals(3 * HIDDEN), "m": None, "a": None, **PAST},
        ["y", "ok", "ov"],
        {"unidirectional": 1},
    ),
    "multi_head_by_heads": (
        "MultiHeadAttention",
        {"q": _APART["q"], "k": reals(2, 3, 7, 8), "v": reals(2, 3, 7, 8)},
        ["y"],
        {},
    ),
    "embed": ("EmbedLayerNormalization", {**_EMBEDDED, "m": integers(2, 5, below=3)}, ["y", "i"], {"epsilon": 1e-5}),
    "embed_sum": ("EmbedLayerNormalization", _EMBEDDED, ["y", "i", "s"], {}),
    "embed_places": (
        "EmbedLayerNormalization",
        {**_EMBEDDED, "segments": None, "kinds": None, "m": None, "p": integers(1, 5, below=11)},
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
    _operands = {f"x{i}": reals(*shape) for i, shape in enumerate(_shapes)}
    CASES[f"einsum {_equation}"] = ("Einsum", _operands, ["y"], {"equation": _equation})
for _name, _image, _weights, _attributes in (
    ("pads", (2, 3, 5, 6), (3, 4, 3, 2), {"strides": [2, 3], "pads": [1, 0, 1, 1]}),
    ("groups", (2, 4, 5, 6), (4, 3, 3, 2),
     {"group": 2, "strides": [2, 2], "dilations": [2, 1], "output_padding": [1, 0]}),
    ("lower", (2, 3, 5, 6), (3, 4, 3, 4), {"auto_pad": "SAME_LOWER", "strides": [2, 3]}),
    ("shape", (1, 3, 5, 6), (3, 4, 4, 4), {"strides": [2, 2], "output_shape": [11, 12]}),
    ("cut", (2, 3, 9), (3, 2, 3), {"pads": [2, 3]}),
):  # fmt: skip
    _filled = {"x": reals(*_image), "w": reals(*_weights), "b": reals(_weights[1] * _attributes.get("group", 1))}
    CASES[f"transposed {_name}"] = ("ConvTranspose", _filled, ["y"], _attributes)

_OF_ONNX = {"Einsum", "ConvTranspose"}


def model_of_case(case: str, dtype: type = np.float32) -> tuple[onnx.ModelProto, Feeds]:
    op, inputs, outputs, attributes = CASES[case]
    if op in ("Attention", "MultiHeadAttention"):
        attributes = {"num_heads": HEADS, **attributes}
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
