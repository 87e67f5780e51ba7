"""Batches of programs, each named by a seed, and the process that checks them."""

from __future__ import annotations

import logging
import signal
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import hypothesis
import torch
from hypothesis import strategies as st
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

from tests.ops.workers import READY

from .check import Outcome, check, reduced
from .doors import DOOR_WEIGHTS, TRAINING_DOORS
from .program import Program, programs

PROGRAMS_OF_A_BATCH = 10


@dataclass(frozen=True)
class Batch:
    """Programs that a seed names, through any door or through these."""

    seed: int
    doors: tuple[str, ...] = ()

    @property
    def words(self) -> tuple[Any, ...]:
        return self.seed, self.doors

    def outcome(self) -> Outcome:
        return Outcome(seeds=[self.seed])


def programs_of(door: str) -> st.SearchStrategy[Program]:
    """Programs that a door is for: a file has no gradients, and does not know which of its inputs are one tensor."""
    return programs(trains=None if door in TRAINING_DOORS else False, alias=door != "export")


def drawn(seed: int, doors: Sequence[str] = ()) -> list[tuple[Program, str]]:
    """The programs of a batch, each with its door."""
    weighted = [name for name, weight in DOOR_WEIGHTS.items() for _ in range(weight)]
    found: list[tuple[Program, str]] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=PROGRAMS_OF_A_BATCH,
        phases=[hypothesis.Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(st.sampled_from(list(doors) or weighted), st.data())
    def draw_one(door: str, data: st.DataObject) -> None:
        found.append((data.draw(programs_of(door)), door))

    with _without_constants_of_modules():
        draw_one()
    return found


@contextmanager
def _without_constants_of_modules() -> Iterator[None]:
    """Keep hypothesis from drawing constants that it finds in the source of our modules.

    Which of them are loaded depends on the programs before, and a seed has to name the same programs at any time.
    """
    was = providers._get_local_constants
    providers._get_local_constants = Constants
    providers.CONSTANTS_CACHE.cache.clear()
    try:
        yield
    finally:
        providers._get_local_constants = was
        providers.CONSTANTS_CACHE.cache.clear()


def serve(pipe: Connection) -> None:
    """Take a seed, doors and a first program; give an outcome for each program from there on."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it, and ends us
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    pipe.send(READY)
    while True:
        seed, doors, first, _ = pipe.recv()
        programs = drawn(seed, doors)
        pipe.send(len(programs))
        for at, (program, door) in enumerate(programs):
            if at >= first:
                pipe.send(_outcome(program, door, f"batch {seed}, program {at}"))


def _outcome(program: Program, door: str, name: str) -> Outcome:
    started = time.perf_counter()
    outcome = check(program, door)
    if outcome.wrong:
        smaller = check(reduced(program, door), door).wrong or outcome.wrong
        outcome.wrong = [f"{name}: {text}" for text in smaller]
    outcome.seconds = time.perf_counter() - started
    return outcome
