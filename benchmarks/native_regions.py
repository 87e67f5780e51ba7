"""The regions that native kernels are measured on: what models have between their matrix products."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnx.parser
import torch
from torch.nn import functional as F

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
Array: TypeAlias = np.ndarray[Any, Any]
Feeds: TypeAlias = dict[str, Array]
Tensors: TypeAlias = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Region:
    """A small model as text, and what it computes."""

    name: str
    inputs: Shapes
    outputs: Shapes
    body: str
    exact: Callable[[Tensors], torch.Tensor]
    """The same in double precision."""
    weights: Shapes = field(default_factory=dict)
    """Constants of the model: engines may fuse with those what they would not with inputs."""
    gate: float = 1.0
    """How many times as fast as ONNX Runtime's its kernel has to be."""

    def model(self) -> onnx.ModelProto:
        """The model, with random weights."""
        given = ", ".join(_typed(name, shape) for name, shape in self.inputs.items())
        made = ", ".join(_typed(name, shape) for name, shape in self.outputs.items())
        text = f'<ir_version: 10, opset_import: ["": 21]> g ({given}) => ({made}) {{ {self.body} }}'
        model = onnx.parser.parse_model(text)
        for name, shape in self.weights.items():
            model.graph.initializer.append(onnx.numpy_helper.from_array(_numbers(name, shape), name))
        return onnx.shape_inference.infer_shapes(model, data_prop=True, strict_mode=True)

    def feeds(self) -> Feeds:
        """Numbers for the inputs."""
        return {name: _numbers(name, shape) for name, shape in self.inputs.items()}

    def wanted(self) -> list[torch.Tensor]:
        """The output in double precision."""
        every = {**self.inputs, **self.weights}
        given = {name: torch.from_numpy(_numbers(name, shape)) for name, shape in every.items()}
        return [self.exact({name: x if x.dtype == torch.bool else x.double() for name, x in given.items()})]


def _typed(name: str, shape: tuple[int, ...]) -> str:
    return f"{'bool' if _is_mask(name) else 'float'}[{','.join(map(str, shape))}] {name}"


def _is_mask(name: str) -> bool:
    return name == "keep"


def _numbers(name: str, shape: tuple[int, ...]) -> Array:
    """The same at each call. A mask forbids what is to come."""
    if _is_mask(name):
        return np.tril(np.ones(shape, np.bool_))
    if name == "mask":
        return np.where(np.tril(np.ones(shape, np.bool_)), 0, -np.inf).astype(np.float32)
    if name in ("ones", "zeros"):
        return np.full(shape, name == "ones", np.float32)
    return np.random.default_rng(len(name) + ord(name[0])).standard_normal(shape, np.float32)


