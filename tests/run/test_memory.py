"""Memory stays flat over calls and over recompiles; measured in a process of its own."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import ctypes, gc, sys, torch
from torch import nn

torch.set_num_threads(1)

def resident():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free and lies between is not held
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 1e6

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
    work = {"calls": lambda: calls(10_000), "recompiles": lambda: recompile(50)}[sys.argv[1]]
    {"calls": lambda: calls(200), "recompiles": lambda: recompile(15)}[sys.argv[1]]()
    before = resident()
    work()
    print(resident() - before)
"""


def growth(work: str) -> float:
    """Megabytes that a process gains by the work, after warming up."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, work], capture_output=True, text=True, check=True)
    return float(done.stdout)


def test_ten_thousand_calls_keep_nothing() -> None:
    assert growth("calls") < 5


def test_fifty_recompiles_keep_no_session() -> None:
    """A session of this model holds 2 MB in weights and their packed form; fifty of them would be 100."""
    assert growth("recompiles") < 30
