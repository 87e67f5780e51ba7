"""Memory stays flat over calls and over recompiles; measured in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys, torch
from torch import nn

from tests.memory import growth

torch.set_num_threads(1)

def calls(count):
    for _ in range(count):
        run(x)

def recompile(count):
    for _ in range(count):
        torch._dynamo.reset()
        torch.compile(nn.Sequential(nn.Linear(512, 512), nn.ReLU()).eval(), backend="sardonyx")(x)

x = torch.randn(8, 512)
with torch.no_grad():
    run = torch.compile(nn.Sequential(nn.Linear(512, 512), nn.ReLU()).eval(), backend="sardonyx")
    print(growth({"calls": lambda: calls(5_000), "recompiles": lambda: recompile(15)}[sys.argv[1]], rounds=2))
"""


def megabytes_kept(work: str) -> float:
    """By a process of its own."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, work], capture_output=True, text=True, check=True, cwd=ROOT)
    return float(done.stdout) / 1e6


def test_thousands_of_calls_keep_nothing() -> None:
    assert megabytes_kept("calls") < 3


def test_recompiles_keep_no_session() -> None:
    """A session of this model holds 2 MB in weights and their packed form; fifteen of them would be 30."""
    assert megabytes_kept("recompiles") < 10
