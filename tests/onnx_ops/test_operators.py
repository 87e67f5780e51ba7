"""ONNX's operators, called from torch: right values on the CPU and on the device, traced, compiled and exported."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_leaves, tree_map_only

import sardonyx
from sardonyx import onnx_ops
from sardonyx.errors import AutogradError, EngineError
from sardonyx.onnx_ops import page
from sardonyx.onnx_ops.schemas import OUTPUTS, find_operator

from .node_tests import Case, cases
from .samples import SAMPLES, Sample

onnx_ops.register()
ort = torch.ops.ort

PAGE = Path(__file__).resolve().parents[2] / "docs" / "onnx-operators.md"

PLAIN = [x.name for x in onnx_ops.operators() if not x.domain]

REFUSED = {
    "test_attention_4d_attn_mask_causal_bf16": "a part of it has no kernel for bfloat16",
    "test_attention_4d_with_past_and_present_qk_matmul_bias_3d_mask_causal": "its scores are not ONNX's",
    "test_attention_4d_with_past_and_present_qk_matmul_bias_4d_mask_causal": "its scores are not ONNX's",
    "test_convinteger_with_padding": "a tensor of one element is no zero point for the kernel",
    "test_gru_batchwise": "the kernel has no layout 1",
    "test_lstm_batchwise": "the kernel has no layout 1",
    "test_simple_rnn_batchwise": "the kernel has no layout 1",
    "test_maxunpool_export_with_output_shape": "the kernel puts values elsewhere",
    "test_reduce_max_empty_set_bool": "the kernel has no maximum of no booleans",
}
"""What ONNX tests and ONNX Runtime does not do, or not as ONNX says: an error."""

OTHERWISE = {
    "test_resize_downsample_scales_linear_align_corners": "sizes are rounded before coordinates are computed",
    "test_resize_downsample_scales_cubic_align_corners": "sizes are rounded before coordinates are computed",
    **dict.fromkeys(("test_training_dropout", "test_training_dropout_mask"), "other random numbers"),
    **dict.fromkeys(("test_training_dropout_default", "test_training_dropout_default_mask"), "other random numbers"),
}
"""Where ONNX Runtime's numbers are others for a reason."""

NO_KERNEL = "Could not find an implementation"


def tolerance(case: Case) -> dict[str, float]:
    """ONNX's own tests are run with a relative 1e-3; sums of many sines are near zero, half precision is coarse."""
    if case.operator.name in ("dft", "stft"):
        return {"rtol": 1e-3, "atol": 5e-4}
    half = any(x.dtype in (torch.float16, torch.bfloat16) for x in case.expected)
    return {"rtol": 5e-3, "atol": 1e-3} if half else {"rtol": 1e-3, "atol": 1e-5}


def results_of(case: Case) -> list[torch.Tensor] | None:
    """None for a call that is refused, as only some may be; those of another version may be called otherwise."""
    try:
        return case.call()
    except RuntimeError as error:
        if not case.same_version or case.name in REFUSED or NO_KERNEL in str(error):
            return None
        raise


@pytest.mark.parametrize("name", PLAIN)
def test_onnxs_own_tests_of_a_node(name: str) -> None:
    given = [tree_map_only(torch.Tensor, torch.clone, case.args) for case in cases()[name]]
    tried = [(case, results) for case in cases()[name] if (results := results_of(case)) is not None]
    assert tried
    for before, case in zip(given, cases()[name], strict=True):
        torch.testing.assert_close(case.args, before, rtol=0, atol=0, equal_nan=True, allow_subclasses=False)
    for case, results in tried:
        assert case.name not in REFUSED, f"{case.name} works now"
        memory = {x.data_ptr() for x in tree_leaves(case.args) if isinstance(x, torch.Tensor) and x.numel()}
        assert not any(x.data_ptr() in memory for x in results if x.numel()), f"{case.name}: a result is an operand"
        for result, expected in zip(results, case.expected, strict=True):
            if case.name in OTHERWISE:
                assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
            else:
                torch.testing.assert_close(result, expected, **tolerance(case), equal_nan=True)


