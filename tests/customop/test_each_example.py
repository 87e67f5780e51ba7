"""What is particular to one example of a custom operator; and the examples as programs."""

from __future__ import annotations

import re
import sys
from functools import partial
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor

import sardonyx
from sardonyx.customop import op_check
from sardonyx.customop.project import Project

from .example_cases import (
    HALF_A_UNIT,
    Call,
    assert_same,
    bytes_of,
    example,
    gradients,
    group_norm,
    plain,
    quantised_matmul,
    rotary,
    wide,
)

pytestmark = pytest.mark.usefixtures("sizes_that_kernels_know_are_captured")


# One by one


@pytest.mark.parametrize("sizes", [(3, 4), (3, 4, 5), (2, 4, 3, 2, 5), (0, 4, 3)], ids=str)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_group_norm_is_torchs_in_any_rank(sizes: tuple[int, ...], groups: int) -> None:
    given = torch.randn(sizes), torch.randn(4), torch.randn(4)
    own = partial(example("group_norm").group_norm, num_groups=groups)

    def torchs(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.nn.functional.group_norm(x, groups, weight, bias)

    found, exact = ((f(*args), *gradients(f, *args)) for f, args in ((own, given), (torchs, tuple(map(wide, given)))))
    for ours, theirs in zip(found, exact, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_group_norm_is_exported_as_onnxs_own_operator(dtype: torch.dtype) -> None:
    module = example("group_norm")
    model, x = module.GroupNorm(2, 6).to(dtype).eval(), torch.randn(2, 6, 5, 5).to(dtype)
    program = sardonyx.export(model, (x,), opset=21, translations={torch.ops.mydomain.GroupNorm: module.standard})
    assert [(node.domain, node.op_type) for node in program.model.graph] == [("", "GroupNormalization")]
    tolerance = 8 * HALF_A_UNIT[dtype]
    torch.testing.assert_close(program(x), model(x), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", HALF_A_UNIT, ids=str)
def test_group_norm_of_whole_numbers_is_exported_as_onnxs_own_operator_in_double_precision(dtype: torch.dtype) -> None:
    module, far = example("group_norm"), 2**20  # whose squares leave no digit of float32 for the variance
    model, x = module.GroupNorm(2, 6).to(dtype).eval(), far + torch.randint(256, (2, 6, 5, 5))
    program = sardonyx.export(model, (x,), opset=21, translations={torch.ops.mydomain.GroupNorm: module.standard})
    assert "GroupNormalization" in {node.op_type for node in program.model.graph}
    exact = torch.nn.functional.group_norm(x.double(), 2).to(dtype)
    for found in (program(x), model(x)):
        torch.testing.assert_close(found, exact, rtol=2 * HALF_A_UNIT[dtype], atol=1e-6)


def test_group_norm_takes_floating_point_of_the_weights_type_alone() -> None:
    op, x, affine = example("group_norm").group_norm, torch.randn(2, 4, 3).half(), torch.randn(4)
    said = r"mydomain::GroupNorm: weight is float32, and .*can be float16"
    with pytest.raises(RuntimeError, match=said):
        op(x, affine, affine, num_groups=2)
    with pytest.raises(TypeError, match=said):
        torch.export.export(Call(group_norm()), (x, affine, affine))
    proto = sardonyx.export(Call(group_norm()).eval(), (x.float(), affine, affine)).proto()
    proto.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    with pytest.raises(Exception, match="GroupNorm"):
        plain(op, proto)


def test_the_gradient_of_whole_numbers_far_from_zero_is_right() -> None:
    case, near = group_norm(), torch.randint(256, (2, 6, 5, 4))
    affine = torch.randn(6), torch.randn(6)
    for found, expected in zip(gradients(case, near + 2**30, *affine), gradients(case, near, *affine), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("sizes", "groups", "said"),
    [
        (((2, 6, 4), (6,), (6,)), 4, "the channels must be a multiple of num_groups"),
        (((2, 6, 4), (6,), (6,)), 0, "the channels must be a multiple of num_groups"),
        (((2, 6, 4), (6,), (5,)), 2, "weight and bias must have an element for each channel"),
        (((2, 6, 4), (6, 1), (6,)), 2, "weight has 2 dimensions, and must have 1"),
        (((6,), (6,), (6,)), 2, "reads dimension 1 of a tensor of rank 1"),
    ],
)
def test_group_norm_refuses_sizes_that_do_not_go_together(sizes: Any, groups: int, said: str) -> None:
    op, given = example("group_norm").group_norm, [torch.randn(s) for s in sizes]
    with pytest.raises(RuntimeError, match=f"mydomain::GroupNorm: .*{said}"):
        op(*given, num_groups=groups)
    names = ["x", "weight", "bias"]
    node = onnx.helper.make_node("GroupNorm", names, ["y"], domain="mydomain", num_groups=groups)
    inputs = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in names]
    output = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("mydomain", 1)]
    graph = onnx.helper.make_graph([node], "graph", inputs, [output])
    session = plain(op, onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10))
    with pytest.raises(Exception, match=f"mydomain::GroupNorm: .*{said}"):
        session.run(None, {name: x.numpy() for name, x in zip(names, given, strict=True)})


