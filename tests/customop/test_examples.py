"""The examples of custom operators are right wherever they run: in torch, differentiated, exported, compiled."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor

import sardonyx
from sardonyx.customop import op_check
from sardonyx.customop.project import Project

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "custom_ops"
HALF_A_UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
EPSILON = 2.0**-10  # which is the same number in ONNX's float32


@dataclass(frozen=True)
class Case:
    """An operator of an example, and how it is tried."""

    op: sardonyx.CustomOp
    given: Callable[[torch.dtype, int], tuple[Tensor, ...]]
    """Arguments of a dtype, of which the sizes that may change are multiples of a number."""
    reference: Callable[..., Any]
    dynamic: tuple[Any, ...]
    """The sizes that may change."""
    attributes: dict[str, Any] = field(default_factory=dict)

    def __call__(self, *given: Tensor) -> Any:
        return self.op(*given, **self.attributes)


def example(name: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        return import_module(name)


def random(*sizes: int, dtype: torch.dtype) -> Tensor:
    """Normal, or small integers."""
    return torch.randint(-3, 4, sizes) if dtype == torch.int64 else torch.randn(sizes).to(dtype)


def floating(dtype: torch.dtype) -> torch.dtype:
    """What is floating point beside numbers of a dtype."""
    return dtype if dtype.is_floating_point else torch.float32


def bytes_of(*sizes: int) -> Tensor:
    return torch.randint(-128, 128, sizes, dtype=torch.int8)


def random_of_20_bits(*sizes: int) -> Tensor:
    return torch.randint(-(2**20), 2**20, sizes)


def group_norm() -> Case:
    def given(dtype: torch.dtype, size: int) -> tuple[Tensor, ...]:
        affine = (random(6, dtype=floating(dtype)) for _ in range(2))
        return random(size, 6, 5, 2 * size, dtype=dtype), *affine

    def reference(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.nn.functional.group_norm(x.to(weight.dtype), 2, weight, bias, EPSILON)

    dynamic = ({0: "batch", 3: "width"}, None, None)
    how = {"num_groups": 2, "epsilon": EPSILON}
    return Case(example("group_norm").group_norm, given, reference, dynamic, how)


def rotary(interleaved: bool, positions: bool) -> Case:
    module = example("rotary")

    def given(dtype: torch.dtype, size: int) -> tuple[Tensor, ...]:
        rows = 3 * size + positions
        tables = (random(rows, 4, dtype=floating(dtype)) for _ in range(2))
        places = [torch.randint(rows, (size, 3 * size))] if positions else []
        return random(size, 5, 3 * size, 8, dtype=dtype), *tables, *places

    rows = {0: "rows" if positions else "length"}
    dynamic = ({0: "batch", 2: "length"}, rows, rows, *([{0: "batch", 1: "length"}] if positions else []))
    how = {"interleaved": interleaved}
    return Case(module.rotary, given, partial(module.reference_rotary, **how), dynamic, how)


def quantised_matmul() -> Case:
    module = example("quantised_matmul")

    def given(dtype: torch.dtype, size: int) -> tuple[Tensor, ...]:
        whole = random_of_20_bits if dtype == torch.int64 else bytes_of
        scales = (random(*sizes, dtype=floating(dtype)) / 1024 for sizes in ((), (7,)))
        return whole(size, 2 * size, 40), whole(40, 7), *scales, whole(), whole(7)

    dynamic = ({0: "batch", 1: "length"}, *(None for _ in range(5)))
    return Case(module.matmul, given, module.reference, dynamic)


def run_lengths() -> Case:
    def given(dtype: torch.dtype, size: int) -> tuple[Tensor, ...]:
        if dtype == torch.float64:  # for finite differences, which would part neighbours that are equal
            return (torch.arange(50 * size).to(dtype) % 7,)
        return (torch.randint(-2, 3, (50 * size,)).to(dtype),)

    def reference(x: Tensor) -> tuple[Tensor, Tensor]:
        _, lengths = torch.unique_consecutive(x, return_counts=True)
        return x[lengths.cumsum(0) - lengths], lengths

    return Case(example("run_lengths").run_lengths, given, reference, ({0: "length"},))


MADE: dict[str, Callable[[], Case]] = {
    "group norm": group_norm,
    "rotary": partial(rotary, False, False),
    "rotary, interleaved, with positions": partial(rotary, True, True),
    "quantised matmul": quantised_matmul,
    "run lengths": run_lengths,
}
"""Every example. What is checked under "Every example" is checked for each of them."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64)
"""And in each of these: of floating point, or, for int64, of whole numbers with float32 where the rest is not whole."""


