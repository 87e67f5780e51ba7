"""The option `precision` in files: sardonyx.export, sardonyx.optimize and native.compile."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import sardonyx
from sardonyx import OptionError, Program, VerificationError
from sardonyx.precision.metric import relative_error
from sardonyx.run import layer_trials, precision_choice
from sardonyx.telemetry.report import PrecisionChoice

pytestmark = pytest.mark.usefixtures("ranked")

PRECISIONS = [("bf16", 0.02), ("int8", 0.1), ("int4", 0.5)]
WEIGHTS = {"bf16": onnx.TensorProto.BFLOAT16, "int8": onnx.TensorProto.INT8, "int4": onnx.TensorProto.UINT8}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64), nn.LayerNorm(64), nn.Linear(64, 48)).eval()


def inputs(rows: int = 20) -> torch.Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(1))


def exported(module: nn.Module, *args: torch.Tensor, **options: Any) -> Program:
    return sardonyx.export(module, args, **{"cache_dir": "", **options})


def choice_of(program: Program) -> PrecisionChoice:
    choice = program.report.precision
    assert choice is not None
    return choice


def precisions(program: Program) -> Sequence[str]:
    return [layer.precision for layer in choice_of(program).layers]


def in_stock_onnxruntime(model: onnx.ModelProto, *args: torch.Tensor) -> torch.Tensor:
    """Run a model without any library of ours."""
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [x.name for x in session.get_inputs()]
    return torch.from_numpy(session.run(None, {n: x.numpy() for n, x in zip(names, args, strict=True)})[0])


# What is in the file


@pytest.mark.parametrize(("precision", "bound"), PRECISIONS)
@pytest.mark.parametrize("domains", [None, ()])
def test_a_file_runs_in_stock_onnxruntime_within_the_bound(
    precision: str, bound: float, domains: tuple[()] | None
) -> None:
    module, x = model(), inputs()
    program = exported(module, x, precision=precision, max_drop=bound, domains=domains)
    proto = program.proto()
    onnx.checker.check_model(proto, full_check=True)
    result = in_stock_onnxruntime(proto, x)
    assert precisions(program) == [precision] * 3
    assert 0 < relative_error(result, module(x)) <= bound
    assert choice_of(program).drop == pytest.approx(relative_error(result, module(x)), rel=1e-3)
    torch.testing.assert_close(program(x), result)
    assert {x.domain for x in proto.opset_import} <= {""} if domains == () else {"", "com.microsoft"}


@pytest.mark.parametrize("precision", ["bf16", "int8", "int4"])
def test_no_float32_weight_is_left(precision: str) -> None:
    program = exported(model(), inputs(), precision=precision, max_drop=0.5)
    matrices = {x.name: x.data_type for x in program.proto().graph.initializer if len(x.dims) > 1}
    assert set(matrices.values()) == {WEIGHTS[precision]}


@pytest.mark.parametrize(("precision", "share"), [("bf16", 1 / 2), ("int8", 1 / 4), ("int4", 1 / 7)])
def test_a_file_is_smaller_by_its_bits(precision: str, share: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512)).eval(), torch.randn(4, 512)
    whole, small = exported(module, x), exported(module, x, precision=precision, max_drop=0.5)
    before, after = (program.save(tmp_path / "model.onnx").stat().st_size for program in (whole, small))
    assert after == pytest.approx(before * share, rel=0.05)


def test_layers_with_one_input_share_its_codes() -> None:
    class Projections(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(32, 32), nn.Linear(32, 48)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.q(x), self.k(x)

    torch.manual_seed(0)
    program = exported(Projections().eval(), torch.randn(5, 32), precision="int8", max_drop=0.1)
    assert program.report.operators["DynamicQuantizeLinear"] == 1
    assert program.report.operators["MatMulInteger"] == 2


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).view(2, 5, 4, 8).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 5, 32))


def test_projections_stay_layers_as_far_as_precision_is_lowered() -> None:
    torch.manual_seed(0)
    module, x = SelfAttention().eval(), torch.randn(2, 5, 32)
    operators = [
        {(node.domain, node.op_type) for node in exported(module, x, precision="int8", max_drop=bound).model.graph}
        for bound in (0.2, 0.0)
    ]
    fused = ("com.microsoft", "Attention")
    assert [fused in found for found in operators] == [False, True]
    assert precisions(exported(module, x, precision="int8", max_drop=0.2)) == ["int8"] * 4


@pytest.mark.parametrize("precision", ["bf16", "int8", "int4"])
def test_tied_weights_are_stored_once(precision: str) -> None:
    module = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).eval()
    module[2].weight = module[0].weight
    program = exported(module, inputs(), precision=precision, max_drop=0.9)
    assert len([x for x in program.proto().graph.initializer if len(x.dims) > 1]) == 1
    assert relative_error(program(inputs()), module(inputs())) < 0.3


@pytest.mark.parametrize("precision", ["bf16", "int8", "int4"])
def test_dynamic_sizes_stay_dynamic(precision: str) -> None:
    module, x = model(), inputs().view(4, 5, 64)
    shapes = ({0: "batch", 1: "tokens"},)
    program = exported(module, x, precision=precision, max_drop=0.5, dynamic_shapes=shapes)
    assert relative_error(program(x[:3, :2]), module(x[:3, :2])) < 0.5
    torch.testing.assert_close(program(x[:3, :2]), in_stock_onnxruntime(program.proto(), x[:3, :2].contiguous()))
    assert program(x[:0]).shape == (0, 5, 48)


@pytest.mark.parametrize("columns", [1, 48])
@pytest.mark.parametrize("depth", [1, 7, 65, 200])
@pytest.mark.parametrize("domains", [None, ()])
def test_weights_of_any_size_become_int4(depth: int, columns: int, domains: tuple[()] | None) -> None:
    torch.manual_seed(0)
    module, x = nn.Linear(depth, columns).eval(), torch.randn(9, depth)
    program = exported(module, x, precision="int4", max_drop=1.0, domains=domains)
    assert precisions(program) == ["int4"]
    assert relative_error(in_stock_onnxruntime(program.proto(), x), module(x)) < 0.2


@pytest.mark.parametrize("domains", [None, ()])
def test_smaller_blocks_of_int4_are_more_exact(domains: tuple[()] | None) -> None:
    torch.manual_seed(0)
    module, x = nn.Linear(256, 48).eval(), torch.randn(9, 256)
    module.weight.normal_()
    errors = []
    for block in (32, 64, 128):
        program = exported(module, x, precision="int4", max_drop=1.0, domains=domains, int4_block=block)
        onnx.checker.check_model(program.proto(), full_check=True)
        errors.append(relative_error(in_stock_onnxruntime(program.proto(), x), module(x)))
    assert 0 < errors[0] < errors[1] < errors[2] < 0.2


@pytest.mark.parametrize("depth", [64, 96, 256])  # of MatMulNBits with one block, an odd number, and an even one
@pytest.mark.parametrize("domains", [None, ()])
def test_weights_far_from_zero_have_zero_points(depth: int, domains: tuple[()] | None) -> None:
    torch.manual_seed(0)
    module, x = nn.Linear(depth, 48).eval(), torch.randn(9, depth)
    module.weight.add_(2.0)
    program = exported(module, x, precision="int4", max_drop=1.0, domains=domains, int4_block=32)
    nodes = [node for node in program.proto().graph.node if node.op_type in ("MatMulNBits", "DequantizeLinear")]
    assert [bool(node.input[3 if node.op_type == "MatMulNBits" else 2]) for node in nodes] == [True]
    assert relative_error(in_stock_onnxruntime(program.proto(), x), module(x)) < 0.05


# The bound


def test_a_layer_with_outliers_stays_in_a_higher_precision() -> None:
    module, x = model(), inputs()
    module[0].weight[:, 3] *= 1e-3  # what it multiplies is as large as before
    x[:, 3] *= 1e3  # and leaves the other channels two codes of 255
    program = exported(module, x, precision="int8", max_drop=0.05)
    assert precisions(program) == ["bf16", "int8", "int8"]
    assert relative_error(program(x), module(x)) <= 0.05


def test_channels_of_outliers_are_scaled_into_the_weight() -> None:
    module, x = model(), inputs(200)
    x[:, 3] *= 1e3
    program = exported(module, x, precision="int8", max_drop=0.05)
    assert precisions(program) == ["int8"] * 3
    assert relative_error(in_stock_onnxruntime(program.proto(), x), module(x)) <= 0.05
    assert "0.weight_channels" in program.model.graph.initializers


def test_a_remembered_choice_stores_weights_as_before(tmp_path: Path) -> None:
    module, x = model(), inputs(200)
    for precision in ("int8", "int4"):
        options = {"precision": precision, "max_drop": 0.5, "cache_dir": str(tmp_path)}
        first, second = (exported(module, x, **options) for _ in range(2))
        assert choice_of(second).remembered
        assert torch.equal(first(x), second(x))


def test_a_bound_of_zero_is_float32_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        program = exported(model(), inputs(), precision="int8", max_drop=0.0)
    torch.testing.assert_close(program(inputs()), model()(inputs()))
    assert "no layer in lower precision keeps the drop within max_drop=0.0" in caplog.text
    assert program.report.operators["MatMulInteger"] == 0


def test_the_bound_holds_for_every_calibration_call() -> None:
    module, x = model(), inputs()
    outliers = x.clone()
    outliers[:, 3] *= 1e3
    calls = [(x,), (outliers,)]
    program = exported(module, x, precision="int8", max_drop=0.05, calibration=calls)
    assert max(relative_error(program(y), module(y)) for y in (x, outliers)) <= 0.05
    assert precisions(program) != precisions(exported(module, x, precision="int8", max_drop=0.05))


def test_the_drop_may_be_the_users_own() -> None:
    seen: list[tuple[int, int]] = []

    def metric(results: Sequence[Any], references: Sequence[Any]) -> float:
        seen.append((len(results), len(references)))
        return 0.25

    options: dict[str, Any] = {"precision": "int8", "metric": metric, "calibration": [(inputs(),), (inputs(3),)]}
    shapes = ({0: "batch"},)
    assert set(precisions(exported(model(), inputs(), max_drop=0.5, dynamic_shapes=shapes, **options))) == {"int8"}
    assert set(precisions(exported(model(), inputs(), max_drop=0.2, dynamic_shapes=shapes, **options))) == {"float32"}
    assert set(seen) == {(1, 1)}


def test_auto_is_the_fastest() -> None:
    assert set(precisions(exported(model(), inputs(), precision="auto", max_drop=0.5))) == {"int4"}
    assert set(precisions(exported(model(), inputs(), precision="auto", max_drop=0.03))) <= {"int8", "bf16"}


def test_layers_that_are_slower_stay_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_trials, "in_turns", lambda calls, **_: [[1.0], *[[1.1]] * (len(calls) - 1)])
    program = exported(model(), inputs(), precision="int4", max_drop=0.5)
    assert "no layer is faster" in choice_of(program).remark
    assert set(precisions(program)) == {"float32"}


def test_a_model_that_is_slower_stays_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision_choice, "in_turns", lambda calls, **_: [[1.0], [2.0]][: len(calls)])
    program = exported(model(), inputs(), precision="int8", max_drop=0.5)
    assert "in float32" in choice_of(program).remark
    torch.testing.assert_close(program(inputs()), model()(inputs()))


def test_the_report_shows_each_layer() -> None:
    text = str(exported(model(), inputs(), precision="int8", max_drop=0.1).report)
    assert "precision int8: int8 ×3; drop" in text
    assert "    4: int8, error" in text


def test_verification_is_by_the_bound() -> None:
    module, x = model(), inputs()
    exported(module, x, precision="int8", max_drop=0.1, verify=True)
    outliers = x * torch.where(torch.arange(64) == 3, 1e3, 1.0)
    with pytest.raises(VerificationError, match="output 0 differs"):  # the bound was checked by other inputs
        exported(module, outliers, precision="int8", max_drop=0.05, calibration=[(x,)], verify=True)


def test_a_choice_is_remembered(tmp_path: Path) -> None:
    choices = [choice_of(exported(model(), inputs(), precision="bf16", cache_dir=str(tmp_path))) for _ in range(2)]
    assert [choice.remembered for choice in choices] == [False, True]
    other = exported(model(), inputs() + 1, precision="bf16", cache_dir=str(tmp_path))
    assert not choice_of(other).remembered


# The other doors


@pytest.mark.parametrize(("precision", "bound"), PRECISIONS)
def test_a_given_file_gets_it_by_calibration_inputs(precision: str, bound: float, tmp_path: Path) -> None:
    module, x = model(), inputs()
    path = exported(module, x).save(tmp_path / "model.onnx")
    for call in ((x,), {"input": x}, {"input": x.numpy()}, x):
        program = sardonyx.optimize(path, precision=precision, max_drop=bound, calibration=[call], cache_dir="")
        assert precisions(program) == [precision] * 3
    assert program.outputs == sardonyx.optimize(path).outputs
    onnx.checker.check_model(program.proto(), full_check=True)
    assert 0 < relative_error(in_stock_onnxruntime(program.proto(), x), module(x)) <= bound


def test_a_file_agrees_with_the_compiled_model() -> None:
    module, x = model(), inputs()
    torch._dynamo.reset()
    options = {"precision": "int8", "max_drop": 0.05, "cache_dir": ""}
    compiled = torch.compile(module, backend="sardonyx", options=options)
    program = exported(module, x, precision="int8", max_drop=0.05)
    assert relative_error(program(x), compiled(x)) <= 0.1


def test_native_kernels_are_compiled_around_them(tmp_path: Path) -> None:
    module, x = model(), inputs()
    program = exported(module, x)
    compiled = sardonyx.native.compile(
        program, select="all", precision="int8", max_drop=0.05, calibration=[(x,)], cache_dir=str(tmp_path)
    )
    assert "MatMulInteger" in {node.op_type for node in compiled.model.graph}
    result = torch.from_numpy(compiled.session().run(None, {"input": x.numpy()})[0])
    assert 0 < relative_error(result, module(x)) <= 0.05


# What is refused


class Argmax(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.argmax(-1)


def raises(what: str, **options: Any) -> None:
    module = options.pop("module", model())
    with pytest.raises(OptionError, match=what):
        exported(module, options.pop("x", inputs()), **{"precision": "int8", **options})


def test_results_that_cannot_be_compared_are_an_error() -> None:
    raises("integers or empty", module=nn.Sequential(nn.Linear(64, 8), Argmax()).eval())
    raises("integers or empty", calibration=[(inputs(0),)], dynamic_shapes=({0: "rows"},))
    raises("the calibration input 'input' has NaN", x=torch.full((3, 64), math.nan))
    raises("NaN or infinite throughout", x=torch.full((3, 64), math.inf))


def test_a_metric_that_raises_is_an_error() -> None:
    def broken(results: Sequence[Any], references: Sequence[Any]) -> float:
        raise ZeroDivisionError("by zero")

    raises("the metric raised ZeroDivisionError: by zero", metric=broken)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "int4", "opset": 20, "domains": ()}, "precision='int4' in a file of opset 20"),
        ({"engine": "reference"}, "the engine 'reference'"),
        ({"functions": [nn.Linear]}, "with functions="),
    ],
)
def test_options_that_conflict_are_an_error(options: dict[str, Any], message: str) -> None:
    raises(message, **options)


def test_calibration_of_an_export_in_float32_is_an_error() -> None:
    with pytest.raises(OptionError, match="calibration"):
        sardonyx.export(nn.Linear(64, 8), (inputs(),), calibration=[(inputs(),)])


def test_calibration_is_given_by_name() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model()

        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return self.layers(x) * scale

    module, scale = Scaled(), torch.full((1,), 2.0)
    for call in ({"x": inputs(), "scale": scale}, {"x": inputs()}):
        program = exported(module, inputs(), scale, precision="int8", max_drop=0.1, calibration=[call])
        assert precisions(program) == ["int8"] * 3
    with pytest.raises(OptionError, match=r"has \['y'\], and the model takes \['x', 'scale'\]"):
        exported(module, inputs(), scale, precision="int8", calibration=[{"y": inputs()}])


@pytest.mark.parametrize(
    ("calibration", "message"),
    [
        (None, "is a NoneType"),
        (torch.ones(2, 64), "is a Tensor"),
        ({"input": torch.ones(2, 64)}, "is a dict"),
        ([1], "a call of calibration= is a int"),
        ([(torch.ones(2, 64, device="meta"),)], "on the device 'meta'"),
        ([(inputs().double(),)], "float64|DOUBLE|double"),
    ],
)
def test_calibration_of_another_kind_is_an_error(calibration: Any, message: str) -> None:
    proto = exported(model(), inputs()).proto()
    with pytest.raises(OptionError, match=message):
        exported(model(), inputs(), precision="int8", calibration=calibration)
    with pytest.raises(OptionError, match=message):
        sardonyx.optimize(proto, precision="int8", calibration=calibration, cache_dir="")


def test_calibration_that_does_not_match_the_model_is_an_error(tmp_path: Path) -> None:
    raises("does not match the model: input", calibration=[(torch.randn(20, 32),)])
    raises("does not match the model", calibration=[(inputs(), inputs())])
    program = exported(model(), inputs())
    optimize: Callable[..., Program] = sardonyx.optimize
    for call, message in [
        ((torch.randn(20, 32),), "does not match the model: input"),
        ({"x": inputs()}, r"has the inputs \['x'\], and the model takes \['input'\]"),
    ]:
        with pytest.raises(OptionError, match=message):
            optimize(program.model, precision="int8", calibration=[call])


@pytest.mark.parametrize("door", [sardonyx.optimize, sardonyx.native.compile])
def test_calibration_of_a_file_in_float32_is_an_error(door: Callable[..., Any]) -> None:
    proto = exported(model(), inputs()).proto()
    for calibration in ([(inputs(),)], iter([(inputs(),)])):
        with pytest.raises(OptionError, match="calibration= without a precision"):
            door(proto, calibration=calibration, cache_dir="")


@pytest.mark.parametrize("door", [sardonyx.optimize, sardonyx.native.compile])
def test_a_given_file_needs_calibration_inputs(door: Callable[..., Any]) -> None:
    with pytest.raises(OptionError, match="there are no inputs to compute them from"):
        door(exported(model(), inputs()).proto(), precision="int8")


def test_weights_that_are_not_finite_stay_in_float32() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 48), nn.Tanh()).eval()
    module[1].weight[0, 0] = math.inf
    program = exported(module, inputs(), precision="int8", max_drop=0.1)
    assert precisions(program) == ["int8", "bf16"]
