"""The shape rule: called in Python and written down in C++ it says the same, and what it cannot say is refused."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch

from sardonyx.customop import broadcast
from sardonyx.customop.shapes import ShapeRule, UnknownSize, UnknownSizeError
from sardonyx.customop.signature import parse
from sardonyx.errors import DeclarationError

from .rules import CASES, Given, Refused, in_cpp, open_tensors

EVERY = pytest.mark.parametrize("index", range(len(CASES)), ids=[case.name for case in CASES])
REFUSALS = (ValueError, AssertionError, IndexError, ZeroDivisionError, RuntimeError)
Result = list[tuple[int | None, ...]]


def in_python(index: int, given: Given) -> Result | None:
    """What the rule in Python gives; None where it cannot tell."""
    try:
        return [tuple(d if isinstance(d, int) else None for d in s) for s in CASES[index].shapes(given)]
    except UnknownSizeError:
        return None
    except REFUSALS as error:
        raise Refused(str(error)) from error


def outcome(rule: Callable[[int, Given], Result | None], index: int, given: Given) -> Any:
    try:
        return rule(index, given)
    except Refused:
        return "refused"


def negative(result: Any) -> bool:
    return result != "refused" and any(dim is None for shape in result for dim in shape)


@EVERY
def test_a_rule_in_cpp_gives_what_it_gives_in_python(index: int) -> None:
    random = Random(index)
    outcomes = []
    for _ in range(200):
        given = CASES[index].make(random)
        expected = outcome(in_python, index, given)
        result = outcome(in_cpp, index, given)
        if CASES[index].name == "negative" and negative(result):
            result = "refused"  # the call refuses it, after the rule
        assert result == expected, given
        outcomes.append(expected)
    assert any(found != "refused" for found in outcomes)


@EVERY
def test_what_is_said_about_unknown_sizes_is_true_of_known_ones(index: int) -> None:
    random, case = Random(index), CASES[index]
    for _ in range(100):
        given = case.make(random)
        truth = outcome(in_python, index, given)
        hidden = with_unknown(random, given, index)
        if truth == "refused":
            continue
        for told in (outcome(in_python, index, hidden), outcome(in_cpp, index, hidden)):
            assert told != "refused"
            for shape, actual in zip(told or [], truth, strict=False):
                assert len(shape) == len(actual)
                assert all(dim in (None, real) for dim, real in zip(shape, actual, strict=True)), (given, hidden)


def with_unknown(random: Random, given: Given, index: int) -> Given:
    """The same with some sizes unknown: equal ones are called the same."""
    hidden = dict(given)

    def some(sizes: tuple[int, ...]) -> tuple[Any, ...]:
        return tuple(UnknownSize(f"n{dim}") if random.random() < 0.4 else dim for dim in sizes)

    for name, place in open_tensors(given, CASES[index].shapes.signature.inputs):
        if place is None:
            hidden[name] = some(given[name])
        else:
            hidden[name] = [*hidden[name][:place], some(given[name][place]), *hidden[name][place + 1 :]]
    return hidden


def rule_number(name: str) -> int:
    return next(i for i, case in enumerate(CASES) if case.name == name)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("a matrix product", {"x": (2, 3), "y": (5, 4, 2)}, "(2, 3) and (5, 4, 2) do not match: 3 is not 4"),
        ("a matrix product", {"x": (4,), "y": (4, 2)}, "reads dimension -2 of a tensor of rank 1"),
        ("by mode", {"x": (), "mode": 'a "b" \\ ö'}, 'no mode a "b" \\ ö'),
        ("a convolution", {"x": (1, 2, 3, 3), "weight": (1, 1, 1, 1), "stride": 1, "padding": 0}, "channels differ"),
        ("floor division", {"x": (1,), "by": 0}, "its shape rule divides by zero"),
        ("the third of a list", {"x": [(1,), (2,)]}, "reads tensor 2 of a list of 2"),
        ("broadcast", {"x": (2,), "y": (3,)}, "sizes 2 and 3 cannot be broadcast"),
        ("flat", {"x": (2**40, 2**40)}, "overflows 64 bits"),
        ("the same", {"x": (1,) * 9}, None),
        ("reversed", {"x": (1,) * 9}, "was not traced for this rank"),
        ("parts of a list", {"x": [(1,)] * 17}, "more than 16 dimensions"),
    ],
)
def test_what_a_rule_refuses_it_refuses_in_its_words_in_cpp_too(name: str, given: Given, message: str | None) -> None:
    if message is None:
        assert in_cpp(rule_number(name), given) == [given["x"]]
        return
    with pytest.raises(Refused) as caught:
        in_cpp(rule_number(name), given)
    assert message in str(caught.value)


def test_a_size_that_is_passed_on_keeps_its_name() -> None:
    n, m = UnknownSize("n"), UnknownSize("m")
    assert CASES[rule_number("the same")].shapes({"x": (n, 3)})[0][0].name == "n"
    assert [getattr(dim, "name", dim) for dim in broadcast((n, 1, m), (n, 4, 1))] == ["n", 4, "m"]
    assert broadcast((n,), (m,))[0].name is None


def test_a_size_that_is_computed_has_no_name() -> None:
    made = CASES[rule_number("rounded up")].shapes({"x": (UnknownSize("n"),), "by": 2})[0][0]
    assert isinstance(made, UnknownSize)
    assert made.name is None


def test_an_unknown_size_together_with_a_known_one_is_the_known_one_or_one() -> None:
    assert broadcast((UnknownSize("n"),), (4,)) == (4,)
    assert broadcast((UnknownSize("n"),), (1,))[0].name == "n"


# What a rule cannot do


def traced(parameters: str, rule: Callable[..., Any], results: str = "Tensor") -> str:
    return ShapeRule(parse(f"my::Op({parameters}) -> {results}"), rule).cpp()


UNTRACEABLE: list[tuple[str, Callable[..., Any], str]] = [
    ("Tensor x", lambda x: [1 for _ in range(x[0])], "uses a size or an attribute as a Python integer"),
    ("Tensor x", lambda x: (int(x[0]),), "uses a size or an attribute as a Python integer"),
    ("Tensor x", lambda x: (x[0] / 2,), "unsupported operand"),
    ("Tensor x", lambda x: (x[0] + 0.5,), "computes with 0.5, which is not an integer"),
    ("Tensor x", lambda x: (x[0] + None,), "computes with None, which is not an integer"),
    ("Tensor x", lambda x: ({x[0]: 1}[x[0]],), "unhashable"),
    ("Tensor x", lambda x: (x.numel(),), "numel"),
    ("Tensor x", lambda x: x + list(range(1)), "adds a list to a tuple"),
    ("Tensor x", lambda x: (f"{x[0]:d}",), "format"),
    ("Tensor x, float f", lambda x, f: (x[0] * f,), "which is not an integer"),
    ("Tensor x, float f", lambda x, f: x if f < x[0] else (), "something that is not a constant"),
    ("Tensor x, float[] f", lambda x, f: x if f == [1.0] else (), "compares a list of floats"),
    ("Tensor x, float[] f", lambda x, f: x if f else (), "branches on a list of floats"),
    ("Tensor x, str s", lambda x, s: x if s.startswith("a") else (), "startswith"),
    ("Tensor x, str s", lambda x, s: {"a": x}[s], "unhashable"),
    ("Tensor x", lambda x: undefined, "undefined"),  # type: ignore[name-defined]  # noqa: F821
]


@pytest.mark.parametrize(("parameters", "rule", "message"), UNTRACEABLE)
def test_a_rule_that_cannot_be_written_in_cpp_is_refused(
    parameters: str, rule: Callable[..., Any], message: str
) -> None:
    with pytest.raises(DeclarationError) as caught:
        traced(parameters, rule)
    assert caught.value.what.startswith("my::Op: the shape rule cannot be translated to C++: ")
    assert message in caught.value.what
    assert caught.value.hint


WRONG: list[tuple[str, Callable[..., Any], str]] = [
    ("Tensor", lambda x: x[0], "for output, which is not a shape"),
    ("Tensor", lambda x: 3, "returns 3 for output, which is not a shape"),
    ("Tensor", lambda x: None, "returns None for output, which is not a shape"),
    ("(Tensor, Tensor)", lambda x: x, "for 2 results"),
    ("(Tensor, Tensor)", lambda x: (x, x, x), "for 2 results"),
    ("Tensor<T, 2>", lambda x: (1, 2, 3), "returns 3 sizes for output, and the signature says 2"),
    ("Tensor", lambda x: [1 if x[0] // k % 2 else 2 for k in range(1, 14)], "more than 4096 paths"),
]


@pytest.mark.parametrize(("results", "rule", "message"), WRONG)
def test_a_rule_that_gives_something_else_is_refused(results: str, rule: Callable[..., Any], message: str) -> None:
    with pytest.raises(DeclarationError) as caught:
        traced("Tensor x", rule, results)
    assert caught.value.what.startswith("my::Op: the shape rule ")
    assert message in caught.value.what


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (lambda y: y, "the shape rule takes 'y'"),
        (lambda *x: x, "the shape rule has positional-only parameters"),
        (lambda x, /: x, "the shape rule has positional-only parameters"),
        (print, "the shape rule has positional-only parameters"),
        (3, "the shape rule is 3, not a Python function"),
    ],
)
def test_a_rule_takes_what_the_signature_has_by_name(rule: Any, message: str) -> None:
    with pytest.raises(DeclarationError, match=message):
        traced("Tensor x", rule)


def test_a_rule_may_have_parameters_of_its_own_with_defaults() -> None:
    factor = 3
    made = ShapeRule(parse("my::Op(Tensor x) -> Tensor"), lambda x, by=factor: (x[0] * by,))
    assert made({"x": (2,)}) == [(6,)]


def test_a_rule_may_fit_some_ranks_only() -> None:
    made = ShapeRule(parse("my::Op(Tensor x) -> Tensor<T, 2>"), lambda x: tuple(reversed(x)))
    assert "outputs[0]" in made.cpp()
    assert made({"x": (2, 3)}) == [(3, 2)]
    with pytest.raises(DeclarationError, match="returns 1 sizes for output, and the signature says 2"):
        made({"x": (2,)})


def test_a_rule_may_take_everything() -> None:
    made = ShapeRule(parse("my::Op(Tensor x, *, int n=2) -> Tensor"), lambda **given: (*given["x"], given["n"]))
    assert made({"x": (2,), "n": 5}) == [(2, 5)]


@pytest.mark.parametrize("text", ["(Tensor x) -> (Tensor, Tensor)", "(Tensor? x) -> Tensor", "(Tensor[] x) -> Tensor"])
def test_where_that_says_too_little_a_rule_is_needed(text: str) -> None:
    with pytest.raises(DeclarationError, match="my::Op needs a shape rule"):
        ShapeRule(parse(f"my::Op{text}"), None)


def test_without_a_rule_the_result_is_like_the_first_tensor() -> None:
    assert ShapeRule(parse("my::Op(Tensor x, Tensor y) -> Tensor"), None)({"x": (2,), "y": ()}) == [(2,)]


def test_the_same_rule_is_written_in_the_same_words() -> None:
    """What is built is kept by its source."""
    for case in CASES:
        assert case.shapes.cpp() == case.shapes.cpp()


def test_a_rule_is_called_with_symbolic_sizes_of_torch() -> None:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    x = torch._subclasses.FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.empty(6, 4))
    assert CASES[rule_number("flat")].shapes({"x": tuple(x.shape)}) == [(24,)]
