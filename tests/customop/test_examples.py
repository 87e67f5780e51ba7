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
    differentiable: bool = True

    def __call__(self, *given: Tensor) -> Any:
        return self.op(*given, **self.attributes)


def example(name: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        return import_module(name)


def random(*sizes: int, dtype: torch.dtype) -> Tensor:
    """Normal, or small integers."""
    return torch.randint(-3, 4, sizes, dtype=dtype) if dtype == torch.int64 else torch.randn(sizes).to(dtype)


def bytes_of(*sizes: int) -> Tensor:
    return torch.randint(-128, 128, sizes, dtype=torch.int8)


def group_norm() -> Case:
    def given(dtype: torch.dtype, size: int) -> tuple[Tensor, ...]:
        return tuple(random(*sizes, dtype=dtype) for sizes in ((size, 6, 5, 2 * size), (6,), (6,)))

    def reference(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.nn.functional.group_norm(x, 2, weight, bias, EPSILON)

    dynamic = ({0: "batch", 3: "width"}, None, None)
    how = {"num_groups": 2, "epsilon": EPSILON}
    return Case(example("group_norm").group_norm, given, reference, dynamic, how)


def rotary(interleaved: bool) -> Case:
    module = example("rotary")

    def given(dtype: torch.dtype, size: int) -> tuple[Tensor, ...]:
        return tuple(random(*sizes, dtype=dtype) for sizes in ((size, 5, 3 * size, 8), (3 * size, 4), (3 * size, 4)))

    dynamic = ({0: "batch", 2: "length"}, {0: "length"}, {0: "length"})
    how = {"interleaved": interleaved}
    return Case(module.rotary, given, partial(module.reference_rotary, **how), dynamic, how)


def quantised_matmul() -> Case:
    module = example("quantised_matmul")

    def given(dtype: torch.dtype, size: int) -> tuple[Tensor, ...]:
        scales = random(dtype=dtype) / 64, random(7, dtype=dtype) / 64
        return bytes_of(size, 2 * size, 40), bytes_of(40, 7), *(s.to(dtype) for s in scales), bytes_of(), bytes_of(7)

    dynamic = ({0: "batch", 1: "length"}, *(None for _ in range(5)))
    return Case(module.matmul, given, module.reference, dynamic, differentiable=False)


def run_lengths() -> Case:
    def given(dtype: torch.dtype, size: int) -> tuple[Tensor, ...]:
        return (torch.randint(-2, 3, (50 * size,)).to(dtype),)

    def reference(x: Tensor) -> tuple[Tensor, Tensor]:
        values, lengths = torch.unique_consecutive(x, return_counts=True)
        return values, lengths

    dynamic = ({0: "length"},)
    return Case(example("run_lengths").run_lengths, given, reference, dynamic, differentiable=False)


MADE: dict[str, Callable[[], Case]] = {
    "group norm": group_norm,
    "rotary": partial(rotary, False),
    "rotary, interleaved": partial(rotary, True),
    "quantised matmul": quantised_matmul,
    "run lengths": run_lengths,
}
WHOLE = {"run lengths": (torch.int64,)}
"""What takes whole numbers beside floating point; the others refuse them."""
DIFFERENTIABLE = [name for name in MADE if name.startswith(("group", "rotary"))]


@pytest.fixture
def case(request: pytest.FixtureRequest) -> Case:
    return MADE[request.param]()


@pytest.fixture(autouse=True)
def sizes_that_kernels_know_are_captured() -> Iterator[None]:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield


every = pytest.mark.parametrize("case", MADE, indirect=True)
differentiable = pytest.mark.parametrize("case", DIFFERENTIABLE, indirect=True)


def in_each(names: Iterable[str]) -> pytest.MarkDecorator:
    """Each operator in each of the dtypes that it has kernels for."""
    pairs = [(name, dtype) for name in names for dtype in (*HALF_A_UNIT, *WHOLE.get(name, ()))]
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


def gradients(function: Callable[..., Tensor], *given: Tensor) -> tuple[Tensor, ...]:
    """Those of a sum in which each number weighs something else, that every dtype can hold."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in given]
        y = function(*leaves)
        weights = (torch.arange(y.numel()) % 7 - 3).to(y.dtype).view(y.shape)
        return torch.autograd.grad((y * weights).sum(), leaves)


# Right


@in_each(MADE)
def test_it_is_right_to_the_last_digit(case: Case, dtype: torch.dtype) -> None:
    given = case.given(dtype, 2)
    expected = case.reference(*map(wide, given))
    found = case(*given)
    if isinstance(found, tuple):
        assert_same(found, tuple(e.to(f.dtype) for e, f in zip(expected, found, strict=True)))
    else:
        assert found.dtype == dtype
        # half a unit for the result's own rounding; what is computed in float32 before may add a little
        torch.testing.assert_close(found.double(), expected, rtol=2 * HALF_A_UNIT[dtype], atol=2e-7)


@pytest.mark.parametrize("case", [name for name in MADE if name not in WHOLE], indirect=True)
def test_a_dtype_that_it_has_no_kernel_for_is_refused_by_name(case: Case) -> None:
    good = case.given(torch.float32, 2)
    bad, said = (good[0].to(torch.int64), *good[1:]), f"{case.op.signature.qualified}: .* is int64, and can be "
    with pytest.raises(RuntimeError, match=said):
        case(*bad)
    with pytest.raises(TypeError, match=said):
        torch.export.export(Call(case), bad)
    proto = sardonyx.export(Call(case).eval(), good).proto()
    proto.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.INT64
    with pytest.raises(Exception, match=f"{case.op.signature.name}.*int64|int64.*{case.op.signature.name}"):
        plain(case.op, proto)


@every
def test_inputs_need_not_be_contiguous(case: Case) -> None:
    given = case.given(torch.float32, 2)
    strided = tuple(x.repeat_interleave(2, -1)[..., ::2] if x.dim() else x for x in given)
    assert not any(x.is_contiguous() for x in strided if x.dim())
    assert_same(case(*strided), case(*given))
    turned = tuple(x.mT.contiguous().mT if x.dim() > 1 else x for x in given)
    assert_same(case(*turned), case(*given))


@every
def test_torch_finds_nothing_wrong_with_it(case: Case) -> None:
    with torch.enable_grad():
        given = [x.requires_grad_(case.differentiable) for x in case.given(torch.float32, 2)]
        found = torch.library.opcheck(case.op.operator, tuple(given), case.attributes)
    assert set(found.values()) == {"SUCCESS"}


@differentiable
def test_its_gradient_is_its_slope(case: Case) -> None:
    with torch.enable_grad():
        assert torch.autograd.gradcheck(case, [x.requires_grad_() for x in case.given(torch.float64, 1)])


@in_each(DIFFERENTIABLE)
def test_its_gradient_is_near_that_of_double_precision(case: Case, dtype: torch.dtype) -> None:
    given = case.given(dtype, 2)
    for found, expected in zip(gradients(case, *given), gradients(case.reference, *map(wide, given)), strict=True):
        tolerance = 16 * HALF_A_UNIT[dtype]
        torch.testing.assert_close(
            found.double(), expected, rtol=tolerance, atol=tolerance * expected.abs().max().item()
        )


# Out of torch


class Call(torch.nn.Module):
    """A module that does nothing else."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.op, self.attributes = case.op, case.attributes

    def forward(self, *given: Tensor) -> Any:
        return self.op(*given, **self.attributes)


@every
def test_it_is_exported_for_any_size(case: Case) -> None:
    dims: dict[str, Any] = {}
    shapes = tuple(
        {at: dims.setdefault(name, torch.export.Dim(name)) for at, name in sizes.items()} if sizes else None
        for sizes in case.dynamic
    )
    exported = torch.export.export(Call(case), case.given(torch.float32, 2), dynamic_shapes=(shapes,))
    for size in (2, 5):
        given = case.given(torch.float32, size)
        assert_same(exported.module()(*given), case(*given))


@in_each(MADE)
def test_onnx_runtime_gives_torchs_result_for_any_size(case: Case, dtype: torch.dtype) -> None:
    program = sardonyx.export(Call(case).eval(), case.given(dtype, 2), dynamic_shapes={"given": case.dynamic})
    assert [node.op_type for node in program.model.graph] == [case.op.signature.name]
    for size in (2, 5):
        given = case.given(dtype, size)
        assert_same(program(*given), case(*given))


@in_each(MADE)
@pytest.mark.parametrize("backend", ["inductor", "sardonyx"])
def test_it_is_compiled_once_for_all_sizes(case: Case, dtype: torch.dtype, backend: str) -> None:
    options = {"fallback": "error"} if backend == "sardonyx" else {}
    compiled = torch.compile(Call(case), backend=backend, options=options, dynamic=True, fullgraph=True)
    for size in (2, 5):
        given = case.given(dtype, size)
        with torch.compiler.set_stance("fail_on_recompile" if size == 5 else "default"):
            assert_same(compiled(*given), case(*given))


@differentiable
@pytest.mark.parametrize("backend", ["inductor", "sardonyx"])
def test_compiled_it_has_the_same_gradient(case: Case, backend: str) -> None:
    options = {"fallback": "error"} if backend == "sardonyx" else {}
    compiled = torch.compile(Call(case), backend=backend, options=options, fullgraph=True)
    given = case.given(torch.float32, 2)
    for found, expected in zip(gradients(compiled, *given), gradients(case, *given), strict=True):
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


@pytest.mark.parametrize(
    ("sizes", "groups", "said"),
    [
        (((2, 6, 4), (6,), (6,)), 4, "the channels must be a multiple of num_groups"),
        (((2, 6, 4), (6,), (6,)), 0, "the channels must be a multiple of num_groups"),
        (((2, 6, 4), (6,), (5,)), 2, "weight and bias must have an element for each channel"),
        (((2, 6, 4), (6, 1), (6,)), 2, "weight has 2 dimensions, and must have 1"),
        (((6,), (6,), (6,)), 2, "asks for dimension 1 of a tensor of 1"),
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


def test_the_backward_of_rotary_refuses_a_gradient_of_other_sizes() -> None:
    x, table = torch.randn(1, 2, 5, 8), torch.randn(5, 4)
    with pytest.raises(RuntimeError, match="rotary::RotaryGrad: the gradient must have the sizes of x"):
        example("rotary").rotary_grad(x[:, :1], x, table, table, interleaved=False)


def test_quantised_products_do_not_overflow_at_the_greatest_depth() -> None:
    op, one = example("quantised_matmul").matmul, torch.ones(())
    a, b = (torch.full(sizes, -128, dtype=torch.int8) for sizes in ((1, 131_071), (131_071, 1)))
    assert op(a, b, one, one[None]).item() == 131_071 * 2**14
    zero = torch.tensor(127, dtype=torch.int8)
    assert op(a, b, one, one[None], zero, zero[None]).item() == torch.tensor(131_071 * 255.0**2).item()
    with pytest.raises(RuntimeError, match="quantised::MatMul: sums of more than 131071 products can overflow"):
        op(a.new_zeros(1, 131_072), a.new_zeros(131_072, 1), one, one[None])


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


def test_what_follows_sizes_that_only_the_kernel_knows_is_compiled_too() -> None:
    longest, x = example("run_lengths").Longest().eval(), torch.randint(0, 2, (100,)).float()
    program = sardonyx.export(longest, (x,), dynamic_shapes=({0: "length"},))
    compiled = torch.compile(longest, backend="sardonyx", fullgraph=True, options={"fallback": "error"})
    for given in (x, torch.randint(0, 2, (37,)).float()):
        assert_same(program(given), longest(given))
        assert_same(compiled(given), longest(given))


# As programs


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
