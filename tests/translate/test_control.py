"""Branches and loops: torch.cond, while_loop, scan and map as If, Loop and Scan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx as onnx_package
import onnx_ir as ir
import pytest
import torch
from onnxruntime import InferenceSession
from torch import Tensor, nn
from torch._higher_order_ops import associative_scan, scan, while_loop
from torch._higher_order_ops.map import map as map_over
from torch.testing._internal.hop_db import hop_db
from torch.utils._pytree import tree_leaves

import sardonyx
from sardonyx.telemetry.report import Report, collecting
from sardonyx.translate.translator import NotExpressible, translate

from .agreement import agrees, agrees_at, onnx

Function = Callable[..., Any]


def agree_both_ways(function: Function, x: Tensor) -> None:
    """Assert agreement where the condition holds, and where it does not."""
    agrees(function, x)
    agrees(function, -x)


def gradients_agree(function: Function, *calls: tuple[Tensor, ...], dynamic: bool = False) -> Report:
    """Assert that gradients through ONNX alone are eager's."""
    compiled = onnx(function, dynamic=dynamic)
    with collecting() as report:
        for args in calls:
            torch.testing.assert_close(_gradients(compiled, args), _gradients(function, args), rtol=1e-4, atol=1e-5)
    assert not report.fallbacks
    return report


@torch.enable_grad()
def _gradients(function: Function, args: tuple[Tensor, ...]) -> list[Any]:
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in args]
    results = [r for r in tree_leaves(function(*leaves)) if r.is_floating_point()]
    sum((r * torch.arange(1.0, r.numel() + 1).view(r.shape)).sum() for r in results).backward()
    return [x.grad for x in leaves] + [r.detach() for r in results]


# Branches


def branches(x: Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda x: (x.sin(), x.max()), lambda x: (x * x.shape[0], x.mean()), (x,))


