"""`sardonyx.compile(module)`: the module it was, but for how its forward runs."""

from __future__ import annotations

import asyncio
import copy
import inspect
import io
import logging
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import sardonyx

from .scaled import same, scaled

pytestmark = pytest.mark.usefixtures("nothing_on_disk")


# It is the module


def test_state_has_the_names_of_the_original_alone_and_inside_another_module() -> None:
    model = scaled()
    compiled = sardonyx.compile(model)
    assert list(compiled.state_dict()) == list(model.state_dict()) == ["shift", "inner.weight", "inner.bias"]
    assert [name for name, _ in compiled.named_parameters()] == ["inner.weight", "inner.bias"]
    outer, plain = nn.Sequential(compiled), nn.Sequential(scaled())
    assert list(outer.state_dict()) == list(plain.state_dict())
    outer.load_state_dict(plain.state_dict())
    same(outer(torch.ones(2, 4)), plain(torch.ones(2, 4)))
    assert sum(p.numel() for p in outer.parameters()) == 20


def test_modes_moves_and_attributes_reach_the_original() -> None:
    model = scaled()
    compiled = sardonyx.compile(model)
    assert compiled.train() is compiled
    assert model.training
    assert model.inner.training
    assert not compiled.eval().training
    assert compiled.to(torch.float64) is compiled
    assert model.inner.weight.dtype == torch.float64
    compiled.scale = 7
    assert model.scale == 7
    del compiled.scale
    assert not hasattr(model, "scale")
    assert compiled.inner is model.inner
    assert compiled.original is model
    assert "Linear(in_features=4" in repr(compiled)
    assert inspect.signature(compiled.forward) == inspect.signature(model.forward)


def test_a_module_that_has_its_own_train_is_asked_by_it() -> None:
    class Frozen(nn.Linear):
        def train(self, mode: bool = True) -> Frozen:
            return super().train(False)

    assert not sardonyx.compile(Frozen(2, 2)).train().training


