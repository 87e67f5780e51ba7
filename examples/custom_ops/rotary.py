"""A rotary embedding whose backward is another declaration, so that training runs in C++ both ways.

Pairs of numbers are turned by the angle of their position. The pairs are the two halves of a vector, or, interleaved,
its neighbours. `positions` says which row of the tables each vector has, in packed sequences or after a cache; without
it they are counted. What is turned may be whole numbers; the result has the type of the tables.
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

template <class X, class T>
int64_t place_of(int64_t row, In<X> x, In<int64_t> positions, In<T> table) {  // its row in the tables
  const int64_t length = x.dim(2), at = row % length;
  if (!positions) return at;
  const int64_t place = positions[row / (x.dim(1) * length) * length + at];
  check(0 <= place && place < table.dim(0), "a position is outside of cos and sin");
  return place;
}

template <class X, class T>
void Rotary(In<X> x, In<T> cos, In<T> sin, In<int64_t> positions, Out<T> y, bool interleaved, Parallel parallel) {
  const int64_t half = x.dim(3) / 2;
  parallel(x.dim(0) * x.dim(1) * x.dim(2), 64, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t place = place_of(row, x, positions, cos);
      for (int64_t i = 0; i < half; ++i) {
        const Pair at(row, i, half, interleaved);
        const Wide<T> a = x[at.first], b = x[at.second], c = cos[place * half + i], s = sin[place * half + i];
        y[at.first] = a * c - b * s;
        y[at.second] = b * c + a * s;
      }
    }
  });
}

template <class T, class X>
void RotaryGrad(In<T> grad, In<X> x, In<T> cos, In<T> sin, In<int64_t> positions, Out<T> to_x, Out<T> to_cos,
                Out<T> to_sin, bool interleaved, Parallel parallel) {
  const int64_t half = x.dim(3) / 2;
  parallel(half, [&](int64_t begin, int64_t end) {  // a thread has some columns of the tables, and so their sums
    const int64_t columns = end - begin;
    std::vector<double> by_cos(cos.dim(0) * columns), by_sin(cos.dim(0) * columns);
    for (int64_t row = 0; row < x.dim(0) * x.dim(1) * x.dim(2); ++row) {
      const int64_t place = place_of(row, x, positions, cos);
      for (int64_t i = begin; i < end; ++i) {
        const Pair at(row, i, half, interleaved);
        const Wide<T> a = x[at.first], b = x[at.second], c = cos[place * half + i], s = sin[place * half + i];
        const Wide<T> p = grad[at.first], q = grad[at.second];
        to_x[at.first] = p * c + q * s;
        to_x[at.second] = q * c - p * s;
        by_cos[place * columns + i - begin] += double(p) * a + double(q) * b;
        by_sin[place * columns + i - begin] += double(q) * a - double(p) * b;
      }
    }
    for (int64_t place = 0; place < cos.dim(0); ++place) {
      for (int64_t i = begin; i < end; ++i) {
        to_cos[place * half + i] = by_cos[place * columns + i - begin];
        to_sin[place * half + i] = by_sin[place * columns + i - begin];
      }
    }
  });
}
"""
DTYPES = [{"X": x, "T": t} for t in ("float32", "float64", "float16", "bfloat16") for x in (t, "int64")]


def shape(x: Any, cos: Any, sin: Any, positions: Any) -> Any:
    """As x; there is an angle for each position and pair."""
    if x[3] % 2:
        raise ValueError("the last size of x must be even")
    if cos[1] * 2 != x[3] or cos[0] != sin[0] or cos[1] != sin[1]:
        raise ValueError("cos and sin must be (…, dim / 2) where x is (batch, heads, length, dim)")
    if positions is None:
        if cos[0] != x[2]:
            raise ValueError("without positions, cos and sin must be (length, dim / 2)")
    elif positions[0] != x[0] or positions[1] != x[2]:
        raise ValueError("positions must be (batch, length)")
    return x


def shapes(grad: Any, x: Any, cos: Any, sin: Any, positions: Any) -> Any:
    """Those of the gradients."""
    if grad != x:
        raise ValueError("the gradient must have the sizes of x")
    return shape(x, cos, sin, positions), cos, sin


rotary_grad = sardonyx.custom_op(
    "rotary::RotaryGrad(Tensor<T, 4> grad, Tensor<X, 4> x, Tensor<T, 2> cos, Tensor<T, 2> sin,"
    " Tensor<int64, 2>? positions, *, bool interleaved) -> (Tensor grad_x, Tensor grad_cos, Tensor grad_sin)",
    dtypes=DTYPES,
    cpp=KERNELS,
    shape=shapes,
)
rotary = sardonyx.custom_op(
    "rotary::Rotary(Tensor<X, 4> x, Tensor<T, 2> cos, Tensor<T, 2> sin, Tensor<int64, 2>? positions=None,"
    " *, bool interleaved=False) -> Tensor",
    dtypes=DTYPES,
    cpp=KERNELS,
    shape=shape,
    backward=rotary_grad,
    doc="Turns pairs of numbers of x by the angles whose cosines and sines are given.",
)


def reference_rotary(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None, *, interleaved: bool = False
) -> Tensor:
    """The same in torch's operators."""
    if positions is not None:
        cos, sin = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    turned = a * cos - b * sin, b * cos + a * sin
    return torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)


def angles(length: int, dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines, slower from pair to pair."""
    angle = torch.outer(torch.arange(length).double(), 10000.0 ** (torch.arange(0, dim, 2).double() / -dim))
    return angle.cos().float(), angle.sin().float()


def examples_rotary() -> list[Any]:
    """Calls that `sardonyx op test` tries."""
    packed = torch.tensor([[0, 1, 2, 0, 1], [4, 0, 1, 2, 3]])
    calls = (torch.randn(2, 3, 5, 8), *angles(5, 8), None), (torch.randn(2, 2, 5, 4), *angles(6, 4), packed)
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