@pytest.mark.parametrize("name", PLAIN)
def test_fake_tensors_are_like_the_real_results(name: str) -> None:
    for case in cases()[name]:
        results = results_of(case)
        if results is not None and case.same_version:
            for symbolic in (False, True):
                check_fake(case.name, case.call, case.args, results, symbolic)


def check_fake(
    what: str, call: Callable[[Any], list[torch.Tensor]], args: Any, results: list[torch.Tensor], symbolic: bool
) -> None:
    """Fake tensors with sizes that are numbers or symbols, whose values are those of the real ones."""
    environment = ShapeEnv(allow_dynamic_output_shape_ops=True, assume_static_by_default=not symbolic)
    mode = FakeTensorMode(shape_env=environment)
    given = tree_map_only(torch.Tensor, mode.from_tensor, args)
    try:
        with mode:
            fakes = call(given)
    except DynamicOutputShapeException:
        return  # even the number of dimensions depends on values
    for fake, result in zip(fakes, results, strict=True):
        assert fake.dtype == result.dtype, what
        sizes = [size_in(size, real) for size, real in zip(fake.shape, result.shape, strict=True)]
        assert sizes == list(result.shape), (what, symbolic, fake.shape, result.shape)


def size_in(size: Any, real: int) -> int:
    if not isinstance(size, torch.SymInt):
        return int(size)
    return int(size.node.hint) if size.node.has_hint() else real


@pytest.mark.parametrize("name", PLAIN)
def test_on_the_device_as_on_the_cpu(name: str) -> None:
    for case in cases()[name][:2]:
        expected = results_of(case)
        if expected is None or case.operator.is_random:
            continue
        results = case.call(tree_map_only(torch.Tensor, lambda x: x.to("ort"), case.args))
        assert all(x.device == torch.device("ort", 0) for x in results)
        for result, wanted in zip(results, expected, strict=True):
            torch.testing.assert_close(result.cpu(), wanted, rtol=0, atol=0, equal_nan=True)


# Microsoft's, and those of the old system


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
@pytest.mark.parametrize("device", ["cpu", "ort"])
def test_values_are_right(sample: Sample, device: str) -> None:
    expected, results = sample.expected(), sample.call(tree_map_only(torch.Tensor, lambda x: x.to(device), sample.args))
    assert {x.device.type for x in results} == {device}
    for result, wanted in zip(results, expected, strict=True):
        assert result.dtype == wanted.dtype or wanted.dtype == torch.float64
        torch.testing.assert_close(result.cpu(), wanted.to(result.dtype), rtol=sample.tolerance, atol=sample.tolerance)


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_fake_tensors_are_like_microsofts_results(sample: Sample) -> None:
    results = sample.call(sample.args)
    for symbolic in (False, True):
        check_fake(sample.name, sample.call, sample.args, results, symbolic)


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_torch_finds_nothing_wrong(sample: Sample) -> None:
    operator = getattr(ort, sample.name)
    overload = operator.outputs if OUTPUTS in sample.kwargs and OUTPUTS in operator.overloads() else operator.default
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(overload, sample.args, sample.kwargs, test_utils=checks[: 4 if sample.compiles else 3])


@pytest.mark.parametrize("sample", [x for x in SAMPLES if x.compiles], ids=str)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_it_is_that_very_node(sample: Sample, dynamic: bool) -> None:
    run = torch.compile(
        lambda *args: sample.call(list(args)), backend="sardonyx", dynamic=dynamic, options={"fallback": "error"}
    )
    for result, wanted in zip(run(*sample.args), sample.expected(), strict=True):
        torch.testing.assert_close(result, wanted.to(result.dtype), rtol=sample.tolerance, atol=sample.tolerance)


