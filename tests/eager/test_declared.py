"""Operators that are declared in one line: each comes with a test, and so does one that a user adds."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
import torch

import sardonyx
from sardonyx import eager
from sardonyx.eager import device, nodes
from sardonyx.eager.dispatch import HANDWRITTEN
from sardonyx.errors import DeclarationError
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
    with pytest.raises(DeclarationError, match="did you mean 'aten::igamma'"):
        eager.declare({"aten::igama": nodes.Abs("self")})
    with pytest.raises(ValueError, match="takes self, other, not x"):
        eager.declare({"aten::igamma": nodes.Abs("x")})
    with pytest.raises(AttributeError, match="ONNX has no operator 'abs'"):
        nodes.abs("x")


def test_a_wrong_declaration_is_found() -> None:
    eager.declare({"aten::igamma": nodes.Mul("self", "other")})
    with pytest.raises(AssertionError, match=r"aten::igamma\("):
        eager.check("aten::igamma")
    table.remove("aten::igamma")


@pytest.fixture
def table_as_it_was() -> Iterator[None]:
    """Whatever a test declares is taken back."""
    before, bodies, declared = dict(table._TABLE), dict(HANDWRITTEN), dict(nodes.DECLARED)
    yield
    for name in table._TABLE.keys() - before.keys():
        table.remove(name)
    table._TABLE.update(before)
    table._of_torch.clear()
    for held, was in ((HANDWRITTEN, bodies), (nodes.DECLARED, declared)):
        held.clear()
        held.update(was)
    device.clear_caches()


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("aten::sin.out", "'aten::sin'"),
        ("aten::sin_", "'aten::sin'"),
        ("aten::add_.Tensor", "'aten::add.Tensor'"),
        ("aten::max.dim_max", "'aten::max.dim'"),
        ("aten::copy_", "'aten::copy'"),
    ],
)
def test_a_variant_that_writes_is_refused_and_the_right_one_named(name: str, instead: str) -> None:
    with pytest.raises(DeclarationError, match=f"{re.escape(name)} writes to (?s:.*)declare {instead}"):
        eager.declare({name: nodes.Sin("self")}, replace=True)


def test_a_translation_is_replaced_where_asked_for(table_as_it_was: None) -> None:
    x = torch.tensor([0.5, 1.0], device="ort")
    assert x.sin().tolist() == pytest.approx(torch.tensor([0.5, 1.0]).sin().tolist())
    with pytest.raises(DeclarationError, match=r"has a translation already(?s:.*)replace=True"):
        eager.declare({"aten::sin": nodes.Neg("self")})
    eager.declare({"aten::sin": nodes.Neg("self")}, replace=True)
    assert x.sin().tolist() == [-0.5, -1.0]
    out = torch.empty(2, device="ort")
    torch.sin(x, out=out)
    assert out.tolist() == x.clone().sin_().tolist() == [-0.5, -1.0]
    assert [node.op_type for node in sardonyx.export(lambda x: x.sin(), (x.cpu(),)).model.graph] == ["Neg"]


def test_what_torch_composes_for_every_device_can_be_declared(table_as_it_was: None) -> None:
    x = torch.tensor([0.5, 2.0])
    moved = x.to("ort")
    assert torch.special.entr(moved).shape == (2,)
    eager.declare({"aten::deg2rad": nodes.Neg("self"), "aten::special_entr": nodes.Abs("self")}, replace=True)
    assert torch.deg2rad(moved).tolist() == [-0.5, -2.0]
    assert torch.special.entr(moved).tolist() == [0.5, 2.0]
    compiled = torch.compile(torch.special.entr, backend="sardonyx", options={"fallback": "error"})
    assert compiled(x).tolist() == [0.5, 2.0]


def test_a_declaration_that_the_device_never_runs_says_so(
    table_as_it_was: None, caplog: pytest.LogCaptureFixture
) -> None:
    eager.declare({"aten::t": nodes.Transpose("self")}, replace=True)
    assert "compiled and exported graphs only: views are handled by torch" in caplog.text


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: nodes.Sinn("self"), AttributeError, "no operator 'Sinn'; did you mean 'Sin"),
        (lambda: nodes.sin("self"), AttributeError, "no operator 'sin'; did you mean 'Sin'"),
        (lambda: nodes.Node("Relux", "self"), DeclarationError, "did you mean 'Relu'"),
        (
            lambda: nodes.Softmax("self", axes=1),
            DeclarationError,
            "no attribute 'axes'; did you mean 'axis'",
        ),
        (lambda: nodes.Add("self"), DeclarationError, "Add takes A, B, got 1"),
        (lambda: nodes.Cast("self"), DeclarationError, "needs the attribute 'to'"),
        (lambda: nodes.Elu("self", alpha="big"), DeclarationError, "'alpha' of ONNX's Elu is 'big'"),
        (lambda: nodes.Elu("self", alpha=[1.0]), DeclarationError, "'alpha' of ONNX's Elu is"),
        (lambda: nodes.TopK("self", 1), DeclarationError, "returns 2 tensors"),
        (lambda: nodes.Abs(object()), DeclarationError, "operands are names of arguments"),
        (lambda: nodes.SignatureOnly("x"), DeclarationError, "takes a function, not 'x'"),  # type: ignore[arg-type]
        (lambda: eager.declare({"aten::igamma": nodes.Abs("slef")}), DeclarationError, "did you mean 'self'"),
        (lambda: eager.declare({"aten::igamma": "Abs"}), DeclarationError, "use sardonyx.eager.nodes"),  # type: ignore[dict-item]
    ],
)
def test_names_are_checked_when_they_are_written(make: Callable[[], object], error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        make()


def test_only_the_signature_is_declared_where_the_body_is_a_function(
    table_as_it_was: None, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.tensor([3.0, 4.0], device="ort")

    def ones(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(self)

    eager.declare({"aten::igamma": nodes.SignatureOnly(ones)})
    assert torch.special.gammainc(x, x).tolist() == [1.0, 1.0]
    assert "aten::igamma: aten::igamma.out and aten::igamma_ keep their translation" in caplog.text
    with pytest.raises(DeclarationError, match="has an implementation of"):
        eager.declare({"aten::igamma": nodes.SignatureOnly(ones)})
    with pytest.raises(DeclarationError, match="would never be called: views"):
        eager.declare({"aten::t": nodes.SignatureOnly(ones)})


def test_the_old_tables_lines_are_taken(table_as_it_was: None) -> None:
    old = {
        "aten::t": nodes.Transpose("self"),
        "aten::zeros_like": nodes.ConstantOfShape(nodes.Shape("self")),
        "aten::equal": nodes.SignatureOnly(),
        "aten::mm.out": nodes.SignatureOnly(),
        "aten::fill_.Scalar": nodes.SignatureOnly(),
        "aten::as_strided": nodes.SignatureOnly(),
    }
    eager.declare(old, replace=True)
    x = torch.ones(2, 3, device="ort")
    assert torch.zeros_like(x).tolist() == [[0.0] * 3] * 2
    with pytest.raises(
        DeclarationError, match=r"has no implementation of aten::igamma(?s:.*)SignatureOnly\(function\)"
    ):
        eager.declare({"aten::igamma": nodes.SignatureOnly()})
