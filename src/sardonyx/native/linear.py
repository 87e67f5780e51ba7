"""Linear layers on the CPU in reduced precision: weights packed once, and our own operators that multiply by them.

An operator computes activation(x · w + bias) + residual, see linear.h. `pack` converts a weight, `linear_node` makes
the node, and `build` the library of a precision, which is the same for all models.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
import torch
import torch.nn.functional as F
from onnx_ir.tensor_adapters import TorchTensor

from sardonyx.dtypes import to_onnx
from sardonyx.errors import EngineError, OptionError, UnquantizableWeight
from sardonyx.native.partition import registration
from sardonyx.native.processor import processor
from sardonyx.native.session import onnxruntime, register
from sardonyx.options import Options
from sardonyx.toolchain import compiler
from sardonyx.toolchain.headers import read_header
from sardonyx.translate.inference import set_dims
from sardonyx.translate.translator import external_weight

PANEL = 32
"""Columns of a panel, as in linear.h."""
ACTIVATIONS = ("none", "relu", "gelu", "tanh_gelu", "silu")
"""In the order of linear_call.h."""
RESIDUAL = 1
"""The input of a layer's node that is added to its result."""
MOST_PROJECTIONS = 3
"""Weights that one node multiplies the same x by."""
_CHANNELS = "channels"
"""The metadata of a node that is the digest of what it multiplies the channels of x by."""
_COLUMNS = ("columns", "columns_2", "columns_3")
"""Attributes: the columns of each projection, 0 if there is none."""
MAX_INT8_DEPTH = 2**16
"""The depth up to which sums of products of uint8 and int8 fit into int32."""
_SUFFIXES = {
    (ir.DataType.FLOAT, ir.DataType.FLOAT): "",
    (ir.DataType.FLOAT, ir.DataType.BFLOAT16): "ToBfloat16",
    (ir.DataType.BFLOAT16, ir.DataType.FLOAT): "ToFloat32",
    (ir.DataType.BFLOAT16, ir.DataType.BFLOAT16): "Bfloat16",
}
"""Of operators, by the types of x and of the result."""
_VARIABLES = [
    f"{kind}_{types}" for kind in ("linear", "conv") for types in ("float", "to_bfloat", "to_float", "bfloat")
]
_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl")


@dataclass(frozen=True)
class Precision:
    """A precision of linear layers: how weights are stored, and which instructions multiply them."""

    name: str
    pack: Callable[[torch.Tensor], PackedWeight]
    """Converts a weight of depth × columns; one on the device "meta" has the right shapes and no data."""
    headers: Sequence[str]
    scheme: str
    """The name of its struct in the last header, and after "In" in linear_operators.h."""
    instructions: Mapping[str, str]
    """The instruction sets, by their names in /proc/cpuinfo and of compilers."""

    scales_columns: bool = False
    """Whether each column has a scale."""

    @property
    def domain(self) -> str:
        """The domain of its operators."""
        return f"sardonyx.linear.{self.name}"

    @property
    def first_weight(self) -> int:
        """The input of a node that is its first weight; those before it are of all projections."""
        return 3 if self.scales_columns else 2

    def missing(self) -> Sequence[str]:
        """Return the instruction sets that this machine lacks."""
        local = {*processor().instructions}
        return [name for name in self.instructions if name not in local]


@dataclass(frozen=True)
class PackedWeight:
    """The weight of a linear layer, packed for the kernels of a precision."""

    depth: int
    columns: int
    constants: Mapping[str, torch.Tensor]
    """"weight", and in int8 "scales" and "sums" of its columns, and "channels" if x is multiplied by channel."""
    block: int = 0
    """The weights of a column that share a scale, in int4."""
    has_zero_points: bool = False


def pack_bfloat16(weight: torch.Tensor) -> PackedWeight:
    """Round a weight of depth × columns to bfloat16."""
    depth, columns = weight.shape
    return PackedWeight(depth, columns, {"weight": _in_panels(weight.detach().to(torch.bfloat16), 2)})


def pack_int8(weight: torch.Tensor, channels: torch.Tensor | None = None) -> PackedWeight:
    """Quantize each column of a weight of depth × columns symmetrically.

    With `channels` the kernel multiplies each channel of x by its number before it quantizes rows, and the weight is
    divided by them.
    """
    depth, columns = weight.shape
    codes, scales = quantize_int8(weight if channels is None else weight / channels.to(weight.device)[:, None])
    constants = {"weight": _in_panels(codes, 4), "scales": scales, "sums": codes.sum(0, dtype=torch.int32)}
    if channels is not None:
        constants["channels"] = channels.to(weight.device)
    return PackedWeight(depth, columns, constants)