def test_rotary_turns_back_by_the_opposite_angle() -> None:
    op, x = example("rotary").rotary, torch.randn(2, 3, 10, 8, dtype=torch.float64)
    angle = torch.randn(10, 4, dtype=torch.float64)
    torch.testing.assert_close(op(op(x, angle.cos(), angle.sin()), angle.cos(), -angle.sin()), x)


@pytest.mark.parametrize("sizes", [((1, 2, 5, 7), (5, 3)), ((1, 2, 5, 8), (4, 4)), ((1, 2, 5, 8), (5, 8))], ids=str)
def test_rotary_refuses_tables_of_other_sizes(sizes: Any) -> None:
    x, table = map(torch.randn, sizes)
    with pytest.raises(RuntimeError, match=r"rotary::Rotary: .* must be "):
        example("rotary").rotary(x, table, table)


def test_rotary_goes_on_where_a_cache_ends() -> None:
    op, x, (cos, sin) = example("rotary").rotary, torch.randn(2, 3, 9, 8), example("rotary").angles(9, 8)
    last = torch.tensor([[7, 8]]).expand(2, 2)
    assert_same(op(x[:, :, 7:], cos, sin, last), op(x, cos, sin)[:, :, 7:])


@pytest.mark.parametrize("position", [-1, 5])
def test_rotary_refuses_positions_that_are_not_in_the_tables(position: int) -> None:
    module, positions = example("rotary"), torch.tensor([[0, position, 4]])
    given, said = (torch.randn(1, 2, 3, 8), torch.randn(5, 4), torch.randn(5, 4), positions), "a position is outside of"
    with pytest.raises(RuntimeError, match=f"rotary::Rotary: {said}"):
        module.rotary(*given)
    with pytest.raises(RuntimeError, match=f"rotary::RotaryGrad: {said}"):
        module.rotary_grad(given[0], *given, interleaved=False)
    program = sardonyx.export(Call(rotary(False, True)).eval(), (*given[:3], positions.clamp(0, 4)))
    with pytest.raises(Exception, match=f"rotary::Rotary: {said}"):
        program(*given)


def test_rotary_refuses_positions_of_other_sizes() -> None:
    x, table = torch.randn(2, 2, 5, 8), torch.randn(5, 4)
    with pytest.raises(RuntimeError, match=r"rotary::Rotary: positions must be \(batch, length\)"):
        example("rotary").rotary(x, table, table, torch.zeros(1, 5, dtype=torch.int64))


def test_the_backward_of_rotary_refuses_a_gradient_of_other_sizes() -> None:
    x, table = torch.randn(1, 2, 5, 8), torch.randn(5, 4)
    with pytest.raises(RuntimeError, match="rotary::RotaryGrad: the gradient must have the sizes of x"):
        example("rotary").rotary_grad(x[:, :1], x, table, table, None, interleaved=False)


def test_quantised_products_do_not_overflow_at_the_greatest_depth() -> None:
    op, one = example("quantised_matmul").matmul, torch.ones(())
    a, b = (torch.full(sizes, -128, dtype=torch.int8) for sizes in ((1, 131_071), (131_071, 1)))
    assert op(a, b, one, one[None]).item() == 131_071 * 2**14
    zero = torch.tensor(127, dtype=torch.int8)
    assert op(a, b, one, one[None], zero, zero[None]).item() == torch.tensor(131_071 * 255.0**2).item()
    with pytest.raises(RuntimeError, match="quantised::MatMul: sums of more than 131071 products can overflow"):
        op(a.new_zeros(1, 131_072), a.new_zeros(131_072, 1), one, one[None])


def test_quantised_products_of_int64_are_exact_beyond_double_precision() -> None:
    op, one = example("quantised_matmul").matmul, torch.ones((), dtype=torch.float64)
    a, b = torch.tensor([[2**40, 1, -(2**40)]]), torch.tensor([[2**20], [1], [2**20]])
    assert op(a, b, one, one[None]).item() == 1
    zero = torch.tensor(2**21)
    assert op(a + zero, b - zero, one, one[None], zero, -zero[None]).item() == 1


LEAST, MOST = -(2**63), 2**63 - 1


@pytest.mark.parametrize(
    ("a", "b", "a_zero", "b_zero"),
    [
        ([2**32], [2**31], 0, 0),
        ([2**31, 2**31], [2**31, 2**31], 0, 0),
        ([LEAST], [-1], 0, 0),
        ([LEAST], [0], 0, 1),
        ([0], [LEAST], 1, 0),
        ([0], [MOST], 1, LEAST),
        ([1], [0], 0, LEAST),
    ],
    ids=str,
)
def test_quantised_products_of_int64_that_do_not_fit_are_refused(
    a: list[int], b: list[int], a_zero: int, b_zero: int
) -> None:
    case, one = quantised_matmul(), torch.ones(())
    given = torch.tensor([a]), torch.tensor(b)[:, None], one, one[None], torch.tensor(a_zero), torch.tensor([b_zero])
    said = "quantised::MatMul: a sum of products does not fit into 64 bits"
    with pytest.raises(RuntimeError, match=said):
        case(*given)
    program = sardonyx.export(Call(case).eval(), given)
    with pytest.raises(Exception, match=said):
        program(*given)