def _rotated(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat([-x[..., half:], x[..., :half]], dim=-1)


def _masked(v: Tensors) -> torch.Tensor:
    return torch.softmax(v["x"] * 0.125 + v["mask"], -1)


_ROWS, _SCORES, _IMAGE = (1, 128, 768), (1, 12, 128, 128), (1, 320, 32, 32)
_WIDE, _HEADS = (1, 128, 3072), (1, 128, 12, 64)

_RMS_NORM = """two = Constant<value = float {2.0}>()
    axes = Constant<value = int64[1] {-1}>()
    small = Constant<value = float {1e-6}>()
    squares = Pow(x, two)
    mean = ReduceMean<keepdims = 1>(squares, axes)
    least = Add(mean, small)
    root = Sqrt(least)
    inverse = Reciprocal(root)
    scaled = Mul(x, inverse)
    z = Mul(gain, scaled)"""

REGIONS = (
    Region(
        "bias + residual + LayerNorm",
        {"x": _ROWS, "residual": _ROWS},
        {"z": _ROWS},
        """biased = Add(x, bias)
        sum = Add(biased, residual)
        z = LayerNormalization<axis = -1, epsilon = 1e-5>(sum, gain, shift)""",
        lambda v: F.layer_norm(v["x"] + v["bias"] + v["residual"], (768,), v["gain"], v["shift"]),
        {"bias": (768,), "gain": (768,), "shift": (768,)},
        gate=8,
    ),
    Region(
        "LayerNorm",
        {"x": _ROWS},
        {"z": _ROWS},
        "z = LayerNormalization<axis = -1, epsilon = 1e-5>(x, gain, shift)",
        lambda v: F.layer_norm(v["x"], (768,), v["gain"], v["shift"]),
        {"gain": (768,), "shift": (768,)},
    ),
    Region(
        "RMSNorm, decomposed",
        {"x": _ROWS},
        {"z": _ROWS},
        _RMS_NORM,
        lambda v: F.rms_norm(v["x"], (768,), v["gain"], 1e-6),
        {"gain": (768,)},
        gate=3.5,
    ),
    Region(
        "RMSNorm of one token, decomposed",
        {"x": (1, 1, 768)},
        {"z": (1, 1, 768)},
        _RMS_NORM,
        lambda v: F.rms_norm(v["x"], (768,), v["gain"], 1e-6),
        {"gain": (768,)},
    ),
    Region(
        "scale + mask + Softmax + IsNaN + Where",
        {"x": _SCORES, "mask": (128, 128)},
        {"z": _SCORES},
        """scale = Constant<value = float {0.125}>()
        zero = Constant<value = float {0.0}>()
        scaled = Mul(x, scale)
        masked = Add(scaled, mask)
        shares = Softmax<axis = -1>(masked)
        lost = IsNaN(shares)
        z = Where(lost, zero, shares)""",
        _masked,
        gate=1.8,
    ),
    Region(
        "Where + Softmax + ReduceMax + Equal + Where",
        {"x": _SCORES, "keep": (128, 128)},
        {"z": _SCORES},
        """scale = Constant<value = float {0.125}>()
        zero = Constant<value = float {0.0}>()
        never = Constant<value = float {-inf}>()
        axes = Constant<value = int64[1] {-1}>()
        scaled = Mul(x, scale)
        masked = Where(keep, scaled, never)
        most = ReduceMax<keepdims = 1>(masked, axes)
        empty = Equal(most, never)
        shares = Softmax<axis = -1>(masked)
        z = Where(empty, zero, shares)""",
        lambda v: torch.softmax((v["x"] * 0.125).masked_fill(~v["keep"], -torch.inf), -1),
        gate=1.8,
    ),
    Region(
        "11 elementwise operators",
        {"x": _WIDE, "y": _WIDE},
        {"z": _WIDE},
        """half = Constant<value = float {0.5}>()
        xy = Mul(x, y)
        sum = Add(xy, x)
        bent = Tanh(sum)
        apart = Sub(x, y)
        gate = Sigmoid(apart)
        gated = Mul(bent, gate)
        less = Mul(gated, half)
        more = Add(less, y)
        size = Abs(more)
        down = Neg(size)
        z = Exp(down)""",
        lambda v: torch.exp(
            -(torch.tanh(v["x"] * v["y"] + v["x"]) * torch.sigmoid(v["x"] - v["y"]) * 0.5 + v["y"]).abs()
        ),
        gate=1.8,
    ),
    Region(
        "11 elementwise operators, simple ones",
        {"x": _WIDE, "y": _WIDE},
        {"z": _WIDE},
        """half = Constant<value = float {0.5}>()
        two = Constant<value = float {2.0}>()
        most = Constant<value = float {4.0}>()
        xy = Mul(x, y)
        sum = Add(xy, bias)
        apart = Sub(sum, y)
        above = Relu(apart)
        below = Min(above, most)
        scaled = Mul(below, half)
        size = Abs(x)
        more = Add(scaled, size)
        less = Sub(more, two)
        opposite = Neg(less)
        z = Mul(opposite, gain)""",
        lambda v: -((v["x"] * v["y"] + v["bias"] - v["y"]).clamp(0, 4) * 0.5 + v["x"].abs() - 2) * v["gain"],
        {"bias": (3072,), "gain": (3072,)},
        gate=1.8,
    ),
    Region(
        "GroupNorm + SiLU",
        {"x": _IMAGE},
        {"z": _IMAGE},
        """grouped = Constant<value = int64[3] {1, 32, 10240}>()
        whole = Constant<value = int64[4] {1, 320, 32, 32}>()
        groups = Reshape(x, grouped)
        normal = InstanceNormalization<epsilon = 1e-5>(groups, ones, zeros)
        image = Reshape(normal, whole)
        scaled = Mul(image, gain)
        shifted = Add(scaled, shift)
        gate = Sigmoid(shifted)
        z = Mul(shifted, gate)""",
        lambda v: F.silu(F.group_norm(v["x"], 32) * v["gain"] + v["shift"]),
        {"gain": (320, 1, 1), "shift": (320, 1, 1), "ones": (32,), "zeros": (32,)},
        gate=1.6,
    ),
    Region(
        "bias + GELU",
        {"x": _WIDE},
        {"z": _WIDE},
        "biased = Add(x, bias)\nz = Gelu(biased)",
        lambda v: F.gelu(v["x"] + v["bias"]),
        {"bias": (3072,)},
    ),
    Region(
        "GELU, decomposed",
        {"x": _WIDE},
        {"z": _WIDE},
        """root = Constant<value = float {1.4142135}>()
        one = Constant<value = float {1.0}>()
        half = Constant<value = float {0.5}>()
        less = Div(x, root)
        bent = Erf(less)
        more = Add(bent, one)
        both = Mul(x, more)
        z = Mul(both, half)""",
        lambda v: F.gelu(v["x"]),
    ),
    Region(
        "SwiGLU",
        {"x": (1, 128, 2048), "y": (1, 128, 2048)},
        {"z": (1, 128, 2048)},
        "gate = Sigmoid(x)\nbent = Mul(x, gate)\nz = Mul(bent, y)",
        lambda v: F.silu(v["x"]) * v["y"],
    ),
    Region(
        "SwiGLU of one token",
        {"x": (1, 1, 2048), "y": (1, 1, 2048)},
        {"z": (1, 1, 2048)},
        "gate = Sigmoid(x)\nbent = Mul(x, gate)\nz = Mul(bent, y)",
        lambda v: F.silu(v["x"]) * v["y"],
    ),
    Region(
        "Transpose + rotary",
        {"x": _HEADS, "cosine": (1, 1, 128, 64), "sine": (1, 1, 128, 64)},
        {"z": (1, 12, 128, 64)},
        """turned = Transpose<perm = [0, 2, 1, 3]>(x)
        first, second = Split<axis = -1, num_outputs = 2>(turned)
        away = Neg(second)
        rotated = Concat<axis = -1>(away, first)
        straight = Mul(turned, cosine)
        across = Mul(rotated, sine)
        z = Add(straight, across)""",
        lambda v: (t := v["x"].transpose(1, 2)) * v["cosine"] + _rotated(t) * v["sine"],
    ),
    Region(
        "residual + Transpose of heads",
        {"x": (1, 12, 128, 64), "residual": _HEADS},
        {"z": _HEADS},
        "turned = Transpose<perm = [0, 2, 1, 3]>(x)\nz = Add(turned, residual)",
        lambda v: v["x"].transpose(1, 2) + v["residual"],
    ),
    Region(
        "mean of squared differences of rows",
        {"x": _WIDE, "y": _WIDE},
        {"z": (1, 128)},
        """axes = Constant<value = int64[1] {-1}>()
        apart = Sub(x, y)
        squares = Mul(apart, apart)
        z = ReduceMean<keepdims = 0>(squares, axes)""",
        lambda v: (v["x"] - v["y"]).square().mean(-1),
    ),
    Region(
        "residual + sum over the first axis",
        {"x": (128, 768), "y": (128, 768)},
        {"z": (768,)},
        """axes = Constant<value = int64[1] {0}>()
        sum = Add(x, y)
        z = ReduceSum<keepdims = 0>(sum, axes)""",
        lambda v: (v["x"] + v["y"]).sum(0),
    ),
)
