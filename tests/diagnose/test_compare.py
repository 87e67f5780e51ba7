"""`compare` finds where two ways of running a model part, and `find_nonfinite` where a NaN is made."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from sardonyx import OptionError, export
from sardonyx.diagnose import RunConfig, compare, find_nonfinite
from sardonyx.diagnose.comparison.subject import subject_of
from sardonyx.diagnose.comparison.trace import OnnxTrace

from .models import GELU, PLAIN, Wave, gelu


class Root(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x - 1).sqrt()  # the fault
        return (y * 2).softmax(-1)


@pytest.mark.usefixtures("sine_as_cosine")
def test_a_wrong_rule_shows_at_the_operator_module_and_line_where_the_error_begins() -> None:
    found = compare(Wave().eval(), torch.randn(3, 8))
    assert found.differs
    assert found.first is not None
    assert found.first.place.operator == "aten.sin.default"
    assert found.first.jumps
    assert found.first.before < 1e-5
    assert "wave = self.into(x).sin()  # here" in found.first.place.where
    assert "aten.sin.default" in str(found)


@pytest.mark.usefixtures("sine_as_cosine")
def test_a_wrong_rule_shows_in_an_onnx_model_too() -> None:
    model = export(Wave().eval(), (torch.randn(3, 8),), optimize="none").proto()
    found = compare(model, torch.randn(3, 8))
    assert found.ways == (PLAIN, "onnxruntime")
    assert found.first is not None
    assert found.first.place.operator == "aten.sin.default"


@pytest.mark.usefixtures("sine_as_cosine")
def test_the_module_that_holds_the_error_is_told() -> None:
    rows = compare(nn.Sequential(nn.Linear(4, 4), Sine(), nn.Tanh()).eval(), torch.randn(2, 4))
    worst = max(rows.modules(), key=lambda row: row.growth)
    assert worst.place.module == "1"


class Sine(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin()


def test_ways_that_agree_have_no_suspects() -> None:
    found = compare(Wave().eval(), torch.randn(3, 8), ways=("torch:float64", "onnxruntime"))
    assert not found.differs
    assert found.suspects == []
    assert found.error < 1e-5
    assert len(found.rows) >= 3


def test_a_flag_of_the_engine_shows_where_its_own_rewrite_acts() -> None:
    found = compare(gelu(), torch.randn(4, 8), ways=(PLAIN, GELU), tolerance=1e-5)
    assert found.differs
    assert found.first is not None
    assert found.first.place.key == "f"  # the values before it are inside what onnxruntime fuses


def test_the_worst_of_several_calls_counts() -> None:
    calls = [(torch.full((4, 8), 0.0),), (torch.full((4, 8), 1.5),), (torch.full((4, 8), 0.0),)]
    found = compare(gelu(), *calls[0], also=calls[1:], ways=(PLAIN, GELU), tolerance=1e-5)
    assert found.first is not None
    assert found.first.call == 1


def test_values_are_fetched_in_portions_that_fit_the_budget() -> None:
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(16, 16), nn.Tanh()))).eval()
    subject = subject_of(model, (torch.randn(4, 16),), {})
    trace = OnnxTrace(RunConfig.of(PLAIN), subject, budget=4 * 16 * 4 * 3)
    portions = list(trace._portions([trace.keys[key] for key in subject.places], subject.calls[0]))
    assert [len(portion) for portion in portions] == [3, 3, 3, 3, 3, 1]
    small, large = (compare(model, torch.ones(4, 16), budget=budget) for budget in (1000, 2**30))
    assert [row.error for row in small.rows] == [row.error for row in large.rows]


def test_every_value_of_bert_is_found_in_torch_and_in_the_plain_engine() -> None:
    pytest.importorskip("transformers", reason="needs the package transformers")
    from examples.models import bert

    module, args, kwargs = bert()
    found = compare(module, *args, ways=("torch", PLAIN), **kwargs)
    assert not found.differs
    assert len(found.rows) > 50
    assert {"encoder.layer.0.attention.self", "encoder.layer.1.output.LayerNorm"} <= {
        row.place.module for row in found.rows
    }


def test_torch_is_no_way_to_run_onnx() -> None:
    with pytest.raises(OptionError, match="needs the module"):
        compare(gelu(), torch.randn(4, 8), ways=("torch", "onnxruntime"))


def test_inputs_that_do_not_fit_are_named() -> None:
    with pytest.raises(OptionError, match="the model takes x"):
        compare(gelu(), z=np.ones(3))


def test_the_operator_that_makes_nan_from_finite_numbers_is_found() -> None:
    for way in ("torch", "onnxruntime"):
        found = find_nonfinite(Root().eval(), torch.tensor([0.5, 2.0]), way=way)
        assert [x.kind for x in found] == ["NaN"]
        assert found[0].place.operator == "aten.sqrt.default"
        assert "# the fault" in found[0].place.where
        assert "-0.5 to 1" in str(found[0])


def test_an_overflow_is_found_before_the_nan_that_it_becomes() -> None:
    found = find_nonfinite(lambda x: x.exp() - x.exp(), torch.tensor([100.0]))
    assert [(x.kind, x.place.operator) for x in found] == [
        ("NaN", "aten.sub.Tensor"),
        ("Inf", "aten.exp.default"),
        ("Inf", "aten.exp.default"),
    ]


@pytest.mark.parametrize("text", ["torch:float8", "onnxruntime:level", "onnxruntime:level=some", "onnxruntim"])
def test_a_way_that_is_none_is_an_error(text: str) -> None:
    with pytest.raises(OptionError):
        compare(gelu(), torch.randn(4, 8), ways=(PLAIN, text))
