"""Hand-written shape rules, where ONNX Runtime's inference is missing, not symbolic, or wrong.

A rule takes the arguments of a call by name and returns sizes by output index; omitted outputs are inferred. A size of
None is data-dependent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from sardonyx.onnx_ops.schemas import MICROSOFT

Arguments: TypeAlias = Mapping[str, Any]
Sizes: TypeAlias = "dict[int, Sequence[Any]]"
Rule: TypeAlias = Callable[[Arguments], Sizes]

RULES: dict[tuple[str, str], Rule] = {}


def _rule(*op_types: str, domain: str = "") -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        RULES.update({(domain, op_type): rule for op_type in op_types})
        return rule

    return register


@_rule("Concat")
def _concat(arguments: Arguments) -> Sizes:
    first, *others = (list(x.shape) for x in arguments["inputs"])
    axis = arguments["axis"] % len(first)
    return {0: [*first[:axis], sum((x[axis] for x in others), first[axis]), *first[axis + 1 :]]}


@_rule("Flatten")
def _flatten(arguments: Arguments) -> Sizes:
    sizes, axis = list(arguments["input"].shape), arguments.get("axis", 1)
    axis = axis % len(sizes) if axis < 0 else axis
    return {0: [math.prod(sizes[:axis]), math.prod(sizes[axis:])]}


@_rule("DepthToSpace")
def _depth_to_space(arguments: Arguments) -> Sizes:
    (n, c, h, w), block = arguments["input"].shape, arguments["blocksize"]
    return {0: [n, c // (block * block), h * block, w * block]}


@_rule("SpaceToDepth")
def _space_to_depth(arguments: Arguments) -> Sizes:
    (n, c, h, w), block = arguments["input"].shape, arguments["blocksize"]
    return {0: [n, c * block * block, h // block, w // block]}


@_rule("Conv")
def _conv(arguments: Arguments) -> Sizes:
    weight = arguments["W"].shape
    spatial = _window_counts(arguments, arguments["X"].shape[2:], arguments.get("kernel_shape") or weight[2:])
    return {0: [arguments["X"].shape[0], weight[0], *spatial]} if spatial else {}


@_rule("MaxPool", "AveragePool", "LpPool")
def _pool(arguments: Arguments) -> Sizes:
    spatial = _window_counts(arguments, arguments["X"].shape[2:], arguments["kernel_shape"])
    sizes = [*arguments["X"].shape[:2], *spatial]
    return {0: sizes, 1: sizes} if spatial else {}


def _window_counts(arguments: Arguments, sizes: Sequence[Any], kernel: Sequence[Any]) -> list[Any]:
    """Return the number of window positions along each axis; [] where it is not a plain formula."""
    if arguments.get("auto_pad", "NOTSET") != "NOTSET" or arguments.get("ceil_mode"):
        return []
    rank = len(sizes)
    strides, dilations = arguments.get("strides") or [1] * rank, arguments.get("dilations") or [1] * rank
    pads = arguments.get("pads") or [0] * (2 * rank)
    reach = [dilation * (k - 1) + 1 for dilation, k in zip(dilations, kernel, strict=True)]
    padded = [size + pads[i] + pads[i + rank] for i, size in enumerate(sizes)]
    return [(size - r) // stride + 1 for size, r, stride in zip(padded, reach, strides, strict=True)]


@_rule("GroupNormalization", "MeanVarianceNormalization")
def _same_as_input(arguments: Arguments) -> Sizes:
    return {0: list(arguments["X"].shape)}


@_rule("CDist", domain=MICROSOFT)
def _cdist(arguments: Arguments) -> Sizes:
    return {0: [arguments["A"].shape[0], arguments["B"].shape[0]]}


# Attention


@_rule("Attention")
def _attention(arguments: Arguments) -> Sizes:
    (n, heads, length, _), key, value = (_split_heads(arguments, x) for x in ("Q", "K", "V"))
    past = arguments["past_key"].shape[2] if arguments.get("past_key") is not None else 0
    total = past + key[2]
    result = [n, heads, length, value[3]] if arguments["Q"].dim() == 4 else [n, length, heads * value[3]]
    return {0: result, 1: [*key[:2], total, key[3]], 2: [*value[:2], total, value[3]], 3: [n, heads, length, total]}


def _split_heads(arguments: Arguments, name: str) -> list[Any]:
    """Return batch, heads, sequence length and head size."""
    sizes = list(arguments[name].shape)
    if len(sizes) == 4:
        return sizes
    heads = arguments["q_num_heads" if name == "Q" else "kv_num_heads"]
    return [sizes[0], heads, sizes[1], sizes[2] // heads]


@_rule("GroupQueryAttention", domain=MICROSOFT)
def _group_query_attention(arguments: Arguments) -> Sizes:
    """The present length is data-dependent: that of the longest sequence. ORT infers the past's length instead."""
    query, heads = arguments["query"].shape, arguments["num_heads"]
    packed = arguments.get("key") is None
    head = query[2] // (heads + 2 * arguments["kv_num_heads"] if packed else heads)
    sizes: Sizes = {i: [query[0], arguments["kv_num_heads"], None, head] for i in (1, 2)}
    for i, past in ((1, arguments.get("past_key")), (2, arguments.get("past_value"))):
        if past is not None:
            sizes[i] = [*past.shape[:2], None, past.shape[3]]
    return sizes | {3: [query[0], heads, query[1], None]}


@_rule("MultiHeadAttention", domain=MICROSOFT)
def _multi_head_attention(arguments: Arguments) -> Sizes:
    key, value, past = arguments.get("key"), arguments.get("value"), arguments.get("past_key")
    if key is None or value is None or key.dim() != 3 or value.dim() != 3:
        return {}
    if arguments.get("past_sequence_length") is not None:
        return {}
    total = key.shape[1] + (0 if past is None else past.shape[2])
    heads = arguments["num_heads"]
    present = [[x.shape[0], heads, total, x.shape[2] // heads] for x in (key, value)]
    return dict(enumerate(present, 1))
