"""A rotary embedding whose backward is another declaration, so that training runs in C++ both ways.

Pairs of numbers are turned by the angle of their position. The pairs are the two halves of a vector, or, interleaved,
its neighbours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import sardonyx

KERNELS = """
#include <vector>

struct Pair {  // where the two numbers of pair i of a row are
  int64_t first, second;
  Pair(int64_t row, int64_t i, int64_t half, bool interleaved)
      : first(row * 2 * half + (interleaved ? 2 * i : i)), second(first + (interleaved ? 1 : half)) {}
};

template <class T>
void Rotary(In<T> x, In<T> cos, In<T> sin, Out<T> y, bool interleaved, Parallel parallel) {
  const int64_t length = x.dim(2), half = x.dim(3) / 2;
  parallel(x.dim(0) * x.dim(1) * length, 64, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t i = 0; i < half; ++i) {
        const Pair at(row, i, half, interleaved);
        const int64_t angle = row % length * half + i;
        const Wide<T> a = x[at.first], b = x[at.second];
        y[at.first] = a * cos[angle] - b * sin[angle];
        y[at.second] = b * cos[angle] + a * sin[angle];
      }
    }
  });
}

template <class T>
void RotaryGrad(In<T> grad, In<T> x, In<T> cos, In<T> sin, Out<T> to_x, Out<T> to_cos, Out<T> to_sin, bool interleaved,
                Parallel parallel) {
  const int64_t length = x.dim(2), half = x.dim(3) / 2;
  parallel(length, [&](int64_t begin, int64_t end) {  // a thread has all rows of its positions, and so their sums
    for (int64_t place = begin; place < end; ++place) {
      std::vector<double> by_cos(half), by_sin(half);
      for (int64_t row = place; row < x.dim(0) * x.dim(1) * length; row += length) {
        for (int64_t i = 0; i < half; ++i) {
          const Pair at(row, i, half, interleaved);
          const int64_t angle = place * half + i;
          const Wide<T> a = x[at.first], b = x[at.second], p = grad[at.first], q = grad[at.second];
          to_x[at.first] = p * cos[angle] + q * sin[angle];
          to_x[at.second] = q * cos[angle] - p * sin[angle];
          by_cos[i] += double(p) * a + double(q) * b;
          by_sin[i] += double(q) * a - double(p) * b;
        }
      }
      std::copy(by_cos.begin(), by_cos.end(), to_cos.data() + place * half);
      std::copy(by_sin.begin(), by_sin.end(), to_sin.data() + place * half);
    }
  });
}
"""


def shape(x: Any, cos: Any, sin: Any) -> Any:
    """As x; there is an angle for each position and pair."""
    if x[3] % 2:
        raise ValueError("the last size of x must be even")
    for table in (cos, sin):
        if table[0] != x[2] or table[1] * 2 != x[3]:
            raise ValueError("cos and sin must be (length, dim / 2) where x is (batch, heads, length, dim)")
    return x


def shapes(grad: Any, x: Any, cos: Any, sin: Any) -> Any:
    """Those of the gradients."""
    if grad != x:
        raise ValueError("the gradient must have the sizes of x")
    return shape(x, cos, sin), cos, sin


rotary_grad = sardonyx.custom_op(
    "rotary::RotaryGrad(Tensor<T, 4> grad, Tensor<T, 4> x, Tensor<T, 2> cos, Tensor<T, 2> sin, *, bool interleaved)"
    " -> (Tensor grad_x, Tensor grad_cos, Tensor grad_sin)",
    cpp=KERNELS,
    shape=shapes,
)
rotary = sardonyx.custom_op(
    "rotary::Rotary(Tensor<T, 4> x, Tensor<T, 2> cos, Tensor<T, 2> sin, *, bool interleaved=False) -> Tensor",
    cpp=KERNELS,
    shape=shape,
    backward=rotary_grad,
    doc="Turns pairs of numbers of x by the angles whose cosines and sines are given.",
)


def reference_rotary(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """The same in torch's operators."""
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    turned = a * cos - b * sin, b * cos + a * sin
    return torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)


def angles(length: int, dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines, slower from pair to pair."""
    angle = torch.outer(torch.arange(length).double(), 10000.0 ** (torch.arange(0, dim, 2).double() / -dim))
    return angle.cos().float(), angle.sin().float()


def examples_rotary() -> list[Any]:
    """Calls that `sardonyx op test` tries."""
    calls = (torch.randn(2, 3, 5, 8), *angles(5, 8)), (torch.randn(1, 1, 4, 2), *angles(4, 2))
    return [(call, {"interleaved": interleaved}) for call in calls for interleaved in (False, True)]


def examples_rotary_grad() -> list[Any]:
    """The same for the backward."""
    return [((torch.randn_like(args[0]), *args), kwargs) for args, kwargs in examples_rotary()]


def trained(function: Any, x: Tensor, *tables: Tensor, interleaved: bool) -> tuple[Tensor, ...]:
    """The result, and the gradient of its square's sum."""
    x = x.detach().requires_grad_()
    y = function(x, *tables, interleaved=interleaved)
    return y.detach(), *torch.autograd.grad(y.square().sum(), x)


def main() -> None:
    """Run forward and backward in torch and compiled, and compare with double precision."""
    x, tables = torch.randn(2, 4, 128, 64), angles(128, 64)
    compiled = torch.compile(rotary, backend="sardonyx", options={"fallback": "error"})
    print(f"{'':38}result   gradient")
    for interleaved in (False, True):
        exact = trained(reference_rotary, *(t.double() for t in (x, *tables)), interleaved=interleaved)
        for where, run in {"torch": rotary, "torch.compile, sardonyx": compiled}.items():
            found = trained(run, x, *tables, interleaved=interleaved)
            errors = [f"{(y - e).abs().max().item():.1e}" for y, e in zip(found, exact, strict=True)]
            print(f"{where:24}{'interleaved' if interleaved else 'halves':14}{'  '.join(errors)}")


if __name__ == "__main__":
    main()
