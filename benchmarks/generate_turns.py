"""Engines that take turns generating from the same prompts: a process for each, and what it measured."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any

from benchmarks.generate_engines import ENGINES
from benchmarks.generate_models import weight_megabytes
from benchmarks.processes import WorkerFailed, WorkerProcess
from benchmarks.turns import environment

_PAUSE_SECONDS = 0.05  # a thread pool spins for a moment after a run; the next engine must not share the cores with it


@dataclass(frozen=True)
class Case:
    """A model, the length of its prompts, how many there are at once, and how many tokens follow."""

    model: str
    prompt: int
    batch: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.model} {self.prompt}×{self.batch}"


@dataclass
class Measured:
    """What one engine did in one case."""

    case: Case
    engine: str
    export_seconds: float | None = None
    """What writing the engine's files took, once for the model; None if it reads the weights themselves."""
    load_seconds: float | None = None
    cold_seconds: float | None = None
    """From the folder of the model to the first token, with empty caches."""
    cached_seconds: float | None = None
    """The same in a second process, with the disk cache of the first; None if the engine has none."""
    first_generation_seconds: float | None = None
    prefill_seconds: list[float] = field(default_factory=list)
    """From the call to the first token, in each round."""
    decode_rates: list[float] = field(default_factory=list)
    """Tokens a second after the first, of all prompts together, in each round."""
    peak_mb: float | None = None
    cached_peak_mb: float | None = None
    """The peak of the second process."""
    weights_mb: float | None = None
    tokens: list[list[int]] = field(default_factory=list)
    same_as_eager: int | None = None
    """How many tokens equal eager's from the first on, in the row with the fewest."""
    details: dict[str, Any] = field(default_factory=dict)
    failed: str | None = None

    @property
    def prefill(self) -> float | None:
        """The median over the rounds; None if it failed."""
        return median(self.prefill_seconds) if self.prefill_seconds and not self.failed else None

    @property
    def decode(self) -> float | None:
        """The median over the rounds; None if it failed."""
        return median(self.decode_rates) if self.decode_rates and not self.failed else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        told = asdict(self)
        return {**told.pop("case"), **told, "tokens": self.case.tokens, "prefill": self.prefill, "decode": self.decode}


def _offline(variables: dict[str, str]) -> dict[str, str]:
    return {**variables, "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Places:
    """The folder of models and exported files, and the Python of each engine."""

    folder: Path
    python: Callable[[str], str]
    timeout: float

    def model(self, name: str) -> Path:
        """The folder of a model's weights."""
        return self.folder / name

    def exported(self, model: str, engine: str) -> Path:
        """The folder that an engine reads; that of a failed export does not exist."""
        return self.folder / f"{model}-{engine}"

    def command(self, module: str, engine: str, model: str, *more: object) -> list[str]:
        """The command line of a process of an engine."""
        folders = (self.model(model), self.exported(model, engine))
        return [self.python(engine), "-m", f"benchmarks.{module}", engine, *map(str, (*folders, *more))]


def export(places: Places, model: str, engine: str) -> float | None:
    """Write the files an engine reads, unless they are there, and return the seconds it took; None if it needs none."""
    if ENGINES[engine].export is None:
        return None
    folder = places.exported(model, engine)
    told = folder / "seconds.json"
    if not told.exists():
        command = places.command("generate_engines", engine, model)
        environ = _offline(dict(os.environ))
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=places.timeout, env=environ)
        if done.returncode:
            raise WorkerFailed(f"the export failed: {(done.stderr.strip().splitlines() or ['no reason'])[-1]}")
        told.write_text(done.stdout.strip().splitlines()[-1])
    seconds: float = json.loads(told.read_text())["seconds"]
    return seconds


class Contender:
    """An engine in a case, with its process."""

    def __init__(self, places: Places, case: Case, engine: str) -> None:
        self.measured = Measured(case, engine, weights_mb=weight_megabytes(places.model(case.model)))
        self._places, self._stack = places, contextlib.ExitStack()
        self._caches = self._stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        self._worker: WorkerProcess | None = None

    def __enter__(self) -> Contender:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def prepare(self) -> None:
        """Start the process, and wait until it has generated once."""
        m = self.measured
        with self._noting_failure():
            m.export_seconds = export(self._places, m.case.model, m.engine)
            self._worker = self._stack.enter_context(self._start())
            ready = self._worker.answer()
            m.load_seconds, m.first_generation_seconds = ready["load"], ready["seconds"][-1]
            m.cold_seconds = ready["load"] + ready["seconds"][0]
            m.tokens = ready["tokens"]

    def round(self) -> None:
        """Generate once more, unless it failed."""
        with self._noting_failure():
            if self._worker is not None and self.measured.failed is None:
                time.sleep(_PAUSE_SECONDS)
                seconds = self._worker.ask("round")["seconds"]
                later = self.measured.case.batch * (len(seconds) - 1)
                self.measured.prefill_seconds.append(seconds[0])
                self.measured.decode_rates.append(later / (seconds[-1] - seconds[0]))

    def finish(self) -> None:
        """Ask for the memory, end the process, and start another one with its disk cache."""
        m = self.measured
        with self._noting_failure():
            if self._worker is None or m.failed is not None:
                return
            told = self._worker.ask("end")
            m.peak_mb, m.details = told["peak_mb"], {**told["details"], "versions": told["versions"]}
            self._worker.close()
            if ENGINES[m.engine].caches:
                with self._start() as second:
                    ready = second.answer()
                    m.cached_seconds = ready["load"] + ready["seconds"][0]
                    m.cached_peak_mb = ready["peak_mb"]

    def _start(self) -> WorkerProcess:
        case = self.measured.case
        sizes = (case.prompt, case.batch, case.tokens)
        command = self._places.command("generate_worker", self.measured.engine, case.model, *sizes)
        return WorkerProcess(command, self._places.timeout, _offline(environment(caches=self._caches)))

    @contextlib.contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except (WorkerFailed, OSError, subprocess.TimeoutExpired) as error:
            self.measured.failed = str(error)


def compare_with_eager(results: Sequence[Measured]) -> None:
    """Note how many tokens equal eager's, where eager was measured."""
    eager: Mapping[Case, Measured] = {m.case: m for m in results if m.engine == "eager"}
    for m in results:
        if m.tokens and m.case in eager and eager[m.case].tokens:
            m.same_as_eager = min(map(_same, m.tokens, eager[m.case].tokens))


def _same(found: Sequence[int], expected: Sequence[int]) -> int:
    """How many tokens are the same from the first on.

    >>> _same([3, 5, 7, 9], [3, 5, 8, 9])
    2
    """
    pairs = zip(found, expected, strict=True)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), len(expected))
