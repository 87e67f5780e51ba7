"""Convolutions of a file in int8: QuantizeLinear and DequantizeLinear around them, with scales of calibration calls.

ONNX Runtime fuses them to integer kernels, and what lies between, as additions and poolings. A value that a convolution
reads or returns is rounded to codes once, and all that read it read the codes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import TorchTensor

from sardonyx import dtypes
from sardonyx.native.linear import quantize_int8
from sardonyx.precision.file_graph import Constants, FileGraph, data_of
from sardonyx.precision.layers import Layer
from sardonyx.precision.sizes import dims
from sardonyx.precision.static_scales import Range, Scale, activated

_INT32 = torch.iinfo(torch.int32)


class RoundedValues:
    """Values of a graph that are rounded to codes, with their scales."""

    def __init__(self, file: FileGraph) -> None:
        self._file = file
        self._scales: dict[ir.Value, Scale] = {}

    def scale_of(self, rounded: ir.Value) -> float:
        """Return the scale of a rounded value."""
        return self._scales[rounded].scale

    def round(
        self, value: ir.Value, scale: Callable[[], Scale], layer: Layer, *, reads: Callable[[ir.Node], bool]
    ) -> ir.Value:
        """Return a value rounded to codes, which the nodes that `reads` accepts now read."""
        if value in self._scales:
            return value
        g, found = self._file.g, scale()
        readers = [use for use in value.uses() if reads(use.node)]
        step, zero = g.scalar(found.scale, torch.float32), g.scalar(found.zero_point, found.dtype)
        codes = self._file.declared(g.QuantizeLinear(value, step, zero), dims(value), dtypes.to_onnx(found.dtype))
        rounded = self._file.declared(g.DequantizeLinear(codes, step, zero), dims(value))
        self._file.insert_after(value.producer(), layer)
        for reader in readers:
            reader.node.replace_input_with(reader.idx, rounded)
        self._scales[rounded] = found
        return rounded


class StaticQuantizer:
    """Quantizes convolutions of a graph, with the ranges of the values around them, by name."""

    def __init__(self, file: FileGraph, ranges: Mapping[str, Range]) -> None:
        self._file, self._ranges = file, ranges
        self._values = RoundedValues(file)

    def quantize(self, layer: Layer) -> None:
        """Let a convolution read and return codes; its bias has the scale of its sums."""
        g, y = self._file.g, activated(layer)
        x = self._rounded(layer.x, layer)
        codes, scales = self._file.constants(layer, "int8", lambda: _weight_constants(data_of(layer.weight)))
        weight = g.DequantizeLinear(codes, scales, self._zeros(scales, torch.int8), axis=0)
        sizes, bias = dims(layer.weight), layer.bias
        self._file.replace_input(layer, 1, self._file.declared(weight, sizes))
        if bias is not None:
            self._file.replace_input(layer, 2, self._bias(bias, data_of(scales) * self._values.scale_of(x)))
        self._rounded(y, layer)

    def _bias(self, bias: ir.Value, scales: torch.Tensor) -> ir.Value:
        codes = (data_of(bias).double() / scales).round().clamp(_INT32.min, _INT32.max).to(torch.int32)
        stored = self._file.initializer(f"{bias.name}_int32", TorchTensor(codes))
        scale = self._file.initializer(f"{bias.name}_scales", TorchTensor(scales))
        value = self._file.g.DequantizeLinear(stored, scale, self._zeros(stored, torch.int32), axis=0)
        return self._file.declared(value, dims(bias))

    def _zeros(self, like: ir.Value, dtype: torch.dtype) -> ir.Value:
        (count,) = dims(like)
        return self._file.g.constant_vector(0, int(count), dtype)

    def _rounded(self, value: ir.Value, layer: Layer) -> ir.Value:
        """Return a value rounded to its codes, which all that read it now read."""
        scale = partial(self._scale_of, value)
        rounded = self._values.round(value, scale, layer, reads=lambda node: True)
        if rounded is not value and value.is_graph_output():
            self._return_instead(rounded, value)
        return rounded

    def _scale_of(self, value: ir.Value) -> Scale:
        return Scale.of(self._ranges[str(value.name)])

    def _return_instead(self, rounded: ir.Value, value: ir.Value) -> None:
        """Let the graph return the rounded value, under the name of the other one."""
        outputs = self._file.graph.outputs
        rounded.name, value.name = value.name, rounded.name
        outputs[:] = [rounded if output is value else output for output in outputs]


def _weight_constants(weight: torch.Tensor) -> Constants:
    """Return the codes of a convolution's weight, and the scale of each output channel."""
    codes, scales = quantize_int8(weight.flatten(1).t())
    return {"int8": TorchTensor(codes.t().reshape(weight.shape).contiguous()), "scales": TorchTensor(scales)}
