"""Which attention over Concat(past, new) appends in place, by modules that each have one; results are eager's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as attend

import sardonyx
from sardonyx.options import defaults

Form = Callable[..., Any]


@pytest.fixture(autouse=True)
def nothing_on_disk() -> Iterator[None]:
    with defaults(cache_dir=""), torch.no_grad():
        yield


class Step(torch.nn.Module):
    """One step of attention: queries, new keys and values, and pasts."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form

    def forward(self, q: Any, k: Any, v: Any, keys: Any, values: Any, *mask: Any) -> Any:
        return self.form(q, k, v, keys, values, *mask)


def plain(q: Any, k: Any, v: Any, keys: Any, values: Any, mask: Any = None) -> Any:
    keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
    return attend(q, keys, values, mask, enable_gqa=q.shape[1] != k.shape[1]), keys, values


def scaled(q: Any, k: Any, v: Any, keys: Any, values: Any) -> Any:
    keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
    return attend(q, keys, values, scale=0.3), keys, values


def with_length(q: Any, k: Any, v: Any, keys: Any, values: Any) -> Any:
    return (*plain(q, k, v, keys, values), q + keys.shape[2])


def returns_the_past(q: Any, k: Any, v: Any, keys: Any, values: Any) -> Any:
    return (*plain(q, k, v, keys, values), keys * 2)


def reads_keys_twice(q: Any, k: Any, v: Any, keys: Any, values: Any) -> Any:
    y, keys, values = plain(q, k, v, keys, values)
    return y, keys, values, keys.sum(2)


def keys_are_values(q: Any, k: Any, v: Any, keys: Any, values: Any) -> Any:
    keys = torch.cat([keys, k], 2)
    return attend(q, keys, keys), keys


def first_rows(q: Any, k: Any, v: Any, keys: Any, values: Any) -> Any:
    keys, values = torch.cat([k, keys], 2), torch.cat([v, values], 2)
    return attend(q, keys, values), keys, values


def hides_values(q: Any, k: Any, v: Any, keys: Any, values: Any) -> Any:
    y, keys, _ = plain(q, k, v, keys, values)
    return y, keys


def causal(q: Any, k: Any, v: Any, keys: Any, values: Any) -> Any:
    keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
    return attend(q, keys, values, is_causal=True), keys, values


def arguments(
    rows: int, *, batch: int = 2, heads: int = 4, groups: int = 4, size: int = 8, queries: int = 1, **how: Any
) -> list[torch.Tensor]:
    q, new, past = (batch, heads, queries, size), (batch, groups, queries, size), (batch, groups, rows, size)
    return [torch.randn(shape, **how) for shape in (q, new, new, past, past)]


def check(form: Form, calls: list[list[torch.Tensor]]) -> tuple[int, str]:
    """Check the results of calls; return how many keys and values the last session appends in place, and its report."""
    step = Step(form).eval()
    compiled = sardonyx.compile(step, fallback="error")
    for call in calls:
        before = [x.clone() for x in call]
        torch.testing.assert_close(compiled(*call), step(*call), rtol=1e-5, atol=1e-5, equal_nan=True)
        assert all(map(torch.equal, call, before))
    return compiled.report.graphs[-1].regions[-1].in_place, str(compiled.report)


def calls_of(**how: Any) -> list[list[torch.Tensor]]:
    return [arguments(rows, **how) for rows in (5, 6, 300, 3)]


@pytest.mark.parametrize("form", [plain, scaled, with_length])
def test_attention_of_one_query_appends_in_place(form: Form) -> None:
    assert check(form, calls_of())[0] == 2


@pytest.mark.parametrize("groups", [1, 2])
def test_grouped_heads_append_in_place(groups: int) -> None:
    assert check(plain, calls_of(groups=groups))[0] == 2


def test_a_batch_that_varies_appends_in_place() -> None:
    calls = [arguments(rows, batch=batch) for rows, batch in ((5, 2), (6, 3), (7, 2), (7, 4))]
    assert check(plain, calls)[0] == 2


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 4), (2, 4)])
@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_masks_are_added_to_scores(kind: torch.dtype, shape: tuple[int, int]) -> None:
    def mask(rows: int) -> torch.Tensor:
        numbers = torch.randn(*shape, 1, rows + 1)
        return numbers if kind.is_floating_point else numbers > 0

    assert check(plain, [[*arguments(rows), mask(rows)] for rows in (5, 6, 9)])[0] == 2


@pytest.mark.parametrize("masked", [False, -torch.inf, torch.finfo(torch.float32).min])
def test_a_mask_may_hide_every_key_of_a_row(masked: float) -> None:
    def mask(rows: int) -> torch.Tensor:
        values = torch.ones(2, 1, 1, rows + 1, dtype=torch.bool) if masked is False else torch.zeros(2, 1, 1, rows + 1)
        values[0] = masked
        return values

    assert check(plain, [[*arguments(rows), mask(rows)] for rows in (5, 6, 9)])[0] == 2


REFUSED = {
    "more than one query": (plain, {"queries": 3}),
    "a multiple of 8": (plain, {"size": 12}),
    "something else than one Attention reads": (plain, {"dtype": torch.float64}),
    "other readers": (returns_the_past, {}),
    "something else than one Attention": (reads_keys_twice, {}),
    "other keys or values": (hides_values, {}),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_others_are_concatenated_and_the_report_says_why(reason: str) -> None:
    form, how = REFUSED[reason]
    in_place, report = check(form, calls_of(**how))
    assert in_place == 0
    assert reason in report


@pytest.mark.parametrize("form", [first_rows, keys_are_values, causal])
def test_forms_without_a_reason_are_concatenated_as_well(form: Form) -> None:
    assert check(form, calls_of())[0] == 0
