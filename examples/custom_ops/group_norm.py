"""Group norm from nothing: a kernel in C++, its gradient, and two ways out of torch into ONNX.

The declaration makes `torch.ops.mydomain.GroupNorm`. A model that uses it is exported with `mydomain::GroupNorm`, which
a plain onnxruntime runs with the library that was built here, and with ONNX's own GroupNormalization, which needs none.

What is normalised may be whole numbers, as pixels are; the result has the type of the weight and the bias.
"""

from __future__ import annotations

from typing import Any

import onnx
import onnxruntime
import torch
from torch import Tensor, nn

import sardonyx

KERNEL = """
template <class X, class T>
void GroupNorm(In<X> x, In<T> weight, In<T> bias, Out<T> y, int64_t groups, double epsilon, Parallel parallel) {
  const int64_t channels = x.dim(1) / groups, area = x.size() / std::max<int64_t>(1, x.dim(0) * x.dim(1));
  const int64_t count = channels * area;  // a group of one sample is that many numbers in a row
  parallel(x.dim(0) * groups, [&](int64_t begin, int64_t end) {
    for (int64_t g = begin; g < end; ++g) {
      const X* from = x.data() + g * count;
      T* to = y.data() + g * count;
      double sum = 0, squares = 0;
      for (int64_t i = 0; i < count; ++i) sum += double(from[i]);
      const double mean = sum / count;
      for (int64_t i = 0; i < count; ++i) squares += (double(from[i]) - mean) * (double(from[i]) - mean);
      for (int64_t c = g % groups * channels, last = c + channels; c < last; ++c) {
        const double scale = double(weight[c]) / std::sqrt(squares / count + epsilon), shift = bias[c];
        for (int64_t i = 0; i < area; ++i) *to++ = (double(*from++) - mean) * scale + shift;
      }
    }
  });
}
"""


def shape(x: Any, weight: Any, bias: Any, num_groups: Any) -> Any:
    """The shape rule: which sizes go together, and those of the result."""
    if num_groups < 1 or x[1] % num_groups:
        raise ValueError("the channels must be a multiple of num_groups")
    if weight[0] != x[1] or bias[0] != x[1]:
        raise ValueError("weight and bias must have an element for each channel")
    return x


def gradients(
    grad: Tensor, x: Tensor, weight: Tensor, num_groups: int, epsilon: float
) -> tuple[Tensor | None, Tensor, Tensor]:
    """The backward, in torch's operators: narrow types in float32, whole numbers, which have none, in double."""
    wide = torch.promote_types(x.dtype, torch.float32) if x.is_floating_point() else torch.float64
    others = [i for i in range(x.dim()) if i != 1]
    given, shares = grad.to(wide), torch.unflatten(x.to(wide), 1, (num_groups, -1)).flatten(2)
    variance, mean = torch.var_mean(shares, -1, correction=0, keepdim=True)
    scale = (variance + epsilon).rsqrt()
    normal = (shares - mean) * scale
    to_weight, to_bias = (given * normal.reshape(x.shape)).sum(others), given.sum(others)
    if not x.is_floating_point():
        return None, to_weight.to(weight.dtype), to_bias.to(weight.dtype)
    scaled = (given.transpose(1, -1) * weight.to(wide)).transpose(1, -1).reshape(shares.shape)
    to_x = scale * (scaled - scaled.mean(-1, keepdim=True) - normal * (scaled * normal).mean(-1, keepdim=True))
    return to_x.reshape(x.shape).to(x.dtype), to_weight.to(weight.dtype), to_bias.to(weight.dtype)


group_norm = sardonyx.custom_op(
    "mydomain::GroupNorm(Tensor<X> x, Tensor<T, 1> weight, Tensor<T, 1> bias, *, int num_groups, float epsilon=1e-5)"
    " -> Tensor",
    dtypes=[{"X": x, "T": t} for t in ("float32", "float64", "float16", "bfloat16") for x in (t, "int64")],
    cpp=KERNEL,
    shape=shape,
    backward=gradients,
    doc="Normalises groups of channels of each sample, then scales and shifts every channel.",
)


class GroupNorm(nn.GroupNorm):
    """torch's module, with our operator."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise."""
        y: Tensor = group_norm(x, self.weight, self.bias, num_groups=self.num_groups, epsilon=self.eps)
        return y


def standard(g: Any, x: Any, weight: Any, bias: Any, *, num_groups: int, epsilon: float = 1e-5) -> Any:
    """The translation to ONNX's own operator, which has one type for all: whole numbers are computed in double."""
    if x.dtype == weight.dtype:
        return g.GroupNormalization(x, weight, bias, num_groups=num_groups, epsilon=epsilon)
    wide = [g.cast(t, torch.float64) for t in (x, weight, bias)]
    y = g.GroupNormalization(*wide, num_groups=num_groups, epsilon=epsilon, stash_type=onnx.TensorProto.DOUBLE)
    return g.cast(y, g.out.dtype)


def run(program: sardonyx.Program, x: Tensor) -> Tensor:
    """In a plain onnxruntime, told of our library."""
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(group_norm.library))
    session = onnxruntime.InferenceSession(program.proto().SerializeToString(), options)
    return torch.from_numpy(session.run(None, {"x": x.numpy()})[0])


def operators(program: sardonyx.Program) -> str:
    """What it is made of."""
    return ", ".join(f"{node.domain or 'ai.onnx'}::{node.op_type}" for node in program.model.graph)


@torch.no_grad()
def main() -> None:
    """Run it everywhere, and compare with torch's group norm in double precision."""
    model, x = GroupNorm(3, 12), torch.randn(4, 12, 16, 16)
    nn.init.normal_(model.weight)
    nn.init.normal_(model.bias)
    own = sardonyx.export(model.eval(), (x,), dynamic_shapes=({0: "batch", 2: "height", 3: "width"},))
    theirs = sardonyx.export(model, (x,), opset=21, translations={torch.ops.mydomain.GroupNorm: standard})
    results = {
        "torch": model(x),
        "torch.compile, sardonyx": torch.compile(model, backend="sardonyx", options={"fallback": "error"})(x),
        **{f"onnxruntime, {operators(program)}": run(program, x) for program in (own, theirs)},
    }
    exact = nn.functional.group_norm(x.double(), 3, model.weight.double(), model.bias.double())
    for where, y in results.items():
        print(f"{where:50} largest difference {(y - exact).abs().max().item():.1e}")


if __name__ == "__main__":
    main()
