"""Devices whose tensors are in CPU memory: their graphs are compiled and run as CPU graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from sardonyx.run.graph import BoxedCall

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class CpuBackedDevice:
    """Converts tensors between such a device and the CPU, without copying memory."""

    on_host: Callable[[torch.Tensor], torch.Tensor]
    on_device: Callable[[torch.Tensor, int], torch.Tensor]

    def to_cpu_graph(self, graph: torch.fx.GraphModule, device: str) -> torch.fx.GraphModule:
        """Return a copy of the graph with the device replaced by the CPU."""
        moved = copy.copy(graph)
        moved.graph = copy.deepcopy(graph.graph)
        for node in moved.graph.nodes:
            node.args, node.kwargs = pytree.tree_map_only(
                torch.device, lambda x: _CPU if x.type == device else x, (node.args, node.kwargs)
            )
            if "val" in node.meta:
                node.meta = {**node.meta, "val": pytree.tree_map_only(FakeTensor, _on_cpu, node.meta["val"])}
        for name, constant in list(moved.__dict__.items()):
            if isinstance(constant, torch.Tensor):
                setattr(moved, name, self.on_host(constant))
        return moved

    def wrap(self, run: BoxedCall, index: int) -> BoxedCall:
        """Wrap a graph compiled for the CPU so that it takes and returns tensors of the device."""

        def run_on_cpu(args: list[Any]) -> Sequence[Any]:
            on_cpu = [self.on_host(x) if isinstance(x, torch.Tensor) else x for x in args]
            args.clear()
            return [self.on_device(x, index) if isinstance(x, torch.Tensor) else x for x in run(on_cpu)]

        run_on_cpu._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd's convention
        return run_on_cpu


def _on_cpu(value: FakeTensor) -> torch.Tensor:
    with value.fake_mode:
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=_CPU)


DEVICES: dict[str, CpuBackedDevice] = {}
"""Registered devices by type."""
