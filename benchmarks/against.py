"""Whether sardonyx is slower than in an earlier revision: `python -m benchmarks.against REVISION`.

The present benchmarks measure both builds of sardonyx, the working tree's and that of the revision, in turns. Two equal
builds differ by several percent from one process to the next, so a model is measured in several pairs of processes, one
of each build. Unless the confidence interval of the ratio says after the first pairs that the model is at most 3 %
slower, it is measured in more pairs, and all of them count.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import Any
from zipfile import ZipFile

from benchmarks import signed_rank
from benchmarks.machine import describe, note_if_busy
from benchmarks.tables import Progress, Table, milliseconds, progress, say
from benchmarks.turns import Measured, Suite, Worker, environment

ROOT = Path(__file__).resolve().parents[1]
SUITES = ("inference", "training", "export", "eager")
TOLERANCE = 0.03


@dataclass(frozen=True)
class Settings:
    """How long to measure."""

    pairs: int = signed_rank.LEAST
    most: int = 4 * signed_rank.LEAST
    rounds: int = 5
    timeout: float = 900


@dataclass(frozen=True)
class Pair:
    """What one process of each build measured."""

    earlier: Measured
    now: Measured

    @property
    def failed(self) -> str | None:
        """Which build failed, and how."""
        told = {"now": self.now.failed, "in the earlier revision": self.earlier.failed}
        return next(
            (f"failed {build}: {' '.join(error.split())[:300]}" for build, error in told.items() if error), None
        )

    @property
    def ratio(self) -> float:
        """The earlier time divided by the present one: the median over rounds, each with the one next to it."""
        return median(a / b for a, b in zip(self.earlier.round_seconds, self.now.round_seconds, strict=True))


@dataclass
class Compared:
    """One model in one engine, in both builds."""

    suite: Suite
    model: str
    engine: str
    pairs: list[Pair] = field(default_factory=list)

    @property
    def name(self) -> str:
        """What is measured, in words."""
        return f"{self.suite.name}, {self.model}, {self.engine}"

    @property
    def failed(self) -> str | None:
        """How a pair failed; None if none did."""
        return next((pair.failed for pair in self.pairs if pair.failed), None)

    @property
    def ratio(self) -> signed_rank.Estimate:
        """The earlier time divided by the present one; below one, it is slower now."""
        logs = signed_rank.estimate([math.log(pair.ratio) for pair in self.pairs])
        return signed_rank.Estimate(*map(math.exp, (logs.low, logs.middle, logs.high)))

    @property
    def verdict(self) -> str:
        """What the whole interval says."""
        if self.failed:
            return "failed"
        if self.ratio.low >= 1 / (1 + TOLERANCE):
            return "not slower"
        return "slower" if self.ratio.high < 1 / (1 + TOLERANCE) else "undecided"

    def seconds(self, build: str) -> float:
        """The median over the processes of a build."""
        return float(median(getattr(pair, build).seconds for pair in self.pairs))

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        ratio = None if self.failed else vars(self.ratio)
        pairs = [{build: measured.as_dict() for build, measured in vars(pair).items()} for pair in self.pairs]
        named = {"suite": self.suite.name, "model": self.model, "engine": self.engine}
        return {**named, "verdict": self.verdict, "ratio": ratio, "pairs": pairs}


def source_of(revision: str, root: Path = ROOT) -> Path:
    """The folder with the package of a revision, copied out of the repository in `root` unless it was before."""
    commit = _git(root, "rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}").decode().strip()
    folder = root / "build" / "against" / commit
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            ZipFile(BytesIO(_git(root, "archive", "--format=zip", commit, "src"))).extractall(temporary)
            Path(temporary, "src").rename(folder)
    return folder


def _git(root: Path, *words: str) -> bytes:
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True)
    if done.returncode:
        raise SystemExit(f"git {' '.join(words)}: {done.stderr.decode().strip()}")
    return done.stdout


def package(source: Path | None) -> Path:
    """The package that a process with this source imports."""
    words = [sys.executable, "-c", "import sardonyx; print(sardonyx.__file__)"]
    told = subprocess.run(words, env=environment(source), stdout=subprocess.PIPE, text=True, check=True).stdout
    return Path(told.strip()).resolve().parent


def check_sources(earlier: Path) -> None:
    """Refuse to compare a build with itself, as where something precedes PYTHONPATH."""
    expected = (earlier.resolve() / "sardonyx", ROOT / "src" / "sardonyx")
    for source, folder in zip((earlier, None), expected, strict=True):
        found = package(source)
        if found != folder:
            raise SystemExit(f"a process for {folder} imports {found}: check what is installed, and PYTHONPATH")


def compare(compared: Compared, earlier: Path, settings: Settings, shown: Progress) -> None:
    """Measure pairs of processes until it is clear that the model is not slower, or there are no more."""
    wanted = settings.pairs
    while True:
        for number in range(len(compared.pairs), wanted):
            shown.step(f"{compared.name}: processes {number + 1} of {wanted}")
            compared.pairs.append(_pair(compared, earlier, settings))
            if compared.failed:
                return
        if compared.verdict == "not slower" or wanted == settings.most:
            return
        wanted = min(2 * wanted, settings.most)
        shown.total += wanted - len(compared.pairs)


def _pair(compared: Compared, earlier: Path, settings: Settings) -> Pair:
    """Let a process of each build take turns; the one to begin changes with each pair, and with each round."""
    sources = [None, earlier] if len(compared.pairs) % 2 else [earlier, None]
    measured = compared.suite, compared.model, [compared.engine]
    with contextlib.ExitStack() as stack:
        workers = {source: stack.enter_context(Worker(*measured, settings.timeout, source)) for source in sources}
        for worker in workers.values():
            worker.prepare()
        for number in range(settings.rounds):
            for source in sources[:: -1 if number % 2 else 1]:
                workers[source].round(number)
        return Pair(workers[earlier].measured[0], workers[None].measured[0])


def table(results: Sequence[Compared]) -> Table:
    """A row for each model and engine."""
    columns = ["suite", "model", "engine", "earlier ms", "ms", "earlier ÷ now", "95 % interval", "processes", "verdict"]
    made = Table("against an earlier revision", columns, text_columns=3)
    for index, one in enumerate(results):
        made.add(one.suite.name, one.model, one.engine, *_cells(one), str(len(one.pairs)), one.verdict)
        if index + 1 == len(results) or results[index + 1].suite is not one.suite:
            made.end_section()
    return made


def _cells(one: Compared) -> tuple[str, ...]:
    if one.failed:
        return ("", "", "", "")
    ratio = one.ratio
    interval = f"{ratio.low:.3f} to {ratio.high:.3f}"
    return milliseconds(one.seconds("earlier")), milliseconds(one.seconds("now")), f"{ratio.middle:.3f}", interval


def conclusion(results: Sequence[Compared], revision: str) -> Iterator[str]:
    """Which models are slower, which differ too much between processes to tell, and which failed."""
    found: dict[str, list[Compared]] = {"slower": [], "not slower": [], "undecided": [], "failed": []}
    for one in results:
        found[one.verdict].append(one)
    for one in found["slower"]:
        yield f"slower: {one.name}: {1 / one.ratio.middle - 1:.1%}"
    for one in found["undecided"]:
        yield f"undecided: {one.name}: its times differ too much between processes"
    for one in found["failed"]:
        yield f"{one.name}: {one.failed}"
    counts = ", ".join(f"{len(those)} {verdict}" for verdict, those in found.items())
    yield f"against {revision}, by more than {TOLERANCE:.0%}: {counts}"


def _write(path: Path, machine: dict[str, Any], results: Sequence[Compared]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**machine, "results": [one.as_dict() for one in results]}, indent=1) + "\n")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.against", description=__doc__)
    made.add_argument("revision", metavar="REVISION", help="what to compare with: a tag, a commit, HEAD~3")
    made.add_argument("--suites", default=",".join(SUITES), help="names, with commas between them")
    made.add_argument("--only", default="", help="a part of a name in the results, such as 'inference, mlp'")
    made.add_argument("--pairs", type=int, default=Settings.pairs, help="processes of each build, at least 6")
    made.add_argument("--most", type=int, default=Settings.most, help="of each build where fewer are not clear")
    made.add_argument("--rounds", type=int, default=Settings.rounds, help="turns that each process gets")
    made.add_argument("--timeout", type=float, default=Settings.timeout, help="seconds a process may take to answer")
    made.add_argument("--json", type=Path, help="where to write everything measured")
    return made


def parsed(made: argparse.ArgumentParser, words: Sequence[str] | None = None) -> argparse.Namespace:
    """What was given on the command line, checked."""
    given = made.parse_args(words)
    given.suites = given.suites.split(",")
    unknown = [name for name in given.suites if name not in SUITES]
    if unknown:
        made.error(f"unknown name {unknown[0]!r}; suites: {', '.join(SUITES)}")
    if not signed_rank.LEAST <= given.pairs <= given.most:
        made.error(
            f"an interval needs at least {signed_rank.LEAST} processes: --pairs {given.pairs} --most {given.most}"
        )
    if given.rounds < 1:
        made.error(f"--rounds {given.rounds}: at least 1")
    return given


def main() -> int:
    """Measure what the command line asks for; 1 if a model is slower, or fails now."""
    given = parsed(parser())
    earlier = source_of(given.revision)
    check_sources(earlier)
    settings = Settings(given.pairs, given.most, given.rounds, given.timeout)
    suites: list[Suite] = [import_module(f"benchmarks.{name}").SUITE for name in given.suites]
    everything = [Compared(suite, model, engine) for suite in suites for model in suite.models for engine in suite.ours]
    results = [one for one in everything if given.only in one.name]
    if not results:
        raise SystemExit(f"nothing that is measured has {given.only!r} in its name")
    machine = {**describe(), "revision": earlier.name, "busy_cores": note_if_busy()}
    with progress(len(results) * settings.pairs) as shown:
        for number, one in enumerate(results, start=1):
            compare(one, earlier, settings, shown)
            if given.json:
                _write(given.json, machine, results[:number])
    table(results).show()
    for line in conclusion(results, given.revision):
        say(line)
    return int(any(one.verdict == "slower" or one.pairs[-1].now.failed for one in results))


if __name__ == "__main__":
    sys.exit(main())
