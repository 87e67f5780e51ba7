"""Install a wheel alone in fresh environments, with the oldest and the newest torch and Python, and use it there.

python -m tests.wheel                          # the wheel in dist/
python -m tests.wheel --torch 2.13.0 --keep    # one version, and leave the environment for a look
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from .contents import differences, package_files, wheel_files
from .environment import Environment, Failed, fresh
from .matrix import interpreters, torch_versions
from .programs import programs

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class _Results:
    """What came of each environment, a line each, and which Pythons are absent."""

    passed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)

    def show(self) -> None:
        _say("")
        for kind, lines in vars(self).items():
            for line in lines:
                _say(f"{kind}: {line}")

    def exit_code(self, require_torch: bool) -> int:
        """Nothing that passed is a failure too: a run that skips everything has shown nothing."""
        return int(bool(self.failed) or not self.passed or (require_torch and bool(self.skipped)))


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    text = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m tests.wheel", description=__doc__, formatter_class=text)
    parser.add_argument("wheel", type=Path, nargs="?", help="the wheel (default: the one in dist/)")
    parser.add_argument("--torch", nargs="+", metavar="VERSION", help="default: the oldest allowed, and the pinned one")
    parser.add_argument("--cuda-builds", action="store_true", help="install a torch that brings CUDA's packages, too")
    parser.add_argument("--require-torch", action="store_true", help="fail if a version of torch is skipped")
    parser.add_argument("--keep", action="store_true", help="do not delete the environments")
    return parser.parse_args(given)


def _say(text: str) -> None:
    print(text, flush=True)


def _only_wheel() -> Path:
    found = sorted((ROOT / "dist").glob("*.whl"))
    if len(found) != 1:
        sys.exit(f"dist/ has {len(found)} wheels instead of one: run make wheel")
    return found[0]


def _check_contents(wheel: Path) -> None:
    wrong = differences(package_files(ROOT / "src"), wheel_files(wheel))
    if wrong:
        sys.exit(f"{wheel.name} does not hold the package:\n" + "\n".join(f"  {line}" for line in wrong))
    _say(f"{wheel.name} holds every file of the package, and nothing else")


@contextmanager
def _step(name: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    _say(f"  {time.monotonic() - began:6.1f} s  {name}")


def _use(environment: Environment, wheel: Path, torch: str) -> None:
    with _step("pip install"):
        environment.install(wheel, torch)
    for program in programs(ROOT):
        with _step(program.name):
            printed = environment.run(program)
        if program.shown:
            _say(f"            {printed.strip()}")


def _try(wheel: Path, python: str, torch: str, name: str, given: argparse.Namespace, results: _Results) -> None:
    _say(f"\n{name}")
    try:
        with fresh(python, torch, keep=given.keep) as environment:
            cuda = environment.cuda_packages(torch)
            if cuda and not given.cuda_builds:
                _say("  skipped: pip has a build for CUDA alone")
                results.skipped.append(f"{name}: its build is for CUDA, and requires {', '.join(cuda)}")
                return
            _use(environment, wheel, torch)
    except Failed as failure:
        _say(f"FAILED {failure}")
        results.failed.append(name)
    else:
        results.passed.append(name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Try every version; 1 if anything failed."""
    given = _arguments(arguments)
    wheel = given.wheel or _only_wheel()
    _check_contents(wheel)
    results, pythons = _Results(), interpreters()
    results.absent += [f"Python {version}: no python{version} on PATH runs" for version in pythons.absent]
    pinned = torch_versions((ROOT / "pyproject.toml").read_text(), (ROOT / "constraints.txt").read_text())
    for version, python in pythons.chosen.items():
        for torch in given.torch or pinned:
            _try(wheel, python, torch, f"Python {version}, torch {torch}", given, results)
    results.show()
    return results.exit_code(given.require_torch)


if __name__ == "__main__":
    sys.exit(main())
