"""A matrix product of whole numbers: activations × weights, summed exactly, scaled to floating point at the end.

The activations have one scale and zero point, the weights one for each column. The scales have a gradient, and their
dtype is the result's. Sums of int8 are int32, of up to 131071 products; one of int64 that does not fit is an error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import sardonyx

KERNEL = """
#include <vector>

template <class Sum>
Sum add(Sum sum, Sum a, Sum b) {  // sum + a · b
  if (sizeof(Sum) == 4) return sum + a * b;
  const bool overflows = __builtin_mul_overflow(a, b, &a) || __builtin_add_overflow(sum, a, &sum);
  check(!overflows, "a sum of products does not fit into 64 bits");
  return sum;
}

template <class Q, class T>
void MatMul(In<Q> a, In<Q> b, In<T> a_scale, In<T> b_scale, In<Q> a_zero, In<Q> b_zero, Out<T> y, Parallel parallel) {
  using Sum = std::conditional_t<sizeof(Q) == 1, int32_t, int64_t>;
  const int64_t depth = b.dim(0), columns = b.dim(1), rows = y.size() / std::max<int64_t>(1, columns);
  check(sizeof(Sum) == 8 || depth < 1 << 17, "sums of more than 131071 products can overflow int32");
  const int64_t za = a_zero ? a_zero[0] : 0;
  std::vector<int64_t> of_column(columns);  // Σ (zero − b): what the zero point of a is multiplied with
  for (int64_t k = 0; za && k < depth; ++k) {
    for (int64_t n = 0; n < columns; ++n) {
      of_column[n] = add<int64_t>(add<int64_t>(of_column[n], 1, b_zero ? b_zero[n] : 0), -1, b[k * columns + n]);
    }
  }
  parallel(rows, [&](int64_t begin, int64_t end) {
    std::vector<Sum> products(columns);
    for (int64_t m = begin; m < end; ++m) {
      std::fill(products.begin(), products.end(), 0);
      int64_t of_row = 0;  // −Σ a
      for (int64_t k = 0; k < depth; ++k) {
        const Q x = a[m * depth + k];
        const Q* row = b.data() + k * columns;
        for (int64_t n = 0; n < columns; ++n) products[n] = add<Sum>(products[n], x, row[n]);
        of_row = b_zero ? add<int64_t>(of_row, -1, x) : 0;
      }
      for (int64_t n = 0; n < columns; ++n) {
        int64_t sum = add<int64_t>(products[n], za, of_column[n]);
        if (b_zero) sum = add<int64_t>(sum, b_zero[n], of_row);
        y[m * columns + n] = static_cast<double>(sum) * double(a_scale[0]) * double(b_scale[n]);
      }
    }
  });
}
"""


def shape(a: Any, b: Any, b_scale: Any, b_zero: Any) -> Any:
    """(…, depth) × (depth, columns) → (…, columns)."""
    if a[-1] != b[0]:
        raise ValueError("the last size of a and the first of b must be the same")
    if b_scale[0] != b[1] or (b_zero is not None and b_zero[0] != b[1]):
        raise ValueError("b_scale and b_zero must have an element for each column of b")
    return (*a[:-1], b[1])


def gradients(
    grad: Tensor, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, a_zero: Tensor | None, b_zero: Tensor | None
) -> dict[str, Tensor]:
    """Those of the scales, in double precision; the operator itself gives the sums that they scale."""
    one, ones = (torch.ones_like(scale, dtype=torch.float64) for scale in (a_scale, b_scale))
    of_columns = (grad * matmul(a, b, one, ones, a_zero, b_zero)).sum_to_size(b_scale.shape)
    to_a, to_b = (of_columns * b_scale).sum(), of_columns * a_scale
    return {"a_scale": to_a.to(a_scale.dtype), "b_scale": to_b.to(b_scale.dtype)}


matmul = sardonyx.custom_op(
    "quantised::MatMul(Tensor<Q> a, Tensor<Q, 2> b, Tensor<T, 0> a_scale, Tensor<T, 1> b_scale,"
    " Tensor<Q, 0>? a_zero=None, Tensor<Q, 1>? b_zero=None) -> Tensor",
    dtypes={"Q": ["int8", "int64"], "T": ["float32", "float64", "float16", "bfloat16"]},
    cpp=KERNEL,
    shape=shape,
    backward=gradients,
    doc="(a − a_zero) · a_scale, times (b − b_zero) · b_scale.",
)


def reference(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, a_zero: Tensor, b_zero: Tensor) -> Tensor:
    """The same in double precision, in which the sums are exact."""
    product = (a.double() - a_zero.double()) @ (b.double() - b_zero.double())
    return product * a_scale.double() * b_scale.double()


def quantised(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A matrix as int8, with a scale and a zero point for each column."""
    low, high = weight.amin(0).clamp(max=0), weight.amax(0).clamp(min=0)
    scale = (high - low).clamp(min=1e-6) / 255
    zero = (-128 - low / scale).round()
    return (weight / scale + zero).round().clamp(-128, 127).to(torch.int8), scale, zero.to(torch.int8)


def main() -> None:
    """Run a linear layer in torch, compiled and exported, and compare with double precision."""
    weight, a = torch.randn(256, 64), torch.randint(-128, 128, (8, 32, 256), dtype=torch.int8)
    b, b_scale, b_zero = quantised(weight)
    a_scale, a_zero = torch.tensor(0.02), torch.tensor(-5, dtype=torch.int8)

    def layer(a: Tensor) -> Any:
        return matmul(a, b, a_scale, b_scale, a_zero, b_zero)

    results = {
        "torch": layer(a),
        "torch.compile, sardonyx": torch.compile(layer, backend="sardonyx", options={"fallback": "error"})(a),
        "exported": sardonyx.export(layer, (a,), dynamic_shapes=({0: "batch", 1: "length"},))(a),
        "float32 weights": (a.float() + 5) * 0.02 @ weight,
    }
    exact = reference(a, b, a_scale, b_scale, a_zero, b_zero)
    print(f"largest number {exact.abs().max().item():.0f}; largest difference from double precision:")
    for where, y in results.items():
        print(f"  {where:24} {(y - exact).abs().max().item():.1e}")


if __name__ == "__main__":
    main()
