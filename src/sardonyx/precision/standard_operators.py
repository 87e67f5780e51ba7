"""Layers of a file in lower precision, by operators that a stock ONNX Runtime has.

| precision | operators |
|---|---|
| bf16 | a weight stored in bfloat16, Cast, and the layer in float32: half the size, and the same speed |
| int8 | DynamicQuantizeLinear of the activations, MatMulInteger, and the product with both scales |
| int8, of a convolution | QuantizeLinear and DequantizeLinear around it, with scales of calibration calls |
| int4 | com.microsoft's MatMulNBits; in a file without that domain DequantizeLinear of blocks, as of opset 21 |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import onnx_ir as ir
import torch
import torch.nn.functional as F
from onnx_ir.tensor_adapters import TorchTensor

from sardonyx import opsets
from sardonyx.errors import OptionError
from sardonyx.native.linear import Int4Weight, quantize_int4, quantize_int8
from sardonyx.optimize.subgraphs import replace_node
from sardonyx.precision.file_graph import Constants, FileGraph, Packed, data_of, matrix_of
from sardonyx.precision.layers import Layer, layers_of
from sardonyx.precision.plan import FLOAT32, Plan, Type
from sardonyx.precision.sizes import dims
from sardonyx.precision.static_quantization import StaticQuantizer
from sardonyx.precision.static_scales import Range
from sardonyx.translate.builder import MICROSOFT

_COMPUTES_IN_INT8 = 4
"""The accuracy level of MatMulNBits with which activations become int8: the fast kernels."""


def layers_of_file(graph: ir.Graph) -> Sequence[Layer]:
    """Return the layers of a file, whose weights are initializers with their data."""
    return layers_of(graph, is_weight=_has_data)


def _has_data(x: ir.Value) -> bool:
    return x.is_initializer() and x.const_value is not None and not x.is_graph_input()


def supported(wanted: Sequence[Type], opset: int, domains: frozenset[str]) -> Sequence[Type]:
    """Return the precisions that a file of this opset, with operators of these domains, can have."""
    has_int4 = MICROSOFT in domains or opset >= opsets.BLOCK_SCALES
    return [precision for precision in wanted if precision != "int4" or has_int4]


def lower_file(
    model: ir.Model,
    plan: Plan,
    domains: frozenset[str],
    ranges: Mapping[str, Range] = MappingProxyType({}),
    packed: Packed | None = None,
    *,
    int4_block: int = 64,
) -> None:
    """Replace the layers that a plan has in lower precision, in place; weights that nothing reads are removed.

    `ranges` are those of the values around convolutions, by name; `packed` is shared by models of the same weights. Of
    weights in int4 so many of a column have one scale.
    """
    chosen = [(layer, plan.type_of(layer.name)) for layer in layers_of_file(model.graph)]
    lowering = _Lowering(FileGraph(model.graph, {} if packed is None else packed), domains, ranges, int4_block)
    for layer, precision in chosen:
        if precision != FLOAT32:
            lowering.replace(layer, precision)


class _Lowering:
    """Replaces layers of a graph; layers with one input share its codes."""

    def __init__(self, file: FileGraph, domains: frozenset[str], ranges: Mapping[str, Range], int4_block: int) -> None:
        self.file, self.domains, self.int4_block = file, domains, int4_block
        self._static = StaticQuantizer(file, ranges)
        self._codes: dict[tuple[ir.Value, ir.Value | None], Sequence[ir.Value]] = {}

    def replace(self, layer: Layer, precision: Type) -> None:
        """Replace a layer by its form in a precision."""
        constants = [value for value in layer.node.inputs[1:] if value is not None]
        if precision == "bf16":
            self._store_in_bfloat16(layer)
        elif layer.convolves:
            _check_convolution(precision)
            self._static.quantize(layer)
        else:
            value = self.file.declared(_FORMS[precision](self, layer), dims(layer.result))
            replace_node(self.file.graph, layer.node, self.file.g, value)
        self.file.remove_unread(constants)

    def _store_in_bfloat16(self, layer: Layer) -> None:
        (stored,) = self.file.constants(
            layer, "bf16", lambda: {"bf16": TorchTensor(data_of(layer.weight).to(torch.bfloat16).contiguous())}
        )
        self.file.replace_input(layer, 1, self.file.g.Cast(stored, dtype=ir.DataType.FLOAT))

    def codes(self, x: ir.Value, channels: ir.Value | None) -> Sequence[ir.Value]:
        """Return activations in uint8, times a number for each channel if there are any; their scale and zero point."""
        if (x, channels) not in self._codes:
            scaled = x if channels is None else self.file.declared(self.file.g.Mul(x, channels), dims(x))
            codes, scale, zero = self.file.g.several("DynamicQuantizeLinear", 3, [scaled])
            self.file.declared(codes, dims(x), ir.DataType.UINT8)
            self.file.declared(scale, ()).shape = ir.Shape([])
            self.file.declared(zero, (), ir.DataType.UINT8).shape = ir.Shape([])
            self._codes[x, channels] = codes, scale, zero
        return self._codes[x, channels]

    def with_bias(self, layer: Layer, product: ir.Value) -> ir.Value:
        """Return the product of a layer with its bias added."""
        self.file.declared(product, dims(layer.result))
        return product if layer.bias is None else self.file.g.Add(product, layer.bias)


def _check_convolution(precision: Type) -> None:
    if precision == "int4":
        raise OptionError("convolutions are not computed in int4", hint="use 'int8'")


def _int8(lowering: _Lowering, layer: Layer) -> ir.Value:
    file, g = lowering.file, lowering.file.g
    weight, scales, *channels = file.constants(layer, "int8", lambda: int8_constants(matrix_of(layer)))
    codes, scale, zero = lowering.codes(layer.x, channels[0] if channels else None)
    total = file.declared(g.MatMulInteger(codes, weight, zero), dims(layer.result), ir.DataType.INT32)
    product = g.Mul(g.Cast(total, dtype=ir.DataType.FLOAT), g.Mul(scale, scales))  # ONNX Runtime fuses all of it
    return lowering.with_bias(layer, product)


def int8_constants(weight: torch.Tensor, channels: torch.Tensor | None = None) -> Constants:
    """Return what a weight is stored as, for activations that are multiplied by a number for each channel first."""
    codes, scales = quantize_int8(weight if channels is None else weight / channels[:, None])
    constants: Constants = {"int8": TorchTensor(codes.contiguous()), "scales": TorchTensor(scales)}
    return constants if channels is None else {**constants, "channels": TorchTensor(channels)}


def _int4(lowering: _Lowering, layer: Layer) -> ir.Value:
    block = int4_block(layer, lowering.domains, lowering.int4_block)
    constants = lowering.file.constants(
        layer, "int4", lambda: int4_constants(quantize_int4(matrix_of(layer), block), lowering.domains)
    )
    return (_int4_product if MICROSOFT in lowering.domains else _int4_blocks)(lowering, layer, block, *constants)


def int4_block(layer: Layer, domains: frozenset[str], wanted: int) -> int:
    """Return how many weights of a column have one scale.

    Without MatMulNBits blocks divide the depth: ONNX Runtime 1.31 reads a last block that is shorter wrongly.
    """
    if MICROSOFT in domains:
        return wanted
    depth = layer.matrix_sizes[0]
    return next((size for size in (128, 64, 32, 16) if size <= wanted and depth % size == 0), depth)


def int4_constants(weight: Int4Weight, domains: frozenset[str]) -> Constants:
    """Return what a weight is stored as: codes, scales and, of asymmetric blocks, zero points."""
    return _packed_int4(weight) if MICROSOFT in domains else _blocks_of_int4(weight)


def _int4_product(lowering: _Lowering, layer: Layer, block: int, *constants: ir.Value) -> ir.Value:
    file = lowering.file
    file.graph.opset_imports.setdefault(MICROSOFT, 1)
    depth, columns = layer.matrix_sizes
    codes, scales, *zero_points = constants
    return file.g.node(
        "MatMulNBits",
        [layer.x, codes, scales, zero_points[0] if zero_points else None, None, layer.bias],
        domain=MICROSOFT,
        K=depth,
        N=columns,
        bits=4,
        block_size=block,
        accuracy_level=_COMPUTES_IN_INT8,
    )


def _packed_int4(weight: Int4Weight) -> Constants:
    """Return codes of columns × blocks × bytes, a scale for each block, and zero points of columns × bytes."""
    depth, columns = weight.codes.shape
    blocks = weight.scales.shape[0]
    padded = F.pad(weight.codes, (0, 0, 0, blocks * weight.block - depth), value=8)
    codes = _two_per_byte(padded.t().reshape(columns, blocks, weight.block))
    constants = {"int4": codes, "scales": weight.scales.t().flatten().contiguous()}
    if weight.zero_points is not None:
        constants["zero_points"] = _two_per_byte(F.pad(weight.zero_points.t(), (0, blocks % 2), value=8))
    return {name: TorchTensor(data) for name, data in constants.items()}


def _two_per_byte(codes: torch.Tensor) -> torch.Tensor:
    """Return two codes of the last axis in a byte, the first of them in the low bits."""
    return (codes[..., ::2] | codes[..., 1::2] << 4).contiguous()


def _int4_blocks(lowering: _Lowering, layer: Layer, block: int, *constants: ir.Value) -> ir.Value:
    g = lowering.file.g
    dequantized = g.DequantizeLinear(*constants, axis=0, block_size=block)
    weight = lowering.file.declared(dequantized, dims(constants[0]))
    return lowering.with_bias(layer, g.MatMul(layer.x, weight))


def _blocks_of_int4(weight: Int4Weight) -> Constants:
    constants: Constants = {"int4": _as_int4(weight.codes), "scales": TorchTensor(weight.scales.contiguous())}
    return constants if weight.zero_points is None else {**constants, "zero_points": _as_int4(weight.zero_points)}


def _as_int4(codes: torch.Tensor) -> ir.TensorProtocol:
    return ir.Tensor((codes.to(torch.int8) - 8).numpy().astype(ir.DataType.INT4.numpy()), dtype=ir.DataType.INT4)


_FORMS: Mapping[Type, Callable[[_Lowering, Layer], ir.Value]] = {"int8": _int8, "int4": _int4}
