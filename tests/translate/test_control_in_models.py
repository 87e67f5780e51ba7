"""Branches and loops among the rest of a model: weights, gradients, what stays in torch, exported graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx as onnx_package
import onnx_ir as ir
import pytest
import torch
from onnxruntime import InferenceSession
from torch import Tensor, nn
from torch._higher_order_ops import while_loop
from torch._higher_order_ops.map import map as map_over
from torch.utils._pytree import tree_leaves

import sardonyx
from sardonyx.telemetry.report import collecting
from sardonyx.translate.translator import NotExpressible, translate

from .agreement import onnx
from .control_flow import Function, accumulate, counting, gradients_agree, loops_in_loops, nested, times

# Weights


class Gated(nn.Module):
    """A module that uses its weights inside a branch and a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.register_buffer("scale", torch.arange(1.0, 5.0))

    def forward(self, x: Tensor, n: Tensor) -> Any:
        gated = torch.cond(x.sum() > 0, lambda x: self.norm(self.linear(x)), lambda x: x * self.scale, (x,))
        return while_loop(lambda i, x: i < n, lambda i, x: (i + 1, self.linear(x).tanh()), (torch.tensor(0), gated))


@pytest.fixture
def gated() -> Gated:
    return Gated().eval().requires_grad_(False)


def test_weights_inside_bodies(gated: Gated) -> None:
    compiled = onnx(gated)
    for x in (torch.rand(3, 4), -torch.rand(3, 4)):
        torch.testing.assert_close(compiled(x, torch.tensor(3)), gated(x, torch.tensor(3)))


def test_edited_weights_inside_bodies_are_noticed(gated: Gated) -> None:
    compiled, args = onnx(gated), (torch.rand(3, 4), torch.tensor(2))
    for _ in range(4):  # the third edit makes them inputs
        torch.testing.assert_close(compiled(*args), gated(*args))
        gated.linear.weight.mul_(1.5)


def test_modules_inside_branches_are_decomposed_as_outside() -> None:
    deep = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.GELU()).eval().requires_grad_(False)

    def function(x: Tensor) -> Tensor:
        return torch.cond(
            x.mean() > 0,
            deep,
            lambda x: nn.functional.interpolate(nn.functional.max_pool2d(x, 2), scale_factor=2) + x.softmax(-1),
            (x,),
        )

    compiled = onnx(function)
    for x in (torch.rand(2, 3, 8, 8), -torch.rand(2, 3, 8, 8)):
        torch.testing.assert_close(compiled(x), function(x), rtol=1e-4, atol=1e-5)


# Gradients


def test_gradients_through_branches() -> None:
    x, y = torch.rand(3, 4), torch.rand(5, 2)
    report = gradients_agree(nested, *((sign * v,) for v in (x, y) for sign in (-1, 0.1, 9)), dynamic=True)
    assert report.operators["If"] > 2


def test_gradients_through_loops() -> None:
    calls = [(torch.rand(rows, 4), torch.tensor(n)) for rows in (3, 5) for n in (1, 4)]
    assert gradients_agree(times, *calls, dynamic=True).operators["Loop"] == 2


def test_gradients_through_a_loop_without_a_round_are_torchs() -> None:
    gradients_agree(times, (torch.rand(3, 4), torch.tensor(0)))


def test_gradients_through_scans_and_maps() -> None:
    gradients_agree(accumulate, (torch.rand(3, 4),), (torch.rand(6, 2),), dynamic=True)
    gradients_agree(
        lambda x, y: map_over(lambda x, y: x.sin() * y, x, y),
        (torch.rand(3, 4), torch.rand(4)),
    )


# What stays in torch


def unknown_inside(x: Tensor) -> Tensor:
    def branch(x: Tensor) -> Tensor:
        return torch.linalg.svdvals(x) * 1

    return torch.cond(x.sum() > 0, branch, lambda x: x[:, 0] * 2, (x.sin(),)).cos()


def in_parts(function: Function) -> Function:
    torch._dynamo.reset()
    return torch.compile(function, backend="sardonyx", fullgraph=True, options={"fallback": "quiet"})


def test_an_operator_inside_a_branch_that_onnx_lacks_keeps_the_branches_in_torch() -> None:
    with collecting() as report:
        compiled = in_parts(unknown_inside)
        for x in (torch.rand(3, 4), -torch.rand(3, 4)):
            torch.testing.assert_close(compiled(x), unknown_inside(x))
    (fallback,) = report.fallbacks
    assert fallback.operator == "cond"
    assert "aten._linalg_svd.default" in fallback.reason
    assert "torch.linalg.svdvals(x) * 1" in fallback.where
    assert {"Sin", "Cos"} <= set(report.operators)


