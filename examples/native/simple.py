"""Small graphs that ONNX Runtime runs one operator at a time, each as one kernel: a chain of Exp, and some more.

python examples/native/simple.py --rows 512
"""

from __future__ import annotations

import argparse

import torch
from comparing import compare
from torch import nn


class ExpChain(nn.Module):
    """Exp, again and again, each of a small number."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Stays between 0 and 1."""
        for _ in range(self.length):
            x = torch.exp(-x)
        return x


class MaskedSoftmax(nn.Module):
    """Scale, mask and softmax, where a row that is masked throughout is zero."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """As attention does it."""
        weights = torch.softmax((x * 0.125).masked_fill(~mask, -torch.inf), -1)
        return torch.where(weights.isnan(), 0.0, weights)


class Normed(nn.Module):
    """RMS norm written out, and a gate."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width))

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Of the sum of both."""
        x = x + residual
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight
        return x * torch.sigmoid(1.702 * x)


def main() -> None:
    """Compile each, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=512, help="rows of the tensors (default: 512)")
    rows = parser.parse_args().rows
    torch.manual_seed(0)
    x = torch.randn(rows, 768)
    compare("Exp, eight times", ExpChain(8), (x.abs(),))
    compare("masked softmax", MaskedSoftmax(), (x, torch.rand(rows, 768) > 0.3))
    compare("residual, RMS norm and gate", Normed(768), (x, torch.randn(rows, 768)))


if __name__ == "__main__":
    main()
