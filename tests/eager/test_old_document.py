"""The document of ONNX Runtime's eager mode: its mappings as they are written there, and what it says of `out=`.

Every operator of its test program is in `test_old_operators.py`, `torch.ops.ort.<op_name>` in `tests/onnx_ops`.
Building ONNX Runtime, its other half, is not needed.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sardonyx import eager
from sardonyx.eager import nodes
from sardonyx.translate import table

hand_implemented = {
    "aten::t": nodes.Transpose("self"),
    "aten::zeros_like": nodes.ConstantOfShape(nodes.Shape("self")),
}


@pytest.fixture
def declared() -> Iterator[None]:
    """The document's mappings in the place of ours."""
    ours = {name: table.lookup(name) for name in hand_implemented if name in table.names()}
    before = dict(nodes.DECLARED)
    for name in ours:
        table.remove(name)
    eager.declare(hand_implemented)
    yield
    for name in hand_implemented:
        table.remove(name)
    for name, translation in ours.items():
        table.register(name, translation)
    nodes.DECLARED.clear()
    nodes.DECLARED.update(before)


@pytest.mark.usefixtures("declared")
@pytest.mark.parametrize("name", hand_implemented)
def test_a_mapping_of_the_document_computes(name: str) -> None:
    for dtype in (torch.float32, torch.int64):
        assert eager.check(name, (torch.arange(6).reshape(2, 3).to(dtype),))


def test_custom_operators_are_invoked_from_torch() -> None:
    a, b, c = torch.randn(2, 3), torch.randn(3, 4), torch.randn(4)
    found = torch.ops.ort.gemm(a.to("ort"), b.to("ort"), c.to("ort"), alpha=2.0)
    torch.testing.assert_close(found.cpu(), 2 * a @ b + c)


def test_an_out_tensor_is_empty_or_of_the_right_shape() -> None:
    x = torch.tensor([1.0, -2.0]).to("ort")
    for out in (torch.empty(0, device="ort"), torch.empty(2, device="ort")):
        assert torch.abs(x, out=out).tolist() == [1.0, 2.0]
        assert out.tolist() == [1.0, 2.0]
    with pytest.raises(RuntimeError, match=r"resize|shape|size"):
        torch.abs(x, out=torch.empty(3, device="ort"))
