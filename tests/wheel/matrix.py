"""Which versions of Python and torch a wheel is tried with."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
"""The versions of Python that are looked for, the oldest first."""
_CUDA = re.compile(r"(?:nvidia|cuda)-", re.IGNORECASE)


@dataclass(frozen=True)
class Interpreters:
    """The path of each Python to try, by version, and the versions of which there is none that runs."""

    chosen: dict[str, str]
    absent: tuple[str, ...]


def working(name: str) -> str | None:
    """The path of a Python that can make environments; what a version manager puts on PATH may lead to none."""
    path = shutil.which(name)
    if path is None or subprocess.run([path, "-c", "import ensurepip, venv"], capture_output=True).returncode:
        return None
    return path


def interpreters(which: Callable[[str], str | None] = working) -> Interpreters:
    """The oldest and the newest Python on PATH.

    >>> interpreters({"python3.11": "/a", "python3.12": "/b", "python3.13": "/c"}.get)
    Interpreters(chosen={'3.11': '/a', '3.13': '/c'}, absent=('3.14',))
    """
    found = {version: path for version in PYTHONS if (path := which(f"python{version}"))}
    chosen = {version: found[version] for version in dict.fromkeys([*list(found)[:1], *list(found)[-1:]])}
    absent = tuple(version for version in PYTHONS if version not in found)
    return Interpreters(chosen, absent)


def torch_versions(pyproject: str, constraints: str) -> list[str]:
    """The oldest torch that the package says it takes, and the one that it is developed with.

    >>> torch_versions('[project]\\ndependencies = ["torch>=2.11"]', "onnx==1.23.2\\ntorch==2.13.0\\n")
    ['2.11.0', '2.13.0']
    """
    dependencies = "\n".join(tomllib.loads(pyproject)["project"]["dependencies"])
    oldest = _only(r"^torch>=([\d.]+)$", dependencies)
    newest = _only(r"^torch==([\d.]+)$", constraints)
    return list(dict.fromkeys([_with_patch(oldest), newest]))


def _only(pattern: str, text: str) -> str:
    (found,) = re.findall(pattern, text, re.MULTILINE)
    return str(found)


def _with_patch(version: str) -> str:
    return version if version.count(".") > 1 else f"{version}.0"


def cuda_packages(requirements: Iterable[str] | None) -> Sequence[str]:
    """Of what a build of torch requires, the packages of CUDA: gigabytes, which a build for the CPU does without.

    >>> cuda_packages(["sympy>=1.13", 'nvidia-cudnn-cu13==9.19; platform_system == "Linux"'])
    ['nvidia-cudnn-cu13']
    """
    return [re.split(r"[^\w.-]", text, maxsplit=1)[0] for text in requirements or () if _CUDA.match(text)]
