"""Scaled dot-product attention, which PyTorch's operator database does not reach through torch.compile."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import sardonyx

from .agreement import agrees

Q, K, V = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 7, 8), torch.randn(2, 4, 7, 6)


def test_plain() -> None:
    agrees(F.scaled_dot_product_attention, Q, K, V)


def test_the_scale_may_be_given() -> None:
    agrees(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.3), Q, K, V)


@pytest.mark.parametrize("lengths", [(5, 5), (5, 7), (7, 5), (1, 4)])
def test_the_causal_mask_starts_at_the_upper_left(lengths: tuple[int, int]) -> None:
    q, k = torch.randn(2, 4, lengths[0], 8), torch.randn(2, 4, lengths[1], 8)
    agrees(lambda q, k: F.scaled_dot_product_attention(q, k, k, is_causal=True), q, k)


@pytest.mark.parametrize("shape", [(5, 7), (1, 7), (2, 1, 5, 7), (2, 4, 5, 7), (2, 1, 1, 7)])
def test_masks_broadcast(shape: tuple[int, ...]) -> None:
    mask = torch.rand(shape) > 0.3
    mask[..., 0] = True
    agrees(lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m), Q, K, V, mask)
    agrees(lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m), Q, K, V, torch.randn(shape))
    agrees(lambda q, k, m: F.scaled_dot_product_attention(q, k, k, m), Q, K, torch.randn(shape))  # one size of head


def test_a_row_that_may_see_nothing_gives_zeros() -> None:
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[2] = False
    agrees(lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m), Q, K, V, mask)


def test_a_row_with_the_lowest_number_throughout_is_the_mean_of_the_values() -> None:
    mask, lowest = torch.zeros(5, 7), torch.finfo(torch.float32).min
    mask[2], mask[3, 1:] = lowest, lowest
    agrees(lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m), Q, K, V, mask)
    agrees(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask), Q, K, V)
    agrees(lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, torch.where(m < 0, lowest, 0.0)), Q, K, V, mask)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_query_heads_share_keys_and_values(heads: int) -> None:
    k, v = torch.randn(2, heads, 7, 8), torch.randn(2, heads, 7, 6)
    for x in (torch.float32, torch.float64):
        operands = (operand.to(x) for operand in (Q, k, v))
        agrees(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), *operands)


@pytest.mark.parametrize("opset", [18, 22])
def test_query_heads_share_keys_and_values_in_old_opsets(opset: int) -> None:
    k, v = torch.randn(2, 2, 7, 8), torch.randn(2, 1, 7, 6)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    program = sardonyx.export(attend, (Q, k, v), dynamic_shapes=({0: "n"}, {0: "n"}, {0: "n"}), opset=opset)
    torch.testing.assert_close(program(Q, k, v), attend(Q, k, v))
    torch.testing.assert_close(program(Q[:1], k[:1], v[:1]), attend(Q[:1], k[:1], v[:1]))


@pytest.mark.parametrize("rank", [2, 3])
def test_fewer_dimensions(rank: int) -> None:
    q, k, v = (x[(0,) * (4 - rank)] for x in (Q, K, V))
    agrees(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), q, k, v)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions(dtype: torch.dtype) -> None:
    agrees(F.scaled_dot_product_attention, *(x.to(dtype) for x in (Q, K, V)))


def test_what_is_not_a_number_stays_so_beside_rows_that_see_nothing() -> None:
    scores = torch.randn(4, 5)
    scores[1], scores[2, 3] = -torch.inf, torch.nan
    agrees(lambda x: torch.ops.aten._safe_softmax(x, -1), scores)


def test_an_exported_model_computes_in_double_precision() -> None:
    q, k, v = (x.double() for x in (Q, K, V))
    program = sardonyx.export(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), (q, k, v))
    expected = F.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(program(q, k, v), expected, rtol=1e-13, atol=1e-13)
