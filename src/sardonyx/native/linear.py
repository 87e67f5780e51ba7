"""Linear layers on the CPU in reduced precision: weights packed once, and our own operators that multiply by them.

An operator computes activation(x · w + bias) + residual, see linear.h. `pack` converts a weight, `linear_node` makes
the node, and `build` the library of a precision, which is the same for all models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import TorchTensor

from sardonyx.errors import EngineError, OptionError
from sardonyx.native.partition import registration
from sardonyx.native.processor import processor
from sardonyx.native.session import onnxruntime, register
from sardonyx.options import Options
from sardonyx.toolchain import compiler
from sardonyx.toolchain.headers import read_header

PANEL = 32
"""Columns of a panel, as in linear.h."""
ACTIVATIONS = ("none", "relu", "gelu", "tanh_gelu", "silu")
"""In the order of linear_call.h."""
_MAX_INT8_DEPTH = 2**16
"""The depth up to which sums of products of uint8 and int8 fit into int32."""
_OPERATORS = {
    (ir.DataType.FLOAT, ir.DataType.FLOAT): "Linear",
    (ir.DataType.FLOAT, ir.DataType.BFLOAT16): "LinearToBfloat16",
    (ir.DataType.BFLOAT16, ir.DataType.FLOAT): "LinearToFloat32",
    (ir.DataType.BFLOAT16, ir.DataType.BFLOAT16): "LinearBfloat16",
}
"""By the types of x and of the result."""
_VARIABLES = ("linear_float", "linear_to_bfloat", "linear_to_float", "linear_bfloat")
_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl")


@dataclass(frozen=True)
class Precision:
    """A precision of linear layers: how weights are stored, and which instructions multiply them."""

    name: str
    group: int
    """Weights along the depth that one instruction multiplies in a lane."""
    convert: Callable[[torch.Tensor], Mapping[str, torch.Tensor]]
    """Returns the weights of depth × columns in this precision, and for each column what else the kernels need."""
    header: str
    struct: str
    """In linear_operators.h."""
    instructions: Mapping[str, str]
    """The instruction sets, by their names in /proc/cpuinfo and of compilers."""
    max_depth: int | None = None

    @property
    def domain(self) -> str:
        """The domain of its operators."""
        return f"sardonyx.linear.{self.name}"

    def missing(self) -> Sequence[str]:
        """Return the instruction sets that this machine lacks."""
        local = {*processor().instructions}
        return [name for name in self.instructions if name not in local]


@dataclass(frozen=True)
class PackedWeight:
    """The weight of a linear layer, packed for the kernels of a precision."""

    precision: Precision
    depth: int
    columns: int
    constants: Mapping[str, torch.Tensor]
    """"weight", and of a quantized one "scales" and "sums" of its columns."""


def _in_bfloat16(weight: torch.Tensor) -> Mapping[str, torch.Tensor]:
    return {"weight": weight.to(torch.bfloat16)}


def _in_int8(weight: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """Quantize each column symmetrically."""
    weight = weight.to(torch.float32)
    largest = weight.abs().amax(0) if weight.shape[0] else torch.zeros(weight.shape[1])
    if not bool(torch.isfinite(largest).all()):
        raise OptionError("a weight with infinity or NaN cannot be quantized", hint="leave its layer in float32")
    scales = torch.where(largest > 0, largest / 127, 1.0)
    quantized = (weight / scales).round().clamp(-127, 127).to(torch.int8)
    return {"weight": quantized, "scales": scales, "sums": quantized.sum(0, dtype=torch.int32)}


PRECISIONS: Mapping[str, Precision] = {
    precision.name: precision
    for precision in (
        Precision(
            "bf16",
            2,
            _in_bfloat16,
            "linear_bfloat16.h",
            "InBfloat16",
            {**dict(zip(_AVX512, _AVX512, strict=True)), "avx512_bf16": "avx512bf16"},
        ),
        Precision(
            "int8",
            4,
            _in_int8,
            "linear_int8.h",
            "InInt8",
            {**dict(zip(_AVX512, _AVX512, strict=True)), "avx512_vnni": "avx512vnni"},
            _MAX_INT8_DEPTH,
        ),
    )
}


def pack(weight: torch.Tensor, precision: Precision) -> PackedWeight:
    """Convert a weight of depth × columns, which may be a transposed view, and pack it for the kernels."""
    depth, columns = weight.shape
    if precision.max_depth is not None and depth > precision.max_depth:
        raise OptionError(f"sums over {depth} products overflow in {precision.name}", hint="leave the layer in float32")
    constants = dict(precision.convert(weight.detach()))
    constants["weight"] = _in_panels(constants["weight"], precision.group)
    return PackedWeight(precision, depth, columns, constants)


def _in_panels(weight: torch.Tensor, group: int) -> torch.Tensor:
    """Return panels × steps × `PANEL` × group, padded with zeros."""
    depth, columns = weight.shape
    steps, panels = -(-depth // group), -(-columns // PANEL)
    padded = weight.new_zeros(steps * group, panels * PANEL)
    padded[:depth, :columns] = weight
    return padded.view(steps, group, panels, PANEL).permute(2, 0, 3, 1).contiguous()


def linear_node(
    x: ir.Value,
    packed: PackedWeight,
    *,
    name: str,
    result: ir.DataType = ir.DataType.FLOAT,
    bias: ir.Value | None = None,
    residual: ir.Value | None = None,
    activation: str = "none",
) -> tuple[ir.Node, Sequence[ir.Value]]:
    """Return a node that computes a linear layer, and its constants, which are to be registered as initializers.

    `x` is in float32 or bfloat16, `bias` in float32, `residual` of the type of the result and of its shape.
    """
    if x.dtype is None or (x.dtype, result) not in _OPERATORS:
        raise OptionError(f"a linear layer cannot take {x.dtype} and return {result}")
    values = {key: _constant(f"{name}_{key}", tensor) for key, tensor in packed.constants.items()}
    inputs = [x, values["weight"], bias, residual, *(values[key] for key in ("scales", "sums") if key in values)]
    attributes = [
        ir.AttrInt64("depth", packed.depth),
        ir.AttrInt64("columns", packed.columns),
        ir.AttrInt64("activation", ACTIVATIONS.index(activation)),
    ]
    node = ir.Node(packed.precision.domain, _OPERATORS[x.dtype, result], inputs, attributes, name=name)
    output = node.outputs[0]
    output.name, output.type = f"{name}_result", ir.TensorType(result)
    return node, list(values.values())


def _constant(name: str, tensor: torch.Tensor) -> ir.Value:
    value = TorchTensor(tensor, name=name)
    return ir.Value(name=name, const_value=value, shape=ir.Shape(tensor.shape), type=ir.TensorType(value.dtype))


def build(precision: Precision, options: Options) -> Path:
    """Return the library of a precision's operators, checked to load."""
    missing = precision.missing()
    if missing:
        raise EngineError(f"{precision.name} needs a processor with {', '.join(missing)}", hint="use float32")
    flags = tuple(f"-m{name}" for name in precision.instructions.values())
    library = compiler.build_library(_kernels(precision), options, flags=flags, common=_operators(precision))
    register(onnxruntime().SessionOptions(), library)
    return library


def _kernels(precision: Precision) -> str:
    """Return the source of the kernels, which need the instructions of the precision."""
    toolchain = [read_header("sardonyx.toolchain", name) for name in ("ort.h", "narrow.h")]
    names = ("lanes.h", "arithmetic.h", "functions.h", "kernels.h", "linear_call.h", "linear.h", precision.header)
    return "\n".join([*toolchain, *(read_header("sardonyx.native", name) for name in names)])


def _operators(precision: Precision) -> str:
    """Return the source of the operators, which run on any processor."""
    headers = [
        "#include <mutex>",
        read_header("sardonyx.toolchain", "ort.h"),
        read_header("sardonyx.native", "linear_call.h"),
        read_header("sardonyx.native", "linear_operators.h"),
    ]
    declared = f"namespace {{ LINEAR_OPERATORS({precision.struct}) }}"
    return "\n".join([*headers, declared, registration(precision.domain, _VARIABLES)])
