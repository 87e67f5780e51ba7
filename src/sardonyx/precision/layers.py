"""The layers of a model that can run in lower precision: products and convolutions with constant weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from sardonyx import opsets
from sardonyx.sizes import Dims
from sardonyx.telemetry.source import module_of
from sardonyx.translate.inference import set_dims
from sardonyx.translate.translator import WEIGHTS_LOCATION

PRODUCTS = frozenset({"MatMul", "Gemm"})


@dataclass(frozen=True, eq=False)
class Layer:
    """A node with a constant weight, as reports, plans and caches name it."""

    name: str
    node: ir.Node

    @property
    def x(self) -> ir.Value:
        """The activations."""
        return _present(self.node.inputs[0])

    @property
    def weight(self) -> ir.Value:
        """The weight: a matrix."""
        return _present(self.node.inputs[1])

    @property
    def bias(self) -> ir.Value | None:
        """What is added to each row, if anything."""
        return self.node.inputs[2] if len(self.node.inputs) > 2 else None

    @property
    def result(self) -> ir.Value:
        """The output."""
        return self.node.outputs[0]

    @property
    def transposed(self) -> bool:
        """Whether the weight has a row for each output."""
        attribute = self.node.attributes.get("transB")
        return attribute is not None and bool(attribute.as_int())


def is_torch_weight(x: ir.Value) -> bool:
    """Whether a value is an initializer with its data in a torch tensor, as weights of sessions have."""
    data = x.const_value
    return x.is_initializer() and isinstance(data, ir.ExternalTensor) and data.location == WEIGHTS_LOCATION


def layers_of(graph: ir.Graph, is_weight: Callable[[ir.Value], bool] = is_torch_weight) -> Sequence[Layer]:
    """Return the layers of a graph, in its order, with unique names."""
    named: dict[str, Layer] = {}
    for node in graph:
        if _is_layer(node, is_weight):
            name = _unique(module_of(node.meta.get("fx")) or _weight_name(node), named)
            named[name] = Layer(name, node)
    return list(named.values())


def _is_layer(node: ir.Node, is_weight: Callable[[ir.Value], bool]) -> bool:
    if node.domain or node.op_type not in PRODUCTS:
        return False
    x, weight, *rest = node.inputs
    if x is None or weight is None or x.dtype != ir.DataType.FLOAT or not is_weight(weight):
        return False
    if len(dims(weight)) != 2 or len(dims(x)) < 2 or not all(isinstance(size, int) and size for size in dims(weight)):
        return False
    return node.op_type == "MatMul" or _is_plain_gemm(node, rest[0] if rest else None)


def _is_plain_gemm(node: ir.Node, bias: ir.Value | None) -> bool:
    scales = [node.attributes[name].as_float() for name in ("alpha", "beta") if name in node.attributes]
    transposed = "transA" in node.attributes and node.attributes["transA"].as_int()
    is_row = bias is None or (bias.is_initializer() and dims(bias) == dims(node.outputs[0])[-1:])
    return not transposed and all(scale == 1 for scale in scales) and is_row


def alone(layer: Layer, shape: Sequence[int]) -> ir.Model:
    """Return a model of one layer, of activations of this shape."""
    graph = layer.node.graph
    assert graph is not None
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT))
    set_dims(x, tuple(shape))
    constants = [_copied(value) for value in layer.node.inputs[1:] if value is not None]
    node = ir.Node("", layer.node.op_type, [x, *constants], list(layer.node.attributes.values()))
    y = node.outputs[0]
    y.name, y.type = "y", ir.TensorType(ir.DataType.FLOAT)
    columns = dims(layer.weight)[0 if layer.transposed else 1]
    set_dims(y, (*shape[:-1], columns))
    versions = dict(graph.opset_imports)
    copy = ir.Graph([x], [y], nodes=[node], initializers=constants, opset_imports=versions, name="layer")
    return ir.Model(copy, ir_version=opsets.IR_VERSION)


def _copied(value: ir.Value) -> ir.Value:
    copy = ir.Value(name=value.name, type=value.type, const_value=value.const_value)
    set_dims(copy, dims(value))
    return copy


def _weight_name(node: ir.Node) -> str:
    """Return the name of the weight without its suffix: that of the module in torch."""
    name = str(_present(node.inputs[1]).name)
    return name.removesuffix(".weight")


def _unique(name: str, taken: dict[str, Layer]) -> str:
    return next(candidate for candidate in _candidates(name) if candidate not in taken)


def _candidates(name: str) -> Iterator[str]:
    yield name
    number = 2
    while True:
        yield f"{name}#{number}"
        number += 1


def dims(x: ir.Value) -> Dims:
    """Return the sizes of a value; none if they are unknown."""
    found: Dims | None = x.meta.get("dims", tuple(x.shape) if x.shape is not None else None)
    return () if found is None else found


def _present(x: ir.Value | None) -> ir.Value:
    assert x is not None
    return x
