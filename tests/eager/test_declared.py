"""Operators that are declared in one line: each comes with a test, and so does one that a user adds."""

from __future__ import annotations

import pytest
import torch

from sardonyx import eager
from sardonyx.eager import nodes
from sardonyx.translate import table

table.names()  # which declares those of ours


@pytest.mark.parametrize("name", sorted(nodes.DECLARED))
def test_it_gives_the_cpus_results(name: str) -> None:
    assert eager.check(name)


def test_an_operator_is_added_in_one_line() -> None:
    x = torch.tensor([-2.0, 0.0, 0.5, 3.0])
    with pytest.raises(eager.NotMapped, match="special_spherical_bessel_j0"):
        torch.special.spherical_bessel_j0(x.to("ort"))
    ratio = nodes.Div(nodes.Sin("x"), "x")
    eager.declare({"aten::special_spherical_bessel_j0": nodes.Where(nodes.Equal("x", 0), 1, ratio)})
    assert eager.check("aten::special_spherical_bessel_j0", (x,))
    out = torch.empty(4, device="ort")
    torch.special.spherical_bessel_j0(x.to("ort"), out=out)
    torch.testing.assert_close(out.cpu(), torch.special.spherical_bessel_j0(x))
    table.remove("aten::special_spherical_bessel_j0")


def test_what_cannot_be_declared() -> None:
    with pytest.raises(ValueError, match="torch has no operator 'aten::no_such'"):
        eager.declare({"aten::no_such": nodes.Abs("self")})
    with pytest.raises(ValueError, match="takes self, other, and not x"):
        eager.declare({"aten::igamma": nodes.Abs("x")})
    with pytest.raises(AttributeError, match="ONNX has no operator 'abs'"):
        nodes.abs("x")


def test_a_wrong_declaration_is_found() -> None:
    eager.declare({"aten::igamma": nodes.Mul("self", "other")})
    with pytest.raises(AssertionError, match=r"aten::igamma\("):
        eager.check("aten::igamma")
    table.remove("aten::igamma")