@pytest.mark.parametrize("sample", [x for x in SAMPLES if x.compiles], ids=str)
def test_exported_it_is_that_very_node(sample: Sample) -> None:
    class Module(torch.nn.Module):
        def forward(self, *args: Any) -> Any:
            return sample.call(list(args))

    program = sardonyx.export(Module(), tuple(sample.args), optimize="none")
    operator = find_operator(sample.name) if sample.name not in BEFORE else find_operator(BEFORE[sample.name])
    assert (operator.domain, operator.op_type) in [(x.domain, x.op_type) for x in program.model.graph]
    onnx.checker.check_model(program.proto()) if not operator.domain else None
    results = program(*sample.args)
    results = [results] if isinstance(results, torch.Tensor) else results
    for result, wanted in zip(results, sample.expected(), strict=True):
        torch.testing.assert_close(result, wanted.to(result.dtype), rtol=sample.tolerance, atol=sample.tolerance)


BEFORE = {"my_cat": "concat"}


def test_inductor_calls_it() -> None:
    def block(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return ort.quick_gelu(ort.gemm(x * 2, weight, transB=1)) + 1

    run = torch.compile(block, backend="inductor", fullgraph=True, dynamic=True)
    weight = torch.randn(4, 3)
    for rows in (2, 5):
        x = torch.randn(rows, 3)
        y = (x.double() * 2) @ weight.double().t()
        torch.testing.assert_close(run(x, weight), (y * torch.sigmoid(1.702 * y) + 1).float(), rtol=1e-5, atol=1e-5)


def test_one_compilation_serves_every_size() -> None:
    counter = CompileCounterWithBackend("sardonyx")

    def block(x: torch.Tensor, y: torch.Tensor, image: torch.Tensor) -> Any:
        joined = ort.concat([x, y], axis=0)
        return ort.fused_matmul(joined, joined, transB=1), ort.max_pool(image, kernel_shape=[2, 3], strides=[2, 1])

    run = torch.compile(block, backend=counter, fullgraph=True, dynamic=True)
    for n, m, h in ((2, 5, 9), (3, 4, 12), (7, 6, 11)):
        x, y, image = torch.randn(n, 8), torch.randn(m, 8), torch.randn(6, 3, h, h + 1)
        product, pooled = run(x, y, image)
        joined = torch.cat([x, y])
        torch.testing.assert_close(product, joined @ joined.t(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(pooled, F.max_pool2d(image, (2, 3), (2, 1)))
    assert counter.frame_count == 1


def test_sizes_that_depend_on_values_are_left_open() -> None:
    x = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        run = torch.compile(lambda x: ort.non_zero(x) + 1, backend="sardonyx", fullgraph=True)
        assert run(x).tolist() == [[1, 2], [2, 1]]
        assert run(torch.ones(2, 2)).shape == (2, 4)


def test_without_that_the_graph_breaks_there() -> None:
    run = torch.compile(lambda x: ort.non_zero(x) + 1, backend="sardonyx")
    assert run(torch.tensor([[0.0, 1.0], [2.0, 0.0]])).tolist() == [[1, 2], [2, 1]]


# What the old system had


@pytest.mark.parametrize("device", ["cpu", "ort"])
def test_gemm_takes_its_attributes_by_position_too(device: str) -> None:
    ones = torch.ones(3, 3, device=device)
    assert ort.gemm(ones, ones, ones, 1.0, 1.0, 0, 0).tolist() == [[4.0] * 3] * 3
    a, b, c = torch.randn(4, 2), torch.randn(3, 4), torch.randn(3)
    expected = 0.5 * a.double().t() @ b.double().t() + 2 * c.double()
    result = ort.gemm(*(x.to(device) for x in (a, b, c)), 0.5, 2.0, 1, 1)
    torch.testing.assert_close(result.cpu().double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", ["cpu", "ort"])
def test_batchnorm_inplace_writes_to_three_of_its_operands(device: str) -> None:
    x, scale, bias = torch.randn(4, 2, 3, dtype=torch.float32), torch.tensor([1.0, 1.5]), torch.tensor([0.0, 1.0])
    mean, var = torch.tensor([0.0, 3.0]), torch.tensor([1.0, 1.5])
    own = [t.clone().to(device) for t in (x, scale, bias, mean, var)]
    y, mean_out, var_out = ort.batchnorm_inplace(*own, 1e-5, 0.9)
    assert [x.data_ptr() for x in (y, mean_out, var_out)] == [own[i].data_ptr() for i in (0, 3, 4)]
    expected = F.batch_norm(x.double(), None, None, scale.double(), bias.double(), training=True, eps=1e-5)
    torch.testing.assert_close(own[0].cpu().double(), expected, rtol=1e-5, atol=1e-5)
    batch = x.transpose(0, 1).reshape(2, -1).double()
    torch.testing.assert_close(own[3].cpu().double(), mean * 0.9 + batch.mean(1) * 0.1, rtol=1e-5, atol=1e-5)
    wanted = var * 0.9 + batch.var(1, unbiased=False) * 0.1
    torch.testing.assert_close(var_out.cpu().double(), wanted, rtol=1e-5, atol=1e-5)


def test_batchnorm_inplace_is_compiled_as_what_it_is_composed_of() -> None:
    given = [torch.randn(4, 2, 3), torch.ones(2), torch.zeros(2), torch.zeros(2), torch.ones(2)]
    eager = [x.clone() for x in given]
    ort.batchnorm_inplace(*eager, 1e-5, 0.9)
    run = torch.compile(
        lambda *args: ort.batchnorm_inplace(*args, 1e-5, 0.9)[0] * 2, backend="sardonyx", options={"fallback": "error"}
    )
    torch.testing.assert_close(run(*given), eager[0] * 2)
    for a, b in zip(given, eager, strict=True):
        torch.testing.assert_close(a, b)
    torch.library.opcheck(ort.batchnorm_inplace.default, (*(x.clone() for x in eager), 1e-5, 0.9))


# How it is called


@pytest.mark.parametrize("operator", onnx_ops.operators(), ids=lambda x: x.name)
def test_torch_has_the_schema(operator: Any) -> None:
    for overload in operator.overloads():
        registered = getattr(getattr(ort, operator.name), overload or "default")._schema
        assert registered == torch._C.parse_schema(f"ort::{operator.schema(overload)}")
        assert not any(a.alias_info for a in registered.arguments)


def test_names_are_told_apart() -> None:
    names = [x.name for x in onnx_ops.operators()]
    assert len(names) == len(set(names))
    assert all(name.isidentifier() for name in names)
    assert {"attention", "microsoft_attention", "qlinear_matmul", "matmul_nbits", "group_query_attention"} <= set(names)


def test_outputs_are_chosen_by_their_indices() -> None:
    x, scale = torch.randn(3, 8), torch.ones(8)
    y, mean, inverse = ort.layer_normalization(x, scale, outputs=[0, 1, 2])
    assert isinstance(ort.layer_normalization(x, scale), torch.Tensor)
    (again,) = ort.layer_normalization(x, scale, outputs=[2])
    torch.testing.assert_close(again, inverse, rtol=0, atol=0)
    torch.testing.assert_close(mean, x.mean(1, keepdim=True))
    torch.testing.assert_close(y, F.layer_norm(x, (8,)), rtol=1e-5, atol=1e-5)
    assert [p.shape for p in ort.split(torch.arange(7.0), num_outputs=3, outputs=3)] == [(3,), (3,), (1,)]


@pytest.mark.parametrize("outputs", [[], [0, 0], [3], [-1]])
def test_outputs_that_there_are_not(outputs: list[int]) -> None:
    with pytest.raises(EngineError, match=r"ort::layer_normalization: outputs is .* 0: Y, 1: Mean, 2: InvStdDev"):
        ort.layer_normalization(torch.ones(2, 3), torch.ones(3), outputs=outputs)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda x: ort.gemm(x, x.long()), r"ort::gemm: .*bound to different types \(tensor\(float\) and tensor\(int"),
        (lambda x: ort.gemm(x[None], x), r"ort::gemm: .*expected to have rank 2 but has rank 3"),
        (lambda x: ort.gemm(x, x[:2]), r"ort::gemm: .*Dimension mismatch"),
        (lambda x: ort.gelu(x.long()), r"ort::gelu: .*'tensor\(int64\)' of input parameter"),
        (lambda x: ort.gelu(x.to(torch.complex64)), r"ort::gelu: ONNX has no tensors of dtype torch.complex64"),
        (lambda x: ort.gelu(x.bfloat16()), r"ort::gelu: .*Could not find an implementation"),
        (lambda x: ort.gelu(x, approximate="quick"), r"ort::gelu: .*approximat"),
        (lambda x: ort.leaky_relu(x, alpha=1e300), r"ort::leaky_relu: alpha is 1e\+300, which overflows"),
        (lambda x: ort.gelu(x, kind="tanh"), r"Unknown keyword argument 'kind' for operator 'ort::gelu'"),
        (lambda x: ort.concat([], axis=0), r"ort::concat"),
        (lambda x: ort.add(x, x.to("ort")), r"ort::add: tensors are on cpu and ort:0"),
        (lambda x: ort.inverse(x[:2]), r"ort::inverse: the matrices are not square: \(2, 3\)"),
        (lambda x: ort.unique(x[:0]), r"ort::unique: a tensor is empty"),
        (lambda x: ort.skip_layer_normalization(x, x[:0], x[0]), r"ort::skip_layer_normalization: a tensor is empty"),
        (lambda x: ort.stft(x[None], torch.tensor(0)), r"ort::stft: the frame step or frame length is not positive"),
        (lambda x: ort.multi_head_attention(x, x, x, num_heads=0), r"ort::multi_head_attention: num_heads is 0"),
        (lambda x: ort.max_unpool(x[None, None], x[None, None].long(), torch.tensor([1, 1, 9, 9]), kernel_shape=[2, 2]),
         r"ort::max_unpool: with an output_shape"),
    ],
)  # fmt: skip
def test_an_error_names_the_operator_and_the_cause(call: Callable[[torch.Tensor], Any], match: str) -> None:
    with pytest.raises(RuntimeError, match=re.compile(match, re.DOTALL)) as error:
        call(torch.ones(3, 3))
    assert str(error.value).count("ort::") <= 2


@pytest.mark.parametrize("device", ["cpu", "ort"])
def test_a_gradient_that_is_asked_for_is_an_error(device: str) -> None:
    with torch.enable_grad():
        x = torch.randn(2, 3, device=device).requires_grad_()
        loss = ort.gelu(x).sum()
        with pytest.raises(AutogradError, match="ort::gelu has no gradient"):
            loss.backward()
        (y, _) = ort.dropout(x, outputs=[0, 1])
        with pytest.raises(AutogradError, match="ort::dropout has no gradient"):
            y.sum().backward()
        assert not ort.gelu(x.detach()).requires_grad


def test_strides_and_sizes_at_the_edge() -> None:
    x = torch.randn(4, 6)
    for device in ("cpu", "ort"):
        given = x.to(device)
        torch.testing.assert_close(ort.neg(given.t()[::2]).cpu(), -x.t()[::2])
        torch.testing.assert_close(ort.neg(given[0, 0]).cpu(), -x[0, 0])
        torch.testing.assert_close(ort.concat([given[:0], given[:, :6]], axis=0).cpu(), x)
        assert ort.neg(given[:0]).shape == (0, 6)
        assert ort.logical_not(given > 0).cpu().equal(x <= 0)


def test_results_own_their_memory() -> None:
    x = torch.randn(4)
    y = ort.identity(x)
    y.add_(1)
    torch.testing.assert_close(y - 1, x)
    kept = [ort.neg(torch.full((1000,), float(i))) for i in range(50)]
    assert [int(k[0]) for k in kept] == [-i for i in range(50)]
    assert all(np.ptp(k.numpy()) == 0 for k in kept)


def test_registering_again_does_nothing() -> None:
    before = ort.gelu.default
    onnx_ops.register()
    assert ort.gelu.default is before


def test_the_page_is_up_to_date() -> None:
    text = PAGE.read_text()
    if page.versions_used() not in text:
        pytest.skip(f"the page is for another version than {onnxruntime.__version__}")
    assert page.update_page(text) == text, "python -m sardonyx.onnx_ops.page docs/onnx-operators.md"
