"""`sardonyx.compile(module)`: the module it was, but for how its forward runs."""

from __future__ import annotations

import asyncio
import copy
import gc
import inspect
import io
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import sardonyx
from sardonyx.options import defaults
from tests.sizes import agrees_at_the_edges


@pytest.fixture(autouse=True)
def nothing_on_disk() -> Iterator[None]:
    with defaults(cache_dir=""):
        yield


def same(result: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


class Scaled(nn.Module):
    """Reads a number, a list, a setting and a buffer beside its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("shift", torch.arange(4.0))
        self.scale, self.powers, self.settings = 2, [1.0], {"sign": 1}
        self.table = np.ones(4, dtype=np.float32)
        self.extra = torch.ones(4)

    def forward(self, x: torch.Tensor, flip: bool = False) -> torch.Tensor:
        y = self.inner(x) * self.scale + self.shift + self.extra
        for power in self.powers:
            y = y + power
        y = y * self.settings["sign"] + torch.from_numpy(self.table)
        return -y if flip else y

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return self(x) + self(x)

    def stream(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        for _ in range(2):
            x = self(x)
            yield x

    async def later(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self(x)
        return result


def scaled() -> Scaled:
    return Scaled().eval()


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


# Nothing old is ever given


@pytest.mark.parametrize(
    "edit",
    [
        lambda m: setattr(m, "scale", 3),
        lambda m: m.powers.append(4.0),
        lambda m: m.settings.update(sign=-1),
        lambda m: m.table.__setitem__(2, 9.0),
        lambda m: m.extra.add_(1),
        lambda m: setattr(m, "extra", torch.full((4,), 5.0)),
        lambda m: m.inner.weight.mul_(2),
        lambda m: m.inner.weight.data.mul_(2),
        lambda m: m.shift.add_(1),
        lambda m: setattr(m.inner, "bias", None),
        lambda m: setattr(m.inner, "weight", nn.Parameter(torch.ones(4, 4))),
        lambda m: setattr(m, "inner", nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))),
        lambda m: m.load_state_dict({name: torch.ones_like(value) for name, value in m.state_dict().items()}),
        lambda m: m.inner.register_forward_hook(lambda module, args, result: result + 1),
        lambda m: setattr(m, "forward", lambda x: x),
        lambda m: torch.nn.utils.parametrizations.weight_norm(m.inner),
    ],
)
def test_an_edit_of_the_module_is_seen_by_the_next_call(edit: Callable[[Any], Any]) -> None:
    model, x = scaled(), torch.randn(3, 4)
    compiled = sardonyx.compile(model, fallback="quiet")
    same(compiled(x), model(x))
    edit(model)
    same(compiled(x), model(x))


def test_a_method_given_to_the_class_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = scaled(), torch.randn(3, 4)
    compiled = sardonyx.compile(model)
    compiled(x)
    monkeypatch.setattr(Scaled, "forward", lambda self, x: x - 1)
    same(compiled(x), x - 1)


FACTOR, OFFSETS = 2, {"first": 1.0}


def test_global_variables_that_a_method_names_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    class Global(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * FACTOR + OFFSETS["first"]

    compiled, x = sardonyx.compile(Global().eval()), torch.ones(2)
    assert compiled(x).tolist() == [3, 3]
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 5)
    assert compiled(x).tolist() == [6, 6]
    monkeypatch.setitem(OFFSETS, "first", 7.0)
    assert compiled(x).tolist() == [12, 12]


def test_another_dtype_and_autocast_are_other_sessions() -> None:
    model, x = scaled(), torch.randn(3, 4)
    compiled = sardonyx.compile(model, cache_size=8)
    compiled(x)
    model.double()
    result = compiled(x.double())
    assert result.dtype == torch.float64
    same(result, model(x.double()))
    model.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(compiled(x), model(x), rtol=2e-2, atol=2e-2)
    same(compiled(x), model(x))


def test_going_back_to_an_earlier_setting_finds_its_session() -> None:
    compiled = sardonyx.compile(scaled())
    for scale in (1, 2, 1, 2):
        compiled.scale = scale
        same(compiled(torch.ones(1, 4)), compiled.original(torch.ones(1, 4)))
    assert compiled.cache_info()[:2] == (2, 2)
    assert "scale" in compiled.builds[1].reason


def test_a_forward_that_changes_its_module_is_not_compiled_as_one_graph() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x + self.calls

    with pytest.raises(sardonyx.CaptureError, match="'calls'"):
        sardonyx.compile(Counting().eval(), fallback="error")(torch.ones(1))
    compiled = sardonyx.compile(Counting().eval(), fallback="quiet")
    first = compiled(torch.ones(1))
    assert compiled(torch.ones(1)) == first + 1


@pytest.mark.parametrize("fallback", ["error", "quiet"])
def test_edits_of_inputs_and_buffers_are_made_or_refused(fallback: Any) -> None:
    class Editing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(3))

        def forward(self, x: torch.Tensor, where: str) -> torch.Tensor:
            (self.total if where == "buffer" else x).add_(1)
            return x + self.total

    for where in ("buffer", "input"):
        model, x, y = Editing().eval(), torch.zeros(3), torch.zeros(3)
        compiled = sardonyx.compile(copy.deepcopy(model), fallback=fallback)
        if fallback == "error":
            with pytest.raises(sardonyx.CaptureError, match="modifies"):
                compiled(x, where)
        else:
            same(compiled(x, where), model(y, where))
            same(x, y)
            same(compiled.total, model.total)


def test_random_numbers_are_drawn_anew_by_torchs_seed() -> None:
    class Noisy(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.rand_like(x)

    compiled = sardonyx.compile(Noisy().eval())
    draws = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        draws.append(compiled(torch.zeros(8)))
    assert torch.equal(draws[0], draws[2])
    assert not torch.equal(draws[0], draws[1])


# Sessions


def test_the_session_used_longest_ago_is_dropped() -> None:
    compiled = sardonyx.compile(nn.ReLU().eval(), dynamic=False, cache_size=2)
    for rows in (2, 3, 2, 4, 2, 3):  # 4 drops 3, not 2
        compiled(torch.ones(rows))
    assert compiled.cache_info() == (2, 4, 2, 2, 4)


def test_a_size_that_changes_becomes_dynamic_and_serves_the_sizes_before() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1)).eval()
    compiled = sardonyx.compile(model)
    for rows in (3, 5, 7, 3, 100):
        same(compiled(torch.ones(rows, 4)), model(torch.ones(rows, 4)))
    assert compiled.cache_info() == (3, 2, 1, 3, 2)
    assert [build.dynamic for build in compiled.builds] == [False, True]
    for rows in (0, 1):  # special to torch: sizes of one broadcast
        same(compiled(torch.ones(rows, 4)), model(torch.ones(rows, 4)))


def test_a_size_of_one_is_not_asked_to_be_dynamic(caplog: pytest.LogCaptureFixture) -> None:
    compiled = sardonyx.compile(nn.Linear(4, 2).eval())
    with caplog.at_level(logging.WARNING):
        for rows in (3, 1):
            assert compiled(torch.ones(rows, 4)).shape == (rows, 2)
    assert caplog.records == []


def test_every_size_can_be_dynamic_from_the_start() -> None:
    compiled = sardonyx.compile(nn.GELU().eval(), dynamic=True)
    for sizes in ((3, 4), (5, 6), (2, 9)):
        same(compiled(torch.ones(sizes)), nn.GELU()(torch.ones(sizes)))
    assert compiled.cache_info().built == 1


def test_sizes_of_zero_one_and_many() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)).eval()
    compiled = sardonyx.compile(model, dynamic=True, cache_size=9)
    agrees_at_the_edges(compiled, model, lambda a, b: (torch.randn(a, b, 4),), {"a": 3, "b": 5}, edges=(0, 1, 33))


def test_a_size_that_decides_is_not_shared_by_those_it_decides_differently_for() -> None:
    class Deciding(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1 if x.shape[0] % 4 == 0 and x.shape[0] < 20 else x - 1

    compiled = sardonyx.compile(Deciding().eval(), cache_size=8)
    for rows in (4, 8, 5, 12, 7, 24, 16, 9):
        assert torch.equal(compiled(torch.zeros(rows)), Deciding()(torch.zeros(rows))), rows


def test_released_sessions_are_gone_and_built_again() -> None:
    compiled = sardonyx.compile(nn.Linear(4, 4).eval())
    x = torch.ones(2, 4)
    expected = compiled(x)
    (session,) = [s for _, s in compiled._core._sessions.items()]
    gone = weakref.ref(session.run.__self__)  # type: ignore[attr-defined]  # a region's method
    del session
    compiled.release()
    gc.collect()
    assert gone() is None
    assert compiled.cache_info().size == 0
    same(compiled(x), expected)
    assert compiled.cache_info().built == 2
    compiled.cache_clear()
    assert compiled.cache_info() == (0, 0, 0, 3, 0)


def test_sessions_can_be_built_ahead() -> None:
    compiled = sardonyx.compile(scaled(), dynamic=False)
    compiled.warm_up((2, 4), (torch.ones(3, 4), True), {"x": torch.ones(5, 4)})
    assert compiled.cache_info()[:2] == (0, 3)
    compiled(torch.ones(2, 4))
    compiled(torch.ones(3, 4), True)
    compiled(x=torch.ones(5, 4))
    assert compiled.cache_info()[:2] == (3, 3)


def test_threads_that_come_first_together_build_once_and_agree() -> None:
    model, x = scaled(), torch.randn(3, 4)
    compiled = sardonyx.compile(model)
    other = sardonyx.compile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval())
    expected = (model(x), other.original(x), model.twice(x))
    results, together = [], threading.Barrier(4)

    @torch.no_grad()
    def call() -> None:
        together.wait()
        first, second = compiled(x), other(x)
        together.wait()
        results.append((first, second, compiled.twice(x)))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    for found in results:
        for result, wanted in zip(found, expected, strict=True):
            same(result, wanted)
    assert compiled.cache_info().built == other.cache_info().built == 1
    assert "forward" not in vars(model)


def test_an_interrupted_build_leaves_a_module_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    from sardonyx.doors import session_cache

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    model = scaled()
    compiled = sardonyx.compile(model)
    with monkeypatch.context() as patched:
        patched.setattr(session_cache, "compile_graph", interrupted)
        with pytest.raises(KeyboardInterrupt):
            compiled.twice(torch.ones(2, 4))
    assert "forward" not in vars(model)
    same(compiled.twice(torch.ones(2, 4)), model.twice(torch.ones(2, 4)))


@pytest.mark.parametrize("engine", ["onnxruntime", "reference"])
def test_any_engine_runs_it(engine: str) -> None:
    compiled = sardonyx.compile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), engine=engine)
    same(compiled(torch.ones(2, 4)), compiled.original(torch.ones(2, 4)))


# Gradients


def gradients(module: Any, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    with torch.enable_grad():
        loss = module(x).pow(2).sum()
        return list(torch.autograd.grad(loss, [x, *module.parameters()]))


@pytest.mark.parametrize("training", [False, True])
def test_gradients_are_torchs_in_both_modes(training: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)).train(training)
    compiled, x = sardonyx.compile(copy.deepcopy(model)), torch.randn(6, 4)
    for mine, theirs in zip(gradients(compiled, x), gradients(model, x), strict=True):
        same(mine, theirs)
    same(compiled.get_submodule("1").running_mean, model[1].running_mean)


@pytest.mark.skipif("isolate_recompiles" not in inspect.signature(torch.compile).parameters, reason="an older torch")
def test_modules_in_training_do_not_use_up_each_others_recompilations() -> None:
    for width in range(2, 2 + 2 * torch._dynamo.config.recompile_limit):
        compiled = sardonyx.compile(nn.Sequential(nn.Linear(width, 2), nn.Tanh()).train())
        with torch.enable_grad():
            compiled(torch.ones(3, width))
        assert compiled.report.graphs, width
        assert not compiled.builds


@pytest.mark.parametrize("why", ["no_grad", "nothing requires a gradient"])
def test_training_mode_with_nothing_to_train_has_a_session(why: str) -> None:
    model, x = nn.Sequential(nn.Linear(4, 2), nn.Tanh()).train(), torch.randn(3, 4)
    model.requires_grad_(why == "no_grad")
    compiled = sardonyx.compile(model, cache_dir="", fallback="error")
    with torch.set_grad_enabled(why != "no_grad"):
        same(compiled(x), model(x))
    assert compiled.cache_info().built == 1
    with torch.enable_grad():
        assert compiled(x.requires_grad_()).grad_fn is not None
    assert compiled.cache_info().built == 1


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.BatchNorm1d(4)], ids=["dropout", "batch norm"])
def test_training_mode_that_is_at_work_is_told_once(layer: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), layer).train(), torch.randn(6, 4)
    compiled = sardonyx.compile(copy.deepcopy(model), cache_dir="")
    with caplog.at_level("WARNING", "sardonyx"):
        results = [compiled(x) for _ in range(2)]
    assert caplog.text.count("in training mode: call eval() for inference") == 1
    assert len(compiled.report.fallbacks) == 1
    if isinstance(layer, nn.Dropout):
        assert not torch.equal(*results)
        assert 0 < (results[0] == 0).sum() < results[0].numel()
    else:
        same(results[0], model(x))
        model(x)
        same(compiled.get_submodule("1").running_mean, model[1].running_mean)


def test_second_derivatives_and_hooks_of_parameters_are_eagers() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).eval()
    compiled, x = sardonyx.compile(model), torch.randn(2, 3, requires_grad=True)
    seen: list[torch.Tensor] = []
    model[0].weight.register_hook(lambda grad: seen.append(grad) or grad * 2)
    found = []
    for module in (compiled, model):
        with torch.enable_grad():
            (first,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
            found.append(torch.autograd.grad(first.sum(), [x, model[0].weight]))
    for mine, theirs in zip(*found, strict=True):
        same(mine, theirs)
    assert len(seen) == 2


def test_gradients_of_a_module_that_was_changed_since_are_refused() -> None:
    compiled = sardonyx.compile(scaled())
    with torch.enable_grad():
        result = compiled(torch.ones(2, 4, requires_grad=True)).sum()
    compiled.scale = 9
    with pytest.raises(sardonyx.AutogradError, match="changed since"):
        result.backward()


def test_gradients_are_refused_if_an_argument_without_one_was_edited_since() -> None:
    compiled, x = sardonyx.compile(nn.Linear(4, 2).eval()), torch.ones(3, 4)
    with torch.enable_grad():
        result = compiled(x).sum()
    x.zero_()
    with pytest.raises(sardonyx.AutogradError, match="an argument was edited in place since"):
        result.backward()


def test_without_gradients_nothing_is_attached() -> None:
    compiled = sardonyx.compile(nn.Linear(4, 4).requires_grad_(False).eval())
    with torch.enable_grad():
        assert not compiled(torch.ones(2, 4)).requires_grad
        assert sardonyx.compile(nn.Linear(4, 4).eval())(torch.ones(2, 4)).requires_grad
    with torch.inference_mode():
        assert not compiled(torch.ones(3, 4)).requires_grad


def test_it_can_be_compiled_into_something_larger() -> None:
    model = scaled()
    outer = torch.compile(nn.Sequential(sardonyx.compile(model), nn.ReLU()), backend="eager", fullgraph=True)
    same(outer(torch.ones(2, 4)), model(torch.ones(2, 4)).relu())


@pytest.mark.parametrize("wrong", [{"dynamic": "often"}, {"cache_sice": 2}, {"engine": "none such"}])
def test_wrong_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(sardonyx.OptionError):
        sardonyx.compile(nn.ReLU().eval(), **wrong)(torch.ones(2))


def test_only_modules_are_taken() -> None:
    with pytest.raises(TypeError, match="takes a module"):
        sardonyx.compile(torch.sin)  # type: ignore[arg-type]  # on purpose
    with pytest.raises(sardonyx.CaptureError, match=r"torch\.func"):
        torch.vmap(sardonyx.compile(nn.ReLU().eval()))(torch.ones(2, 2))


def test_intercept_shows_each_call_once() -> None:
    seen: list[Any] = []
    model = sardonyx.compile(nn.Linear(4, 2).eval(), cache_dir="", intercept=seen.append)
    model(torch.ones(3, 4))
    model(torch.ones(3, 4))
    model.train()
    model(torch.ones(3, 4))
    assert [call.number for call in seen] == [0, 1, 2]
    assert all(torch.equal(call.arguments["input"], torch.ones(3, 4)) for call in seen)


def test_a_call_that_is_simply_wrong_is_the_callers_error(caplog: pytest.LogCaptureFixture) -> None:
    model = sardonyx.compile(nn.Linear(4, 2).eval())
    with pytest.raises(TypeError, match="missing a required argument: 'input'"):
        model()
    with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
        model(torch.ones(3, 4), other=1)
    assert not caplog.messages
    assert not model.report.fallbacks