def quantize_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes of −127 … 127 of a weight of depth × columns, and the scale of each column."""
    weight = _finite(weight)
    if weight.shape[0] > MAX_INT8_DEPTH:
        raise OptionError(f"sums over {weight.shape[0]} products overflow in int8", hint="leave the layer in float32")
    largest = weight.abs().amax(0) if weight.shape[0] else torch.zeros(weight.shape[1])
    scales = torch.where(largest > 0, largest / 127, 1.0)
    return (weight / scales).round().clamp(-127, 127).to(torch.int8), scales


@dataclass(frozen=True)
class Int4Weight:
    """A weight quantized in blocks along the depth: scales · (codes − zero points)."""

    codes: torch.Tensor
    """0 … 15, of depth × columns."""
    scales: torch.Tensor
    """float32, of blocks × columns."""
    zero_points: torch.Tensor | None
    """Of blocks × columns; 8, if absent."""
    block: int

    def dequantized(self) -> torch.Tensor:
        """Return the weight that it stands for."""
        zero = 8 if self.zero_points is None else self._repeated(self.zero_points)
        return (self.codes.to(torch.float32) - zero) * self._repeated(self.scales)

    def _repeated(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.float32).repeat_interleave(self.block, 0)[: self.codes.shape[0]]


def quantize_int4(weight: torch.Tensor, block: int = 64, *, symmetric: bool = True) -> Int4Weight:
    """Quantize blocks of a weight of depth × columns by rounding to the nearest."""
    weight = _finite(weight)
    depth, columns = weight.shape
    blocks = F.pad(weight, (0, 0, 0, -depth % block)).view(-(-depth // block), block, columns)
    low, high = blocks.amin(1).clamp(max=0), blocks.amax(1).clamp(min=0)
    furthest = torch.where(-low > high, low, high)  # of a symmetric block it is code 0, which is −8
    scales = furthest / -8 if symmetric else (high - low) / 15
    scales = torch.where(scales == 0, 1.0, scales)
    zero = torch.full_like(scales, 8) if symmetric else (-low / scales).round()
    codes = ((blocks / scales[:, None]).round() + zero[:, None]).clamp(0, 15)
    codes = codes.flatten(0, 1)[:depth].to(torch.uint8)
    return Int4Weight(codes, scales, None if symmetric else zero.to(torch.uint8), block)


def pack_int4(weight: Int4Weight) -> PackedWeight:
    """Pack a quantized weight in the order of linear_int4.h."""
    depth, columns = weight.codes.shape
    blocks, panels = weight.scales.shape[0], -(-columns // PANEL)
    padded = weight.codes.new_full((blocks * weight.block, panels * PANEL), 8)
    padded[:depth, :columns] = weight.codes
    steps = padded.view(blocks, weight.block // 4, 2, 2, panels, 2, PANEL // 2).permute(4, 0, 1, 6, 3, 2, 5)
    codes = steps[..., 0] | steps[..., 1] << 4
    numbers = [weight.scales]
    if weight.zero_points is not None:
        numbers.append((8.0 - weight.zero_points) * weight.scales)
    parts = [*(_bytes_of_panels(x, panels) for x in numbers), codes.reshape(panels, blocks, weight.block * PANEL // 2)]
    constants = {"weight": torch.cat(parts, dim=2).contiguous()}
    return PackedWeight(depth, columns, constants, weight.block, weight.zero_points is not None)


def _bytes_of_panels(x: torch.Tensor, panels: int) -> torch.Tensor:
    """Return float32 numbers of blocks × columns as panels × blocks × bytes."""
    padded = F.pad(x.to(torch.float32), (0, panels * PANEL - x.shape[1]))
    return padded.view(x.shape[0], panels, PANEL).transpose(0, 1).contiguous().view(torch.uint8)


def _finite(weight: torch.Tensor) -> torch.Tensor:
    weight = weight.detach().to(torch.float32)
    if not weight.is_meta and not bool(torch.isfinite(weight).all()):
        raise UnquantizableWeight("a weight with infinity or NaN cannot be quantized", hint="use precision='float32'")
    return weight


def _in_panels(weight: torch.Tensor, group: int) -> torch.Tensor:
    """Return panels × steps × `PANEL` × group, padded with zeros."""
    depth, columns = weight.shape
    steps, panels = -(-depth // group), -(-columns // PANEL)
    padded = weight.new_zeros(steps * group, panels * PANEL)
    padded[:depth, :columns] = weight
    return padded.view(steps, group, panels, PANEL).permute(2, 0, 3, 1).contiguous()


_AVX512_BF16 = {**dict(zip(_AVX512, _AVX512, strict=True)), "avx512_bf16": "avx512bf16"}
_AVX512_VNNI = {**dict(zip(_AVX512, _AVX512, strict=True)), "avx512_vnni": "avx512vnni"}
PRECISIONS: Mapping[str, Precision] = {
    precision.name: precision
    for precision in (
        Precision("bf16", pack_bfloat16, ["linear_bfloat16.h"], "Bfloat16", _AVX512_BF16),
        Precision("int8", pack_int8, ["linear_int8.h"], "Int8", _AVX512_VNNI, scales_columns=True),
        Precision(
            "int4",
            lambda weight: pack_int4(quantize_int4(weight)),
            ["linear_bfloat16.h", "linear_int4.h"],
            "Int4",
            _AVX512_BF16,
        ),
    )
}


@dataclass(frozen=True)
class Window:
    """The window of a convolution, in ONNX's terms."""

    shape: tuple[int, int]
    strides: tuple[int, int] = (1, 1)
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilations: tuple[int, int] = (1, 1)

    def places(self, image: tuple[int, int]) -> tuple[int, int]:
        """Return the height and width of the result for those of an image."""
        height, width = (
            (size + sum(self.pads[axis::2]) - (self.shape[axis] - 1) * self.dilations[axis] - 1) // self.strides[axis]
            + 1
            for axis, size in enumerate(image)
        )
        return height, width

    @property
    def attribute(self) -> ir.Attr:
        """Its numbers, as windows.h reads them."""
        return ir.AttrInt64s("window", [*self.shape, *self.strides, *self.pads, *self.dilations])


