"""`compare` sees the values that ONNX Runtime keeps in blocks of channels, each as the value that it is."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sardonyx.diagnose import Comparison, RunConfig, compare
from sardonyx.diagnose.comparison import trace
from sardonyx.diagnose.comparison.blocked import show_blocked
from sardonyx.diagnose.comparison.subject import subject_of
from sardonyx.diagnose.comparison.trace import OnnxTrace

ENGINE = "onnxruntime:optimize=none"
BLOCKED = "com.microsoft.nchwc"


class Residual(nn.Module):
    """Two convolutions with batch norms around a shortcut, as ResNet has them."""

    def __init__(self, channels: int = 32) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(y)) + x)


class Pools(nn.Module):
    """A stem that is read without blocks, both kinds of pools, and a block between them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block, self.last = nn.Conv2d(3, 32, 3, padding=1), Residual(), nn.Conv2d(32, 16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.stem(x)), 3, 2, 1)
        return F.adaptive_avg_pool2d(self.last(F.avg_pool2d(self.block(x), 2)), 1).flatten(1)


class Groups(nn.Module):
    """Convolutions by groups and by channel, joined, and the product of what they give."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Conv2d(32, 32, 1), nn.Conv2d(64, 32, 1)
        self.groups, self.channels = nn.Conv2d(32, 32, 3, padding=1, groups=2), nn.Conv2d(32, 32, 3, 1, 1, groups=32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.into(x)
        joined = torch.cat([F.leaky_relu(self.groups(x)), self.channels(x).sigmoid()], 1)
        return self.out(joined) * x + 1


class Odd(nn.Module):
    """Channels that fill no block."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 20, 3), nn.Conv2d(20, 12, 3), nn.Conv2d(12, 20, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(F.relu(self.b(F.relu(self.a(x)))))


class Sums(nn.Module):
    """Sums of two convolutions, of one with itself, of three, and after an activation: some are fused, some are not."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(32, 32, 1) for _ in range(9))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, b, c, d, e, f, g, h, last = self.convs
        x = a(x)
        two = F.relu(b(x) + c(x))
        doubled = d(two)
        twice = (doubled + doubled).tanh()
        three = e(twice) + f(twice) + twice
        after = F.relu(g(three)) + three
        again = F.relu(F.relu(h(after)))
        return last(again), after


def settled(model: nn.Module) -> nn.Module:
    """A model for inference whose batch norms do something."""
    draw = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.normal_(generator=draw)
            module.running_var.uniform_(0.5, 2.0, generator=draw)
    return model.eval()


def blocks(count: int) -> nn.Module:
    """Residual blocks after a convolution, so that what the first reads is in blocks too."""
    return settled(nn.Sequential(nn.Conv2d(3, 32, 1), *(Residual() for _ in range(count))))


def traced(model: nn.Module, x: torch.Tensor) -> OnnxTrace:
    return OnnxTrace(RunConfig.of(ENGINE), subject_of(model, (x,), {}), 2**28)


@pytest.fixture(autouse=True)
def _needs_blocks() -> None:
    made = traced(nn.Conv2d(32, 32, 3).eval(), torch.ones(1, 32, 8, 8))._optimized
    if not any(node.domain == BLOCKED for node in made.graph):
        pytest.skip("ONNX Runtime keeps no values in blocks on this processor")


def keys_of(found: Comparison) -> list[str]:
    return [row.place.operator.removeprefix("aten.").partition(".")[0] for row in found.rows]


CASES: list[tuple[nn.Module, tuple[int, ...], list[str]]] = [
    (blocks(2), (1, 3, 12, 12), ["conv2d", "relu", "relu", "relu", "relu"]),
    (
        Residual(),
        (1, 32, 12, 12),
        ["relu", "batch_norm", "add", "relu"],
    ),  # the sum is not fused: its input has no blocks
    (
        Pools(),
        (2, 3, 32, 32),
        # max pooling that keeps NaN returns no blocks, so the sum after it is not fused
        [
            *("relu", "max_pool2d", "relu", "batch_norm", "add", "relu"),
            *("avg_pool2d", "conv2d", "adaptive_avg_pool2d", "flatten"),
        ],
    ),
    (Groups(), (1, 32, 8, 8), ["conv2d", "leaky_relu", "sigmoid", "cat", "conv2d", "mul", "add"]),
    (Odd(), (1, 3, 12, 12), ["relu", "relu", "conv2d"]),
]


@pytest.mark.parametrize(("model", "sizes", "operators"), CASES, ids=lambda x: type(x).__name__)
def test_every_value_that_is_computed_is_compared_and_agrees(
    model: nn.Module, sizes: tuple[int, ...], operators: list[str]
) -> None:
    found = compare(settled(model), torch.randn(sizes), ways=("torch:float64", ENGINE))
    assert keys_of(found) == operators
    assert max(row.error for row in found.rows) < 1e-5


def test_no_value_is_taken_for_another_where_sums_are_fused_in_part() -> None:
    found = compare(settled(Sums()), torch.randn(1, 32, 8, 8), ways=("torch:float64", ENGINE))
    assert max(row.error for row in found.rows) < 1e-5
    assert len(found.rows) >= 10


def test_an_error_is_found_at_the_convolution_whose_weight_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(*given: Any) -> Any:
        model, options = prepared(*given)
        weight = model.graph.initializers["3.second.weight"]
        assert weight.const_value is not None
        weight.const_value = ir.Tensor(weight.const_value.numpy() * 1.1, name=weight.name)
        return model, options

    prepared = trace.prepare_model
    monkeypatch.setattr(trace, "prepare_model", spoiled)
    found = compare(blocks(4), torch.randn(1, 3, 12, 12), ways=("torch", ENGINE))
    assert len(found.rows) == 9
    assert [row.place.module for row in found.suspects] == ["3"]
    assert found.first is not None
    assert found.first.before < 1e-5
    assert found.first.place.operator == "aten.relu.default"  # the convolution, the sum and the activation are one node
    assert "self.second(y)" in found.first.place.where


def test_what_a_value_is_computed_from_is_told_without_blocks() -> None:
    run = traced(blocks(1), torch.randn(1, 3, 12, 12))
    stem, inner, result = run.keys.values()
    assert run.reads(stem)[0] == "input"
    assert run.reads(inner)[0] == stem
    assert {stem, inner} <= set(run.reads(result))


def test_a_value_is_left_out_where_the_names_do_not_tell_what_it_is() -> None:
    run = traced(blocks(2), torch.randn(1, 3, 12, 12))
    given = run.model
    made, _ = trace._optimized_by_engine(given, run._options, run._subject.calls[0])
    for node in made.graph:
        node.name = f"{node.name}_token_1"
    assert list(show_blocked(made, given).values()) == ["output"]  # which is not in blocks


def test_sizes_that_change_are_compared_too() -> None:
    calls = [torch.randn(2, 3, 32, 32), torch.randn(3, 3, 40, 32)]
    found = compare(settled(Pools()), calls[0], also=calls[1:], ways=("torch", ENGINE), budget=100_000)
    assert not found.differs
    assert keys_of(found)[:4] == ["relu", "max_pool2d", "relu", "batch_norm"]
