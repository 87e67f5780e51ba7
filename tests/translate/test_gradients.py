"""Gradients: what a training step gets from the operators whose backward we translate ourselves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sardonyx.engines.onnxruntime import OnnxRuntime
from sardonyx.telemetry.report import collecting

from .agreement import gradients, onnx


def same_gradients(function: Callable[..., torch.Tensor], *args: torch.Tensor) -> None:
    exact = gradients(function, *(x.double() for x in args))
    for got, expected in zip(gradients(onnx(function), *args), exact, strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("groups", [1, 2])
def test_convolution(stride: int, padding: int, dilation: int, groups: int) -> None:
    x, weight, bias = torch.randn(2, 4, 9, 8), torch.randn(6, 4 // groups, 3, 2), torch.randn(6)
    same_gradients(lambda x, w, b: F.conv2d(x, w, b, stride, padding, dilation, groups), x, weight, bias)


@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("width", [9, 33])
def test_convolution_over_blocks_of_channels(width: int, dilation: int) -> None:
    x, weight, bias = torch.randn(4, 16, 35, width), torch.randn(32, 16, 3, 3), torch.randn(32)
    with collecting() as report:
        same_gradients(lambda x, w, b: F.conv2d(x, w, b, 1, dilation, dilation), x, weight, bias)
    if OnnxRuntime().local_domains(torch.device("cpu"), {"Conv"}):
        assert report.rules["BlockedConvolution"]
        assert report.rules["BlockedTransposedConvolution"]


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_convolution(stride: int, groups: int) -> None:
    x, weight, bias = torch.randn(2, 4, 5, 6), torch.randn(4, 3, 3, 3), torch.randn(3 * groups)
    extra = stride - 1
    same_gradients(lambda x, w, b: F.conv_transpose2d(x, w, b, stride, 1, extra, groups), x, weight, bias)


@pytest.mark.parametrize("ceil", [False, True])
@pytest.mark.parametrize("count_include_pad", [False, True])
def test_average_pooling(ceil: bool, count_include_pad: bool) -> None:
    same_gradients(lambda x: F.avg_pool2d(x, 3, 2, 1, ceil, count_include_pad), torch.randn(2, 3, 8, 7))


def test_overlapping_windows_add_up_in_max_pooling() -> None:
    same_gradients(lambda x: F.max_pool2d(x, 3, 1), torch.randn(2, 3, 6, 6))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_adaptive_pooling(size: int) -> None:
    same_gradients(lambda x: F.adaptive_avg_pool2d(x, size) + F.adaptive_max_pool2d(x, size), torch.randn(2, 3, 7, 6))


def test_batch_norm_learns_from_the_batch_and_keeps_its_statistics() -> None:
    x, weight, bias = torch.randn(4, 3, 5), torch.randn(3), torch.randn(3)
    same_gradients(lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), x, weight, bias)
    eager, compiled = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    eager(x), onnx(compiled)(x)
    torch.testing.assert_close(compiled.running_mean, eager.running_mean)
    torch.testing.assert_close(compiled.running_var, eager.running_var)


def test_group_and_layer_norm() -> None:
    weight, bias = torch.randn(4), torch.randn(4)
    same_gradients(lambda x, w, b: F.group_norm(x, 2, w, b), torch.randn(3, 4, 5), weight, bias)
    same_gradients(lambda x, w, b: F.layer_norm(x, (4,), w, b), torch.randn(3, 5, 4), weight, bias)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_cross_entropy_weighs_classes_and_ignores_an_index(reduction: str) -> None:
    target, weight = torch.tensor([1, 0, -100, 2]), torch.tensor([0.2, 1.0, 3.0])

    def loss(x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x, target, weight.to(x), reduction=reduction)

    same_gradients(loss, torch.randn(4, 3))


def test_a_matrix_times_a_vector() -> None:
    same_gradients(torch.mv, torch.randn(5, 7), torch.randn(7))


def test_embedding_rows_used_twice_add_up() -> None:
    index = torch.tensor([[0, 2, 0], [1, 2, 2]])
    same_gradients(lambda w: F.embedding(index, w), torch.randn(4, 3))


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_resizing(mode: str) -> None:
    same_gradients(lambda x: F.interpolate(x, (7, 5), mode=mode), torch.randn(1, 2, 4, 6))


def test_rows_add_up_where_threads_meet() -> None:
    index = torch.randint(0, 2, (8, 128))
    torch.set_num_threads(2)
    try:
        for _ in range(5):
            same_gradients(lambda w: F.embedding(index, w).sin(), torch.randn(2, 256))
    finally:
        torch.set_num_threads(1)


def test_layer_norm_over_a_size_of_zero() -> None:
    x = torch.randn(2, 3, 0)

    def normal(x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (3, 0))

    expected, actual = gradients(normal, x), gradients(onnx(normal), x)
    assert [g.shape for g in actual] == [g.shape for g in expected] == [x.shape]
