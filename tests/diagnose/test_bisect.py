"""`bisect` names what changes a result: a rule, a kernel, an optimizer of ONNX Runtime, an option."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper

from sardonyx import MissingDependency, OptionError, export, timing
from sardonyx.diagnose import bisect
from sardonyx.diagnose.bisection import minimal_subset
from sardonyx.native.region import Lowering
from sardonyx.native.table import TABLE, operand
from sardonyx.optimize.optimizer import all_rules
from sardonyx.optimize.pattern import P
from sardonyx.optimize.rule import RULES, Match, rule
from sardonyx.toolchain import compiler

from .models import FLAGS, Wave, gelu


@pytest.mark.parametrize("wanted", [{3}, {0, 99}, {10, 11, 50}])
def test_the_smallest_part_is_found(wanted: set[int]) -> None:
    assert set(minimal_subset(range(100), lambda part: wanted <= set(part))) == wanted


def test_what_never_happens_has_no_part() -> None:
    assert minimal_subset(range(10), lambda part: False) == []


@pytest.mark.usefixtures("sine_as_cosine")
def test_a_wrong_rule_is_named_among_everything() -> None:
    found = bisect(Wave().eval(), torch.randn(3, 8))
    (culprit,) = found.culprits
    assert (culprit.kind, culprit.names) == ("rule", ("SineAsCosine",))
    assert culprit.error > 1e-2
    assert 'optimize="default-SineAsCosine"' in str(found)
    assert found.engine is not None
    assert found.engine < 1e-5


@pytest.mark.usefixtures("sine_as_cosine")
def test_a_wrong_rule_is_named_for_an_onnx_model() -> None:
    model = export(Wave().eval(), (torch.randn(3, 8),), optimize="none").proto()
    (culprit,) = bisect(model, torch.randn(3, 8), over=["rule"]).culprits
    assert culprit.names == ("SineAsCosine",)


def test_a_wrong_flag_is_named_among_harmless_ones() -> None:
    options = {"session_options": {"config": FLAGS, "enable_mem_pattern": False}, "optimize": "none"}
    found = bisect(gelu(), torch.randn(4, 8), options=options, tolerance=1e-5)
    (culprit,) = found.culprits
    assert culprit.kind == "option"
    assert culprit.names == ("session_options.config.optimization.enable_gelu_approximation=1",)
    assert found.tried["option"] == 4


def test_optimizers_of_onnxruntime_that_do_it_together_are_named() -> None:
    options = {"session_options": {"config": FLAGS}, "optimize": "none"}
    found = bisect(gelu(), torch.randn(4, 8), options=options, over=["optimizer"], tolerance=1e-5)
    (culprit,) = found.culprits
    assert culprit.kind == "optimizer"
    assert "GeluApproximation" in culprit.names
    assert "optimization.disable_specified_optimizers" in culprit.remedy


def test_nothing_is_at_fault_where_nothing_changes() -> None:
    found = bisect(gelu(), torch.randn(4, 8))
    assert found.culprits == ()
    assert "nothing is at fault" in str(found)


@pytest.mark.usefixtures("sine_as_cosine")
def test_what_costs_time_is_named_by_the_times_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is made up: a call is slow where its model has the operator that the rule makes."""

    def seconds(call: Callable[[], Any], repeats: int = 1) -> float:
        return 2.0 if torch.equal(call()[0], slow) else 1.0

    x = torch.randn(3, 8)
    module = Wave().eval()
    slow = export(module, (x,), optimize="none+SineAsCosine")(x)
    monkeypatch.setattr(timing, "seconds", seconds)
    (culprit,) = bisect(module, x, over=["rule"], by="time", options={"optimize": "none+SineAsCosine+Silu"}).culprits
    assert culprit.names == ("SineAsCosine",)
    assert culprit.slower == 2.0


def test_an_unknown_kind_is_an_error() -> None:
    with pytest.raises(OptionError, match="cannot go over"):
        bisect(gelu(), torch.randn(4, 8), over=["weather"])  # type: ignore[list-item]


@pytest.fixture
def slow_rule(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A rule that is right, and takes three times as long by a clock that is made up: results tell who was called."""
    known = all_rules()

    @rule(P.Tan("x"))
    def the_long_way(m: Match) -> ir.Value:
        return m.g.Div(m.g.Sin(m.x), m.g.Cos(m.x))

    def seconds(call: Callable[[], Any], repeats: int = 1) -> float:
        return 1.0 if torch.equal(call()[0], short) else 3.0

    short = export(Tan(), (ANGLES,), optimize="none")(ANGLES)
    monkeypatch.setattr(timing, "seconds", seconds)
    yield
    RULES[:] = known


class Tan(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.tan()


ANGLES = torch.linspace(0, 1, 1000)


@pytest.mark.usefixtures("slow_rule")
def test_a_rule_that_is_slow_is_named_and_an_option_that_is_not_slow_is_not() -> None:
    options = {"optimize": "none+TheLongWay+Silu", "session_options": {"enable_mem_pattern": False}}
    found = bisect(Tan(), ANGLES, by="time", slower=2.5, over=["option", "rule"], options=options)
    (culprit,) = found.culprits
    assert (culprit.kind, culprit.names) == ("rule", ("TheLongWay",))
    assert culprit.slower == 3.0
    assert culprit.error < 1e-5
    assert found.tried == {"option": 1, "rule": 2}


@pytest.fixture
def wrong_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lowering that is wrong on purpose."""
    try:
        compiler.find()
    except MissingDependency as error:
        pytest.skip(str(error))

    def erf_as_tanh(r: Lowering, node: ir.Node) -> None:
        r.define(node.outputs[0], r.apply("tanh", operand(r, node, 0)))

    monkeypatch.setitem(TABLE, ("", "Erf"), erf_as_tanh)


def two_kernels() -> onnx.ModelProto:
    """Two groups of operators that can be kernels, and a determinant, which cannot, between them."""
    nodes = [
        helper.make_node("Exp", ["x"], ["a"]),
        helper.make_node("Neg", ["a"], ["b"]),
        helper.make_node("Det", ["b"], ["c"]),
        helper.make_node("Erf", ["c"], ["d"]),
        helper.make_node("Abs", ["d"], ["y"]),
    ]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", [8, 4, 4]), ("y", [8])))
    graph = helper.make_graph(nodes, "two", [x], [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


@pytest.mark.usefixtures("wrong_kernels")
def test_a_wrong_kernel_is_named_among_right_ones() -> None:
    found = bisect(two_kernels(), torch.randn(8, 4, 4) * 0.3, options={"native": True, "optimize": "none"})
    assert found.tried["kernel"] == 2
    (culprit,) = found.culprits
    assert (culprit.kind, culprit.names) == ("kernel", ("y (Erf Abs)",))
    assert culprit.error > 1e-2
    assert "native=False" in culprit.remedy


def test_native_kernels_are_tried() -> None:
    try:
        compiler.find()
    except MissingDependency as error:
        pytest.skip(str(error))
    found = bisect(gelu(), torch.randn(4, 8), options={"native": True, "optimize": "none"}, over=["kernel"])
    assert found.tried == {"kernel": 1}
    assert found.culprits == ()
