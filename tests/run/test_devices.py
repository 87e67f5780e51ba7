"""Results that are on another device than their graph."""

from __future__ import annotations

import torch

from sardonyx.capture.regions import Result, region_of
from sardonyx.run.binding import restore_result


def test_a_result_on_the_cpu_of_a_graph_on_an_accelerator() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.ops.aten.neg.default, (x,))
    positions = graph.call_function(torch.ops.aten.arange.default, (3,))
    graph.output((y, positions))
    x.meta["val"] = y.meta["val"] = torch.empty(2, device="meta")  # in place of an accelerator
    positions.meta["val"] = torch.arange(3)
    region = region_of(torch.fx.GraphModule({}, graph), frozenset())
    assert region is not None
    assert region.device.type == "meta"
    assert [result.device for result in region.results] == [None, torch.device("cpu")]


def test_such_a_result_is_moved() -> None:
    moved = restore_result(Result(0, device=torch.device("meta")), [torch.ones(2)])
    assert moved.device.type == "meta"
