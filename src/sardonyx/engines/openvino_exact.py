"""Which computations OpenVINO's CPU plugin does exactly as torch does.

It accepts every dtype but computes some in another, without an error: doubles in float, wide integers in 32 bits,
integer sums and quotients in float, sums of bytes with saturation. So doubles are refused, and integer computations
are accepted only if their values stay in a range where all of these are exact. Integer inputs are assumed to be at most
2²³ in magnitude, which each call checks; ranges are propagated from there through the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeAlias

import onnx
import onnx_ir as ir
import torch

from sardonyx.errors import EngineError
from sardonyx.optimize.legalize import Kernels, unsupported_reason
from sardonyx.optimize.subgraphs import graphs_of
from sardonyx.translate.translator import WEIGHTS_LOCATION

Range: TypeAlias = tuple[float, float]

_FLOAT_EXACT = 1 << 24
"""Integers up to this are exact in float."""
_INT32_MAX = (1 << 31) - 1
_INT32: Range = (-_INT32_MAX, _INT32_MAX)
_EXACT: Range = (-_FLOAT_EXACT, _FLOAT_EXACT)
_INPUT_LIMIT = 1 << 23
_INPUTS: Range = (-_INPUT_LIMIT, _INPUT_LIMIT)
_UNKNOWN: Range = (-math.inf, math.inf)
_LIMITS: Mapping[ir.DataType, Range] = {
    ir.DataType.INT8: (-128, 127),
    ir.DataType.UINT8: (0, 255),
    ir.DataType.INT16: (-(1 << 15), (1 << 15) - 1),
    ir.DataType.UINT16: (0, (1 << 16) - 1),
    ir.DataType.INT32: _INT32,
    ir.DataType.INT64: _INT32,
}
"""The range in which it computes each integer dtype as torch does."""
_HINT = 'use options={"engine": "onnxruntime"}'


class Exact(Kernels):
    """Every operator, except for dtypes that are computed in a narrower one."""

    def accepts(self, op_type: str, opset: int, types: Mapping[str, str]) -> bool:
        """Whether results equal torch's: doubles may only be cast to float, and floats not to wide integers."""
        if op_type == "Cast":
            return (types.get("T1"), types.get("T2")) not in _INEXACT_CASTS
        return op_type not in _UNSUPPORTED and not _INEXACT & set(types.values())


_UNSUPPORTED = frozenset({"MaxUnpool"})
_INEXACT = frozenset({"tensor(double)", "tensor(uint32)", "tensor(uint64)"})
_FLOATS = ("tensor(float)", "tensor(float16)", "tensor(bfloat16)", "tensor(double)")
_WIDE = ("tensor(int32)", "tensor(int64)", "tensor(uint32)", "tensor(uint64)")
_INEXACT_CASTS = frozenset(
    [(narrow, wide) for narrow in _FLOATS for wide in _WIDE]
    + [(wide, "tensor(double)") for wide in _WIDE]
    + [("tensor(double)", narrow) for narrow in ("tensor(float16)", "tensor(bfloat16)", "tensor(bool)")]
)


def check(model: ir.Model, weights: Mapping[str, torch.Tensor]) -> None:
    """Raise unless every result is guaranteed to be as exact as torch's."""
    if any(value.dtype is None for node in model.graph.all_nodes() for value in node.outputs if value.name):
        model = ir.from_proto(onnx.shape_inference.infer_shapes(ir.to_proto(model)))
    opset, exact, ranges = model.graph.opset_imports[""], Exact({}), _Ranges(frozenset(model.graph.inputs), weights)
    for graph in graphs_of(model.graph):
        for node in graph:
            reason = unsupported_reason(node, opset, exact)
            if reason:
                raise EngineError(f"openvino computes in a narrower dtype: {reason}", hint=_HINT)
            ranges.propagate(node)


def bounded_inputs(model: onnx.ModelProto) -> frozenset[int]:
    """Return the indices of inputs with wide integers."""
    wide = {int(ir.DataType[name]) for name in ("INT32", "INT64", "UINT32", "UINT64")}
    return frozenset(i for i, x in enumerate(model.graph.input) if x.type.tensor_type.elem_type in wide)


