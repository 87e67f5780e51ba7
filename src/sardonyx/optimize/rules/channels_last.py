"""Images with channels last: Transposes from channels last to first move towards the outputs, where they meet others.

A kernel that reads and writes channels last stands between two Transposes. That of its result moves through what
follows, until it meets the one before the next such kernel and both vanish.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from sardonyx.optimize.pattern import array_of, permutation_of
from sardonyx.optimize.rule import Match, rule_at
from sardonyx.sizes import Dim, Dims

CHANNELS_LAST = "channels_last"
"""What these rules need: kernels with channels last."""
TO_LAST, TO_FIRST = [0, 2, 3, 1], [0, 3, 1, 2]
_ELEMENTWISE = (
    *("Relu", "Gelu", "QuickGelu", "Sigmoid", "Tanh", "LeakyRelu", "Elu", "Selu", "HardSigmoid", "HardSwish", "Mish"),
    *("Softplus", "Clip", "Neg", "Exp", "Sqrt", "Reciprocal", "Erf", "Abs", "Cast"),
)


def channels_last(value: ir.Value | None) -> ir.Value | None:
    """Return x if the value is a Transpose of x from channels last to channels first."""
    producer = value.producer() if value is not None else None
    if permutation_of(producer) != TO_FIRST:
        return None
    assert producer is not None
    source = producer.inputs[0]
    return source if source is not None and "dims" in source.meta else None


def image_of(m: Match) -> ir.Value:
    """Return the first input with channels last; refuse if it is not the Transpose of one."""
    source = channels_last(m.node.inputs[0])
    m.require(source is not None, "its input is not transposed from channels last")
    assert source is not None
    return source


def to_last(dims: Dims) -> Sequence[Dim]:
    """Return the sizes of an image with channels last."""
    return [dims[axis] for axis in TO_LAST]


def attributes_of(node: ir.Node) -> dict[str, Any]:
    """Return the attributes of a node, to change them."""
    return {name: attribute.value for name, attribute in node.attributes.items()}


@rule_at(*_ELEMENTWISE, needs=CHANNELS_LAST, late=True)
def channels_last_elementwise(m: Match) -> ir.Value:
    """f(Transpose(x)) = Transpose(f(x))."""
    image = image_of(m)
    inputs = [image, *m.node.inputs[1:]]
    y = m.g.node(m.node.op_type, inputs, domain=m.node.domain, **attributes_of(m.node))
    return m.g.transpose(m.g.shaped(y, m.dims(image)), TO_FIRST)


@rule_at("Add", "Sub", "Mul", "Div", "Max", "Min", "Pow", needs=CHANNELS_LAST, late=True)
def channels_last_arithmetic(m: Match) -> ir.Value:
    """f(Transpose(x), y) = Transpose(f(x, y with channels last)) if y is transposed too, or has one row per image."""
    m.require(any(channels_last(x) is not None for x in m.node.inputs), "no input is transposed from channels last")
    operands = [_with_channels_last(m, x) for x in m.node.inputs if x is not None]
    y = m.g.node(m.node.op_type, operands)
    return m.g.transpose(m.g.shaped(y, to_last(m.dims(m.result))), TO_FIRST)


def _with_channels_last(m: Match, value: ir.Value) -> ir.Value:
    """Return an operand with channels last: a number, one number per channel, or per image and channel."""
    image = channels_last(value)
    if image is not None:
        return image
    dims = m.dims(value)
    m.require(len(dims) <= 4, "of more than four axes")
    count, channels, *positions = (1,) * (4 - len(dims)) + tuple(dims)
    m.require(positions == [1, 1], "an operand has channels first")
    if all(dim == 1 for dim in dims):
        return value
    return m.g.reshape(value, [channels] if count == 1 else [count, 1, 1, channels])


@rule_at("Concat", needs=CHANNELS_LAST, late=True)
def channels_last_concat(m: Match) -> ir.Value:
    """Concat(Transpose(x), Transpose(y)) = Transpose(Concat(x, y)), along the axis where they have it."""
    images = [channels_last(x) for x in m.node.inputs]
    m.require(all(image is not None for image in images), "not all inputs are transposed from channels last")
    axis = TO_FIRST[m.attribute(m.result, "axis") % 4]
    y = m.g.node("Concat", images, axis=axis)
    return m.g.transpose(m.g.shaped(y, to_last(m.dims(m.result))), TO_FIRST)


@rule_at("Pad", needs=CHANNELS_LAST, late=True)
def channels_last_pad(m: Match) -> ir.Value:
    """Pad(Transpose(x)) = Transpose(Pad(x)), with the padding of each axis where the axis is."""
    image = image_of(m)
    _, pads, *rest = m.node.inputs
    counts = array_of(pads)
    m.require(
        counts is not None and counts.size == 8 and len(rest) < 2, "not of constant sizes, or along some axes only"
    )
    moved = [int(side[axis]) for side in counts.reshape(2, 4) for axis in TO_LAST]
    y = m.g.node("Pad", [image, m.g.ints(moved), *rest], **attributes_of(m.node))
    return m.g.transpose(m.g.shaped(y, to_last(m.dims(m.result))), TO_FIRST)


@rule_at("ReduceMean", "ReduceSum", needs=CHANNELS_LAST, late=True)
def channels_last_reduction(m: Match) -> ir.Value:
    """Reduce(Transpose(x)) over positions = Reduce(x), which has only axes of one element to move."""
    image = image_of(m)
    axes = array_of(m.node.inputs[1]) if len(m.node.inputs) > 1 else None
    m.require(axes is not None and {int(axis) % 4 for axis in axes} == {2, 3}, "not over positions, as constants")
    kept = m.attribute(m.result, "keepdims", 1)
    count, *_, channels = m.dims(image)
    y = m.g.node(m.node.op_type, [image, m.g.ints([1, 2])], keepdims=kept)
    if not kept:
        return m.g.shaped(y, [count, channels])
    return m.g.transpose(m.g.shaped(y, [count, 1, 1, channels]), TO_FIRST)
