"""Devices whose memory is the CPU's under another name: a graph for them is compiled and run as one of the CPU's."""

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
    """How tensors change from such a device to the CPU and back, over the same memory."""

    on_host: Callable[[torch.Tensor], torch.Tensor]
    on_device: Callable[[torch.Tensor, int], torch.Tensor]

    def graph(self, graph: torch.fx.GraphModule, device: str) -> torch.fx.GraphModule:
        """A graph of the device's as one of the CPU's."""
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

    def run(self, run: BoxedCall, index: int) -> BoxedCall:
        """A compiled graph of the CPU's, for tensors of the device."""

        def hosted(args: list[Any]) -> Sequence[Any]:
            given = [self.on_host(x) if isinstance(x, torch.Tensor) else x for x in args]
            args.clear()
            return [self.on_device(x, index) if isinstance(x, torch.Tensor) else x for x in run(given)]

        hosted._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd's convention
        return hosted


def _on_cpu(value: FakeTensor) -> torch.Tensor:
    with value.fake_mode:
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=_CPU)


DEVICES: dict[str, CpuBackedDevice] = {}
"""By their types."""
