"""Run-length encoding: results whose size nobody knows before the kernel has looked at the numbers.

The shape rule says None for such a size, and the kernel calls `resize` when it knows. torch.export and torch.compile
carry on with a symbol for it, and ONNX Runtime allocates what the kernel asks for.

Floating point has a gradient: a run's value is its first number.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import sardonyx

KERNEL = """
template <class T>
void RunLengths(In<T> x, Out<T> values, Out<int64_t> lengths, Parallel) {
  auto begins = [&](int64_t i) { return i == 0 || x[i] != x[i - 1]; };
  int64_t runs = 0;
  for (int64_t i = 0; i < x.size(); ++i) runs += begins(i);
  values.resize({runs});
  lengths.resize({runs});
  for (int64_t i = 0, run = -1; i < x.size(); ++i) {
    if (begins(i)) {
      values[++run] = x[i];
      lengths[run] = 0;
    }
    ++lengths[run];
  }
}
"""


def gradient(grad_values: Tensor, x: Tensor) -> Tensor:
    """That of the values, which goes to where the runs begin."""
    begins = torch.cat([torch.ones_like(x[:1], dtype=torch.bool), x[1:] != x[:-1]])
    return torch.where(begins, grad_values[begins.cumsum(0) - 1], 0)


run_lengths = sardonyx.custom_op(
    "runs::RunLengths(Tensor<T, 1> x) -> (Tensor values, Tensor<int64> lengths)",
    dtypes=["float32", "float64", "float16", "bfloat16", "int64"],
    cpp=KERNEL,
    shape=lambda x: ((None,), (None,)),
    backward=gradient,
    doc="Every run of equal numbers as one of them, and how many there are.",
)


class Longest(nn.Module):
    """The longest run: of which number it is, and how long."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Encode, and look for it."""
        values, lengths = run_lengths(x)
        longest, at = lengths.max(0, keepdim=True)
        return values.gather(0, at), longest


def main() -> None:
    """Encode, decode, and find the longest run in torch and in ONNX Runtime."""
    x = torch.randint(0, 2, (10_000,)).cumsum(0) // 3
    values, lengths = run_lengths(x)
    assert torch.equal(torch.repeat_interleave(values, lengths), x)
    print(f"{len(x)} numbers are {len(values)} runs; decoded, they are the same again")
    model = Longest().eval()
    program = sardonyx.export(model, (x,), dynamic_shapes=({0: "length"},))
    print(f"exported as {[node.op_type for node in program.model.graph]}")
    for length in (10_000, 1_000, 10):
        (number, longest), found = model(x[:length]), program(x[:length])
        same = all(map(torch.equal, found, (number, longest)))
        print(
            f"{length:6} numbers: {longest.item()} times {number.item()} is longest; ONNX Runtime's is the same: {same}"
        )


if __name__ == "__main__":
    main()
