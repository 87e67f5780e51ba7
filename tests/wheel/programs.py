"""What is run with an installed wheel: code of the documents where they have it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_INSTALLED = """
import sys
from importlib.metadata import version
from pathlib import Path

import sardonyx

assert Path(sardonyx.__file__).is_relative_to(sys.prefix), f"sardonyx was imported from {sardonyx.__file__}"
assert sardonyx.__version__ == version("sardonyx"), (sardonyx.__version__, version("sardonyx"))
names = ("sardonyx", "torch", "onnx", "onnx-ir", "onnxscript", "onnxruntime", "numpy")
print(", ".join(f"{name} {version(name)}" for name in names))
"""

_DEVICE = """
import torch

from sardonyx import eager

eager.enable(executor="{executor}")
x = torch.ones(3, device="ort")
assert x.device.type == "ort"
assert (x + x).cpu().tolist() == [2.0, 2.0, 2.0]
assert eager.stats().calls, "nothing ran on the device"
assert not eager.stats().fallbacks, eager.stats()
"""


@dataclass(frozen=True)
class Program:
    """A file to run by the environment's Python, or a command that the environment has."""

    name: str
    source: str = ""
    command: Sequence[str] = ()
    shown: bool = False
    """Whether what it prints is of interest where it succeeds."""


def programs(root: Path) -> list[Program]:
    """Everything to run, in order; `root` is the checkout that the documents are in."""
    readme = python_blocks((root / "README.md").read_text(encoding="utf-8"))
    operators = python_blocks((root / "docs" / "custom-operators.md").read_text(encoding="utf-8"))
    return [
        Program("the installed package", _INSTALLED, shown=True),
        Program("the first example of README.md", readme[0]),
        Program("sardonyx doctor", command=("sardonyx", "doctor")),
        Program("a custom operator in C++, in torch and in ONNX Runtime alone", "\n".join(operators[:2])),
        Program("the device ort by its core in C++", _DEVICE.format(executor="native")),
        Program("the device ort by Python", _DEVICE.format(executor="python")),
    ]


def python_blocks(text: str) -> list[str]:
    """The text of every block of Python in a page.

    >>> python_blocks("Run:\\n\\n```python\\nprint(1)\\n```\\n")
    ['print(1)\\n']
    """
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
