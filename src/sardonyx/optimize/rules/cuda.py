"""Graphs for ONNX Runtime's kernels on CUDA, where each kernel reads and writes device memory.

Measured on an H200 in float16: Gemm adds its bias by a second, slow kernel (13 µs of 23 for 1024 × 3072), an activation
or a norm that adds it takes no longer than one without (BiasGelu 6 µs, Gelu 11), and attention with a mask does not use
the flash kernel (38 µs instead of 13 for 512 tokens).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
import torch

from sardonyx.optimize.fold import evaluate_constants
from sardonyx.optimize.pattern import P, is_private, scalar_of
from sardonyx.optimize.rule import Match, Refused, rule, rule_at
from sardonyx.sizes import Dims
from sardonyx.translate.builder import MICROSOFT

CUDA = f"{MICROSOFT}/cuda"
"""What these rules need."""
CUDA_KERNELS = f"{CUDA}/native"
"""What rules need that leave nodes to be fused into native kernels."""
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
NARROW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


@rule_at("Gemm", needs=CUDA, last=True)
def bias_apart(m: Match) -> ir.Value:
    """Gemm(a, b, c) = Gemm(a, b) + c for a row c: an addition of its own is faster, and can be fused."""
    a, b, *rest = m.node.inputs
    m.require(bool(rest) and rest[0] is not None, "no bias")
    bias = rest[0]
    assert bias is not None
    m.require(m.dims(bias) == m.dims(m.result)[-1:], "the addend is not a row")
    m.require(m.attribute(m.result, "beta", 1.0) == 1.0, "the bias is scaled")
    attributes = {name: attribute.value for name, attribute in m.node.attributes.items() if name != "beta"}
    product = m.g.shaped(m.g.node("Gemm", [a, b], **attributes), m.dims(m.result))
    return m.g.shaped(m.g.Add(product, bias), m.dims(m.result))


@rule(P.Gelu(P.Add("x", "bias")), needs=CUDA, last=True)
def bias_gelu(m: Match) -> ir.Value:
    """Gelu(x + b) = BiasGelu(x, b) for a row b; with the tanh approximation FastGelu(x, b)."""
    m.require(m.x.dtype in _FLOATS, "no kernel for the dtype")
    m.require(m.dims(m.x) == m.dims(m.result) and m.dims(m.bias) == m.dims(m.x)[-1:], "the addend is not a row")
    m.require(0 not in m.dims(m.x), "it is empty")
    exact = m.attribute(m.result, "approximate", "none") == "none"
    y = m.g.node("BiasGelu" if exact else "FastGelu", [m.x, m.bias], domain=MICROSOFT)
    return m.g.shaped(y, m.dims(m.result))


@rule_at("LayerNormalization", "RMSNormalization", needs=CUDA_KERNELS, last=True)
def sum_in_float32(m: Match) -> Mapping[ir.Value, ir.Value]:
    """Norm(x + z) = Cast(Norm(Cast(x) + Cast(z))) in half precision: the sum of a network's layers is not rounded.

    A native kernel computes in float32 anyway, and the product before it returns float32.
    """
    x, *rest = m.node.inputs
    assert x is not None
    m.require(x.dtype in NARROW and len(m.node.outputs) == 1, "not in half precision, or the statistics are used")
    m.require(_is_sum(x), "not a norm of a sum")
    sizes = [size for size in m.dims(x) if isinstance(size, int)]
    m.require(len(sizes) < len(m.dims(x)) or math.prod(sizes) >= LEAST_ELEMENTS, "too small for a kernel")
    total = _sum_in_float32(m, x)
    weights = [None if value is None else m.g.cast(value, torch.float32) for value in rest]
    attributes = {name: a.value for name, a in m.node.attributes.items()}
    y = m.g.shaped(m.g.node(m.node.op_type, [total, *weights], **attributes), m.dims(m.result))
    m.g.nodes[-1].meta[_FOR_KERNEL] = True
    rounded = {m.result: m.g.cast(y, m.g.dtype(x))}
    return rounded if is_private(x) else {**rounded, x: m.g.cast(total, m.g.dtype(x))}


LEAST_ELEMENTS = 2**10
"""What a native kernel must write on CUDA."""
_FOR_KERNEL = "for_kernel"
"""Metadata of a norm that stays apart from its sum, since a native kernel has both."""
_AROUND_SUMS = ("Reshape", "Max", "Min")
"""Models in half precision clip their sums to finite numbers."""


def _is_sum(x: ir.Value | None) -> bool:
    node = x.producer() if x is not None else None
    while node is not None and node.op_type in _AROUND_SUMS and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    return node is not None and node.op_type == "Add"


def _sum_in_float32(m: Match, x: ir.Value) -> ir.Value:
    """Return a sum computed from operands in float32; operands that are sums that nothing else reads, too."""
    node = x.producer()
    assert node is not None
    first, *rest = (value for value in node.inputs if value is not None)
    if node.op_type == "Reshape":
        return m.g.reshape(_in_float32(m, first), m.dims(x))
    operands = [_in_float32(m, value) for value in (first, *rest)]
    return m.g.shaped(m.g.node(node.op_type, operands), m.dims(x))


def _in_float32(m: Match, x: ir.Value) -> ir.Value:
    node = x.producer()
    if node is not None and node.op_type == "Cast":
        source = node.inputs[0]
        if source is not None and source.dtype == ir.DataType.FLOAT:
            return source
    computed = node is not None and node.op_type in ("Add", *_AROUND_SUMS) and is_private(x)
    return _sum_in_float32(m, x) if computed else m.g.cast(x, torch.float32)


@rule(P.LayerNormalization(P.Add("x", "skip", _shared=True, _name="sum"), "scale", "shift"), needs=CUDA, last=True)
def skip_layer_norm(m: Match) -> Mapping[ir.Value, ir.Value]:
    """LayerNormalization(x + z) = SkipLayerNormalization(x, z), which adds a bias too, and returns the sum."""
    _check_norm(m)
    x, skip, bias = _without_bias(m)
    inputs = [x, skip, m.scale, m.shift, bias]
    return _skip_norm(m, "SkipLayerNormalization", inputs if bias is not None else inputs[:-1])


@rule(P.RMSNormalization(P.Add("x", "skip", _shared=True, _name="sum"), "scale"), needs=CUDA, last=True)
def skip_rms_norm(m: Match) -> Mapping[ir.Value, ir.Value]:
    """RMSNormalization(x + z) = SkipSimplifiedLayerNormalization(x, z), which returns the sum too."""
    _check_norm(m)
    return _skip_norm(m, "SkipSimplifiedLayerNormalization", [m.x, m.skip, m.scale])


def _check_norm(m: Match) -> None:
    m.require(_FOR_KERNEL not in m.node.meta, "left to a native kernel")
    dims = m.dims(m.sum)
    m.require(m.sum.dtype in _FLOATS and m.scale.dtype == m.sum.dtype, "no kernel for the dtypes")
    m.require(m.dims(m.x) == m.dims(m.skip) == dims and len(dims) in (2, 3), "it broadcasts, or has another rank")
    m.require(m.attribute(m.result, "axis", -1) in (-1, len(dims) - 1), "not the last axis")
    m.require(0 not in dims and len(m.node.outputs) == 1, "it is empty, or the statistics are used")


def _without_bias(m: Match) -> tuple[ir.Value, ir.Value, ir.Value | None]:
    """Return the two addends, and the row that was added to one of them."""
    for x, skip in ((m.x, m.skip), (m.skip, m.x)):
        add = x.producer()
        if add is None or add.op_type != "Add" or not is_private(x):
            continue
        for rows, bias in (add.inputs, reversed(add.inputs)):
            if rows is not None and bias is not None and _is_row(m, rows, bias, m.dims(x)):
                return rows, skip, bias
    return m.x, m.skip, None


def _is_row(m: Match, rows: ir.Value, bias: ir.Value, dims: Dims) -> bool:
    return m.dims(rows) == dims and m.dims(bias) == dims[-1:]


def _skip_norm(m: Match, op_type: str, inputs: list[ir.Value | None]) -> Mapping[ir.Value, ir.Value]:
    dims, returned = m.dims(m.sum), not is_private(m.sum)
    epsilon = m.attribute(m.result, "epsilon", 1e-5)
    count = 4 if returned else 1
    y, *rest = m.g.several(op_type, count, inputs, domain=MICROSOFT, epsilon=epsilon)
    m.g.shaped(y, dims)
    for statistic in rest[:-1]:
        statistic.type = ir.TensorType(ir.DataType.FLOAT)
    return {m.result: y, m.sum: m.g.shaped(rest[-1], dims)} if returned else {m.result: y}


@rule_at("Attention", needs=CUDA, last=True)
def causal_mask(m: Match) -> ir.Value:
    """Attention with a constant mask that lets each query see the keys up to its own position = causal Attention.

    With one that lets each query see every key, it is Attention without a mask.
    """
    m.require(not m.node.domain and len(m.node.inputs) == 4, "no mask, or a cache")
    q, k, v, mask = m.node.inputs
    attributes = {name: a.value for name, a in m.node.attributes.items()}
    m.require(mask is not None and not attributes.get("is_causal", 0), "no mask, or causal already")
    assert mask is not None
    values = evaluate_constants(mask, m.g.opset)
    m.require(values is not None, "the mask is not constant")
    visible = values if values.dtype == bool else np.where(np.isneginf(values), False, values == 0)
    m.require(values.dtype == bool or bool((np.isneginf(values) | (values == 0)).all()), "a bias, not a mask")
    if not visible.all():
        *_, queries, keys = visible.shape
        m.require(queries == keys and bool((visible == np.tri(keys, dtype=bool)).all()), "another mask")
        attributes["is_causal"] = 1
    return m.g.shaped(m.g.node("Attention", [q, k, v], **attributes), m.dims(m.result))


@rule_at("Attention", needs=CUDA)
def scale_in_attention(m: Match) -> Mapping[ir.Value, ir.Value]:
    """Attention(c·q, k, v) = Attention(q, k, v; scale=c·scale), through Reshapes and Transposes of the queries."""
    m.require(not m.node.domain, "an operator of another domain")
    product = _scaled_queries(m)
    queries, factor = product.inputs
    number = scalar_of(factor) if factor is not None else None
    m.require(number is not None and number > 0, "not multiplied by a positive constant")
    assert queries is not None
    assert number is not None
    m.require(m.dims(queries) == m.dims(product.outputs[0]), "the product broadcasts")
    attributes = {name: a.value for name, a in m.node.attributes.items()}
    scale = attributes.get("scale") or 1 / math.sqrt(_head_size(m))
    attributes["scale"] = scale * number
    y = m.g.shaped(m.g.node("Attention", list(m.node.inputs), **attributes), m.dims(m.result))
    return {m.result: y, product.outputs[0]: queries}


def _scaled_queries(m: Match) -> ir.Node:
    """Return the Mul that computes the queries, which nothing else reads."""
    value = m.node.inputs[0]
    while value is not None and is_private(value):
        node = value.producer()
        if node is None or node.op_type not in ("Reshape", "Transpose", "Mul"):
            break
        if node.op_type == "Mul":
            return node
        value = node.inputs[0]
    raise Refused("the queries are not scaled")


def _head_size(m: Match) -> int:
    queries = m.node.inputs[0]
    assert queries is not None
    width, heads = m.dims(queries)[-1], m.attribute(m.result, "q_num_heads", 1)
    m.require(isinstance(width, int), "the size of heads is symbolic")
    assert isinstance(width, int)
    return int(width // heads)


@rule_at("Attention", needs=CUDA, last=True)
def multi_head_attention(m: Match) -> ir.Value:
    """Attention over many rows without a mask = MultiHeadAttention, for which ONNX Runtime uses cuDNN's kernel.

    That kernel takes 60 % of the time of the other one for 1,500 tokens, and needs a second kernel to start.
    """
    m.require(not m.node.domain and len(m.node.inputs) == 3 and len(m.dims(m.result)) == 3, "masked, or not in rows")
    m.require(m.result.dtype in _FLOATS, "no kernel for the dtype")
    q, k, v = m.node.inputs
    assert k is not None
    length = m.dims(k)[1]
    m.require(isinstance(length, int) and length >= _LONG, "few keys, or an unknown number")
    flags = {name: a.value for name, a in m.node.attributes.items()}
    heads, scale = flags.pop("q_num_heads", 0), flags.pop("scale", None)
    m.require(heads == flags.pop("kv_num_heads", 0) and heads > 0, "grouped heads")
    m.require(not any(flags.values()), "it is causal or has other attributes")
    m.require(all(x is not None and m.dims(x)[-1] == m.dims(m.result)[-1] for x in (q, k, v)), "heads of other sizes")
    y = m.g.node("MultiHeadAttention", [q, k, v], domain=MICROSOFT, num_heads=heads, scale=scale)
    return m.g.shaped(y, m.dims(m.result))


_LONG = 512
"""Keys from which on cuDNN's attention is faster; for 128 and 197 it is not."""


