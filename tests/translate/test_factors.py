"""Factors of small matrices: LU, QR, and what is solved and multiplied by them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import linalg

from .agreement import agrees, onnx

SHAPES = [(1, 1), (2, 2), (3, 3), (8, 8), (1, 5), (5, 1), (4, 6), (7, 3), (2, 5, 5), (2, 3, 6, 4), (2, 1, 3, 8)]


def matrices(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator)


def small_integers(*shape: int) -> torch.Tensor:
    """Matrices many of whose pivots are tied, and some of which are singular."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-1, 2, shape, generator=generator).float()


@pytest.mark.parametrize("shape", SHAPES)
def test_lu(shape: tuple[int, ...]) -> None:
    agrees(lambda a: (*linalg.lu_factor_ex(a), *linalg.lu(a)), matrices(*shape))


@pytest.mark.parametrize("shape", [(50, 2, 2), (50, 3, 3), (50, 5, 5), (50, 6, 4), (50, 3, 7)])
def test_the_first_of_tied_pivots_is_taken(shape: tuple[int, ...]) -> None:
    agrees(lambda a: (*linalg.lu_factor_ex(a), *linalg.lu(a)), small_integers(*shape), exact=True)


def test_pivots_that_only_rounding_ties() -> None:
    """In double precision another row is the larger one."""
    a = torch.tensor([[2.0, 0.0, 2.0], [1.0, -1.0, -1.0], [3.0, -1.0, -3.0]])
    agrees(lambda a: linalg.lu_factor_ex(a), a, exact=True)


def test_the_first_pivot_of_zero_is_told() -> None:
    a = torch.stack([torch.zeros(3, 3), torch.ones(3, 3), torch.eye(3), torch.ones(3, 3).triu(1)])
    agrees(lambda a: linalg.lu_factor_ex(a), a)


def test_pivots_that_have_no_reciprocal() -> None:
    agrees(lambda a: linalg.lu_factor_ex(a), torch.tensor([[1e-39, 1.0], [5e-40, 3.0]]), exact=True)


@pytest.mark.parametrize("shape", SHAPES)
def test_unpacking_lu(shape: tuple[int, ...]) -> None:
    packed, pivots = linalg.lu_factor(matrices(*shape))
    agrees(lambda a, p: torch.lu_unpack(a, p), packed, pivots)
    agrees(lambda a, p: torch.lu_unpack(a, p, unpack_data=False), packed, pivots)
    agrees(lambda a, p: torch.lu_unpack(a, p, unpack_pivots=False), packed, pivots)


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("adjoint", [True, False])
def test_solving_by_lu(left: bool, adjoint: bool) -> None:
    for shape, right in (((1, 1), (1, 3)), ((5, 5), (5, 2)), ((2, 1, 4, 4), (3, 4, 2)), ((4, 4), (2, 3, 4, 1))):
        packed, pivots = linalg.lu_factor(matrices(*shape) + 3 * torch.eye(shape[-1]).flip(0))
        b = matrices(*right) if left else matrices(*right).mT
        agrees(lambda *abc: linalg.lu_solve(*abc, left=left, adjoint=adjoint), packed, pivots, b)


def test_info_of_equations_from_the_right() -> None:
    a = torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    agrees(lambda a, b: linalg.solve_ex(a, b, left=False).info, a, torch.eye(2))


@pytest.mark.parametrize("transposed", [True, False])
def test_factors_that_gradients_need(transposed: bool) -> None:
    a = matrices(2, 4, 4).mT if transposed else matrices(2, 4, 4)
    aten = torch.ops.aten
    agrees(lambda a: (*aten._linalg_det(a), *aten._linalg_slogdet(a)), a)
    agrees(lambda a, b: aten._linalg_solve_ex(a, b), a, matrices(2, 4, 3))


@torch.enable_grad()
def slopes(function: Callable[[torch.Tensor], torch.Tensor], a: torch.Tensor) -> torch.Tensor:
    a = a.clone().requires_grad_()
    return torch.autograd.grad(function(a).square().sum(), a)[0]


@pytest.mark.parametrize(
    "function",
    [torch.det, torch.logdet, lambda a: linalg.solve_ex(a, a.mT[..., :2])[0], lambda a: linalg.lu_factor_ex(a)[0]],
    ids=["det", "logdet", "solve", "lu"],
)
def test_gradients(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    a = matrices(3, 4, 4) @ matrices(3, 4, 4).mT + torch.eye(4)
    torch.testing.assert_close(slopes(onnx(function), a), slopes(function, a), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("shape", SHAPES)
def test_qr(shape: tuple[int, ...]) -> None:
    agrees(lambda a: (*torch.geqrf(a), *linalg.qr(a), *linalg.qr(a, "complete"), *linalg.qr(a, "r")), matrices(*shape))


def test_columns_that_need_no_reflection_keep_their_sign() -> None:
    a = torch.stack([-torch.eye(4, 3), torch.zeros(4, 3), matrices(4, 3).triu(), torch.eye(4, 3).flip(0)])
    agrees(lambda a: (*torch.geqrf(a), *linalg.qr(a, "complete")), a)


@pytest.mark.parametrize("shape", [(1, 1), (4, 4), (8, 5), (2, 3, 6, 2)])
def test_products_of_reflections(shape: tuple[int, ...]) -> None:
    a, tau = torch.geqrf(matrices(*shape))
    agrees(lambda a, tau: linalg.householder_product(a, tau), a, tau)
    agrees(lambda a, tau: linalg.householder_product(a, tau), a, tau[..., :1])


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("transpose", [True, False])
def test_multiplying_by_q(left: bool, transpose: bool) -> None:
    for shape in ((1, 1), (5, 3), (3, 5), (2, 4, 4)):
        a, tau = torch.geqrf(matrices(*shape))
        x = matrices(*shape[:-1], 12)
        agrees(lambda *x: torch.ormqr(*x, left=left, transpose=transpose), a, tau, x if left else x.mT)


@pytest.mark.parametrize("shape", [(0, 0), (5, 0), (0, 5), (3, 5, 0), (0, 3, 3)])
def test_factors_of_nothing(shape: tuple[int, ...]) -> None:
    agrees(lambda a: (*linalg.lu_factor_ex(a), *linalg.lu(a)), torch.empty(shape))
    agrees(
        lambda a: (*torch.geqrf(a), *linalg.qr(a), *linalg.qr(a, "complete"), *linalg.qr(a, "r")), torch.empty(shape)
    )


def test_large_factors_stay_in_torch() -> None:
    with pytest.raises(Exception, match="a matrix of 9 columns; up to 8 are written out"):
        onnx(lambda a: linalg.qr(a))(matrices(3, 9))
