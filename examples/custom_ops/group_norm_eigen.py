"""The group norm of group_norm.py over Eigen's maps: a kernel includes what it likes, and `flags` says where that is.

python examples/custom_ops/group_norm_eigen.py [the folder that has Eigen/Core]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from timeit import repeat
from typing import Any

import torch
from group_norm import group_norm, shape

import sardonyx

USUAL = [f"{root}/include/eigen3" for root in ("/usr", "/usr/local", "/opt/homebrew", sys.prefix)]

KERNEL = """
#define eigen_assert(holds) ::sardonyx::check(holds, #holds)  // an error of the operator, not the end of the process
#include <Eigen/Core>

template <class T>
void GroupNormEigen(In<T> x, In<T> weight, In<T> bias, Out<T> y, int64_t groups, double epsilon, Parallel parallel) {
  if (x.size() == 0) return;
  using Column = Eigen::Array<T, Eigen::Dynamic, 1>;
  using Rows = Eigen::Array<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const int64_t channels = x.dim(1) / groups, area = x.size() / (x.dim(0) * x.dim(1));
  parallel(x.dim(0) * groups, [&](int64_t begin, int64_t end) {
    for (int64_t g = begin; g < end; ++g) {
      const Eigen::Map<const Rows> from(x.data() + g * channels * area, channels, area);
      const Eigen::Map<const Column> scale(weight.data() + g % groups * channels, channels);
      const Eigen::Map<const Column> shift(bias.data() + g % groups * channels, channels);
      const T mean = from.mean(), deviation = std::sqrt((from - mean).square().mean() + T(epsilon));
      Eigen::Map<Rows> to(y.data() + g * channels * area, channels, area);
      to = ((from - mean).colwise() * (scale / deviation)).colwise() + shift;
    }
  });
}
"""


def declare(eigen: Path) -> sardonyx.CustomOp:
    """The operator, built with these headers."""
    return sardonyx.custom_op(
        "mydomain::GroupNormEigen(Tensor x, Tensor<T, 1> weight, Tensor<T, 1> bias, *, int num_groups,"
        " float epsilon=1e-5) -> Tensor",
        dtypes=["float32", "float64"],
        cpp=KERNEL,
        shape=shape,
        flags=[f"-I{eigen}"],
    )


def find() -> Path | None:
    """The folder that has Eigen/Core."""
    folders = map(Path, (*sys.argv[1:], *USUAL))
    return next((folder for folder in folders if (folder / "Eigen" / "Core").exists()), None)


def main() -> None:
    """Compare the two kernels with torch's, in double precision and by the clock."""
    eigen = find()
    if eigen is None:
        print("Eigen's headers are not installed: apt-get install libeigen3-dev, or brew install eigen")
        return
    own, given = declare(eigen), (torch.randn(8, 32, 28, 28), torch.randn(32), torch.randn(32))
    calls: dict[str, Callable[..., Any]] = {
        "plain loops": lambda *args: group_norm(*args, num_groups=4),
        "Eigen": lambda *args: own(*args, num_groups=4),
        "torch's own": lambda x, weight, bias: torch.nn.functional.group_norm(x, 4, weight, bias),
    }
    exact = calls["torch's own"](*(t.double() for t in given))
    for name, call in calls.items():
        error = (call(*given) - exact).abs().max().item()
        seconds = min(repeat(partial(call, *given), number=10)) / 10
        print(f"{name:14} largest difference {error:.1e}   {seconds * 1e6:6.0f} µs")


if __name__ == "__main__":
    main()
