"""Layers of a session in int8, for engines that compute what is between Dequantize- and QuantizeLinear in integers.

A linear layer reads its activations rounded; what else reads them, as a residual, does not. What a convolution reads is
rounded for all its readers, and so is the result of one that is added to what another reads: sums are of codes then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir
import torch

from sardonyx.optimize.pattern import is_private
from sardonyx.precision.file_graph import FileGraph
from sardonyx.precision.layers import Layer, layers_of
from sardonyx.precision.packing import CODES, SCALES, Packing, Quantizer
from sardonyx.precision.plan import Plan
from sardonyx.precision.sizes import dims, weight_value
from sardonyx.precision.static_quantization import RoundedValues
from sardonyx.precision.static_scales import KEEP_RANGE, Range, Scale, activated
from sardonyx.precision.storage import Static


def quantize_layers(model: ir.Model, plan: Plan, weights: Mapping[str, int]) -> Sequence[Packing]:
    """Round what the layers read that a plan has in int8, and their weights, in place; return the weights' packings.

    `weights` has the argument of each initializer.
    """
    stored = {layer: plan.storage_of(layer.name) for layer in layers_of(model.graph)}
    ranges = {layer: storage for layer, storage in stored.items() if isinstance(storage, Static)}
    quantizer = _SessionQuantizer(FileGraph(model.graph, {}), list(ranges), weights)
    for layer, storage in ranges.items():
        quantizer.quantize(layer, storage)
    return list(quantizer.packings.values())


class _SessionQuantizer:
    """Quantizes layers of a graph; those of one weight share its codes."""

    def __init__(self, file: FileGraph, layers: Sequence[Layer], weights: Mapping[str, int]) -> None:
        self._file, self._weights = file, weights
        self._values = RoundedValues(file)
        self._linear = {layer.node for layer in layers if not layer.convolves}
        self._convolutions = {layer.node for layer in layers if layer.convolves}
        self._codes: dict[tuple[ir.Value, int], ir.Value] = {}
        self.packings: dict[tuple[ir.Value, int], Packing] = {}

    def quantize(self, layer: Layer, ranges: Static) -> None:
        """Let a layer read rounded activations and a rounded weight."""
        weight = layer.weight
        if layer.convolves:
            self._round_for_all(_rounded_first(layer.x), ranges.x, layer)
        else:
            self._values.round(layer.x, lambda: Scale.of(ranges.x), layer, reads=self._linear.__contains__)
        self._file.replace_input(layer, 1, self._rounded_weight(layer))
        self._file.remove_unread([weight])
        if layer.convolves and self._is_added(activated(layer)):
            self._round_for_all(activated(layer), ranges.result, layer)

    def _round_for_all(self, value: ir.Value, numbers: Range, layer: Layer) -> None:
        self._values.round(value, lambda: Scale.symmetric(numbers), layer, reads=lambda node: True)

    def _is_added(self, value: ir.Value) -> bool:
        """Whether only sums read a value that convolutions read."""
        sums = [use.node for use in value.uses()]
        return bool(sums) and all(node.op_type == "Add" and self._is_convolved(node.outputs[0]) for node in sums)

    def _is_convolved(self, value: ir.Value) -> bool:
        """Whether a convolution reads a value, or what only has its range."""
        readers = [use.node for use in value.uses()]
        following = [node for node in readers if node.op_type in ("Relu", *KEEP_RANGE)]
        return any(node in self._convolutions for node in readers) or any(
            self._is_convolved(node.outputs[0]) for node in following
        )

    def _rounded_weight(self, layer: Layer) -> ir.Value:
        """Return the weight of a layer, dequantized."""
        axis = 0 if layer.convolves or layer.transposed else 1
        key, g = (layer.weight, axis), self._file.g
        if key not in self._codes:
            codes, scales = self._declare(layer.weight, axis)
            zeros = g.constant_vector(0, layer.matrix_sizes[1], torch.int8)
            self._codes[key] = self._file.declared(
                g.DequantizeLinear(codes, scales, zeros, axis=axis), dims(layer.weight)
            )
        return self._codes[key]

    def _declare(self, weight: ir.Value, axis: int) -> Sequence[ir.Value]:
        """Declare the codes and scales of a weight, and their packing."""
        sizes = tuple(int(size) for size in dims(weight) if isinstance(size, int))
        types = {CODES: (ir.DataType.INT8, sizes), SCALES: (ir.DataType.FLOAT, (sizes[axis],))}
        values = {what: weight_value(f"{weight.name}_{what}{axis or ''}", *about) for what, about in types.items()}
        for value in values.values():
            self._file.graph.register_initializer(value)
        names = {what: str(value.name) for what, value in values.items()}
        self.packings[weight, axis] = Packing([self._weights[str(weight.name)]], Quantizer(axis), names)
        return list(values.values())


def _rounded_first(x: ir.Value) -> ir.Value:
    """Return the value that x only rearranges or pools, so that this is done with codes."""
    node = x.producer()
    while node is not None and node.op_type in KEEP_RANGE and node.inputs[0] is not None and is_private(node.inputs[0]):
        x = node.inputs[0]
        node = x.producer()
    return x
