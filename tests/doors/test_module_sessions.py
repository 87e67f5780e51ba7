"""A compiled module gives nothing old, and keeps few sessions."""

from __future__ import annotations

import copy
import gc
import logging
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import sardonyx
from tests.sizes import agrees_at_the_edges

from .scaled import Scaled, same, scaled

pytestmark = pytest.mark.usefixtures("nothing_on_disk")


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