def test_copies_and_files_hold_the_original_and_no_sessions() -> None:
    compiled = sardonyx.compile(scaled(), cache_size=5)
    x = torch.randn(2, 4)
    expected = compiled(x)
    copied = copy.deepcopy(compiled)
    compiled.original.inner.weight.zero_()
    assert copied.cache_info() == (0, 0, 0, 5, 0)
    same(copied(x), expected)
    file = io.BytesIO()
    torch.save(sardonyx.compile(nn.Linear(4, 4).eval()), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded(x).shape == (2, 4)
    assert loaded.cache_info().built == 1


def test_hooks_run_once_whichever_of_both_they_were_put_on() -> None:
    model = scaled()
    compiled = sardonyx.compile(model)
    seen: list[str] = []
    model.register_forward_hook(lambda *_: seen.append("original"))
    compiled.register_forward_hook(lambda *_: seen.append("compiled"))
    compiled(torch.ones(2, 4))
    assert seen == ["original", "compiled"]


def test_methods_of_the_original_call_the_compiled_forward_and_leave_no_trace() -> None:
    model = scaled()
    compiled = sardonyx.compile(model)
    x = torch.randn(2, 4)
    same(compiled.twice(x), model.twice(x))
    assert compiled.cache_info()[:2] == (1, 1)
    assert "forward" not in vars(model)
    model.forward = lambda x: x * 0  # type: ignore[method-assign]  # as some libraries do
    same(compiled.twice(x), torch.zeros(2, 4))
    same(model(x), torch.zeros(2, 4))


def test_methods_that_go_on_later_call_the_compiled_forward_too() -> None:
    compiled, x = sardonyx.compile(scaled()), torch.randn(2, 4)
    for mine, theirs in zip(list(compiled.stream(x)), list(compiled.original.stream(x)), strict=True):
        same(mine, theirs)
    same(asyncio.run(compiled.later(x)), compiled.original(x))
    assert compiled.cache_info()[:2] == (2, 1)
    assert "forward" not in vars(compiled.original)


# Arguments and results


@dataclass
class Pair:
    first: torch.Tensor
    rest: dict[str, Any]


class Memory:
    """A cache in the way of transformers': an object that forward changes."""

    __slots__ = ("seen", "steps")

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []
        self.steps = 0


class Nested(nn.Module):
    def forward(
        self, pair: Pair, *more: torch.Tensor, memory: Memory | None = None, names: tuple[str, ...] = ()
    ) -> Any:
        total = pair.first + sum(more) + pair.rest["bias"]
        if memory is not None:
            memory.seen.append(total)
            memory.steps += total.shape[0]
        return Pair(
            total, {"rows": total.shape[0], "names": names, "given": pair.first, "memory": memory, "both": [total]}
        )


def test_nested_arguments_and_results_are_what_eager_has() -> None:
    model, memories = Nested().eval(), (Memory(), Memory())
    compiled = sardonyx.compile(model)
    for rows in (2, 3, 5):
        pair, more = Pair(torch.randn(rows, 4), {"bias": torch.ones(4)}), torch.randn(rows, 4)
        result = compiled(pair, more, more, memory=memories[0], names=("a",))
        expected = model(pair, more, more, memory=memories[1], names=("a",))
        same(result.first, expected.first)
        assert result.rest["rows"] == rows
        assert result.rest["names"] == ("a",)
        assert result.rest["given"] is pair.first
        assert result.rest["memory"] is memories[0]
        assert result.rest["both"][0] is result.first is memories[0].seen[-1]
    assert memories[0].steps == memories[1].steps == 10
    for mine, theirs in zip(memories[0].seen, memories[1].seen, strict=True):
        same(mine, theirs)


def test_arguments_that_are_no_tensors_count_by_value() -> None:
    class Chosen(nn.Module):
        def forward(self, x: torch.Tensor, how: Any) -> torch.Tensor:
            return x * 2 if how == 1 and isinstance(how, bool) else x * float(how)

    compiled = sardonyx.compile(Chosen().eval(), cache_size=8)
    x = torch.ones(3)
    for how in (True, 1, 1.0, 3, 4, 0.0, -0.0, float("inf")):
        assert torch.equal(compiled(x, how), Chosen()(x, how)), how
        assert torch.equal(torch.signbit(compiled(x, how)), torch.signbit(Chosen()(x, how))), how


def test_an_integer_that_keeps_changing_becomes_an_input() -> None:
    class Windowed(nn.Module):
        def forward(self, x: torch.Tensor, position: int) -> tuple[torch.Tensor, int]:
            return x + position, position + x.shape[0]

    compiled = sardonyx.compile(Windowed().eval())
    for position in range(3, 12):
        result, after = compiled(torch.ones(2), position)
        assert result.tolist() == [position + 1.0] * 2
        assert after == position + 2
    assert compiled.cache_info().built == 2


def test_strides_that_only_show_an_order_or_gaps_are_honoured() -> None:
    class Sums(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.cumsum(1) * torch.arange(x.numel(), dtype=x.dtype).view_as(x)

    compiled, x = sardonyx.compile(Sums().eval()), torch.randn(6, 8)
    for given in (x, x.T, x[:, ::2], x[1:, 3:], x[:1].expand(6, 8), x[:, 2:3]):
        same(compiled(given), Sums()(given))


def test_a_copy_without_gaps_is_not_taken_for_the_argument_itself() -> None:
    class Packed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.contiguous()

    compiled, x = sardonyx.compile(Packed().eval(), fallback="quiet"), torch.randn(4, 6)
    assert compiled(x) is x
    result = compiled(x[:, 1:4])
    assert result.is_contiguous()
    assert torch.equal(result, x[:, 1:4])
    assert result.data_ptr() != x[:, 1:4].data_ptr()


def test_sizes_among_the_results_are_torchs() -> None:
    class Measured(nn.Module):
        def forward(self, x: torch.Tensor, to: torch.Size) -> tuple[torch.Tensor, torch.Size]:
            return x.reshape(to), x.shape

    compiled = sardonyx.compile(Measured().eval(), fallback="error")
    for rows in (2, 3, 5):
        result, shape = compiled(torch.ones(rows, 4), torch.Size([4, rows]))
        assert result.shape == (4, rows)
        assert type(shape) is torch.Size
        assert shape == (rows, 4)


def test_what_cannot_be_understood_is_refused_or_goes_through_torch_compile(caplog: pytest.LogCaptureFixture) -> None:
    class Indexed(nn.Module):
        def forward(self, x: torch.Tensor, which: Any) -> torch.Tensor:
            return x[next(iter(which))]

    with pytest.raises(sardonyx.CaptureError, match=r"builtins\.set"):
        sardonyx.compile(Indexed().eval(), fallback="error")(torch.ones(3), {1})
    compiled = sardonyx.compile(Indexed().eval())
    assert compiled(torch.arange(3.0), {2}) == 2
    assert compiled(torch.arange(3.0), {1}) == 1
    assert [record.levelno for record in caplog.records].count(logging.WARNING) == 1
    assert "builtins.set" in str(compiled.report.fallbacks[0])


def test_a_module_that_is_no_single_graph_is_right_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    class Branching(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.sum() > 0 else x - 1

    compiled = sardonyx.compile(Branching().eval())
    assert compiled(torch.ones(3)).tolist() == [2, 2, 2]
    assert compiled(-torch.ones(3)).tolist() == [-2, -2, -2]
    assert "Branching.forward" in caplog.text
    assert len(compiled.report.fallbacks) == 1
    with pytest.raises(sardonyx.CaptureError, match="cannot capture"):
        sardonyx.compile(Branching().eval(), fallback="error")(torch.ones(3))


def test_a_call_that_the_module_itself_refuses_raises_and_spoils_nothing() -> None:
    compiled = sardonyx.compile(nn.Linear(4, 2).eval(), fallback="quiet")
    with pytest.raises(Exception, match=r"reduction dim|shapes"):
        compiled(torch.ones(3, 5))
    assert compiled(torch.ones(3, 4)).shape == (3, 2)
    assert compiled.cache_info().size == 1
