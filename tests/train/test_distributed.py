"""Several processes: gradients are those of one, and talking to others is torch's affair."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import _functional_collectives as collectives

from sardonyx.telemetry.report import collecting

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "distributed.py"


@pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo")
def test_two_processes_have_the_gradients_of_one() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, str(EXAMPLE), "--ddp", "--fsdp", "--fsdp1", "--steps", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("gradients as in one process") == 3
    graphs = dict(re.findall(r"2 processes, (\w+), sardonyx: (\d+) graphs, \d+ ONNX nodes, 0 operators", done.stdout))
    assert int(graphs["ddp"]) > 2, "dynamo cuts the graph where torch sends a bucket of gradients"
    assert int(graphs["fsdp"]) == int(graphs["fsdp1"]) == 2
    losses = torch.tensor([float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]).view(3, 3)
    torch.testing.assert_close(losses, losses[:1].expand(3, 3), rtol=1e-3, atol=1e-3)
    assert "in torch:" not in done.stderr


@pytest.fixture
def group() -> Iterator[Any]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_collectives_inside_a_graph_are_no_fallback(group: Any, caplog: pytest.LogCaptureFixture) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        everywhere: torch.Tensor = collectives.all_reduce((x @ w).tanh(), "sum", group)
        return everywhere.exp().sum(-1)

    x, w = torch.randn(3, 4), torch.randn(4, 5)
    with collecting() as report, caplog.at_level(logging.WARNING, "sardonyx"):
        result = torch.compile(function, backend="sardonyx", fullgraph=True, options={"fallback": "error"})(x, w)
    torch.testing.assert_close(result, function(x, w))
    assert len(report.graphs[0].regions) == 2
    assert not report.fallbacks
    assert not [record for record in caplog.records if record.name.startswith("sardonyx")]


def test_collectives_written_in_place(group: Any) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        dist.all_reduce(y)
        return y.cos()

    x = torch.randn(3, 4)
    run = torch.compile(function, backend="sardonyx", fullgraph=True, options={"fallback": "error"})
    torch.testing.assert_close(run(x), x.sin().cos())
