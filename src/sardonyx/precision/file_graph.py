"""A graph whose layers are replaced: new nodes and constants, and in a file the data of weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import TorchTensor

from sardonyx.optimize.subgraphs import unused_tag
from sardonyx.precision.layers import Layer
from sardonyx.sizes import Dims
from sardonyx.translate.builder import Builder
from sardonyx.translate.inference import set_dims

Constants = Mapping[str, ir.TensorProtocol]
"""What a weight becomes, by the suffix of its name."""


Packed = dict[tuple[str, str, bool], Constants]
"""What weights became, by their name, the precision, and whether they are transposed."""


class FileGraph:
    """Adds nodes and initializers to a graph; layers with one weight share what becomes of it.

    `packed` shares it with other graphs of the same weights.
    """

    def __init__(self, graph: ir.Graph, packed: Packed) -> None:
        self.graph, self._packed = graph, packed
        self.g = Builder(graph.opset_imports[""], tag=unused_tag(graph))
        self._made: dict[tuple[ir.Value, str, bool], Sequence[ir.Value]] = {}

    def constants(self, layer: Layer, what: str, make: Callable[[], Constants]) -> Sequence[ir.Value]:
        """Return the initializers that a layer's weight becomes."""
        key = (layer.weight, what, layer.transposed)
        if key not in self._made:
            name = key_of_weight(layer, what)
            if name not in self._packed:
                self._packed[name] = make()
            made = self._packed[name].items()
            self._made[key] = [self.initializer(f"{layer.weight.name}_{suffix}", data) for suffix, data in made]
        return self._made[key]

    def initializer(self, name: str, data: ir.TensorProtocol) -> ir.Value:
        """Return a new initializer."""
        while name in self.graph.initializers:
            name += "_"
        value = ir.Value(name=name, type=ir.TensorType(data.dtype), const_value=_named(data, name))
        set_dims(value, tuple(data.shape.numpy()))
        self.graph.register_initializer(value)
        return value

    def declared(self, value: ir.Value, sizes: Dims, dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
        """Declare the type and sizes of a value, as far as they are known."""
        value.type = ir.TensorType(dtype)
        if sizes:
            set_dims(value, sizes)
        return value

    def insert_after(self, node: ir.Node | None, layer: Layer) -> None:
        """Insert the new nodes after another one, or first, as nodes of a layer."""
        if node is None:
            self.graph.insert_before(self.graph[0], self._new_nodes(layer))
        else:
            self.graph.insert_after(node, self._new_nodes(layer))

    def replace_input(self, layer: Layer, index: int, value: ir.Value) -> None:
        """Let a layer's node read a value that the new nodes compute."""
        self.graph.insert_before(layer.node, self._new_nodes(layer))
        layer.node.replace_input_with(index, value)

    def _new_nodes(self, layer: Layer) -> Sequence[ir.Node]:
        nodes = list(self.g.nodes)
        self.g.nodes.clear()
        for node in nodes:
            node.meta["fx"] = layer.node.meta.get("fx")
        for value in self.g.initializers.values():
            self.graph.register_initializer(value)
        return nodes

    def remove_unread(self, constants: Sequence[ir.Value]) -> None:
        """Remove initializers that nothing reads, nor the graph returns."""
        for value in constants:
            if not value.uses() and not value.is_graph_output():
                self.graph.initializers.pop(str(value.name), None)


def key_of_weight(layer: Layer, precision: str) -> tuple[str, str, bool]:
    """Return the key of what a layer's weight becomes in a precision."""
    return str(layer.weight.name), precision, layer.transposed


def _named(data: ir.TensorProtocol, name: str) -> ir.TensorProtocol:
    """Return a tensor of the same data with a name of its own."""
    if isinstance(data, TorchTensor):
        return TorchTensor(data.raw, name=name)
    return ir.Tensor(data.numpy(), dtype=data.dtype, name=name)


def data_of(weight: ir.Value) -> torch.Tensor:
    """Return the data of an initializer."""
    data = weight.const_value
    assert data is not None
    return data.raw.detach() if isinstance(data, TorchTensor) else torch.from_numpy(np.array(data.numpy()))


def matrix_of(layer: Layer) -> torch.Tensor:
    """Return the weight of a layer, of depth × columns."""
    return layer.form.matrix(data_of(layer.weight))
