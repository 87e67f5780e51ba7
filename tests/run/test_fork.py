"""A child process has none of its parent's threads: what was compiled before the fork works there all the same."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import Future

import pytest

from sardonyx import fork
from sardonyx.doors import module_store
from sardonyx.errors import EngineError

_LIMIT = 600
"""Seconds after which a child counts as hanging, so that a failure does not block the other tests."""

_SCRIPT = """
import multiprocessing, sys, torch, sardonyx
from torch import nn
from torch.utils.data import DataLoader

torch.set_num_threads(2)
x = torch.randn(64, 512)
model = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512)).eval()

class Rows(torch.utils.data.Dataset):
    def __init__(self, run):
        self.run = run
    def __len__(self):
        return 2
    def __getitem__(self, index):
        with torch.no_grad():
            return self.run(x)[index]

def child(run, expected, queue):
    with torch.no_grad():
        queue.put([float((run(x) - expected).abs().max()) for _ in range(2)])

def in_child(run, expected):
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=child, args=(run, expected, queue))
    process.start()
    process.join(LIMIT)
    hangs = process.is_alive()
    if hangs:
        process.kill()
    return "hangs" if hangs else max(queue.get()) if not process.exitcode else "failed"

with torch.no_grad():
    ways = {
        "wrapper": sardonyx.compile(model),
        "torch.compile": torch.compile(model, backend="sardonyx"),
        "program": sardonyx.export(model, (x,)),
        "native": sardonyx.compile(model, native=True),
    }
    eager = model(x)
    for run in ways.values():
        torch.testing.assert_close(run(x), eager)
    torch.relu(torch.ones(1 << 20))  # torch's own threads are there, too
    for name, run in ways.items():
        print(name, in_child(run, run(x)), flush=True)
    print("eager", in_child(model, eager), flush=True)
    how = {"num_workers": 1, "timeout": LIMIT, "multiprocessing_context": "fork"}
    loader = DataLoader(Rows(ways["wrapper"]), batch_size=2, **how)
    print("DataLoader", float((next(iter(loader)) - eager[:2]).abs().max()) < 1e-4, flush=True)
    print("parent", all(torch.allclose(run(x), eager, atol=1e-4) for run in ways.values()))
""".replace("LIMIT", str(_LIMIT))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_what_was_compiled_before_a_fork_runs_in_the_child() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=False, env=environment)
    expected = ["wrapper 0.0", "torch.compile 0.0", "program 0.0", "native 0.0", "eager 0.0", "DataLoader True"]
    assert done.stdout.splitlines() == [*expected, "parent True"], done.stderr


def test_a_lock_that_another_thread_holds_is_free_in_the_child() -> None:
    lock = fork.Lock()
    held = lock._lock
    held.acquire()
    fork._notify_child()
    with lock:
        assert lock._lock is not held


def test_an_engine_that_cannot_make_its_threads_again_refuses_at_once() -> None:
    with pytest.raises(EngineError, match="forked after the model was loaded"):
        fork.raise_in_child("openvino")(1, 2)


def test_a_comparison_that_the_fork_cut_off_makes_a_kept_model_stale() -> None:
    restored = module_store.StoredModel.__new__(module_store.StoredModel)
    restored._verdict = Future()
    restored.forked()
    with pytest.raises(module_store.StaleModel):
        restored([])
