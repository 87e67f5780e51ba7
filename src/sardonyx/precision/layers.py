"""The layers of a model that can run in lower precision: products and convolutions with constant weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from sardonyx import opsets
from sardonyx.precision.convolutions import is_plain_convolution, to_first, to_last, window_of
from sardonyx.precision.scales import epsilon_of, scale_after, weights_of
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
    scale: ir.Node | None = None
    """What scales the columns of its result, and is folded into the weight."""

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
        return [self.node] if self.scale is None else [self.node, self.scale]

    @property
    def result(self) -> ir.Value:
        """The output."""
        return self.nodes[-1].outputs[0]

    @property
    def folded(self) -> Sequence[ir.Value]:
        """The weights that become packed constants, as the form of the weight takes them."""
        if self.scale is None:
            return [self.weight]
        scales = weights_of(self.scale, self.node.outputs[0])
        return [x for x in (self.weight, self.bias, *scales) if x is not None]

    @property
    def convolves(self) -> bool:
        """Whether it is a convolution."""
        return self.node.op_type == "Conv"

    @property
    def form(self) -> WeightForm:
        """How its constants become a matrix."""
        if self.scale is None:
            return WeightForm(self.transposed, self.convolves)
        return WeightForm(self.transposed, self.convolves, True, self.bias is not None, epsilon_of(self.scale))

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
            named[name] = Layer(name, node, scale_after(node))
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
    model = side_by_side([layer], [shape])
    if channels_last:
        _put_channels_last(model.graph)
    return model


def side_by_side(layers: Sequence[Layer], shapes: Sequence[Sequence[int]]) -> ir.Model:
    """Return a model of layers that each have an input of this shape and a result of their own."""
    inputs, nodes, outputs = [], [], []
    constants = {value: _copied(value) for layer in layers for value in _constants(layer)}
    for number, (layer, shape) in enumerate(zip(layers, shapes, strict=True)):
        x = float_value(f"x/{number}", tuple(shape))
        copied = _copied_nodes(layer, x, constants, _result_sizes(layer, shape), f"y/{number}/")
        inputs.append(x)
        nodes += copied
        outputs.append(copied[-1].outputs[0])
    graph = layers[0].node.graph
    assert graph is not None
    versions, weights = dict(graph.opset_imports), list(constants.values())
    copy = ir.Graph(inputs, outputs, nodes=nodes, initializers=weights, opset_imports=versions, name="layers")
    return ir.Model(copy, ir_version=opsets.IR_VERSION)


def _put_channels_last(graph: ir.Graph) -> None:
    """Let a graph of one convolution take and return channels last."""
    (x,), (y,) = graph.inputs, graph.outputs
    axes = len(dims(x))
    given = float_value("x_last", tuple(dims(x)[axis] for axis in to_last(axes)))
    last = float_value("y_last", tuple(dims(y)[axis] for axis in to_last(axes)))
    graph.inputs[:], graph.outputs[:] = [given], [last]
    graph.insert_before(graph[0], _transpose(given, to_first(axes), x))
    graph.append(_transpose(y, to_last(axes), last))


def _copied_nodes(
    layer: Layer, x: ir.Value, constants: Mapping[ir.Value, ir.Value], sizes: Dims, prefix: str
) -> list[ir.Node]:
    """Return the nodes of a layer that reads these; the names of their results have a prefix."""
    nodes: list[ir.Node] = []
    for number, node in enumerate(layer.nodes):
        inputs = [None if value is None else constants.get(value, x) for value in node.inputs]
        x = float_value(f"{prefix}{number}", sizes)
        nodes.append(_like(node, inputs, x))
    return nodes


def _constants(layer: Layer) -> Sequence[ir.Value]:
    read = (value for node in layer.nodes for value in node.inputs if value is not None)
    return [value for value in dict.fromkeys(read) if value not in (layer.x, layer.node.outputs[0])]


def _like(node: ir.Node, inputs: Sequence[ir.Value | None], y: ir.Value) -> ir.Node:
    return ir.Node(node.domain, node.op_type, inputs, list(node.attributes.values()), outputs=[y])


def _transpose(x: ir.Value, order: Sequence[int], y: ir.Value) -> ir.Node:
    return ir.Node("", "Transpose", [x], [ir.AttrInt64s("perm", order)], outputs=[y])


def _result_sizes(layer: Layer, shape: Sequence[int]) -> Dims:
    columns = layer.matrix_sizes[1]
    if not layer.convolves:
        return (*shape[:-1], columns)
    rows, places = window_of(layer.node).places((shape[2] if len(shape) == 4 else 1, shape[-1]))
    return (shape[0], columns, rows, places) if len(shape) == 4 else (shape[0], columns, places)


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
