"""Random programs give on the device what they give on the CPU; `python -m tests.eager.stress` runs many more."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sardonyx import eager

from . import stress


@pytest.fixture(autouse=True)
def with_fallback() -> Iterator[None]:
    """What has no model is right too; torch says of each program that it refuses what it was doing."""
    eager.enable(fallback="quiet")
    said = logging.getLogger("torch._subclasses.fake_tensor")
    level = said.level
    said.setLevel(logging.CRITICAL)
    yield
    said.setLevel(level)


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.randoms(use_true_random=False))
def test_a_random_program_is_right(rng: random.Random) -> None:
    program = stress.Program(rng)
    program.run()
    assert not program.mismatch, "\n".join(program.said)


def test_programs_in_several_threads_are_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stress, "_A_BATCH", 2)
    run = stress.Stress(40, tmp_path / "last.txt")
    run.run(lambda: run.programs >= 6, threads=3)
    assert run.programs >= 6
    assert not run.mismatches
    assert "--batches" in (tmp_path / "last.txt").read_text()


def test_a_wrong_number_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    off = {"do_off": lambda rng, like: lambda tensors: torch.ones(2, device=tensors[0].device) + tensors[0].is_ort}
    monkeypatch.setattr(stress, "STEPS", off)
    problem = stress.batch(0, lambda program: None)
    assert problem.startswith("do_off of "), "as small as it gets: one step"
    assert "Tensor-likes are not" in problem


def test_a_refusal_of_the_device_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(x: torch.Tensor) -> torch.Tensor:
        if x.is_ort:  # type: ignore[attr-defined]
            raise RuntimeError("not here")
        return x

    monkeypatch.setattr(stress, "STEPS", {"do_refuse": lambda rng, like: lambda tensors: refuse(tensors[0])})
    assert "refused by the device" in stress.batch(0, lambda program: None)
