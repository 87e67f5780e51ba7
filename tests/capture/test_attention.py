"""Attention that torch.compile keeps as one operator."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from sardonyx.capture import aot
from sardonyx.capture.composite_ops import preserve_attention
from sardonyx.doors.dynamo import sardonyx as backend

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


def heads(width: int = 16) -> torch.Tensor:
    return torch.randn(2, 8, 4, width).transpose(1, 2)


def captured(monkeypatch: pytest.MonkeyPatch, function: Any, *args: Any) -> tuple[Any, list[torch.fx.GraphModule]]:
    """Compile with attention kept on the CPU; return the result and the captured graphs."""
    monkeypatch.setattr(aot, "preserve_attention", functools.partial(preserve_attention, "cpu"))
    graphs = []

    def recording(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        def compile_graph(fx: torch.fx.GraphModule, *rest: Any) -> Any:
            graphs.append(fx)
            return fx

        return aot.lower(graph, inputs, compile_graph)

    return torch.compile(function, backend=recording)(*args), graphs


def calls(graph: torch.fx.GraphModule) -> list[Any]:
    return [node.target for node in graph.graph.nodes if node.op == "call_function"]


@torch.no_grad()
@pytest.mark.parametrize("mask", [None, torch.zeros(()).expand(2, 1, 8, 8)], ids=["no mask", "expanded mask"])
def test_it_is_one_operator_with_eagers_strides(monkeypatch: pytest.MonkeyPatch, mask: torch.Tensor | None) -> None:
    q = heads()
    result, (graph,) = captured(monkeypatch, lambda q: F.scaled_dot_product_attention(q, q, q, mask), q)
    expected = F.scaled_dot_product_attention(q, q, q, mask)
    assert calls(graph).count(ATTENTION) == 1
    node = next(node for node in graph.graph.nodes if node.target is ATTENTION)
    assert node.meta["val"].stride() == expected.stride()
    torch.testing.assert_close(result, expected)


@torch.no_grad()
def test_on_other_devices_it_is_decomposed() -> None:
    graphs = []

    def recording(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        return aot.lower(graph, inputs, lambda fx, *rest: graphs.append(fx) or fx)

    q = heads()
    torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q), backend=recording)(q)
    assert ATTENTION not in calls(graphs[0])


@torch.enable_grad()
def test_training_decomposes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    q = heads().requires_grad_()
    result, graphs = captured(monkeypatch, lambda q: F.scaled_dot_product_attention(q, q, q), q)
    result.sum().backward()
    assert all(ATTENTION not in calls(graph) for graph in graphs)


def test_torch_is_as_before_afterwards() -> None:
    before = dict(ATTENTION.py_kernels)
    with preserve_attention():
        assert ATTENTION.py_kernels != before
    assert ATTENTION.py_kernels == before


@torch.no_grad()
@pytest.mark.parametrize("mask", [None, torch.zeros(()).expand(2, 1, 8, 8)], ids=["no mask", "expanded mask"])
def test_the_compiled_result_is_eagers(monkeypatch: pytest.MonkeyPatch, mask: torch.Tensor | None) -> None:
    monkeypatch.setattr(aot, "preserve_attention", functools.partial(preserve_attention, "cpu"))
    q, k = heads(), heads()
    run = torch.compile(lambda q, k: F.scaled_dot_product_attention(q, k, k, mask), backend=backend)
    expected = F.scaled_dot_product_attention(q, k, k, mask)
    result = run(q, k)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    assert result.stride() == expected.stride()
