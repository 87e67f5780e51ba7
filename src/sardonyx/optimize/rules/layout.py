"""Remove, merge, or move reshapes, transposes and expands."""

from __future__ import annotations

import onnx_ir as ir

from sardonyx.optimize.pattern import P, is_private, permutation_of
from sardonyx.optimize.rule import Match, rule, rule_at
from sardonyx.sizes import Dims

_ELEMENTWISE = ("Relu", "Gelu", "QuickGelu", "Sigmoid", "Tanh", "LeakyRelu", "HardSigmoid", "HardSwish")
_FUNCTIONS = ("Neg", "Exp", "Sqrt", "Reciprocal", "Erf", "Abs", "Cast")


@rule(P.Reshape("x", "shape"))
def drop_reshape(m: Match) -> ir.Value:
    """Reshape(x, shape of x) = x."""
    m.require(m.dims(m.x) == m.dims(m.result), "the shapes differ")
    return m.x


@rule(P.Reshape(P.Reshape("x", "first", _shared=True), "second"))
@rule(P.Reshape(P.Unsqueeze("x", "first", _shared=True), "second"))
@rule(P.Reshape(P.Squeeze("x", "first", _shared=True), "second"))
def join_reshapes(m: Match) -> ir.Value:
    """Reshape(Reshape(x, a), b) = Reshape(x, b)."""
    return m.g.reshape(m.x, m.dims(m.result))


@rule(P.Unsqueeze("x", "axes"))
@rule(P.Squeeze("x", "axes"))
def view_as_reshape(m: Match) -> ir.Value:
    """Squeeze and Unsqueeze = Reshape, if they follow one and merge with it."""
    producer = m.x.producer()
    m.require(producer is not None and producer.op_type in ("Reshape", "Squeeze", "Unsqueeze"), "nothing to merge")
    assert producer is not None
    assert producer.inputs[0] is not None
    m.dims(producer.inputs[0])
    return m.g.reshape(producer.inputs[0], m.dims(m.result))


@rule(P.Transpose("x", _name="outer"))
def drop_transpose(m: Match) -> ir.Value:
    """A Transpose that moves only axes of size one is a Reshape; one that moves no axis has no effect."""
    dims = m.dims(m.x)
    moved = [axis for axis in permutation_of(m.outer.producer()) if dims[axis] != 1]
    m.require(moved == sorted(moved), "axes with more than one element are permuted")
    return m.g.reshape(m.x, m.dims(m.result))


@rule(P.Transpose(P.Transpose("x", _shared=True, _name="inner"), _name="outer"))
def join_transposes(m: Match) -> ir.Value:
    """Transpose(Transpose(x, p), q) = Transpose(x, p∘q)."""
    m.dims(m.x)
    inner, outer = permutation_of(m.inner.producer()), permutation_of(m.outer.producer())
    m.require(len(inner) == len(outer) > 0, "the permutation is unknown")
    return m.g.transpose(m.x, [inner[axis] for axis in outer])


def _transposed_from(value: ir.Value | None) -> tuple[ir.Value, list[int]] | None:
    """Return x and the permutation if the value is a private Transpose of x."""
    producer = value.producer() if value is not None else None
    if producer is None or value is None or producer.op_type != "Transpose" or not is_private(value):
        return None
    source = producer.inputs[0]
    order = permutation_of(producer)
    return (source, order) if source is not None and "dims" in source.meta and order else None


def _meets_transpose(m: Match) -> bool:
    """Whether only Transposes read the result, so that one moved after it merges with them."""
    readers = m.result.uses()
    return bool(readers) and not m.result.is_graph_output() and all(use.node.op_type == "Transpose" for use in readers)


@rule_at(*_ELEMENTWISE, *_FUNCTIONS)
def sink_transpose_through_elementwise(m: Match) -> ir.Value:
    """Transpose(f(Transpose(x))) = Transpose(Transpose(f(x))), which merge."""
    transposed = _transposed_from(m.node.inputs[0])
    m.require(transposed is not None and _meets_transpose(m), "not between two Transposes")
    assert transposed is not None
    source, perm = transposed
    attributes = {name: a.value for name, a in m.node.attributes.items()}
    result = m.g.node(m.node.op_type, [source, *m.node.inputs[1:]], domain=m.node.domain, **attributes)
    return m.g.transpose(m.g.shaped(result, m.dims(source)), perm)


@rule_at("Add", "Sub", "Mul", "Div")
def sink_transpose_through_arithmetic(m: Match) -> ir.Value:
    """f(Transpose(x), Transpose(y)) = Transpose(f(x, y)); a number needs no Transpose."""
    sides = [(x, _transposed_from(x)) for x in m.node.inputs if x is not None]
    perms = [transposed[1] for _, transposed in sides if transposed is not None]
    m.require(bool(perms) and perms[0] == perms[-1], "no Transposes before it, or different ones")
    numbers = [x for x, transposed in sides if transposed is None]
    m.require(not numbers or (_is_number(m, numbers[0], len(perms[0])) and _meets_transpose(m)), "no Transpose saved")
    operands = [x if transposed is None else transposed[0] for x, transposed in sides]
    return m.g.transpose(m.g.node(m.node.op_type, operands), perms[0])


def _is_number(m: Match, value: ir.Value, rank: int) -> bool:
    dims = m.dims(value)
    return len(dims) <= rank and all(dim == 1 for dim in dims)


