"""How samples become a verdict, and verdicts a page."""

from __future__ import annotations

from copy import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from .check import Outcome, check_sample, difference, nearer_to_truth
from .database import database_samples, operators, over_tensors, samples
from .edges import edge_samples, edge_values
from .page import page, page_of
from .ways import FALLBACK, STRICT


@pytest.mark.parametrize(
    ("outcome", "verdict"),
    [
        (Outcome("add", "float32", passed=3), "passes"),
        (Outcome("add", "float32", passed=2, empty=1), "passes"),
        (Outcome("add", "float32", empty=1), "only empty"),
        (Outcome("add", "float32", passed=2, refused=1), "partly"),
        (Outcome("add", "float32", refused=3), "in torch"),
        (Outcome("add", "float32", refused=3, empty=1), "in torch"),
        (Outcome("add", "float32", passed=2, wrong=["sample 0"]), "WRONG"),
        (Outcome("add", "float32", passed=2, crashed=["sample 0"]), "crash"),
        (Outcome("add", "float32"), "no samples"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_one_bad_sample_spoils_an_operator(outcome: Outcome, verdict: str) -> None:
    assert outcome.verdict == verdict


def test_the_outcomes_of_samples_add_up() -> None:
    outcome = Outcome("add", "float32", passed=1, reasons={"a": 1})
    outcome.add(Outcome("add", "float32", refused=2, reasons={"a": 1, "b": 1}, crashed=["c"]))
    assert outcome == Outcome("add", "float32", passed=1, refused=2, reasons={"a": 2, "b": 1}, crashed=["c"])


def test_values_dtypes_shapes_and_counts_are_compared() -> None:
    one = torch.ones(2)
    assert difference(one, one.clone()) == ""
    assert "dtype" in difference(one, one.double())
    assert "shape" in difference(one, one[:1])
    assert "close" in difference(one, one + 1)
    assert "results" in difference((one, one), (one,))


def test_samples_are_spread_over_the_database() -> None:
    op = operators()["nn.functional.conv2d"]
    few, all_of_them = database_samples(op, torch.float32, 2), database_samples(op, torch.float32)
    assert len(few) == 2 < len(all_of_them)
    assert few[-1].input.shape == all_of_them[-1].input.shape


def test_samples_at_the_edges_of_a_dtype_join_those_of_the_database() -> None:
    values = edge_values(torch.float64)
    assert values.isnan().any()
    assert values.isinf().sum() == 2
    assert (values[values == 0].signbit()).tolist() == [False, True]
    assert {2**53 - 1, 2**53 + 1} < set(edge_values(torch.int64).tolist())
    assert samples(operators()["add"], torch.int8, 0)[0].args[0].tolist() == edge_values(torch.int8).tolist()


def test_whole_numbers_are_not_divided_where_torch_traps() -> None:
    for sample in edge_samples(operators()["floor_divide"], torch.int8):
        left, right = sample.input.flatten().tolist(), sample.args[0].tolist()
        assert 0 not in right
        assert not (-128 in left and -1 in right)


def test_a_zero_of_the_other_sign_is_wrong_at_the_edges() -> None:
    def loses_sign(x: torch.Tensor) -> torch.Tensor:
        return x + 0.0 if torch.compiler.is_compiling() else x.clone()

    sample = edge_samples(operators()["neg"], torch.float32)[0]
    op = copy(operators()["neg"])
    op.op = loses_sign
    assert "zeros of the other sign" in check_sample("neg", "float32", 0, op, sample).wrong[0]


def test_sequences_with_edges_are_sorted() -> None:
    sequence = edge_samples(operators()["searchsorted"], torch.float32)[0].input
    torch.testing.assert_close(sequence, sequence.sort(-1).values, equal_nan=True)


def test_the_truth_of_integers_that_become_floating_point_is_in_double_precision() -> None:
    x = torch.tensor([2**24 + 1])
    truth = torch.sqrt(x.double())
    assert nearer_to_truth(torch.sqrt, [x], torch.tensor([0.0]), truth.float())
    assert not nearer_to_truth(torch.sqrt, [x], truth.float(), torch.tensor([0.0]))


def test_where_torch_overflows_only_the_truth_or_torchs_own_will_do() -> None:
    def cube_root_of_cube(x: torch.Tensor) -> torch.Tensor:
        return (x * x * x) ** (1 / 3)

    x = torch.tensor([1e20])
    assert cube_root_of_cube(x).isinf()
    right, wrong = torch.tensor([1e20]), torch.tensor([2e20])
    assert nearer_to_truth(cube_root_of_cube, [x], cube_root_of_cube(x), right)
    assert not nearer_to_truth(cube_root_of_cube, [x], cube_root_of_cube(x), wrong)


def test_the_factor_of_a_matrix_that_has_none_is_not_compared() -> None:
    op = operators()["linalg.cholesky_ex"]
    sample = SimpleNamespace(input=torch.tensor([[4.0, 2.0], [2.0, -5.0]]), args=(), kwargs={}, name="")

    def other(*ignored: Any) -> Any:
        return lambda x: (torch.zeros(2, 2), torch.tensor(2, dtype=torch.int32))

    assert check_sample(op.name, "float32", 0, op, sample, other).verdict == "passes"


def test_a_sample_is_a_function_of_its_tensors_wherever_they_are() -> None:
    received = []
    op = SimpleNamespace(op=lambda *args, **kwargs: received.append((args, kwargs)))
    one, two = torch.tensor(1), torch.tensor(2)
    over_tensors(op, (one, ([two, 3], "x"), {"out": {"a": (one,)}, "dim": -1}))(one, two, one)
    assert received == [((one, [two, 3], "x"), {"out": {"a": (one,)}, "dim": -1})]
    assert received[0][0][0] is not one


def drawn_from(function: Any) -> Outcome:
    op = SimpleNamespace(op=function, name="drawn")
    return check_sample("drawn", "float32", 0, op, SimpleNamespace(input=torch.zeros(50), args=(), kwargs={}, name=""))


def test_random_numbers_are_judged_by_their_distribution() -> None:
    assert drawn_from(lambda x: x.bernoulli(0.3)).random == 1
    assert drawn_from(lambda x: x.bernoulli(0.3)).verdict == "passes"


def test_random_numbers_of_another_distribution_are_wrong() -> None:
    def biased(x: torch.Tensor) -> torch.Tensor:
        return x.bernoulli(0.3 if torch.compiler.is_compiling() else 0.4)

    assert "distributions differ" in drawn_from(biased).wrong[0]


def test_random_numbers_that_are_eagers_own_are_compared_by_value() -> None:
    assert drawn_from(torch.rand_like) == Outcome("drawn", "float32", passed=1)


def row(name: str, **counts: Any) -> str:
    outcome = Outcome(name, "float32", **counts).as_json()
    results = {"date": "2026-01-01", "versions": {"torch": "2.13"}, "samples": None, "outcomes": [outcome]}
    return next(line for line in page(results).splitlines() if line.startswith(f"| `{name}`"))


def test_the_page_has_a_row_for_each_operator_and_the_reason_for_each_refusal() -> None:
    assert row("add", passed=3) == "| `add` | ✓ |  |"
    assert row("svd", refused=1, reasons={"no translation": 1}) == "| `svd` | in torch | no translation |"
    assert row("sum", passed=3, refused=1, reasons={"odd": 1}) == "| `sum` | partly, 3 of 4 | odd |"


def test_the_page_has_the_device_beside_what_is_compiled() -> None:
    def results(*outcomes: Outcome) -> dict[str, Any]:
        made = {"date": "2026-01-01", "versions": {"torch": "2.13"}, "samples": None}
        return {**made, "outcomes": [outcome.as_json() for outcome in outcomes]}

    compiled = results(Outcome("svd", "float32", refused=2, reasons={"why": 2}), Outcome("svd", "int64"))
    device = results(
        Outcome("svd", "float32", passed=2, way=FALLBACK),
        Outcome("svd", "float32", passed=1, refused=1, way=STRICT),
        Outcome("relu", "float32", refused=1, reasons={"odd": 1}, way=STRICT),
    )
    lines = page(compiled, device).splitlines()
    assert "| operator | float32 | integers | device, strict | device, with fallback | why not all |" in lines
    assert "| `svd` | in torch | – | partly, 1 of 2 | ✓ | why |" in lines
    assert "| `relu` | – | – | in torch | – | odd |" in lines
    assert "| device, strict | 1 | 0 | 2 | 0 | 33.3% |" in lines


def test_the_page_is_that_of_the_results() -> None:
    docs = Path(__file__).resolve().parents[2] / "docs"
    assert (docs / "operators.md").read_text() == page_of(docs / "operators.json", docs / "eager-operators.json")


def test_the_page_says_what_was_not_judged_by_value() -> None:
    assert row("empty", passed=3, shape_only=3) == "| `empty` | ✓ shape |  |"
    assert row("randint", passed=3, random=2) == "| `randint` | ✓ random |  |"
    assert row("nonzero", empty=2) == "| `nonzero` | ✓ empty |  |"
