"""Convolutions in ONNX Runtime's NCHWc layout, with channels in blocks of eight or sixteen.

ONNX Runtime uses it by itself for constant weights. Here, weights that are inputs, as in training, are reordered at
every call, which pays off if they are applied at many positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps

import onnx_ir as ir

from sardonyx.optimize.integers import is_dequantized
from sardonyx.optimize.rule import Match, Rewrite, rule_at
from sardonyx.sizes import Dims

NCHWC = "com.microsoft.nchwc"
_LEAST_POSITIONS = {"Conv": 512, "ConvTranspose": 128}
"""With fewer positions, reordering the weights costs more than the faster kernel saves."""


def blocked_convolution(m: Match, width: int) -> ir.Value:
    """Conv(x, w) = ReorderOutput(nchwc.Conv(ReorderInput(x), w in blocks))."""
    original, (out, channels, *kernel) = _weight(m, width, of_input=1, of_output=0)
    # First blocks of `width` output channels for each input channel, then blocks of input channels.
    rows = m.g.reshape(original, [1, out, channels, math.prod(kernel)])
    rows = m.g.shaped(m.g.node("ReorderInput", [rows], domain=NCHWC), rows.meta["dims"])
    blocks = m.g.reshape(rows, [out // width, channels // width, width, math.prod(kernel), width])
    weight = m.g.reshape(m.g.transpose(blocks, [0, 1, 3, 2, 4]), [out, channels, *kernel])
    return _blocked_conv(m, weight, **{name: m.attribute(m.result, name) for name in ("strides", "pads", "dilations")})


def blocked_transposed_convolution(m: Match, width: int) -> ir.Value:
    """ConvTranspose(x, w) with stride one is a Conv with flipped weights, which is then blocked."""
    original, (channels, out, *kernel) = _weight(m, width, of_input=0, of_output=1)
    strides, dilations = (m.attribute(m.result, name, (1, 1)) for name in ("strides", "dilations"))
    pads = m.attribute(m.result, "pads", (0,) * 4)
    m.require(max(strides) == 1 and not any(m.attribute(m.result, "output_padding", ())), "its stride is not one")
    reach = [d * (k - 1) for d, k in zip(dilations, kernel, strict=True)] * 2
    m.require(all(r >= p for r, p in zip(reach, pads, strict=True)), "its padding exceeds the kernel")
    positions = math.prod(kernel)
    by_position = m.g.transpose(m.g.reshape(original, [channels * out, positions]), [1, 0])
    flipped = m.g.shaped(m.g.Gather(by_position, m.g.ints(range(positions)[::-1]), axis=0), by_position.meta["dims"])
    blocks = m.g.reshape(flipped, [positions, channels // width, width, out // width, width])
    weight = m.g.reshape(m.g.transpose(blocks, [3, 1, 0, 2, 4]), [out, channels, *kernel])
    return _blocked_conv(m, weight, pads=[r - p for r, p in zip(reach, pads, strict=True)], dilations=dilations)


def _weight(m: Match, width: int, *, of_input: int, of_output: int) -> tuple[ir.Value, Dims]:
    """Return the weight and its shape, if the blocked kernel applies and is faster."""
    weight = m.node.inputs[1]
    assert weight is not None
    dims = m.dims(weight)
    m.require(not m.node.domain and weight.dtype == ir.DataType.FLOAT, "no kernel for the dtype")
    m.require(not weight.is_initializer(), "constant weights are blocked by the engine")
    m.require(not is_dequantized(weight), "the engine computes it in integers")
    m.require(len(dims) == 4 and all(isinstance(dim, int) for dim in dims), "not a 2-d convolution")
    m.require(m.attribute(m.result, "group", 1) == 1 and "auto_pad" not in m.node.attributes, "grouped or auto_pad")
    m.require(dims[of_input] % width == 0 and dims[of_output] % width == 0, "channels do not fill blocks")
    n, _, *positions = m.dims(m.result)
    known = [dim for dim in (n, *positions) if isinstance(dim, int)]
    m.require(len(known) < 3 or math.prod(known) >= _LEAST_POSITIONS[m.node.op_type], "too few positions")
    return weight, dims


def _blocked_conv(m: Match, weight: ir.Value, **attributes: Sequence[int] | None) -> ir.Value:
    x, bias = m.node.inputs[0], m.node.inputs[2] if len(m.node.inputs) > 2 else None
    assert x is not None
    dims = m.dims(m.result)
    ordered = m.g.shaped(m.g.node("ReorderInput", [x], domain=NCHWC), m.dims(x))
    y = m.g.shaped(m.g.node("Conv", [ordered, weight, bias], domain=NCHWC, **attributes), dims)
    return m.g.shaped(m.g.node("ReorderOutput", [y], domain=NCHWC, channels=dims[1]), dims)


def _with_width(rewrite: Callable[[Match, int], ir.Value], width: int) -> Rewrite:
    @wraps(rewrite)
    def of_width(m: Match) -> ir.Value:
        return rewrite(m, width)

    return of_width


for _width in (8, 16):
    _needs = f"{NCHWC}/{_width}"
    rule_at("Conv", needs=_needs, late=True)(_with_width(blocked_convolution, _width))
    rule_at("ConvTranspose", needs=_needs, late=True)(_with_width(blocked_transposed_convolution, _width))