def test_quantised_products_without_zero_points_and_of_nothing() -> None:
    op, one = example("quantised_matmul").matmul, torch.ones(())
    a, b, scales = bytes_of(3, 4), bytes_of(4, 2), torch.ones(2)
    assert_same(op(a, b, one, scales), (a.double() @ b.double()).float())
    assert_same(op(a[:, :0], b[:0], one, scales), torch.zeros(3, 2))
    assert_same(op(a[:0], b, one, scales), torch.zeros(0, 2))
    with pytest.raises(RuntimeError, match="quantised::MatMul: the last size of a and the first of b must be the same"):
        op(a, b[:3], one, scales)


@pytest.mark.parametrize("x", [[], [1.0], [float("nan")] * 3, [0.0, -0.0, 1.0], [float("inf")] * 2], ids=str)
def test_run_lengths_of_special_numbers_are_torchs(x: list[float]) -> None:
    given = torch.tensor(x)
    values, lengths = example("run_lengths").run_lengths(given)
    expected = torch.unique_consecutive(given, return_counts=True)
    torch.testing.assert_close((values, lengths), tuple(expected), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("x", "first"),
    [
        ([], []),
        ([3.0, 3.0, 3.0, 1.0, 3.0, 3.0], [1, 0, 0, 1, 1, 0]),
        ([0.0, -0.0, float("nan"), float("nan")], [1, 0, 1, 1]),
    ],
    ids=str,
)
def test_the_gradient_of_run_lengths_goes_to_where_runs_begin(x: list[float], first: list[int]) -> None:
    with torch.enable_grad():
        given = torch.tensor(x, requires_grad=True)
        values, lengths = example("run_lengths").run_lengths(given)
        assert not lengths.requires_grad
        (found,) = torch.autograd.grad(values, given, torch.arange(1.0, 1 + len(values)))
    first_of = torch.tensor(first)
    assert_same(found, (first_of * first_of.cumsum(0)).float())


def test_what_follows_sizes_that_only_the_kernel_knows_is_compiled_too() -> None:
    longest, x = example("run_lengths").Longest().eval(), torch.randint(0, 2, (100,)).float()
    program = sardonyx.export(longest, (x,), dynamic_shapes=({0: "length"},))
    compiled = torch.compile(longest, backend="sardonyx", fullgraph=True, options={"fallback": "error"})
    for given in (x, torch.randint(0, 2, (37,)).float()):
        assert_same(program(given), longest(given))
        assert_same(compiled(given), longest(given))


# As programs


@pytest.mark.parametrize("name", ["group_norm", "quantised_matmul", "rotary", "run_lengths"])
def test_op_test_finds_nothing_wrong_with_it(name: str) -> None:
    module = example(name)
    operators = tuple(op for op in vars(module).values() if isinstance(op, sardonyx.CustomOp))
    found = list(op_check.check_project(Project(name, "0", (module,), operators)))
    assert {outcome.result for outcome in found} == {"passed"}, found
    assert {outcome.operator for outcome in found if outcome.check == "gradcheck"} == {
        op.signature.qualified for op in operators if op.differentiable
    }


@pytest.mark.parametrize(("name", "rows"), [("group_norm", 4), ("quantised_matmul", 3), ("rotary", 4)])
def test_a_program_prints_small_differences(name: str, rows: int, capsys: pytest.CaptureFixture[str]) -> None:
    with torch.enable_grad():
        example(name).main()
    lines = [
        line for line in capsys.readouterr().out.splitlines() if line.lstrip().startswith(("torch", "onnx", "exp"))
    ]
    errors = [float(number) for line in lines for number in re.findall(r"\d\.\de-\d+", line)]
    assert len(lines) == rows
    assert 0 < max(errors) < 1e-5


def test_the_program_of_run_lengths_finds_the_same_in_onnx_runtime(capsys: pytest.CaptureFixture[str]) -> None:
    example("run_lengths").main()
    assert capsys.readouterr().out.count("ONNX Runtime's is the same: True") == 3


def test_without_eigen_the_program_says_how_to_get_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = example("group_norm_eigen")
    monkeypatch.setattr(module, "USUAL", ())
    monkeypatch.setattr(sys, "argv", ["group_norm_eigen.py"])
    module.main()
    assert "apt-get install libeigen3-dev" in capsys.readouterr().out


def test_with_eigen_the_kernel_is_right() -> None:
    module = example("group_norm_eigen")
    eigen = module.find()
    if eigen is None:
        pytest.skip("Eigen's headers are not installed")
    given = torch.randn(2, 6, 5, 5), torch.randn(6), torch.randn(6)
    exact = torch.nn.functional.group_norm(given[0].double(), 2, *map(wide, given[1:]))
    torch.testing.assert_close(module.declare(eigen)(*given, num_groups=2).double(), exact, rtol=1e-5, atol=1e-5)