def test_control_flow_beside_an_operator_that_onnx_lacks() -> None:
    def function(x: Tensor) -> Any:
        total = torch.linalg.svdvals(x).sum()
        rounds, x = counting(x.sin())
        return rounds, torch.cond(total > 1, lambda x: x + 1, lambda x: x * 2, (x,))

    with collecting() as report:
        compiled = in_parts(function)
        for x in (torch.rand(3, 4), torch.rand(3, 4) * 0.01):
            torch.testing.assert_close(compiled(x), function(x))
    assert [fallback.operator for fallback in report.fallbacks] == ["aten._linalg_svd.default"]
    assert (report.operators["Loop"], report.operators["If"]) == (1, 1)


def test_numbers_that_torch_computes_from_a_count_are_given_to_what_follows() -> None:
    def function(x: Tensor) -> Any:
        rounds, x = counting(x)
        x = torch.linalg.svdvals(x)
        return x * (rounds + 2), torch.arange(rounds * 2) + x.sum()

    x = torch.rand(3, 4)
    torch.testing.assert_close(in_parts(function)(x), function(x))


def test_names_from_torch_do_not_clash_with_names_of_results() -> None:
    def function(x: Tensor) -> Any:
        sums = [x + i for i in range(1, 9)]  # called add, add_1 and so on, and given to the part after svdvals
        result = torch.linalg.svdvals(torch.cat(sums))
        for y in sums:
            result = result + y
        return result

    x = torch.rand(4, 4)
    torch.testing.assert_close(in_parts(function)(x), function(x))


def test_random_numbers_inside_a_body_stay_in_torch() -> None:
    def function(x: Tensor) -> Any:
        return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x + torch.rand_like(x)), (torch.tensor(0), x))

    with collecting() as report:
        result = in_parts(function)(torch.zeros(1000))[1]
    assert "random numbers" in report.fallbacks[0].reason
    assert result.std() < 0.6  # three draws; one draw three times would have 0.87


# The model


def checked(folder: Path) -> list[onnx_package.ModelProto]:
    """The models in a folder, each checked by ONNX, types and shapes included."""
    paths = sorted(folder.glob("*.onnx"))
    for path in paths:
        onnx_package.checker.check_model(path, full_check=True)
    return [onnx_package.load(path) for path in paths]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("optimize", ["default", "none"])
def test_models_with_bodies_are_valid_and_names_unique(tmp_path: Path, dtype: torch.dtype, optimize: str) -> None:
    torch._dynamo.reset()
    options = {"fallback": "error", "dump": str(tmp_path), "optimize": optimize}
    compiled = torch.compile(loops_in_loops, backend="sardonyx", fullgraph=True, options=options)
    x = torch.rand(3, 4).to(dtype)
    compiled(x * x, torch.tensor(2))
    (model,) = checked(tmp_path)
    names = [name for graph in _graphs(model.graph) for node in graph.node for name in node.output]
    assert len(names) == len(set(names))
    assert all(node.metadata_props for graph in _graphs(model.graph) for node in graph.node if node.op_type == "Loop")


def _graphs(graph: onnx_package.GraphProto) -> list[onnx_package.GraphProto]:
    held = [attribute.g for node in graph.node for attribute in node.attribute if attribute.HasField("g")]
    return [graph, *(inner for body in held for inner in _graphs(body))]


def test_operators_inside_bodies_are_counted() -> None:
    with collecting() as report:
        onnx(loops_in_loops)(torch.rand(3, 4), torch.tensor(2))
    assert (report.operators["Loop"], report.operators["If"]) == (2, 1)
    assert report.operators["Less"] == 4  # each loop's condition stands before it and in it


def test_verification_runs_control_flow_in_torch_too() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(loops_in_loops, backend="sardonyx", options={"fallback": "error", "verify": True})
    args = torch.rand(3, 4), torch.tensor(2)
    torch.testing.assert_close(compiled(*args), loops_in_loops(*args))


def test_the_reference_engine_runs_control_flow() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(loops_in_loops, backend="sardonyx", options={"fallback": "error", "engine": "reference"})
    args = torch.rand(3, 4), torch.tensor(2)
    torch.testing.assert_close(compiled(*args), loops_in_loops(*args))


# Exported graphs


