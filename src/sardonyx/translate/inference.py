"""Infer dtypes and sizes of the nodes that a translation appends, as far as later steps of it need them.

This is not full shape inference: FX has the metadata of every user operation. It covers the nodes in between.
"""

from __future__ import annotations

import operator

import onnx_ir as ir

from sardonyx.sizes import Dim, Dims, Equality

_TO_BOOL = {"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Not", "And", "Or", "Xor", "IsNaN", "IsInf"}
_TO_INT64 = {"Shape", "Size", "ArgMax", "ArgMin", "NonZero"}
_SECOND = {"Where": 1}
_ELEMENTWISE = {
    *_TO_BOOL - {"NonZero"},
    *("Add", "Sub", "Mul", "Div", "Pow", "Mod", "Min", "Max", "Where", "BitwiseAnd", "BitwiseOr", "BitwiseXor"),
    *("BitwiseNot", "BitShift", "Cast", "Neg", "Abs", "Exp", "Log", "Sqrt", "Reciprocal", "Erf", "Sigmoid", "Tanh"),
    *("Relu", "Gelu", "Floor", "Ceil", "Round", "Sign", "Sin", "Cos", "Tan", "Asin", "Acos", "Atan", "Sinh", "Cosh"),
    *("Asinh", "Acosh", "Atanh", "Elu", "Selu", "Celu", "LeakyRelu", "HardSigmoid", "HardSwish", "Mish", "Softplus"),
    *("Softsign", "ThresholdedRelu", "Clip", "Softmax", "LogSoftmax", "Identity", "QuickGelu", "Trilu", "CumSum"),
    *("LayerNormalization", "RMSNormalization", "InstanceNormalization", "GroupNormalization", "LpNormalization"),
}


def annotate(node: ir.Node, dtype: ir.DataType | None, equal: Equality = operator.eq) -> None:
    """Set the dtype, and for elementwise operators the sizes, of a new node's outputs."""
    dtype = dtype or _dtype(node)
    dims = _DIMS.get(node.op_type, _elementwise_dims if node.op_type in _ELEMENTWISE else _unknown)(node, equal)
    for output in node.outputs:
        if dtype is not None:
            output.type = ir.TensorType(dtype)
        if dims is not None:
            set_dims(output, dims)


def set_dims(value: ir.Value, dims: Dims) -> None:
    """Store sizes as expressions, for later translations, and as an ONNX shape."""
    value.meta["dims"] = dims
    value.shape = ir.Shape([dim if isinstance(dim, int) else str(dim) for dim in dims])


def _dtype(node: ir.Node) -> ir.DataType | None:
    if node.op_type in _TO_BOOL:
        return ir.DataType.BOOL
    if node.op_type in _TO_INT64:
        return ir.DataType.INT64
    if node.op_type == "Cast":
        return ir.DataType(node.attributes["to"].as_int())
    if node.op_type == "ConstantOfShape":
        value = node.attributes.get("value")
        return ir.DataType.FLOAT if value is None else value.as_tensor().dtype
    if "dtype" in node.attributes and not node.domain:
        return ir.DataType(node.attributes["dtype"].as_int())
    source = node.inputs[_SECOND.get(node.op_type, 0)] if node.inputs else None
    return source.dtype if source is not None else None


def _elementwise_dims(node: ir.Node, equal: Equality) -> Dims | None:
    operands = [x for x in node.inputs if x is not None]
    if node.op_type.endswith("Normalization") or node.op_type in ("CumSum", "Trilu"):
        operands = operands[:1]
    known: list[Dims] = [x.meta["dims"] for x in operands if x.meta.get("dims") is not None]
    return broadcast(*known, equal=equal) if len(known) == len(operands) else None


def _unknown(node: ir.Node, equal: Equality) -> Dims | None:
    return None


def _input_dims(node: ir.Node) -> list[Dims] | None:
    inputs = [x.meta.get("dims") for x in node.inputs if x is not None]
    known = [dims for dims in inputs if dims is not None]
    return known if len(known) == len(inputs) else None


def _concat_dims(node: ir.Node, equal: Equality) -> Dims | None:
    pieces = _input_dims(node)
    if not pieces:
        return None
    axis = node.attributes["axis"].as_int() % len(pieces[0])
    size = sum((piece[axis] for piece in pieces[1:]), pieces[0][axis])
    return (*pieces[0][:axis], size, *pieces[0][axis + 1 :])


def _matmul_dims(node: ir.Node, equal: Equality) -> Dims | None:
    known = _input_dims(node)
    if not known or min(map(len, known)) < 2:
        return None
    left, right = known
    batch = broadcast(left[:-2], right[:-2], equal=equal)
    return None if batch is None else (*batch, left[-2], right[-1])


_DIMS = {"Concat": _concat_dims, "MatMul": _matmul_dims}


def broadcast(*shapes: Dims, equal: Equality = operator.eq) -> Dims | None:
    """Return the broadcast shape of several operands; None if it depends on which of two sizes is one.

    >>> broadcast((4, 1), (3,))
    (4, 3)
    """
    rank = max(map(len, shapes), default=0)
    padded = [(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes]
    dims = [_wider(column, equal) for column in zip(*padded, strict=True)]
    known = tuple(dim for dim in dims if dim is not None)
    return known if len(known) == rank else None


def _wider(sizes: tuple[Dim, ...], equal: Equality) -> Dim | None:
    wide = [size for size in dict.fromkeys(sizes) if size != 1]
    constant = [size for size in wide if isinstance(size, int)]
    if constant or len(wide) < 2:
        return (constant or wide or [1])[0]
    wide = [size for size in wide if not equal(size, 1)] or [1]
    return wide[0] if all(equal(wide[0], size) for size in wide[1:]) else None