@rule(P.Expand("x", "shape"))
def drop_expand(m: Match) -> ir.Value:
    """Expand(x, shape of x) = x."""
    m.require(m.dims(m.x) == m.dims(m.result), "it broadcasts")
    return m.x


_ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Pow", "Max", "Min")
_COMPARISON = ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "And", "Or", "Where")


@rule_at(*_ARITHMETIC, *_COMPARISON)
def drop_expand_before_broadcast(m: Match) -> ir.Value:
    """f(Expand(x), y) = f(x, y) where f broadcasts to the same shape by itself."""
    inputs = [_unexpand(x) for x in m.node.inputs]
    m.require(any(a is not b for a, b in zip(inputs, m.node.inputs, strict=True)), "no Expand among the operands")
    for index, (unexpanded, original) in enumerate(zip(inputs, m.node.inputs, strict=True)):
        others = [x for i, x in enumerate(m.node.inputs) if i != index]
        if unexpanded is not original and not _is_covered(m, original, others):
            inputs[index] = original
    m.require(any(a is not b for a, b in zip(inputs, m.node.inputs, strict=True)), "the Expand sets the shape")
    return m.g.node(m.node.op_type, inputs)


def _unexpand(value: ir.Value | None) -> ir.Value | None:
    producer = value.producer() if value is not None else None
    if producer is None or producer.op_type != "Expand":
        return value
    source = producer.inputs[0]
    return source if source is not None and "dims" in source.meta else value


def _is_covered(m: Match, expanded: ir.Value | None, others: list[ir.Value | None]) -> bool:
    """Whether one other operand, not expanded, has the full shape."""
    if expanded is None:
        return False
    shape = m.dims(expanded)
    return any(
        other is not None and other is not expanded and _unexpand(other) is other and m.dims(other) == shape
        for other in others
    )


# Reshapes sink towards the outputs, through elementwise and row-wise operators, so that they meet and merge.

_ROWWISE = ("LayerNormalization", "RMSNormalization", "Softmax", "LogSoftmax")


def _reshaped_from(value: ir.Value | None) -> ir.Value | None:
    """Return x if the value is a private Reshape of x."""
    producer = value.producer() if value is not None else None
    if producer is None or value is None or producer.op_type not in ("Reshape",) or not is_private(value):
        return None
    source = producer.inputs[0]
    return source if source is not None and "dims" in source.meta else None


@rule_at(*_ELEMENTWISE, *_FUNCTIONS)
def sink_reshape_through_elementwise(m: Match) -> ir.Value:
    """f(Reshape(x)) = Reshape(f(x))."""
    source = _reshaped_from(m.node.inputs[0])
    m.require(source is not None, "no Reshape before it")
    m.require(m.result.dtype is None or m.result.dtype.bitwidth >= 8, "ONNX Runtime reshapes no numbers of 4 bits")
    attributes = {name: a.value for name, a in m.node.attributes.items()}
    result = m.g.node(m.node.op_type, [source, *m.node.inputs[1:]], domain=m.node.domain, **attributes)
    return m.g.reshape(result, m.dims(m.result))


@rule_at(*_ROWWISE)
def sink_reshape_through_rowwise(m: Match) -> ir.Value:
    """f(Reshape(x)) = Reshape(f(x)) where f works along the last axis and the Reshape keeps it."""
    source = _reshaped_from(m.node.inputs[0])
    m.require(source is not None and bool(m.dims(source)), "no Reshape before it")
    assert source is not None
    before, after = m.dims(source), m.dims(m.result)
    axis = m.node.attributes["axis"].value if "axis" in m.node.attributes else -1
    m.require(axis in (-1, len(after) - 1), "it works along more than the last axis")
    m.require(before[-1] == after[-1], "the last axis changes")
    attributes = {name: a.value for name, a in m.node.attributes.items()} | {"axis": -1}
    result = m.g.node(m.node.op_type, [source, *m.node.inputs[1:]], **attributes)
    return m.g.reshape(m.g.shaped(result, before), after)


@rule_at("Add", "Sub", "Mul", "Div")
def sink_reshape_through_arithmetic(m: Match) -> ir.Value:
    """f(Reshape(x), y) = Reshape(f(x, Reshape(y))) for operands of one shape, or a number, or a row both keep."""
    left, right = m.node.inputs
    flipped = _reshaped_from(left) is None
    view, other = (right, left) if flipped else (left, right)
    source = _reshaped_from(view)
    m.require(source is not None and view is not None and other is not None, "no Reshape before it")
    assert source is not None
    assert view is not None
    assert other is not None
    before, after = m.dims(source), m.dims(m.result)
    m.require(m.dims(view) == after, "it broadcasts")
    moved = _reshape_operand(m, other, before, after)
    operands = [moved, source] if flipped else [source, moved]
    return m.g.reshape(m.g.shaped(m.g.node(m.node.op_type, operands), before), after)


def _reshape_operand(m: Match, other: ir.Value, before: Dims, after: Dims) -> ir.Value:
    """Return the other operand in its shape before the Reshape."""
    dims = m.dims(other)
    if all(dim == 1 for dim in dims) and len(dims) <= len(before):
        return other
    if len(dims) == 1 and before and dims[0] == before[-1] == after[-1]:
        return other
    m.require(dims == after, "the other operand has another shape")
    m.require(len(before) < len(after) or _reshaped_from(other) is not None, "no Reshape would be saved")
    return m.g.reshape(other, before)