def check_range(x: torch.Tensor) -> None:
    """Raise if an integer input exceeds the range that the model was checked for."""
    if x.numel() and max(-int(x.min()), int(x.max())) > _INPUT_LIMIT:
        raise EngineError(
            f"an integer input has values beyond ±{_INPUT_LIMIT:,}, but openvino computes integers in 32 bits",
            hint=_HINT,
        )


class _Ranges:
    """The range of each integer value of a model.

    Sizes, and what is computed only from sizes, are bounded by memory and not checked.
    """

    def __init__(self, inputs: frozenset[ir.Value], weights: Mapping[str, torch.Tensor]) -> None:
        self._inputs, self._weights = inputs, weights
        self._ranges: dict[ir.Value, Range] = {}
        self._sizes: set[ir.Value] = set()

    def propagate(self, node: ir.Node) -> None:
        """Compute the ranges of a node's outputs from those of its inputs."""
        read = [value for value in node.inputs if value is not None and _is_integer(value)]
        about_sizes = node.op_type in _SIZES or (
            any(value in self._sizes for value in read)
            and all(value in self._sizes or value.const_value is not None for value in read)
        )
        if node.op_type in _COMPUTED and not about_sizes:
            for value in read:
                self._require(node, self.get(value), _EXACT if node.op_type in _IN_FLOAT else _INT32)
        for output in filter(_is_integer, node.outputs):
            if about_sizes and node.op_type != "Range":
                self._sizes.add(output)
            else:
                self._ranges[output] = self._result(node, output)

    def get(self, value: ir.Value) -> Range:
        """Return the range of a value: computed, or read from a constant; that of an input is checked at each call."""
        if value in self._ranges:
            return self._ranges[value]
        if value.const_value is not None:
            self._ranges[value] = self._constant_range(value.const_value)
            return self._ranges[value]
        limits = _LIMITS.get(_dtype(value), _UNKNOWN)
        if _is_narrow(value):
            return limits
        return _INPUTS if value in self._sizes or value in self._inputs else _UNKNOWN

    def _constant_range(self, tensor: ir.TensorProtocol) -> Range:
        if isinstance(tensor, ir.ExternalTensor) and tensor.location == WEIGHTS_LOCATION:
            weight = self._weights[str(tensor.name)]
            return int(weight.min()), int(weight.max())
        array = tensor.numpy()
        return (int(array.min()), int(array.max())) if array.size else (0, 0)

    def _result(self, node: ir.Node, output: ir.Value) -> Range:
        limits = _LIMITS.get(_dtype(output), _UNKNOWN)
        if node.op_type in _ARITHMETIC:
            ranges = [self.get(value) for value in node.inputs if value is not None and _is_integer(value)]
            result = _ARITHMETIC[node.op_type](node, ranges)
            self._require(node, result, limits)
            return result
        if node.op_type in _VALUE_OPERANDS:
            indices = _VALUE_OPERANDS[node.op_type] or range(len(node.inputs))
            operands = [node.inputs[i] for i in indices if i < len(node.inputs)]
            return _union([self.get(v) for v in operands if v is not None and _is_integer(v)] or [limits])
        if node.op_type == "Cast":
            operand = node.inputs[0]
            result = self.get(operand) if operand is not None and _is_integer(operand) else (0, 1)
            result = limits if operand is not None and _is_floating(operand) else result
            return result if _within(result, limits) or not _is_narrow(output) else limits
        if node.op_type in _INDICES and not _is_narrow(output):
            return _union([_INPUTS, *(self.get(v) for v in node.inputs[:1] if v is not None and _is_integer(v))])
        return limits if _is_narrow(output) else _UNKNOWN

    def _require(self, node: ir.Node, result: Range, limits: Range) -> None:
        if not _within(result, limits):
            raise EngineError(
                f"openvino computes integers in 32 bits or float; {node.op_type} ({node.name}) may exceed that",
                hint=_HINT,
            )


def _elements(node: ir.Node) -> float:
    """Return how many elements a reduction adds at most; for symbolic sizes, as many as float counts exactly."""
    operand = node.inputs[0]
    sizes = operand.shape if operand is not None else None
    if sizes is None or not all(isinstance(size, int) for size in sizes):
        return _FLOAT_EXACT
    return math.prod(size for size in sizes if isinstance(size, int))


