"""Random programs give through every door what they give in eager; `make fuzz` runs many more."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings

from . import doors
from .batches import drawn, programs_of
from .check import check, reduced
from .program import Input, Program
from .reference import Reference

X = Input("x0", ("a", 3), torch.float32)
PROGRAM = Program((X,), {"a": 4}, ("v0 = torch.sin(x0)", "v1 = v0.floor()", "v2 = v0 + 1"), ("v1", "v2"), seed=0)
FEW = settings(
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize(("door", "many"), [("compile", 6), ("wrapper", 3), ("export", 5), ("native", 2)])
def test_random_programs_are_right(door: str, many: int) -> None:
    @settings(FEW, max_examples=many)
    @given(programs_of(door))
    def run(program: Program) -> None:
        outcome = check(program, door)
        assert not outcome.wrong, outcome.wrong[0]

    run()


def test_a_batch_is_named_by_its_seed() -> None:
    assert drawn(3) == drawn(3) != drawn(4)


def test_a_seed_names_the_same_programs_whatever_is_loaded() -> None:
    code = "from tests.fuzz.batches import drawn; print(drawn(3))"
    fresh, loaded = (
        subprocess.run([sys.executable, "-c", first + code], capture_output=True, text=True, check=True).stdout
        for first in ("", "import sardonyx.cli.bench, sardonyx.native.cuda, tests.ops.edges; ")
    )
    assert fresh == loaded != ""


def test_a_wrong_number_is_found_and_the_program_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    def off(program: Program) -> doors.Function:
        return lambda x: tuple(y + 0.01 * (y > 1) for y in program.function()(x))

    monkeypatch.setitem(doors.DOORS, "compile", off)
    assert "instead of" in check(PROGRAM, "compile").wrong[0]
    assert reduced(PROGRAM, "compile").lines == ("v0 = torch.sin(x0)", "v2 = v0 + 1")


def test_a_wrong_shape_or_an_error_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(doors.DOORS, "compile", lambda p: lambda x: tuple(y[:1] for y in p.function()(x)))
    assert "has shape" in check(PROGRAM, "compile").wrong[0]
    monkeypatch.setitem(doors.DOORS, "compile", lambda p: lambda x: 1 / 0)
    assert "ZeroDivisionError" in check(PROGRAM, "compile").wrong[0]


def test_other_strides_and_aliases_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program((X,), {"a": 4}, ("v0 = x0.t()",), ("v0",), seed=0)
    monkeypatch.setitem(doors.DOORS, "compile", lambda p: lambda x: (x.t().contiguous(),))
    assert "has strides" in check(program, "compile").wrong[0]
    monkeypatch.setitem(doors.DOORS, "compile", lambda p: lambda x: (x.clone().t(),))
    assert "share memory" in check(program, "compile").wrong[0]


def test_a_difference_that_rounding_explains_is_none() -> None:
    def steps(x: torch.Tensor) -> tuple[torch.Tensor]:
        return ((x / 3 * 3 + torch.arange(4)).floor(),)

    reference = Reference(steps, lambda: [torch.ones(4)])
    other = Reference(lambda x: ((x / 3 * 3 + torch.arange(4) - 1e-7).floor(),), lambda: [torch.ones(4)])
    assert not reference.difference(other.run)
    further = Reference(lambda x: (steps(x)[0] + 20,), lambda: [torch.ones(4)])
    assert "is 21.0 instead of 1.0" in reference.difference(further.run)
