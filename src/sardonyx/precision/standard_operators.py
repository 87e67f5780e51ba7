"""Linear layers of a file in lower precision, by operators that a stock ONNX Runtime has.

| precision | operators |
|---|---|
| bf16 | a weight stored in bfloat16, Cast, and the product in float32: half the size, and the same speed |
| int8 | DynamicQuantizeLinear of the activations, MatMulInteger, and the product with both scales |
| int4 | com.microsoft's MatMulNBits; in a file without that domain DequantizeLinear of blocks, as of opset 21 |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
import torch
import torch.nn.functional as F
from onnx_ir.tensor_adapters import TorchTensor

from sardonyx import opsets
from sardonyx.native.linear import Int4Weight, quantize_int4, quantize_int8
from sardonyx.optimize.subgraphs import replace_node, unused_tag
from sardonyx.precision.layers import Layer, layers_of
from sardonyx.precision.plan import FLOAT32, Plan, Type
from sardonyx.precision.sizes import dims
from sardonyx.sizes import Dims
from sardonyx.translate.builder import MICROSOFT, Builder
from sardonyx.translate.inference import set_dims

_COMPUTES_IN_INT8 = 4
"""The accuracy level of MatMulNBits with which activations become int8: the fast kernels."""

_BLOCK = 64


def layers_of_file(graph: ir.Graph) -> Sequence[Layer]:
    """Return the layers of a file, whose weights are initializers with their data."""
    return [layer for layer in layers_of(graph, is_weight=_has_data) if not layer.convolves]


def _has_data(x: ir.Value) -> bool:
    return x.is_initializer() and x.const_value is not None and not x.is_graph_input()


def supported(wanted: Sequence[Type], opset: int, domains: frozenset[str]) -> Sequence[Type]:
    """Return the precisions that a file of this opset, with operators of these domains, can have."""
    has_int4 = MICROSOFT in domains or opset >= opsets.BLOCK_SCALES
    return [precision for precision in wanted if precision != "int4" or has_int4]


def lower_file(model: ir.Model, plan: Plan, domains: frozenset[str]) -> None:
    """Replace the layers that a plan has in lower precision, in place; weights that nothing reads are removed."""
    chosen = [(layer, plan.type_of(layer.name)) for layer in layers_of_file(model.graph)]
    lowering = _Lowering(model.graph, domains)
    for layer, precision in chosen:
        if precision != FLOAT32:
            lowering.replace(layer, precision)


def weight_matrix(layer: Layer) -> torch.Tensor:
    """Return the weight of a layer, of depth × columns."""
    data = layer.weight.const_value
    assert data is not None
    weight = data.raw.detach() if isinstance(data, TorchTensor) else torch.from_numpy(np.array(data.numpy()))
    return weight.t() if layer.transposed else weight


@dataclass
class _Lowering:
    """Replaces layers of a graph; layers with one input or one weight share what is computed of it."""

    graph: ir.Graph
    domains: frozenset[str]
    activations: dict[ir.Value, Sequence[ir.Value]] = field(default_factory=dict)
    weights: dict[tuple[ir.Value, Type, bool], Sequence[ir.Value]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.g = Builder(self.graph.opset_imports[""], tag=unused_tag(self.graph))

    def replace(self, layer: Layer, precision: Type) -> None:
        """Replace a layer by its form in a precision."""
        weight = layer.weight
        value = _FORMS[precision](self, layer)
        value.type = ir.TensorType(ir.DataType.FLOAT)
        replace_node(self.graph, layer.node, self.g, value)
        if not weight.uses():
            self.graph.initializers.pop(str(weight.name), None)

    def constants(
        self, layer: Layer, precision: Type, make: Callable[[torch.Tensor], Mapping[str, ir.TensorProtocol]]
    ) -> Sequence[ir.Value]:
        """Return the initializers that a layer's weight becomes."""
        key = (layer.weight, precision, layer.transposed)
        if key not in self.weights:
            made = make(weight_matrix(layer)).items()
            self.weights[key] = [self._initializer(f"{layer.weight.name}_{name}", data) for name, data in made]
        return self.weights[key]

    def _initializer(self, name: str, data: ir.TensorProtocol) -> ir.Value:
        while name in self.graph.initializers:
            name += "_"
        data.name = name
        value = ir.Value(name=name, type=ir.TensorType(data.dtype), const_value=data)
        set_dims(value, tuple(data.shape.numpy()))
        self.graph.register_initializer(value)
        return value

    def result(self, value: ir.Value, sizes: Dims, dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
        """Declare the type and sizes of a value."""
        value.type = ir.TensorType(dtype)
        if sizes:
            set_dims(value, sizes)
        return value

    def quantized(self, x: ir.Value) -> Sequence[ir.Value]:
        """Return activations in uint8, their scale and their zero point."""
        if x not in self.activations:
            codes, scale, zero = self.g.several("DynamicQuantizeLinear", 3, [x])
            self.result(codes, dims(x), ir.DataType.UINT8)
            self.result(scale, ()).shape = ir.Shape([])
            self.result(zero, (), ir.DataType.UINT8).shape = ir.Shape([])
            self.activations[x] = codes, scale, zero
        return self.activations[x]


def _bfloat16(lowering: _Lowering, layer: Layer) -> ir.Value:
    (stored,) = lowering.constants(
        layer, "bf16", lambda weight: {"bf16": TorchTensor(weight.to(torch.bfloat16).contiguous())}
    )
    weight = lowering.g.Cast(stored, dtype=ir.DataType.FLOAT)
    return _with_bias(lowering, layer, lowering.g.MatMul(layer.x, weight))


def _int8(lowering: _Lowering, layer: Layer) -> ir.Value:
    g, sizes = lowering.g, dims(layer.result)
    codes, scale, zero = lowering.quantized(layer.x)
    weight, scales = lowering.constants(layer, "int8", _int8_constants)
    total = lowering.result(g.MatMulInteger(codes, weight, zero), sizes, ir.DataType.INT32)
    product = g.Mul(g.Cast(total, dtype=ir.DataType.FLOAT), g.Mul(scale, scales))  # ONNX Runtime fuses all of it
    return _with_bias(lowering, layer, product)


def _int8_constants(weight: torch.Tensor) -> Mapping[str, ir.TensorProtocol]:
    codes, scales = quantize_int8(weight)
    return {"int8": TorchTensor(codes.contiguous()), "scales": TorchTensor(scales)}


def _int4(lowering: _Lowering, layer: Layer) -> ir.Value:
    return (_int4_blocks if MICROSOFT not in lowering.domains else _int4_product)(lowering, layer)


def _int4_product(lowering: _Lowering, layer: Layer) -> ir.Value:
    lowering.graph.opset_imports.setdefault(MICROSOFT, 1)
    packed, scales = lowering.constants(layer, "int4", lambda weight: _packed_int4(quantize_int4(weight, _BLOCK)))
    depth, columns = layer.matrix_sizes
    return lowering.g.node(
        "MatMulNBits",
        [layer.x, packed, scales, None, None, layer.bias],
        domain=MICROSOFT,
        K=depth,
        N=columns,
        bits=4,
        block_size=_BLOCK,
        accuracy_level=_COMPUTES_IN_INT8,
    )


def _packed_int4(weight: Int4Weight) -> Mapping[str, ir.TensorProtocol]:
    """Return codes of columns × blocks × bytes, the first of each two in the low bits, and a scale for each block."""
    depth, columns = weight.codes.shape
    blocks = weight.scales.shape[0]
    padded = F.pad(weight.codes, (0, 0, 0, blocks * weight.block - depth), value=8)
    pairs = padded.t().reshape(columns, blocks, weight.block // 2, 2)
    scales = weight.scales.t().reshape(-1)
    return {
        "int4": TorchTensor((pairs[..., 0] | pairs[..., 1] << 4).contiguous()),
        "scales": TorchTensor(scales.contiguous()),
    }


def _int4_blocks(lowering: _Lowering, layer: Layer) -> ir.Value:
    block = _block(_depth(layer))
    stored, scales = lowering.constants(layer, "int4", lambda weight: _blocks_of_int4(quantize_int4(weight, block)))
    weight = lowering.g.DequantizeLinear(stored, scales, axis=0, block_size=block)
    lowering.result(weight, dims(stored))
    return _with_bias(lowering, layer, lowering.g.MatMul(layer.x, weight))


def _blocks_of_int4(weight: Int4Weight) -> Mapping[str, ir.TensorProtocol]:
    codes = (weight.codes.to(torch.int8) - 8).numpy().astype(ir.DataType.INT4.numpy())
    return {"int4": ir.Tensor(codes, dtype=ir.DataType.INT4), "scales": TorchTensor(weight.scales.contiguous())}


def _block(depth: int) -> int:
    """Return the size of blocks that divide the depth: ONNX Runtime 1.31 reads a last block that is shorter wrongly."""
    return next((size for size in (64, 32, 16) if depth % size == 0), depth)


def _depth(layer: Layer) -> int:
    return layer.matrix_sizes[0]


def _with_bias(lowering: _Lowering, layer: Layer, product: ir.Value) -> ir.Value:
    lowering.result(product, dims(layer.result))
    return product if layer.bias is None else lowering.g.Add(product, layer.bias)


_FORMS: Mapping[Type, Callable[[_Lowering, Layer], ir.Value]] = {"bf16": _bfloat16, "int8": _int8, "int4": _int4}
