"""Convolutions of files in int8, with scales from calibration calls."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import sardonyx
from sardonyx import Program
from sardonyx.precision.metric import relative_error
from sardonyx.precision.static_scales import Scale
from tests.precision.residual_block import Block

pytestmark = pytest.mark.usefixtures("ranked")


def model() -> nn.Module:
    torch.manual_seed(0)
    stem = [nn.Conv2d(3, 16, 7, stride=2, padding=3), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*stem, Block(16), Block(16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)).eval()


@pytest.mark.parametrize("size", [1e-11, 1e-30, 1e30])
def test_scales_keep_their_digits_however_small(size: float) -> None:
    scale = Scale.of((-size, 1.55 * size))
    assert scale.scale * 255 == pytest.approx(2.55 * size, rel=1e-7)
    assert scale.zero_point == 100


def images(count: int = 2) -> torch.Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def exported(module: nn.Module, x: torch.Tensor, **options: Any) -> Program:
    return sardonyx.export(module, (x,), **{"cache_dir": "", "precision": "int8", "max_drop": 0.2, **options})


def precisions(program: Program) -> Mapping[str, str]:
    choice = program.report.precision
    assert choice is not None
    return {layer.layer: layer.precision for layer in choice.layers}


def stock_session(program: Program, options: onnxruntime.SessionOptions | None = None) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(program.proto().SerializeToString(), options)


def run(program: Program, x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(stock_session(program).run(None, {program.inputs[0]: x.numpy()})[0])


def test_a_network_is_quantized_within_the_bound() -> None:
    module, x = model(), images()
    program = exported(module, x)
    onnx.checker.check_model(program.proto(), full_check=True)
    assert set(precisions(program).values()) == {"int8"}
    assert len(precisions(program)) == 6
    assert 0 < relative_error(run(program, x), module(x)) <= 0.2
    torch.testing.assert_close(program(x), run(program, x))


def test_onnxruntime_fuses_convolutions_additions_and_poolings(tmp_path: Path) -> None:
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 3
    stock_session(exported(model(), images()), options)
    operators = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    assert operators.count("QLinearConv") == 5
    assert operators.count("QLinearAdd") == 1  # the last one is not read by a convolution
    assert not {"Conv", "FusedConv", "MaxPool"} & set(operators)


def test_no_float32_weight_is_left_and_constants_are_few() -> None:
    program = exported(model(), images())
    matrices = [x.data_type for x in program.proto().graph.initializer if len(x.dims) > 1]
    assert set(matrices) == {onnx.TensorProto.INT8}


def test_the_batch_stays_dynamic() -> None:
    module, x = model(), images(3)
    program = exported(module, x, dynamic_shapes=({0: "batch"},))
    assert relative_error(run(program, x[:1].contiguous()), module(x[:1])) <= 0.2


def test_a_result_of_a_convolution_keeps_its_name() -> None:
    module, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval(), images()
    program = exported(module, x, output_names=["scores"])
    assert program.outputs == ["scores"]
    assert relative_error(run(program, x), module(x)) <= 0.2


def test_scales_are_of_all_calibration_calls() -> None:
    module, x = model(), images()
    alone = exported(module, x, max_drop=10.0)
    both = exported(module, x, max_drop=10.0, calibration=[(x,), (8 * x,)])
    assert relative_error(both(8 * x), module(8 * x)) < relative_error(alone(8 * x), module(8 * x))


def test_values_without_a_range_are_quantized() -> None:
    module = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.Conv2d(8, 4, 1)).eval()
    module[0].weight.zero_()
    program = exported(module, images())
    torch.testing.assert_close(run(program, images()), module(images()), atol=1e-2, rtol=0)


def test_weights_are_stored_in_bfloat16() -> None:
    module, x = model(), images()
    program = exported(module, x, precision="bf16", max_drop=0.02)
    assert set(precisions(program).values()) == {"bf16"}
    assert 0 < relative_error(run(program, x), module(x)) <= 0.02


def test_int4_is_for_linear_layers() -> None:
    found = precisions(exported(model(), images(), precision="int4", max_drop=0.5))
    assert found == {name: "int4" if name == "7" else "int8" for name in found}


@pytest.mark.parametrize("groups", [2, 16])
def test_grouped_convolutions_stay_in_float32(groups: int) -> None:
    module = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3, groups=groups)).eval()
    assert set(precisions(exported(module, images()))) == {"0"}
