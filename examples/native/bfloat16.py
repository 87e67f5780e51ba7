"""bfloat16 on a CPU: onnxruntime has no kernels for it there, and a library made for the model has.

python examples/native/bfloat16.py --rows 512
"""

from __future__ import annotations

import argparse

import onnxruntime
import torch
from torch import nn

import sardonyx


class Gate(nn.Module):
    """What a gated layer computes between its products."""

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """SiLU of the one, times the other."""
        return nn.functional.silu(gate) * x


class Normed(nn.Module):
    """A residual and a layer norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Of the sum of both."""
        out: torch.Tensor = self.norm(x + residual)
        return out


def refusal(program: sardonyx.Program) -> str:
    """What onnxruntime says to a model."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        onnxruntime.InferenceSession(program.proto().SerializeToString(), options)
    except Exception as error:
        return str(error)
    return "nothing"


def half_ulps(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest error, where 1 is half the distance of the bfloat16 numbers around the exact one."""
    ulp = torch.exp2(exact.abs().clamp_min(2.0**-20).log2().floor() - 8)
    return float(((found.double() - exact).abs() / ulp).max())


def show(title: str, module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
    """Export a module in bfloat16 without and with kernels, and print."""
    module = module.eval().bfloat16()
    plain, compiled = (sardonyx.export(module, args, native=how) for how in (False, True))
    with torch.no_grad():
        exact = module.double()(*(x.double() for x in args))
    print(f"# {title}\nonnxruntime: {refusal(plain)}")
    print(f"operators: {', '.join(node.op_type for node in plain.model.graph)}; kernels: {compiled.report.nodes}")
    print(f"largest error: {half_ulps(compiled(*args), exact):.3f} of a bfloat16's half ulp\n")


def main() -> None:
    """Compile each, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=512, help="rows of the tensors (default: 512)")
    rows = parser.parse_args().rows
    torch.manual_seed(0)
    args = torch.randn(rows, 768).bfloat16(), torch.randn(rows, 768).bfloat16()
    show("gate", Gate(), args)
    show("residual and layer norm", Normed(768), args)


if __name__ == "__main__":
    main()