def conv_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return the weight of a convolution as depth × columns: channels lie side by side, place after place."""
    return weight.permute(2, 3, 1, 0).flatten(0, 2)


def linear_node(
    precision: Precision,
    x: ir.Value,
    packed: PackedWeight,
    *,
    name: str,
    result: ir.DataType = ir.DataType.FLOAT,
    bias: ir.Value | None = None,
    residual: ir.Value | None = None,
    activation: str = "none",
    activates_sum: bool = False,
    window: Window | None = None,
) -> tuple[ir.Node, Sequence[ir.Value]]:
    """Return a node that computes a linear layer, and its constants, which are to be registered as initializers.

    Constants on the device "meta" are declared, as weights of a session whose data is given when it is opened.

    `x` is in float32 or bfloat16, `bias` in float32, `residual` of the type of the result and of its shape. With
    `activates_sum` the residual is added before the activation. With a window it is a convolution of images with their
    channels last, and `packed` is of its `conv_weight`.
    """
    if x.dtype is None or (x.dtype, result) not in _SUFFIXES:
        raise OptionError(f"a linear layer cannot take {x.dtype} and return {result}")
    values = {key: _constant(f"{name}_{key}", tensor) for key, tensor in packed.constants.items()}
    inputs = [x, residual]
    if precision.scales_columns:
        inputs.append(values.get("channels"))
    inputs += [values["weight"], bias]
    if precision.scales_columns:
        inputs += [values["scales"], values["sums"]]
    numbers = {
        "depth": packed.depth,
        **dict(zip(_COLUMNS, (packed.columns, 0, 0), strict=True)),
        "activation": ACTIVATIONS.index(activation),
        "activates_sum": int(activates_sum),
        "is_gated": 0,
        "block": packed.block,
        "has_zero_points": int(packed.has_zero_points),
    }
    attributes = [ir.AttrInt64(key, number) for key, number in numbers.items()]
    operator = ("Linear" if window is None else "Conv") + _SUFFIXES[x.dtype, result]
    if window is not None:
        attributes.append(window.attribute)
    node = ir.Node(precision.domain, operator, inputs, attributes, name=name)
    output = node.outputs[0]
    output.name, output.type = f"{name}_result", ir.TensorType(result)
    return node, list(values.values())


def is_layer(node: ir.Node) -> bool:
    """Whether a node is one that `linear_node` made."""
    return any(node.domain == precision.domain for precision in PRECISIONS.values())


def bias_index(node: ir.Node) -> int:
    """Return the input of a layer's node that is its bias, the first projection's if there are several."""
    return _precision_of(node).first_weight + 1


def _precision_of(node: ir.Node) -> Precision:
    return next(precision for precision in PRECISIONS.values() if precision.domain == node.domain)


def note_channels(node: ir.Node, contents: str) -> None:
    """Note the digest of what a node multiplies the channels of x by: nodes of the same can be joined."""
    node.meta[_CHANNELS] = contents


def joins(node: ir.Node) -> bool:
    """Whether a layer's node has one projection, which could be computed with others of the same x."""
    several = bool(node.attributes[_COLUMNS[1]].as_int())
    channels = node.inputs[RESIDUAL + 1 : _precision_of(node).first_weight]
    known = _CHANNELS in node.meta or all(x is None for x in channels)
    return not several and not is_convolution(node) and node.inputs[RESIDUAL] is None and known


