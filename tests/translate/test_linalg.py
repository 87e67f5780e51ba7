"""Small matrices: determinants, inverses, solutions, factors."""

from __future__ import annotations

import pytest
import torch
from torch import linalg
from torch.nn import functional as F

from .agreement import agrees, gradients, onnx


def matrices(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator)


def positive(*shape: int) -> torch.Tensor:
    a = matrices(*shape)
    return a @ a.mT + torch.eye(shape[-1])


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_determinants(size: int) -> None:
    for a in (matrices(size, size), matrices(2, 3, size, size), torch.ones(size, size), torch.zeros(size, size)):
        agrees(lambda a: (torch.det(a), *linalg.slogdet(a)), a)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_inverses(size: int) -> None:
    for a in (matrices(size, size), matrices(2, 3, size, size)):
        agrees(lambda a: linalg.inv_ex(a), a)


@pytest.mark.parametrize("shape", [(0, 0), (3, 0, 0), (0, 3, 3)])
def test_matrices_without_elements(shape: tuple[int, ...]) -> None:
    agrees(lambda a: (torch.det(a), *linalg.slogdet(a), *linalg.inv_ex(a), *linalg.cholesky_ex(a)), torch.empty(shape))
    agrees(lambda a, b: linalg.solve_ex(a, b), torch.empty(shape), torch.empty(*shape[:-1], 2))


def test_equations_without_a_right_hand_side() -> None:
    agrees(lambda a, b: linalg.solve_ex(a, b), matrices(3, 3), torch.empty(3, 0))


def test_a_pivot_of_zero_is_exchanged() -> None:
    agrees(lambda a: linalg.inv_ex(a), torch.tensor([[0.0, 1.0], [2.0, 0.0]]))


def test_a_singular_matrix_is_told() -> None:
    agrees(lambda a: linalg.inv_ex(a).info, torch.stack([torch.ones(3, 3), torch.eye(3), torch.zeros(3, 3)]))


def test_inverting_a_singular_matrix_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="inversion could not be completed"):
        torch.compile(lambda a: linalg.inv(a) + 1, backend="sardonyx")(torch.ones(3, 3))


def test_solutions_of_linear_equations() -> None:
    a, batch = matrices(4, 4), matrices(2, 3, 4, 4)
    for b in (matrices(4), matrices(4, 2), matrices(2, 3, 4, 2)):
        agrees(lambda a, b: linalg.solve_ex(a, b), a, b)
    agrees(lambda a, b: linalg.solve_ex(a, b), batch, matrices(2, 3, 4))
    agrees(lambda a, b: linalg.solve_ex(a, b, left=False), batch, matrices(2, 3, 5, 4))


@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("unit", [False, True])
def test_triangular_equations(upper: bool, unit: bool) -> None:
    a = linalg.cholesky(positive(2, 3, 4, 4), upper=upper)
    agrees(lambda a, b: linalg.solve_triangular(a, b, upper=upper, unitriangular=unit), a, matrices(4, 2))
    agrees(lambda a, b: linalg.solve_triangular(a, b, upper=upper, left=False), a, matrices(2, 3, 5, 4))
    agrees(lambda a, b: torch.triangular_solve(b, a, upper=upper, transpose=unit), a, matrices(2, 3, 4, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_triangular_equations_of_many_rows_are_solved_by_blocks(dtype: torch.dtype) -> None:
    a = (matrices(2, 1, 21, 21) / 5 + 2 * torch.eye(21)).to(dtype)
    right, beside = matrices(3, 21, 2).to(dtype), matrices(2, 3, 2, 21).to(dtype)

    def solutions(a: torch.Tensor, right: torch.Tensor, beside: torch.Tensor) -> list[torch.Tensor]:
        found = [linalg.solve_triangular(a, right, upper=upper) for upper in (True, False)]
        found += [linalg.solve_triangular(a, right, upper=upper, unitriangular=True) for upper in (True, False)]
        found += [linalg.solve_triangular(a, beside, upper=upper, left=False) for upper in (True, False)]
        return [*found, torch.cholesky_solve(right, a.squeeze(1)[:1]), torch.cholesky_inverse(a, upper=True)]

    agrees(solutions, a, right, beside)


def test_a_chunk_of_linear_attention() -> None:
    keys = torch.nn.functional.normalize(matrices(2, 64, 16), dim=-1)

    def chunk(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        lower = (keys @ keys.mT).tril(-1) + torch.eye(64, dtype=keys.dtype)
        return linalg.solve_triangular(lower, values, upper=False, unitriangular=True)

    values = matrices(2, 64, 8)
    agrees(chunk, keys, values)
    expected = gradients(chunk, keys.double(), values.double())
    for found, wanted in zip(gradients(onnx(chunk), keys, values), expected, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)


def test_equations_by_given_factors_of_many_rows() -> None:
    factors, pivots = linalg.lu_factor(matrices(2, 20, 20))
    agrees(
        lambda lu, b: (linalg.lu_solve(lu, pivots, b), linalg.lu_solve(lu, pivots, b.mT, left=False, adjoint=True)),
        factors,
        matrices(2, 20, 3),
    )


def test_triangular_equations_without_elements() -> None:
    agrees(lambda a, b: linalg.solve_triangular(a, b, upper=True), torch.empty(2, 0, 0), torch.empty(2, 0, 3))
    agrees(lambda a, b: linalg.solve_triangular(a, b, upper=True), torch.eye(3), torch.empty(2, 3, 0))


def test_cholesky_factors() -> None:
    a = positive(2, 3, 4, 4)
    agrees(lambda a: (*linalg.cholesky_ex(a), *linalg.cholesky_ex(a, upper=True)), a)
    agrees(lambda a: linalg.cholesky_ex(a).info, torch.stack([a[0, 0], -a[0, 0], torch.zeros(4, 4)]))
    agrees(lambda b, c: torch.cholesky_solve(b, c), matrices(2, 3, 4, 2), linalg.cholesky(a))
    agrees(lambda c: (torch.cholesky_inverse(c), torch.cholesky_inverse(c.mT, upper=True)), linalg.cholesky(a))


def test_large_matrices_stay_in_torch() -> None:
    with pytest.raises(Exception, match="a matrix of 9 rows; up to 8 are written out"):
        onnx(torch.det)(matrices(9, 9))


def test_bilinear_forms() -> None:
    agrees(F.bilinear, matrices(2, 3, 4), matrices(2, 3, 5), matrices(6, 4, 5), matrices(6))


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, float("inf")])
def test_distances_of_all_pairs(p: float) -> None:
    agrees(lambda x: F.pdist(x, p), matrices(5, 4))


@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 8.0])
def test_the_exponential_of_a_matrix(scale: float) -> None:
    agrees(linalg.matrix_exp, matrices(5, 5) * scale)
    agrees(linalg.matrix_exp, matrices(3, 4, 4) * torch.tensor([0.0, scale, 0.1])[:, None, None])


def test_a_rotation_is_the_exponential_of_a_large_angle() -> None:
    a = torch.tensor([[0.0, -500.0], [500.0, 0.0]])
    torch.testing.assert_close(onnx(linalg.matrix_exp)(a), linalg.matrix_exp(a.double()).float(), rtol=0, atol=1e-5)