@rule_at("Conv", needs=CUDA, late=True)
def patches_as_product(m: Match) -> ir.Value:
    """Conv whose windows do not overlap = Gemm of the windows, each a row: cuDNN has no fast kernel for large ones."""
    x, weight, bias = _convolution(m)
    (batch, channels, *sizes), (out, _, *kernel) = m.dims(x), m.dims(weight)
    m.require(len(sizes) == 2 and min(kernel) > 1, "not windows of an image")
    m.require(list(m.attribute(m.result, "strides", [1, 1])) == kernel, "the windows overlap or leave gaps")
    m.require(not any(m.attribute(m.result, "pads", ())), "it is padded")
    m.require(all(size % width == 0 for size, width in zip(sizes, kernel, strict=True)), "windows do not cover it")
    height, width = (size // step for size, step in zip(sizes, kernel, strict=True))
    split = m.g.reshape(x, [batch, channels, height, kernel[0], width, kernel[1]])
    depth = channels * kernel[0] * kernel[1]
    rows = m.g.reshape(m.g.transpose(split, [0, 2, 4, 1, 3, 5]), [batch * height * width, depth])
    product = _product(m, rows, m.g.reshape(weight, [out, depth]), bias)
    by_channel = m.g.transpose(m.g.reshape(product, [batch, height * width, out]), [0, 2, 1])
    return m.g.reshape(by_channel, [batch, out, height, width])


@rule_at("Conv", needs=CUDA, late=True)
def sequence_convolution_as_product(m: Match) -> ir.Value:
    """Conv over one axis in half precision = Gemm of the windows: cuDNN uses no tensor cores for it."""
    x, weight, bias = _convolution(m)
    (batch, channels, *sizes), (out, _, *kernel) = m.dims(x), m.dims(weight)
    m.require(len(sizes) == 1 and x.dtype == ir.DataType.FLOAT16, "not over one axis, or not in half precision")
    m.require(kernel[0] <= _MOST_TAPS, "a long kernel")
    (step,), (gap,) = (m.attribute(m.result, name, [1]) for name in ("strides", "dilations"))
    before, after = m.attribute(m.result, "pads", [0, 0])
    length = m.dims(m.result)[-1]
    steps = m.g.transpose(x, [0, 2, 1])
    if before or after:
        padded = m.g.Pad(steps, m.g.ints([0, before, 0, 0, after, 0]))
        steps = m.g.shaped(padded, [batch, sizes[0] + before + after, channels])
    taps = [_every(m, steps, tap * gap, length, step) for tap in range(kernel[0])]
    windows = taps[0] if len(taps) == 1 else m.g.node("Concat", taps, axis=-1)
    rows = m.g.reshape(
        m.g.shaped(windows, [batch, length, kernel[0] * channels]), [batch * length, kernel[0] * channels]
    )
    by_tap = m.g.reshape(m.g.transpose(weight, [0, 2, 1]), [out, kernel[0] * channels])
    product = _product(m, rows, by_tap, bias)
    return m.g.transpose(m.g.reshape(product, [batch, length, out]), [0, 2, 1])


_MOST_TAPS = 8
"""The windows take as many times the memory of the input."""


def _convolution(m: Match) -> tuple[ir.Value, ir.Value, ir.Value | None]:
    """Return the input, the weight and the bias of a Conv of known sizes, without groups or automatic padding."""
    x, weight, *rest = m.node.inputs
    assert x is not None
    assert weight is not None
    m.require(not m.node.domain and x.dtype in (*_FLOATS, ir.DataType.BFLOAT16), "no kernel for the dtype")
    m.require(m.attribute(m.result, "group", 1) == 1 and "auto_pad" not in m.node.attributes, "grouped or auto_pad")
    sizes = (*m.dims(x), *m.dims(weight), *m.dims(m.result))
    m.require(all(isinstance(size, int) and size > 0 for size in sizes), "empty, or of symbolic size")
    return x, weight, rest[0] if rest else None


def _every(m: Match, x: ir.Value, start: int, count: int, step: int) -> ir.Value:
    """Return `count` rows from `start` on, one in `step`."""
    dims = list(m.dims(x))
    dims[1] = count
    return m.g.shaped(m.g.slice(x, 1, start, start + (count - 1) * step + 1, step), dims)


def _product(m: Match, rows: ir.Value, weight: ir.Value, bias: ir.Value | None) -> ir.Value:
    dims = [m.dims(rows)[0], m.dims(weight)[0]]
    return m.g.shaped(m.g.node("Gemm", [rows, weight, *([bias] if bias is not None else [])], transB=1), dims)
