"""OpenVINO: torch's numbers, or a refusal where it would compute in a narrower type."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

import sardonyx
from sardonyx.errors import EngineError, OptionError, SardonyxError
from sardonyx.precision.metric import relative_error
from sardonyx.run import precision_choice, region_precision
from sardonyx.telemetry.report import collecting

pytest.importorskip("openvino", reason='pip install "sardonyx[openvino]"')


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SARDONYX_CACHE_DIR", str(tmp_path / "cache"))


def program(function: Callable[..., Any], *args: torch.Tensor, **more: Any) -> sardonyx.Program:
    return sardonyx.export(function, args, engine="openvino", **more)


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    return torch.compile(function, backend="sardonyx", options={"engine": "openvino", **options})


def test_it_computes_in_float_unless_asked_otherwise() -> None:
    model, x = nn.Linear(256, 256).eval(), torch.randn(64, 256)
    expected = model.double()(x.double()).float()
    model.float()
    assert (program(model, x)(x) - expected).abs().max() < 1e-5
    asked = program(model, x, engine_options={"INFERENCE_PRECISION_HINT": "bf16"})(x)
    torch.testing.assert_close(asked, expected, rtol=0.1, atol=0.1)


def test_precision_is_its_own_within_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (region_precision, precision_choice):
        monkeypatch.setattr(module, "in_turns", lambda calls, **_: [[2.0], [1.0]][: len(calls)])
    model, x = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 64)).eval(), torch.randn(64, 256)
    with collecting() as report:
        error = relative_error(compiled(model, precision="bf16", max_drop=0.05)(x), model(x))
    assert error <= 0.05
    assert "the whole model: bf16, error" in str(report)


def test_its_property_and_precision_exclude_each_other() -> None:
    options = {"precision": "bf16", "engine_options": {"INFERENCE_PRECISION_HINT": "bf16"}}
    with pytest.raises(OptionError, match="precision='bf16' and 'INFERENCE_PRECISION_HINT'"):
        sardonyx.compile(nn.Linear(8, 8).eval(), engine="openvino", **options)(torch.ones(2, 8))


def test_an_unknown_property_is_an_error() -> None:
    with pytest.raises(EngineError, match="NO_SUCH"):
        compiled(torch.sin, engine_options={"NO_SUCH": "1"})(torch.ones(3))


def test_engine_options_are_a_dict() -> None:
    with pytest.raises(BackendCompilerFailed, match="use a dict"):
        compiled(torch.sin, engine_options="f32")(torch.ones(3))


@pytest.mark.parametrize(
    ("function", "values"),
    [
        (lambda x: x * x, [3, 4]),
        (lambda x: x + 2**40, [1]),
        (lambda x: x > 2**40, [1]),
        (lambda x: x.sum(), list(range(300))),
        (lambda x: x.cumsum(0), list(range(300))),
        (lambda x: x << 20, [1]),
    ],
    ids=["product", "large constant", "compared with a large one", "sum", "running sum", "shift"],
)
def test_integers_that_may_exceed_32_bits_are_refused(function: Callable[..., Any], values: list[int]) -> None:
    x = torch.tensor(values)
    with pytest.raises(SardonyxError, match=r"32 bits|does not take"):
        program(function, x)(x)


@pytest.mark.parametrize(
    ("function", "values"),
    [
        (lambda x: x + 1, [2**23, -(2**23)]),
        (lambda x: (x > 0).sum(), [1, -1, 5]),
        (lambda x: (x > 0).cumsum(0) - 1, [1, -1, 5]),
        (lambda x: (x % 5) * 3 - x // 4, [7, -7, 11]),
        (lambda x: torch.where(x > 2, x, -x).abs(), [1, 2, 3]),
        (lambda x: x.max(), [5, 2**23]),
        (lambda x: x & 6, [5, 1000]),
    ],
    ids=["sum of two", "count", "positions", "remainder and quotient", "choice", "largest", "bits"],
)
def test_integers_that_stay_small_are_exact(function: Callable[..., Any], values: list[int]) -> None:
    x = torch.tensor(values)
    assert torch.equal(program(function, x)(x), function(x))


def test_an_integer_input_that_is_too_large_is_refused_when_it_is_given() -> None:
    x = torch.tensor([1, 2])
    run = program(lambda x: x + 1, x)
    assert run(x).tolist() == [2, 3]
    with pytest.raises(EngineError, match="beyond"):
        run(torch.tensor([1, 2**23 + 1]))


def test_an_integer_weight_counts_with_its_values() -> None:
    model = nn.Module()
    model.register_buffer("table", torch.tensor([1000, 7]))
    model.forward = lambda x: model.table[x] * 1000
    x = torch.tensor([0, 1])
    assert torch.equal(program(model, x)(x), model(x))
    model.table = torch.tensor([2**30, 7])
    with pytest.raises(EngineError, match="32 bits"):
        program(model, x)(x)


def test_what_it_would_round_stays_in_torch_and_is_reported() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x * 10).long() + (x.double() + 1e-12).sum().float()

    x = torch.tensor([1.5, -2.5])
    with collecting() as report:
        assert torch.equal(compiled(function, fallback="quiet")(x), function(x))
    assert any("int64" in str(fallback) for fallback in report.fallbacks)
    assert any("double" in str(fallback) for fallback in report.fallbacks)


def test_weights_are_read_where_torch_has_them() -> None:
    weight = torch.randn(8, 6).T  # not in the order of memory
    model = nn.Module()
    model.weight = nn.Parameter(weight, requires_grad=False)
    model.forward = lambda x: x @ model.weight
    x = torch.randn(3, 6)
    torch.testing.assert_close(program(model, x)(x), x @ weight, rtol=1e-5, atol=1e-5)


def test_a_second_process_finds_the_compiled_model(tmp_path: Path) -> None:
    model, x = nn.Linear(4, 3).eval(), torch.randn(2, 4)
    program(model, x)(x)
    blobs = list((tmp_path / "cache").rglob("model.blob"))
    assert len(blobs) == 1
    made = blobs[0].stat().st_mtime_ns
    torch.testing.assert_close(program(model, x)(x), model(x), rtol=1e-5, atol=1e-5)
    assert [blob.stat().st_mtime_ns for blob in (tmp_path / "cache").rglob("model.blob")] == [made]


def test_its_message_is_the_errors() -> None:
    def transform(model: Any) -> None:
        model.graph.node[0].op_type = "NoSuchOperator"

    with pytest.raises(EngineError, match="NoSuchOperator"):
        compiled(torch.sin, transforms=[transform])(torch.ones(3))
