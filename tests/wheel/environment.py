"""A fresh virtual environment outside the checkout, with a wheel and a torch in it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from .matrix import cuda_packages
from .programs import Program

EXTRAS = "cpu,cli"
_NOT_PASSED_ON = ("PYTHON", "SARDONYX_", "ONNXRT_", "TORCH", "VIRTUAL_ENV", "LD_PRELOAD")
"""How variables begin that would change what a program imports or how it runs."""


class Failed(Exception):
    """A command of an environment failed."""


class Environment:
    """A virtual environment, and an empty folder to run programs in."""

    def __init__(self, folder: Path, python: str) -> None:
        self.work = folder / "work"
        self._bin = folder / "venv" / "bin"
        self._variables = clean_variables(os.environ, folder)
        self.work.mkdir()
        self._call([python, "-m", "venv", str(folder / "venv")])

    def cuda_packages(self, torch: str) -> Sequence[str]:
        """The packages of CUDA that this version of torch would bring; nothing is installed."""
        report = self.work.parent / "torch.json"
        self._pip("--dry-run", "--no-deps", "--report", str(report), f"torch=={torch}")
        (found,) = json.loads(report.read_text(encoding="utf-8"))["install"]
        return cuda_packages(found["metadata"].get("requires_dist"))

    def install(self, wheel: Path, torch: str) -> None:
        """Install the wheel with its extras, and exactly this torch."""
        self._pip(f"torch=={torch}", f"sardonyx[{EXTRAS}] @ {wheel.resolve().as_uri()}")

    def run(self, program: Program) -> str:
        """Run a program in the empty folder; what it printed."""
        if program.command:
            name, *arguments = program.command
            return self._call([str(self._bin / name), *arguments])
        file = self.work / "program.py"
        file.write_text(program.source, encoding="utf-8")
        return self._call([str(self._bin / "python"), file.name])

    def _pip(self, *arguments: str) -> None:
        self._call([str(self._bin / "python"), "-m", "pip", "install", "--quiet", *arguments])

    def _call(self, command: Sequence[str]) -> str:
        done = subprocess.run(
            command,
            cwd=self.work,
            env=self._variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        if done.returncode:
            raise Failed(f"{' '.join(command)} exits with {done.returncode}:\n{done.stdout}")
        return done.stdout


def clean_variables(variables: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The environment variables without those that reach into a checkout, and with caches in `folder`.

    >>> clean_variables({"PYTHONPATH": "src", "PATH": "/bin"}, Path("/tmp/x"))
    {'PATH': '/bin', 'XDG_CACHE_HOME': '/tmp/x/cache', 'TORCHINDUCTOR_CACHE_DIR': '/tmp/x/inductor'}
    """
    passed = {name: value for name, value in variables.items() if not name.startswith(_NOT_PASSED_ON)}
    pip = {"PIP_CACHE_DIR": cache} if (cache := _pip_cache(variables)) else {}
    ours = {"XDG_CACHE_HOME": str(folder / "cache"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    return {**passed, **pip, **ours}


def _pip_cache(variables: Mapping[str, str]) -> str | None:
    """Where pip keeps what it downloaded: the one thing that environments share, for torch is large."""
    if "PIP_CACHE_DIR" in variables:
        return variables["PIP_CACHE_DIR"]
    home = variables.get("XDG_CACHE_HOME") or (f"{variables['HOME']}/.cache" if "HOME" in variables else None)
    return home and f"{home}/pip"


@contextmanager
def fresh(python: str, name: str, *, keep: bool) -> Iterator[Environment]:
    """An environment in a temporary folder, which is deleted at the end unless it is to be kept."""
    folder = Path(tempfile.mkdtemp(prefix=f"sardonyx-wheel-{name}-"))
    try:
        yield Environment(folder, python)
    finally:
        if keep:
            print(f"  kept: {folder}", flush=True)
        else:
            shutil.rmtree(folder)