@pytest.fixture
def case(request: pytest.FixtureRequest) -> Case:
    return MADE[request.param]()


@pytest.fixture(autouse=True)
def sizes_that_kernels_know_are_captured() -> Iterator[None]:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield


every = pytest.mark.parametrize("case", MADE, indirect=True)
in_each = pytest.mark.parametrize("dtype", DTYPES, ids=str)
by_each = pytest.mark.parametrize("backend", ["inductor", "sardonyx"])


def trained_in(*dtypes: torch.dtype) -> pytest.MarkDecorator:
    """Every example in each of the dtypes; run lengths of whole numbers have nothing to train."""
    pairs = [(name, dtype) for name in MADE for dtype in dtypes if (name, dtype) != ("run lengths", torch.int64)]
    return pytest.mark.parametrize(("case", "dtype"), pairs, indirect=["case"], ids=str)


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def plain(op: sardonyx.CustomOp, model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    """A session as one makes it without sardonyx."""
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(op.library))
    return onnxruntime.InferenceSession(model.SerializeToString(), options)


def wide(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def wanting_gradients(given: Iterable[Tensor]) -> list[Tensor]:
    """Leaves; whole numbers as they are."""
    return [x.detach().clone().requires_grad_(x.is_floating_point()) for x in given]


def gradients(function: Callable[..., Any], *given: Tensor) -> tuple[Tensor, ...]:
    """Those of a sum in which each number of the first result weighs something else, that every dtype can hold."""
    with torch.enable_grad():
        leaves = wanting_gradients(given)
        result = function(*leaves)
        y = result[0] if isinstance(result, tuple) else result
        weights = (torch.arange(y.numel()) % 7 - 3).to(y.dtype).view(y.shape)
        return torch.autograd.grad((y * weights).sum(), [x for x in leaves if x.requires_grad])


class Call(torch.nn.Module):
    """A module that does nothing else."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.op, self.attributes = case.op, case.attributes

    def forward(self, *given: Tensor) -> Any:
        return self.op(*given, **self.attributes)


def compiled(case: Case, backend: str, **how: Any) -> Any:
    options = {"fallback": "error"} if backend == "sardonyx" else {}
    return torch.compile(Call(case), backend=backend, options=options, fullgraph=True, **how)


# Every example


@every
@in_each
def test_it_is_right_to_the_last_digit(case: Case, dtype: torch.dtype) -> None:
    given = case.given(dtype, 2)
    expected, found = case.reference(*map(wide, given)), case(*given)
    if isinstance(found, tuple):
        assert found[0].dtype == dtype
        assert_same(found, tuple(e.to(f.dtype) for e, f in zip(expected, found, strict=True)))
    else:
        assert found.dtype == floating(dtype)
        # half a unit for the result's own rounding; what is computed in float32 before may add a little
        atol = 1e-6 if dtype == torch.int64 else 2e-7
        torch.testing.assert_close(found.double(), expected, rtol=2 * HALF_A_UNIT[found.dtype], atol=atol)


@every
def test_a_dtype_that_it_has_no_kernel_for_is_refused_by_name(case: Case) -> None:
    good = case.given(torch.float32, 2)
    bad, said = (good[0].to(torch.int32), *good[1:]), f"{case.op.signature.qualified}: .* is int32, and can be "
    with pytest.raises(RuntimeError, match=said):
        case(*bad)
    with pytest.raises(TypeError, match=said):
        torch.export.export(Call(case), bad)
    proto = sardonyx.export(Call(case).eval(), good).proto()
    proto.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.INT32
    with pytest.raises(Exception, match=f"{case.op.signature.name}.*int32|int32.*{case.op.signature.name}"):
        plain(case.op, proto)


@every
@in_each
def test_inputs_need_not_be_contiguous(case: Case, dtype: torch.dtype) -> None:
    given = case.given(dtype, 2)
    program = sardonyx.export(Call(case).eval(), given)
    strided = tuple(x.repeat_interleave(2, -1)[..., ::2] if x.dim() else x for x in given)
    turned = tuple(x.mT.contiguous().mT if x.dim() > 1 else x for x in given)
    assert not any(x.is_contiguous() for x in strided if x.dim())
    for other in (strided, turned):
        assert_same(case(*other), case(*given))
        assert_same(program(*other), case(*given))


@every
@in_each
def test_torch_finds_nothing_wrong_with_it(case: Case, dtype: torch.dtype) -> None:
    with torch.enable_grad():
        given = tuple(wanting_gradients(case.given(dtype, 2)))
        found = torch.library.opcheck(case.op.operator, given, case.attributes)
    assert set(found.values()) == {"SUCCESS"}


@every
def test_its_gradient_is_its_slope(case: Case) -> None:
    with torch.enable_grad():
        assert torch.autograd.gradcheck(case, wanting_gradients(case.given(torch.float64, 1)))


@every
def test_whole_numbers_have_no_gradient_and_what_is_beside_them_has_its_slope(case: Case) -> None:
    with torch.enable_grad():
        given = wanting_gradients(map(wide, case.given(torch.int64, 1)))
        if any(x.requires_grad for x in given):
            assert torch.autograd.gradcheck(case, given)
        else:
            assert not any(x.requires_grad for x in case(*given))


@trained_in(*DTYPES)
def test_its_gradient_is_near_that_of_double_precision(case: Case, dtype: torch.dtype) -> None:
    given = case.given(dtype, 2)
    for found, expected in zip(gradients(case, *given), gradients(case.reference, *map(wide, given)), strict=True):
        tolerance = 16 * HALF_A_UNIT[found.dtype]
        torch.testing.assert_close(
            found.double(), expected, rtol=tolerance, atol=tolerance * expected.abs().max().item()
        )


@every
@in_each
def test_it_is_exported_for_any_size(case: Case, dtype: torch.dtype) -> None:
    dims: dict[str, Any] = {}
    shapes = tuple(
        {at: dims.setdefault(name, torch.export.Dim(name)) for at, name in sizes.items()} if sizes else None
        for sizes in case.dynamic
    )
    exported = torch.export.export(Call(case), case.given(dtype, 2), dynamic_shapes=(shapes,))
    for size in (2, 5):
        given = case.given(dtype, size)
        assert_same(exported.module()(*given), case(*given))


@every
@in_each
def test_onnx_runtime_gives_torchs_result_for_any_size(case: Case, dtype: torch.dtype) -> None:
    program = sardonyx.export(Call(case).eval(), case.given(dtype, 2), dynamic_shapes={"given": case.dynamic})
    assert [node.op_type for node in program.model.graph] == [case.op.signature.name]
    for size in (2, 5):
        given = case.given(dtype, size)
        assert_same(program(*given), case(*given))


@every
@in_each
@by_each
def test_it_is_compiled_once_for_all_sizes(case: Case, dtype: torch.dtype, backend: str) -> None:
    run = compiled(case, backend, dynamic=True)
    for size in (2, 5):
        given = case.given(dtype, size)
        with torch.compiler.set_stance("fail_on_recompile" if size == 5 else "default"):
            assert_same(run(*given), case(*given))


@trained_in(torch.float32, torch.int64)
@by_each
def test_compiled_it_has_the_same_gradient(case: Case, dtype: torch.dtype, backend: str) -> None:
    given = case.given(dtype, 2)
    for found, expected in zip(gradients(compiled(case, backend), *given), gradients(case, *given), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


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
