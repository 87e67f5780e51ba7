"""Sizes that ONNX Runtime's inference does not tell, or not of symbols, or tells wrong: by operator, written by hand.

A rule takes the arguments of a call by name and gives the sizes of outputs by their indices; what it leaves out is
inferred. None as a size is one that depends on values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from sardonyx.onnx_ops.schemas import MICROSOFT

Given: TypeAlias = Mapping[str, Any]
Sizes: TypeAlias = "dict[int, Sequence[Any]]"
Rule: TypeAlias = Callable[[Given], Sizes]

RULES: dict[tuple[str, str], Rule] = {}


def _rule(*op_types: str, domain: str = "") -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        RULES.update({(domain, op_type): rule for op_type in op_types})
        return rule

    return register


@_rule("Concat")
def _concat(given: Given) -> Sizes:
    first, *others = (list(x.shape) for x in given["inputs"])
    axis = given["axis"] % len(first)
    return {0: [*first[:axis], sum((x[axis] for x in others), first[axis]), *first[axis + 1 :]]}


@_rule("Flatten")
def _flatten(given: Given) -> Sizes:
    sizes, axis = list(given["input"].shape), given.get("axis", 1)
    axis = axis % len(sizes) if axis < 0 else axis
    return {0: [math.prod(sizes[:axis]), math.prod(sizes[axis:])]}


@_rule("DepthToSpace")
def _depth_to_space(given: Given) -> Sizes:
    (n, c, h, w), block = given["input"].shape, given["blocksize"]
    return {0: [n, c // (block * block), h * block, w * block]}


@_rule("SpaceToDepth")
def _space_to_depth(given: Given) -> Sizes:
    (n, c, h, w), block = given["input"].shape, given["blocksize"]
    return {0: [n, c * block * block, h // block, w // block]}


@_rule("Conv")
def _conv(given: Given) -> Sizes:
    weight = given["W"].shape
    spatial = _windows(given, given["X"].shape[2:], given.get("kernel_shape") or weight[2:])
    return {0: [given["X"].shape[0], weight[0], *spatial]} if spatial else {}


@_rule("MaxPool", "AveragePool", "LpPool")
def _pool(given: Given) -> Sizes:
    spatial = _windows(given, given["X"].shape[2:], given["kernel_shape"])
    sizes = [*given["X"].shape[:2], *spatial]
    return {0: sizes, 1: sizes} if spatial else {}


def _windows(given: Given, sizes: Sequence[Any], kernel: Sequence[Any]) -> list[Any]:
    """How many places a window has along each axis; nothing where that is not a matter of plain amounts."""
    if given.get("auto_pad", "NOTSET") != "NOTSET" or given.get("ceil_mode"):
        return []
    rank = len(sizes)
    strides, dilations = given.get("strides") or [1] * rank, given.get("dilations") or [1] * rank
    pads = given.get("pads") or [0] * (2 * rank)
    reach = [dilation * (k - 1) + 1 for dilation, k in zip(dilations, kernel, strict=True)]
    padded = [size + pads[i] + pads[i + rank] for i, size in enumerate(sizes)]
    return [(size - r) // stride + 1 for size, r, stride in zip(padded, reach, strides, strict=True)]


@_rule("GroupNormalization", "MeanVarianceNormalization")
def _like_the_first(given: Given) -> Sizes:
    return {0: list(given["X"].shape)}


@_rule("CDist", domain=MICROSOFT)
def _cdist(given: Given) -> Sizes:
    return {0: [given["A"].shape[0], given["B"].shape[0]]}


# Attention


@_rule("Attention")
def _attention(given: Given) -> Sizes:
    (n, heads, length, _), key, value = (_by_heads(given, x) for x in ("Q", "K", "V"))
    past = given["past_key"].shape[2] if given.get("past_key") is not None else 0
    total = past + key[2]
    result = [n, heads, length, value[3]] if given["Q"].dim() == 4 else [n, length, heads * value[3]]
    return {0: result, 1: [*key[:2], total, key[3]], 2: [*value[:2], total, value[3]], 3: [n, heads, length, total]}


def _by_heads(given: Given, name: str) -> list[Any]:
    """Batch, heads, length and size of a head."""
    sizes = list(given[name].shape)
    if len(sizes) == 4:
        return sizes
    heads = given["q_num_heads" if name == "Q" else "kv_num_heads"]
    return [sizes[0], heads, sizes[1], sizes[2] // heads]


@_rule("GroupQueryAttention", domain=MICROSOFT)
def _group_query_attention(given: Given) -> Sizes:
    """As long as the longest sequence, which is a value; ONNX Runtime infers that nothing is added to the past."""
    query, heads = given["query"].shape, given["num_heads"]
    packed = given.get("key") is None
    head = query[2] // (heads + 2 * given["kv_num_heads"] if packed else heads)
    sizes: Sizes = {i: [query[0], given["kv_num_heads"], None, head] for i in (1, 2)}
    for i, past in ((1, given.get("past_key")), (2, given.get("past_value"))):
        if past is not None:
            sizes[i] = [*past.shape[:2], None, past.shape[3]]
    return sizes | {3: [query[0], heads, query[1], None]}


@_rule("MultiHeadAttention", domain=MICROSOFT)
def _multi_head_attention(given: Given) -> Sizes:
    key, value, past = given.get("key"), given.get("value"), given.get("past_key")
    if key is None or value is None or key.dim() != 3 or value.dim() != 3:
        return {}
    if given.get("past_sequence_length") is not None:
        return {}
    total = key.shape[1] + (0 if past is None else past.shape[2])
    heads = given["num_heads"]
    present = [[x.shape[0], heads, total, x.shape[2] // heads] for x in (key, value)]
    return dict(enumerate(present, 1))
