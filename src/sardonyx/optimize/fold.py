"""Constant folding of small nodes, whose values rules inspect. The engine folds the large ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from sardonyx.optimize.pattern import array_of
from sardonyx.optimize.subgraphs import bodies_of, is_random
from sardonyx.translate.builder import Builder

_LARGEST = 1024
_LARGEST_EVALUATED = 2**25
_NEVER = {"Identity", "Constant", "QuantizeLinear", "DequantizeLinear"}


def fold_constant(node: ir.Node, g: Builder) -> ir.Value | None:
    """Return the value of a node whose inputs are all small constants, else None."""
    if node.op_type in _NEVER or node.domain or len(node.outputs) != 1 or not node.inputs:
        return None
    if is_random(node) or bodies_of(node):
        return None
    if node.op_type == "Shape":
        return _static_shape(node, g)
    if not all(x is None or (x.const_value is not None and x.const_value.size <= _LARGEST) for x in node.inputs):
        return None
    arrays = [array_of(x) if x is not None else None for x in node.inputs]
    if any(a is None for a, x in zip(arrays, node.inputs, strict=True) if x is not None):
        return None
    dims = node.outputs[0].meta.get("dims")
    if dims is not None and not (all(isinstance(d, int) for d in dims) and np.prod(dims) <= _LARGEST):
        return None
    if node.op_type in ("Div", "Mod") and _has_zero_integer(arrays[1]):
        return None  # the engine raises the division by zero
    result = _evaluate(node, arrays, g.opset)
    return None if result is None or result.size > _LARGEST else g.constant(result, node.outputs[0].dtype)


def evaluate_constants(value: ir.Value, opset: int) -> Any:
    """Return the array of a value that is computed from constants, however large; None if it is not."""
    array = array_of(value)
    node = value.producer()
    if array is not None or node is None:
        return array
    if node.domain or len(node.outputs) != 1 or not node.inputs or is_random(node) or bodies_of(node):
        return None
    dims = value.meta.get("dims")
    if dims is None or not all(isinstance(dim, int) for dim in dims) or np.prod(dims) > _LARGEST_EVALUATED:
        return None
    arrays = [None if x is None else evaluate_constants(x, opset) for x in node.inputs]
    if any(a is None for a, x in zip(arrays, node.inputs, strict=True) if x is not None):
        return None
    return _evaluate(node, arrays, opset)


def _has_zero_integer(array: Any) -> bool:
    return array.dtype.kind in "iu" and not array.all()


def _static_shape(node: ir.Node, g: Builder) -> ir.Value | None:
    source = node.inputs[0]
    dims = source.meta.get("dims") if source is not None else None
    if dims is None:
        return None
    start = node.attributes["start"].as_int() if "start" in node.attributes else 0
    end = node.attributes["end"].as_int() if "end" in node.attributes else len(dims)
    sizes = dims[start:end]
    return g.ints(list(sizes)) if all(isinstance(d, int) for d in sizes) else None


def _evaluate(node: ir.Node, arrays: list[Any], opset: int) -> Any:
    simple = _NUMPY.get(node.op_type)
    try:
        with np.errstate(all="ignore"):
            result = simple(node, *arrays) if simple is not None else _reference(node, arrays, opset)
            return None if result is None else np.asarray(result)
    except Exception:
        return None  # the reference evaluator has gaps; an engine will fold or run the node


_NUMPY: dict[str, Any] = {
    "Cast": lambda node, x: x.astype(ir.DataType(node.attributes["to"].as_int()).numpy()),
    "Add": lambda node, x, y: x + y,
    "Sub": lambda node, x, y: x - y,
    "Mul": lambda node, x, y: x * y,
    "Reshape": lambda node, x, shape: x.reshape(shape) if 0 not in shape else None,
    "Unsqueeze": lambda node, x, axes: np.expand_dims(x, tuple(axes)),
    "Squeeze": lambda node, x, axes: np.squeeze(x, tuple(axes)),
}


def _reference(node: ir.Node, arrays: list[Any], opset: int) -> Any:
    from onnx.reference import ReferenceEvaluator

    names = [f"x{i}" if x is not None else "" for i, x in enumerate(node.inputs)]
    proto = onnx.helper.make_node(node.op_type, names, ["y"])
    proto.attribute.extend(ir.to_proto(attribute) for attribute in node.attributes.values())
    inputs = [
        onnx.helper.make_tensor_value_info(n, int(x.dtype), a.shape)
        for n, x, a in zip(names, node.inputs, arrays, strict=True)
        if x is not None and x.dtype is not None
    ]
    output = onnx.helper.make_tensor_value_info("y", int(node.outputs[0].dtype or 1), None)
    graph = onnx.helper.make_graph([proto], "fold", inputs, [output])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)])
    feeds = {name: array for name, array in zip(names, arrays, strict=True) if name}
    results: Any = ReferenceEvaluator(model).run(None, feeds)
    return results[0]
