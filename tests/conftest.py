"""Every test starts from a clean dynamo, without gradients, with the same random numbers."""

from __future__ import annotations

import time
from collections.abc import Iterator

import onnx_ir as ir
import pytest
import torch

from sardonyx.optimize.optimizer import all_rules
from sardonyx.optimize.pattern import P
from sardonyx.optimize.rule import RULES, Match, rule
from tests.clock import Clock


@pytest.fixture(autouse=True)
def clean_slate() -> Iterator[None]:
    torch._dynamo.reset()
    seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
    seed(0)  # torch.manual_seed writes down the stack for each kind of device that is not there
    with torch.no_grad():
        yield


@pytest.fixture(autouse=True, scope="session")
def one_thread_each() -> None:
    """Two test processes share two cores; pools larger than one thread would spin against each other."""
    torch.set_num_threads(1)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """For the test, what is measured takes as long as the test says, whatever else the machine does."""
    made = Clock()
    for name in ("perf_counter", "monotonic"):
        monkeypatch.setattr(time, name, made)
    return made


@pytest.fixture
def sine_as_cosine() -> Iterator[None]:
    """A rule that is wrong on purpose, known to the test alone."""
    known = all_rules()

    @rule(P.Sin("x"))
    def sine_as_cosine(m: Match) -> ir.Value:
        return m.g.Cos(m.x)

    yield
    RULES[:] = known