def nested(x: Tensor) -> Any:
    def inner(x: Tensor) -> Tensor:
        return torch.cond(x.max() > 1, lambda x: x + 1, lambda x: x - x.shape[0], (x,)).relu()

    return torch.cond(x.sum() > 0, inner, lambda x: x.clone(), (x,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_branch_is_taken_by_the_data(dtype: torch.dtype) -> None:
    agree_both_ways(branches, torch.rand(3, 4).to(dtype))


def test_a_branch_of_any_size() -> None:
    x, y = torch.rand(3, 4), torch.rand(5, 2)
    agrees_at(branches, (x,), (-x,), (y,), (-y,))


def test_branches_within_branches() -> None:
    x, y = torch.rand(3, 4), torch.rand(5, 2)
    agrees_at(nested, *((sign * v,) for v in (x, y) for sign in (-1, 0.1, 9)))


def test_branches_of_integers_and_booleans() -> None:
    agree_both_ways(lambda x: torch.cond(x.sum() > 3, lambda x: x // 2, lambda x: x * x, (x,)), torch.arange(5))
    for x in (torch.tensor([True, False]), torch.tensor([False, False])):
        agrees(lambda x: torch.cond(x.any(), lambda x: ~x, lambda x: x.logical_or(x[:1]), (x,)), x)


def test_branches_of_tensors_without_dimensions_and_without_elements() -> None:
    agree_both_ways(lambda x: torch.cond(x > 3, lambda x: x // 2, lambda x: x * x, (x,)), torch.tensor(7))
    agree_both_ways(lambda x: torch.cond(x.sum() > 0, lambda x: x[:0] * 1, lambda x: x[3:] + 1, (x,)), torch.rand(3, 4))


def test_branches_see_strided_operands_and_return_strided_results() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.transpose(0, 1) + 1, lambda x: x.transpose(0, 1) * 2, (x,))

    agree_both_ways(function, torch.rand(4, 3).t())
    assert onnx(function)(torch.rand(4, 3).t()).stride() == function(torch.rand(4, 3).t()).stride()


def test_branches_of_different_sizes() -> None:
    x, y = torch.rand(3, 4), torch.rand(5, 2)
    agrees_at(
        lambda x: torch.cond(x.sum() > 0, lambda x: x[:2].sin(), lambda x: x.cos(), (x,)) * 2,
        *((sign * v,) for v in (x, y) for sign in (-1, 1)),
    )


def test_a_branch_that_returns_a_constant() -> None:
    held = torch.arange(12.0, dtype=torch.float64).reshape(3, 4)
    agree_both_ways(lambda x: torch.cond(x.sum() > 0, lambda x: held * 1, lambda x: x + held, (x,)), torch.rand(3, 4))


def test_a_branch_by_a_size() -> None:
    agrees_at(
        lambda x: torch.cond(x.shape[0] > 4, lambda x: x + 1, lambda x: x * 2, (x,)),
        *((torch.rand(n, 3),) for n in (3, 4, 5, 6)),
    )


@pytest.mark.parametrize("value", [0, 4])
def test_a_branch_by_a_number_read_from_a_tensor(value: int) -> None:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        agrees(
            lambda x, n: torch.cond(n.item() > 2, lambda x: x + 1, lambda x: x * 2, (x,)),
            torch.rand(3),
            torch.tensor(value),
        )


# Loops


def times(x: Tensor, n: Tensor) -> Any:
    return while_loop(lambda i, x: i < n, lambda i, x: (i + 1, torch.sin(x) * 1.5 + i), (torch.tensor(0), x))


def counting(x: Tensor) -> Any:
    return while_loop(lambda i, x: i < x.shape[0], lambda i, x: (i + 1, torch.sin(x) * i), (0, x))


def loops_in_loops(x: Tensor, n: Tensor) -> Any:
    def body(i: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        x = while_loop(lambda j, x: j < i, lambda j, x: (j + 1, x * 1.1 + i), (torch.tensor(0), x))[1]
        return i + 1, torch.cond(x.sum() > 20, lambda x: x * 0.5, lambda x: x + 1, (x,))

    return while_loop(lambda i, x: i < n, body, (torch.tensor(0), x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rounds", [0, 1, 7])
def test_a_loop_runs_as_often_as_its_condition_says(rounds: int, dtype: torch.dtype) -> None:
    agrees(times, torch.rand(3, 4).to(dtype), torch.tensor(rounds))


def test_a_loop_of_any_size() -> None:
    agrees_at(times, *((torch.rand(rows, 4), torch.tensor(n)) for rows in (3, 5) for n in (0, 1, 7)))


def test_loops_and_branches_within_loops() -> None:
    agrees_at(loops_in_loops, *((torch.rand(rows, 4), torch.tensor(n)) for rows in (3, 5) for n in (0, 1, 5)))


def test_a_loop_that_starts_with_its_condition_false_returns_what_it_was_given() -> None:
    x = torch.rand(3)
    torch.testing.assert_close(onnx(times)(x, torch.tensor(-1)), (torch.tensor(0), x), rtol=0, atol=0)


def test_a_loop_counts_in_an_integer() -> None:
    with collecting() as report:
        compiled = onnx(counting, dynamic=True)
        for x in (torch.rand(3, 4), torch.rand(6, 2)):
            rounds, result = compiled(x)
            assert rounds == len(x)
            assert type(rounds) is int
            torch.testing.assert_close(result, counting(x)[1])
    assert report.operators["Loop"] == 1


def test_what_follows_a_loop_uses_the_integer_it_counted() -> None:
    def function(x: Tensor) -> Tensor:
        rounds, x = counting(x)
        return x * (rounds + 2)

    agrees_at(function, (torch.rand(3, 4),), (torch.rand(6, 2),))


def test_sizes_inside_a_loop_follow_its_integer() -> None:
    def function(x: Tensor, limit: Tensor) -> Any:
        def goes_on(i: int, x: Tensor) -> Tensor:
            return torch.arange(i).sum() < limit

        return while_loop(goes_on, lambda i, x: (i + 1, x + torch.arange(i + 1).cumsum(0).sum()), (0, x))[1]

    agrees_at(function, *((torch.rand(rows), torch.tensor(n)) for rows in (3, 5) for n in (0, 1, 9)))


# Scans and maps


def accumulate(x: Tensor) -> Any:
    return scan(lambda c, x: (c + x, c * x.sin()), x.new_zeros(x.shape[1]), x, dim=0)


def test_a_scan_returns_what_it_carries_and_what_it_stacks() -> None:
    agrees(accumulate, torch.rand(1, 4))
    agrees_at(accumulate, (torch.rand(3, 4),), (torch.rand(6, 2),))


@pytest.mark.parametrize("dtype", [torch.float16, torch.int64])
def test_a_scan_in_other_dtypes(dtype: torch.dtype) -> None:
    agrees(lambda x: scan(lambda c, x: (c + x, c * x), x[0] * 0, x, dim=0), (torch.rand(3, 4) * 4).to(dtype))


def test_a_scan_backwards_along_another_dimension_of_several_tensors() -> None:
    def combine(carried: Any, xs: Any) -> Any:
        total, product = carried
        x, y = xs["x"], xs["y"]
        return (total + x, product * y.mean()), (total * x, product + x.sum(), y)

    def function(x: Tensor) -> Any:
        start = (x.new_zeros(3), x.new_ones(()))
        return scan(lambda c, xs: _cloned(combine(c, xs)), start, {"x": x, "y": x.exp()}, dim=1, reverse=True)

    agrees(function, torch.rand(3, 5))


def _cloned(results: Any) -> Any:
    carried, (first, second, third) = results
    return carried, (first, second, third.clone())


def test_a_map_over_the_first_dimension() -> None:
    agrees_at(
        lambda x, y: map_over(lambda x, y: x.sin() + y, x, y),
        (torch.rand(3, 4), torch.rand(4)),
        (torch.rand(6, 2), torch.rand(2)),
    )


def test_an_associative_scan() -> None:
    agrees(
        lambda x: associative_scan(lambda a, b: a * b + a + b, x, dim=0, combine_mode="generic"),
        torch.rand(7, 3),
    )


def test_a_region_compiled_once_and_called_twice() -> None:
    @torch.compiler.nested_compile_region
    def region(x: Tensor) -> Tensor:
        return x.sin() * x.cos().sum(0)

    agrees_at(lambda x: region(x) + region(x * 2), (torch.rand(3, 4),), (torch.rand(6, 2),))


_SAMPLED = [
    (op, dtype)
    for op in hop_db
    for dtype in (torch.float32, torch.float16, torch.int64, torch.bool)
    if op.name in ("cond", "invoke_subgraph", "map")
    or (op.name in ("while_loop", "while_loop_stack_output") and dtype.is_floating_point)
    or (op.name == "scan" and dtype != torch.bool)  # a product of booleans, which ONNX has not
]


@pytest.mark.parametrize(
    ("op", "dtype"), _SAMPLED, ids=[f"{op.name}-{op.variant_test_name}-{dtype}" for op, dtype in _SAMPLED]
)
def test_torchs_own_samples(op: Any, dtype: torch.dtype) -> None:
    for sample in op.sample_inputs("cpu", dtype):
        agrees(op.op, sample.input, *sample.args, exact=True)


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
