"""The layers of a model that can run in lower precision: products and convolutions with constant weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from sardonyx import opsets
from sardonyx.precision.convolutions import TO_FIRST, TO_LAST, epsilon_of, is_plain_convolution, norm_after, window_of
from sardonyx.precision.sizes import dims, float_value, is_weight
from sardonyx.precision.weights import WeightForm
from sardonyx.sizes import Dims
from sardonyx.telemetry.source import module_of
from sardonyx.translate.builder import MICROSOFT
from sardonyx.translate.inference import set_dims

LAYERS = frozenset({("", "MatMul"), ("", "Gemm"), (MICROSOFT, "FusedMatMul"), ("", "Conv")})


@dataclass(frozen=True, eq=False)
class Layer:
    """A node with a constant weight, as reports, plans and caches name it."""

    name: str
    node: ir.Node
    norm: ir.Node | None = None
    """The batch norm of a convolution's result, which is folded into the weight."""

    @property
    def x(self) -> ir.Value:
        """The activations."""
        return _present(self.node.inputs[0])

    @property
    def weight(self) -> ir.Value:
        """The weight: a matrix, or one for each place of a window."""
        return _present(self.node.inputs[1])

    @property
    def bias(self) -> ir.Value | None:
        """What is added to each row, if anything."""
        return self.node.inputs[2] if len(self.node.inputs) > 2 else None

    @property
    def nodes(self) -> Sequence[ir.Node]:
        """What computes the result of the activations."""
        return [self.node] if self.norm is None else [self.node, self.norm]

    @property
    def result(self) -> ir.Value:
        """The output."""
        return self.nodes[-1].outputs[0]

    @property
    def folded(self) -> Sequence[ir.Value]:
        """The weights that become packed constants, as the form of the weight takes them."""
        if self.norm is None:
            return [self.weight]
        return [x for x in (self.weight, self.bias, *self.norm.inputs[1:]) if x is not None]

    @property
    def convolves(self) -> bool:
        """Whether it is a convolution."""
        return self.node.op_type == "Conv"

    @property
    def form(self) -> WeightForm:
        """How its constants become a matrix."""
        if self.norm is None:
            return WeightForm(self.transposed, self.convolves)
        return WeightForm(False, True, self.bias is not None, epsilon_of(self.norm))

    @property
    def transposed(self) -> bool:
        """Whether the weight has a row for each output."""
        attribute = self.node.attributes.get("transB")
        return attribute is not None and bool(attribute.as_int())

    @property
    def matrix_sizes(self) -> tuple[int, int]:
        """The depth and the columns of its weight as a matrix."""
        sizes = [int(size) for size in dims(self.weight) if isinstance(size, int)]
        if self.convolves or self.transposed:
            return math.prod(sizes[1:]), sizes[0]
        return sizes[0], sizes[1]


def layers_of(graph: ir.Graph, is_weight: Callable[[ir.Value], bool] = is_weight) -> Sequence[Layer]:
    """Return the layers of a graph, in its order, with unique names."""
    named: dict[str, Layer] = {}
    for node in graph:
        if is_layer(node, is_weight):
            name = _unique(module_of(node.meta.get("fx")) or _weight_name(node), named)
            named[name] = Layer(name, node, norm_after(node) if node.op_type == "Conv" else None)
    return list(named.values())


def is_layer(node: ir.Node, is_weight: Callable[[ir.Value], bool] = is_weight) -> bool:
    """Whether a node is a layer that can run in lower precision."""
    if (node.domain, node.op_type) not in LAYERS:
        return False
    x, weight, *rest = node.inputs
    if x is None or weight is None or x.dtype != ir.DataType.FLOAT or not is_weight(weight):
        return False
    if len(dims(x)) < 2 or not all(isinstance(size, int) and size for size in dims(weight)):
        return False
    if node.op_type == "Conv":
        return is_plain_convolution(node)
    return len(dims(weight)) == 2 and _is_plain(node, rest[0] if rest else None)


def _is_plain(node: ir.Node, bias: ir.Value | None) -> bool:
    """Whether a product neither scales nor transposes the activations, and its bias is one row."""
    scales = [node.attributes[name].as_float() for name in ("alpha", "beta") if name in node.attributes]
    flags = [name for name in ("transA", "transBatchA", "transBatchB") if name in node.attributes]
    transposed = any(node.attributes[name].as_int() for name in flags)
    is_row = bias is None or (bias.is_initializer() and dims(bias) == dims(node.outputs[0])[-1:])
    return not transposed and all(scale == 1 for scale in scales) and is_row


def alone(layer: Layer, shape: Sequence[int], *, channels_last: bool = False) -> ir.Model:
    """Return a model of one layer, of activations of this shape; of a convolution optionally with channels last."""
    graph = layer.node.graph
    assert graph is not None
    x, sizes = float_value("x", tuple(shape)), _result_sizes(layer, shape)
    constants = {value: _copied(value) for value in _constants(layer)}
    nodes, y = [], x
    if channels_last:
        x = float_value("x_last", tuple(shape[axis] for axis in TO_LAST))
        nodes.append(_transpose(x, TO_FIRST, y))
    for number, node in enumerate(layer.nodes):
        inputs = [y, *(None if value is None else constants[value] for value in node.inputs[1:])]
        y = float_value(f"y{number}", sizes)
        nodes.append(_like(node, inputs, y))
    if channels_last:
        y, first = float_value("y_last", tuple(sizes[axis] for axis in TO_LAST)), y
        nodes.append(_transpose(first, TO_LAST, y))
    versions = dict(graph.opset_imports)
    weights = list(constants.values())
    copy = ir.Graph([x], [y], nodes=nodes, initializers=weights, opset_imports=versions, name="layer")
    return ir.Model(copy, ir_version=opsets.IR_VERSION)


def _constants(layer: Layer) -> Sequence[ir.Value]:
    return list(dict.fromkeys(value for node in layer.nodes for value in node.inputs[1:] if value is not None))


def _like(node: ir.Node, inputs: Sequence[ir.Value | None], y: ir.Value) -> ir.Node:
    return ir.Node(node.domain, node.op_type, inputs, list(node.attributes.values()), outputs=[y])


def _transpose(x: ir.Value, order: Sequence[int], y: ir.Value) -> ir.Node:
    return ir.Node("", "Transpose", [x], [ir.AttrInt64s("perm", order)], outputs=[y])


def _result_sizes(layer: Layer, shape: Sequence[int]) -> Dims:
    columns = layer.matrix_sizes[1]
    if not layer.convolves:
        return (*shape[:-1], columns)
    return (shape[0], columns, *window_of(layer.node).places((shape[2], shape[3])))


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


def _present(x: ir.Value | None) -> ir.Value:
    assert x is not None
    return x