def join_key(node: ir.Node) -> Hashable:
    """Return what nodes have in common that can be joined, but for their activation."""
    numbers = tuple(node.attributes[name].as_int() for name in ("block", "has_zero_points"))
    return (node.inputs[0], node.domain, node.op_type, node.meta.get(_CHANNELS), *numbers)


def join(nodes: Sequence[ir.Node], *, gated: bool = False) -> ir.Node:
    """Return one node for several of the same key: it has all their results, or the product of two that are gated.

    The product's first factor is what the first node returns, activated.
    """
    first, start = nodes[0], _precision_of(nodes[0]).first_weight
    inputs = [*first.inputs[:start], *(x for node in nodes for x in node.inputs[start:])]
    columns = [node.attributes[_COLUMNS[0]].as_int() for node in nodes]
    columns += [0] * (MOST_PROJECTIONS - len(columns))
    changed = {**dict(zip(_COLUMNS, columns, strict=True)), "is_gated": int(gated)}
    attributes = [ir.AttrInt64(name, changed.get(name, x.as_int())) for name, x in first.attributes.items()]
    count = 1 if gated else len(nodes)
    return ir.Node(first.domain, first.op_type, inputs, attributes, num_outputs=count, name=first.name)


def is_convolution(node: ir.Node) -> bool:
    """Whether a layer's node reads windows of images."""
    return "window" in node.attributes


def activation_of(node: ir.Node) -> str | None:
    """Return the activation of a layer's node, if it has one."""
    number = node.attributes["activation"].as_int()
    return ACTIVATIONS[number] if number else None


def set_types(node: ir.Node, x: ir.DataType, result: ir.DataType) -> None:
    """Let a layer's node take and return other types; a residual is of the type of the result."""
    before = next(
        suffix for suffix in sorted(_SUFFIXES.values(), key=len, reverse=True) if node.op_type.endswith(suffix)
    )
    node.op_type = node.op_type.removesuffix(before) + _SUFFIXES[x, result]
    for output in node.outputs:
        output.dtype = result


def _constant(name: str, tensor: torch.Tensor) -> ir.Value:
    shape = tuple(tensor.shape)
    data = external_weight(name, to_onnx(tensor.dtype), shape) if tensor.is_meta else TorchTensor(tensor, name=name)
    value = ir.Value(name=name, const_value=data, type=ir.TensorType(data.dtype))
    set_dims(value, shape)
    return value


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
    shared = ("lanes.h", "arithmetic.h", "functions.h", "kernels.h")
    names = (*shared, "windows.h", "linear_call.h", "linear.h", *precision.headers)
    run = "ort::Status* run(const ort::Context* context, const Call& call)"
    entry = f"namespace linear {{ {run} {{ return run_as<{precision.scheme}>(context, call); }} }}"
    return "\n".join([*toolchain, *(read_header("sardonyx.native", name) for name in names), entry])


def _operators(precision: Precision) -> str:
    """Return the source of the operators, which run on any processor."""
    headers = [
        "#include <mutex>",
        read_header("sardonyx.toolchain", "ort.h"),
        read_header("sardonyx.native", "windows.h"),
        read_header("sardonyx.native", "linear_call.h"),
        read_header("sardonyx.native", "linear_operators.h"),
    ]
    declared = f"namespace {{ LINEAR_OPERATORS(In{precision.scheme}) }}"
    return "\n".join([*headers, declared, registration(precision.domain, _VARIABLES)])
