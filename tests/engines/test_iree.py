"""IREE: native code, compiled in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sardonyx
from sardonyx.engines import find
from sardonyx.engines import iree as engine
from sardonyx.errors import EngineError, OptionError

ABSENT = find("iree").probe().reason
installed = pytest.mark.skipif(bool(ABSENT), reason=ABSENT or "installed")


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SARDONYX_CACHE_DIR", str(tmp_path / "cache"))


def program(function: Callable[..., Any], *args: torch.Tensor, **more: Any) -> sardonyx.Program:
    return sardonyx.export(function, args, engine="iree", domains=(), opset=21, **more)


def flags_of(**options: Any) -> tuple[str, ...]:
    return engine._flags(sardonyx.Options(**options))


def test_the_users_flags_come_last() -> None:
    flags = flags_of(engine_options={"flags": "--a --b='c d'"}, compile_options="-O3 --e")
    assert flags[-4:] == ("--a", "--b=c d", "-O3", "--e")
    assert flags_of(engine_options={"flags": ["--a", "--b=c d"]})[-2:] == ("--a", "--b=c d")


def test_an_unknown_engine_option_is_an_error() -> None:
    with pytest.raises(OptionError, match="flag"):
        flags_of(engine_options={"flag": "--a"})


def test_a_long_log_is_cut_to_its_errors() -> None:
    log = "note: x\nmodel:1: error: no such thing " + "y" * 1000 + "\n" + "see current operation\n" * 50
    shown = engine._extract_errors(log)
    assert shown.startswith("model:1: error: no such thing")
    assert len(shown) < 500


@installed
def test_a_failing_compile_says_what_the_compiler_said() -> None:
    with pytest.raises(EngineError, match="no-such-flag"):
        program(nn.SiLU(), torch.ones(3), compile_options="--no-such-flag=1")(torch.ones(3))


@installed
def test_a_compiler_that_dies_is_an_error_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    dying = tmp_path / "dying.py"
    dying.write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    monkeypatch.setattr(engine, "_COMPILER_SCRIPT", dying)
    with pytest.raises(EngineError, match="crashed"):
        program(nn.SiLU(), torch.ones(3))(torch.ones(3))


@installed
def test_a_system_library_computes_the_same() -> None:
    model, x = nn.Linear(6, 4).eval(), torch.randn(3, 6)
    run = program(model, x, engine_options={"system_library": True})
    torch.testing.assert_close(run(x), model(x), rtol=1e-5, atol=1e-5)


@installed
def test_convolutions_are_laid_out_with_channels_last(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    run = engine.subprocess.run
    monkeypatch.setattr(engine.subprocess, "run", lambda command, **more: seen.append(command) or run(command, **more))
    for model, x in ((nn.Conv2d(3, 4, 3), torch.randn(1, 3, 8, 8)), (nn.Linear(3, 4), torch.randn(2, 3))):
        torch.testing.assert_close(program(model.eval(), x)(x), model(x), rtol=1e-4, atol=1e-4)
    assert [engine._CHANNELS_LAST in command for command in seen] == [True, False]


@installed
def test_doubles_stay_doubles() -> None:
    x = torch.tensor([1.0, 2.0], dtype=torch.float64)
    result = program(lambda x: x + 1e-12, x)(x)
    assert result.dtype == torch.float64
    assert torch.equal(result, x + 1e-12)


@installed
def test_half_precision_is_summed_in_float() -> None:
    x = torch.full((1, 4096), 0.1).half()
    result = program(lambda x: x @ x.T, x)(x)
    torch.testing.assert_close(result, x @ x.T, rtol=2e-3, atol=0)


@installed
def test_symbolic_sizes_are_compiled_one_by_one(tmp_path: Path) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).eval()
    run = torch.compile(layer, backend="sardonyx", dynamic=True, options={"engine": "iree", "fallback": "error"})
    with torch.enable_grad():
        for batch, tokens in ((2, 5), (3, 4), (2, 5)):
            x = torch.randn(batch, tokens, 16)
            torch.testing.assert_close(run(x), layer(x), rtol=1e-4, atol=1e-5)
    assert len(list((tmp_path / "cache").rglob("model.vmfb"))) == 2


@installed
def test_sizes_that_depend_on_values_are_refused() -> None:
    mask = torch.tensor([True, False, True])
    with pytest.raises(EngineError, match="depend on values"):
        program(lambda x: x.nonzero() + 1, mask)(mask)


@installed
def test_indices_of_pooling_stay_in_torch() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.nn.functional.max_pool2d_with_indices(x * 2, 2)

    x = torch.randn(2, 3, 4, 4)
    run = torch.compile(function, backend="sardonyx", options={"engine": "iree", "fallback": "quiet"})
    for ours, theirs in zip(run(x), function(x), strict=True):
        assert torch.equal(ours, theirs)


@installed
@pytest.mark.parametrize("amounts", [(1, -1), (-1, 1), (-1, -2, 0, 1), (2, 1)], ids=str)
def test_padding_by_negative_amounts_crops(amounts: tuple[int, ...]) -> None:
    x = torch.randn(3, 6)
    run = program(lambda x: torch.nn.functional.pad(x, amounts) + 1, x)
    assert torch.equal(run(x), torch.nn.functional.pad(x, amounts) + 1)