@pytest.mark.parametrize("dynamic", [False, True])
def test_an_exported_graph_is_translated_as_it_is(gated: Gated, dynamic: bool) -> None:
    shapes = {"x": {0: torch.export.Dim("rows", min=2)}, "n": None} if dynamic else None
    example = (torch.rand(3, 4), torch.tensor(1))
    program = torch.export.export(gated, example, dynamic_shapes=shapes).run_decompositions()
    results = program.graph.output_node().args[0]
    translation = translate(program.graph_module, opset=21, outputs=results, orders=[None] * len(results))
    proto = ir.to_proto(translation.model)
    onnx_package.checker.check_model(proto, full_check=True)
    session = InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    for rows in (3, 5) if dynamic else (3,):
        for args in ((sign * torch.rand(rows, 4), torch.tensor(n)) for sign in (-1, 1) for n in (0, 2)):
            given = _inputs(program, session, args)
            for got, expected in zip(session.run(None, given), gated(*args), strict=True):
                np.testing.assert_allclose(got, expected.numpy(), rtol=1e-5, atol=1e-6)


def _inputs(program: Any, session: InferenceSession, args: tuple[Tensor, Tensor]) -> dict[str, Any]:
    held = {**program.state_dict, **program.constants}
    targets = {spec.arg.name: spec.target for spec in program.graph_signature.input_specs}
    named = dict(zip(("x", "n"), args, strict=True))
    names = [x.name for x in session.get_inputs()]
    return {name: (named[name] if name in named else held[targets[name]]).numpy() for name in names}


def test_an_unknown_higher_order_operator_is_refused() -> None:
    def subgraph(x: Tensor) -> Tensor:
        return x.sin()

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.rand(3)
    held = torch.fx.symbolic_trace(subgraph)
    call = graph.call_function(torch.ops.higher_order.strict_mode, (graph.get_attr("held"), (x,)))
    call.meta["val"] = (torch.rand(3),)
    graph.output((call,))
    module = torch.fx.GraphModule({"held": held}, graph)
    with pytest.raises(NotExpressible) as caught:
        translate(module, opset=21, outputs=())
    assert caught.value.refusals[0].reason == "no translation of this higher-order operator"


# Branches that return memory of their operands


def same(x: Tensor) -> Tensor:
    return x


def turned(x: Tensor) -> Tensor:
    return x.t()


def more(x: Tensor) -> Tensor:
    return x + 1


def more_turned(x: Tensor) -> Tensor:
    return (x + 1).t()


def twice(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    return y, y


def both(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x.view(x.shape)


@pytest.mark.parametrize(
    ("then", "otherwise"),
    [(same, more), (more, same), (turned, more_turned), (twice, both)],
    ids=["an operand", "an operand in the other", "a view", "a tensor twice"],
)
@pytest.mark.parametrize("door", ["torch.compile", "wrapper", "export"])
def test_a_branch_may_return_its_operand_or_a_view_of_it(then: Function, otherwise: Function, door: str) -> None:
    class Branching(torch.nn.Module):
        def forward(self, x: Tensor) -> Any:
            return torch.cond(x.sum() > 0, then, otherwise, (x,))

    model, x = Branching().eval(), torch.rand(2, 3) + 1
    doors: dict[str, Function] = {
        "torch.compile": onnx,
        "wrapper": sardonyx.compile,
        "export": lambda m: sardonyx.export(m, (x,)),
    }
    run = doors[door](model)
    for given in (x, -x):
        for got, wanted in zip(tree_leaves(run(given)), tree_leaves(model(given)), strict=True):
            torch.testing.assert_close(got, wanted)
            assert door == "export" or got.stride() == wanted.stride()


def add_to_operand(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.add_(1)


def add_to_result(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return y.add_(1)


def assign_to_result(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    y[0] = 5
    return y


@pytest.mark.parametrize("edit", [add_to_operand, add_to_result, assign_to_result])
def test_an_edit_of_what_a_branch_returns_is_refused_rather_than_lost(edit: Any) -> None:
    def function(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = torch.cond(p, lambda x: x, lambda x: x + 1, (x,))
        edit(x, y)
        return y

    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(Exception, match="might be aliasing"):
        torch.compile(function, backend="sardonyx")(torch.tensor(True), torch.zeros(3))


def test_an_edit_of_a_copy_of_what_a_branch_returns_is_seen() -> None:
    def function(p: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.cond(p, lambda x: x, lambda x: x + 1, (x,))
        copy = y * 2
        copy.add_(1)
        return y, copy

    torch._dynamo.reset()
    with torch.no_grad():
        y, copy = torch.compile(function, backend="sardonyx")(torch.tensor(True), torch.ones(3))
    torch.testing.assert_close((y, copy), (torch.ones(3), torch.full((3,), 3.0)))
