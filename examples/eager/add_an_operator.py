"""An operator that the device lacks, added in one line, and the test that comes with it."""

from __future__ import annotations

import torch

from sardonyx import eager
from sardonyx.eager import nodes


def main() -> None:
    """Call it before and after it is declared, in every variant."""
    eager.enable(fallback="error")
    x = torch.linspace(0, 20, 1000)
    try:
        torch.special.spherical_bessel_j0(x.to("ort"))
    except eager.NotMapped as error:
        print(error)

    ratio = nodes.Div(nodes.Sin("x"), "x")
    eager.declare({"aten::special_spherical_bessel_j0": nodes.Where(nodes.Equal("x", 0), 1, ratio)})

    compared = eager.check("aten::special_spherical_bessel_j0", (x,), (x.double(),), (x[::2],), (torch.arange(5),))
    print(f"declared; {compared} calls give what the CPU does")
    moved, out = x.to("ort"), torch.empty(1000, device="ort")
    torch.special.spherical_bessel_j0(moved, out=out)
    expected = torch.special.spherical_bessel_j0(x)
    print(f"with out=, the largest difference is {(out.cpu() - expected).abs().max().item():.1e}")


if __name__ == "__main__":
    main()