def _sum(node: ir.Node, ranges: list[Range]) -> Range:
    low, high = ranges[0]
    count = _elements(node)
    return min(low * count, low), max(high * count, high)


def _product(node: ir.Node, ranges: list[Range]) -> Range:
    corners = [a * b for a in ranges[0] for b in ranges[1] if not (math.isinf(a) or math.isinf(b))]
    return (min(corners), max(corners)) if len(corners) == 4 else _UNKNOWN


def _magnitude(node: ir.Node, ranges: list[Range]) -> Range:
    size = max(-ranges[0][0], ranges[0][1])
    return -size, size


def _bits(node: ir.Node, ranges: list[Range]) -> Range:
    """Return the range of all bits that some operand has; a negative number has all higher bits."""
    low, high = _union(ranges)
    return (-_INT32_MAX if low < 0 else 0), (1 << int(high).bit_length()) - 1 if high < _INT32_MAX else _INT32_MAX


_ARITHMETIC: Mapping[str, Callable[[ir.Node, list[Range]], Range]] = {
    "Add": lambda node, r: (r[0][0] + r[1][0], r[0][1] + r[1][1]),
    "Sub": lambda node, r: (r[0][0] - r[1][1], r[0][1] - r[1][0]),
    "Mul": _product,
    "Neg": lambda node, r: (-r[0][1], -r[0][0]),
    "Abs": _magnitude,
    "Div": _magnitude,
    "Mod": lambda node, r: _magnitude(node, r[1:]),
    "Sign": lambda node, r: (-1, 1),
    "ReduceSum": _sum,
    "CumSum": _sum,
    "BitwiseAnd": _bits,
    "BitwiseOr": _bits,
    "BitwiseXor": _bits,
    "BitwiseNot": lambda node, r: (-r[0][1] - 1, -r[0][0] - 1),
}
_VALUE_OPERANDS: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(("Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Expand", "Tile", "Slice"), (0,)),
    **dict.fromkeys(("Flatten", "Split", "Gather", "GatherElements", "GatherND", "Trilu", "Compress"), (0,)),
    **dict.fromkeys(("ReduceMax", "ReduceMin", "DepthToSpace", "ReverseSequence"), (0,)),
    **dict.fromkeys(("ScatterElements", "ScatterND", "Pad"), (0, 2)),
    **dict.fromkeys(("Concat", "Max", "Min", "Clip"), ()),
    "Where": (1, 2),
    "OneHot": (2,),
}
"""Operators whose results are values of their operands: the indices of those operands, or () for all."""
_IN_FLOAT = frozenset({"Div", "Mod", "ReduceSum", "CumSum", "ReduceMax", "ReduceMin"})
_COMPARED = ("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual")
_EXTREMES = ("Max", "Min", "Clip", "ReduceMax", "ReduceMin")
_COMPUTED = frozenset(
    {*_ARITHMETIC, *_COMPARED, *_EXTREMES, "Pow", "MatMul", "Einsum", "BitShift", "ReduceProd", "Sum"}
)
_INDICES = frozenset({"ArgMax", "ArgMin", "NonZero", "Range", "NonMaxSuppression", "TopK", "MaxPool", "Unique"})
"""Operators whose results are indices along a dimension, or values of their operands."""
_SIZES = frozenset({"Shape", "Size"})


def _is_integer(value: ir.Value) -> bool:
    return value.dtype is not None and value.dtype.is_integer()


def _is_floating(value: ir.Value) -> bool:
    return value.dtype is not None and value.dtype.is_floating_point()


def _is_narrow(value: ir.Value) -> bool:
    return _dtype(value) in _LIMITS and _dtype(value).bitwidth < 32


def _dtype(value: ir.Value) -> ir.DataType:
    assert value.dtype is not None
    return value.dtype


def _union(ranges: list[Range]) -> Range:
    return min(low for low, _ in ranges), max(high for _, high in ranges)


def _within(result: Range, limits: Range) -> bool:
    return limits[0] <= result[0] and result[1] <= limits[1]
