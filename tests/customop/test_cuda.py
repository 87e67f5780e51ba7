"""Kernels for the GPU, beside those for the CPU: in torch on its stream, and in ONNX Runtime's CUDA provider."""

from __future__ import annotations

import shutil

import onnxruntime
import pytest
import torch

import sardonyx
from sardonyx.customop import CustomOp

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc"),
]

_CPP = """
template <class T>
void Shifted(In<T> x, In<T> by, Out<T> y, double scale, Parallel parallel) {
  parallel(x.size(), 4096, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) y[i] = Wide<T>(x[i]) * scale + Wide<T>(by[i % by.size()]);
  });
}
"""
_CUDA = """
template <class T>
__global__ void shifted(const T* x, const T* by, T* y, int64_t size, int64_t row, float scale) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i < size) y[i] = T(float(x[i]) * scale + float(by[i % row]));
}

template <class T>
void Shifted(In<T> x, In<T> by, Out<T> y, double scale, cudaStream_t stream) {
  if (x.size() == 0) return;
  shifted<<<(x.size() + 255) / 256, 256, 0, stream>>>(x.data(), by.data(), y.data(), x.size(), by.size(), scale);
  check(cudaGetLastError() == cudaSuccess, "the kernel could not be launched");
}
"""


@pytest.fixture(scope="module")
def shifted() -> CustomOp:
    return sardonyx.custom_op(
        "ongpu::Shifted(Tensor x, Tensor<T, 1> by, *, float scale=2.0) -> Tensor",
        cpp=_CPP,
        cuda=_CUDA,
        dtypes=["float32", "float16", "bfloat16"],
        shape=lambda x: x,
        backward=lambda grad, by, scale: (grad * scale, grad.sum_to_size(by.shape)),
    )


def reference(x: torch.Tensor, by: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
    return x.double() * scale + by.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_both_devices_compute_the_same(shifted: CustomOp, dtype: torch.dtype, device: str) -> None:
    x, by = torch.randn(33, 100, device=device).to(dtype), torch.randn(100, device=device).to(dtype)
    y = shifted(x, by, scale=3.0)
    assert (y.device, y.dtype) == (x.device, dtype)
    torch.testing.assert_close(y.double(), reference(x, by, 3.0), atol=torch.finfo(dtype).eps * 20, rtol=0)


def test_what_is_not_contiguous_is_made_so(shifted: CustomOp) -> None:
    x, by = torch.randn(100, 33, device="cuda").t(), torch.randn(200, device="cuda")[::2]
    torch.testing.assert_close(shifted(x, by).double(), reference(x, by), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("x", "by", "named"), [("cuda", "cpu", "by"), ("cpu", "cuda", "x")])
def test_a_tensor_on_another_device_is_refused_by_name(shifted: CustomOp, x: str, by: str, named: str) -> None:
    with pytest.raises(RuntimeError, match=f"ongpu::Shifted: {named} is not on the same GPU"):
        shifted(torch.ones(2, 3, device=x), torch.ones(3, device=by))


def test_it_runs_on_the_current_stream(shifted: CustomOp) -> None:
    x, by = torch.randn(1000, 1000, device="cuda"), torch.randn(1000, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        y = x
        for _ in range(50):
            y = shifted(y, by, scale=0.5)
    stream.synchronize()
    expected = x.double()
    for _ in range(50):
        expected = reference(expected, by, 0.5)
    torch.testing.assert_close(y.double(), expected, atol=1e-4, rtol=0)


def test_opcheck_passes(shifted: CustomOp) -> None:
    x, by = torch.randn(3, 4, device="cuda", requires_grad=True), torch.randn(4, device="cuda", requires_grad=True)
    torch.library.opcheck(shifted.operator, (x, by))


@pytest.mark.parametrize("backend", ["sardonyx", "inductor"])
def test_compiled_it_trains(shifted: CustomOp, backend: str) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.by = torch.nn.Linear(8, 8), torch.nn.Parameter(torch.randn(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = shifted(self.linear(x), self.by)
            return y.relu()

    if backend == "sardonyx" and "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        pytest.skip("onnxruntime has no CUDA provider")
    model = Model().cuda()
    x = torch.randn(5, 8, device="cuda")
    options = {"options": {"fallback": "error"}} if backend == "sardonyx" else {}
    with torch.enable_grad():
        model(x).sum().backward()
        expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        torch.compile(model, backend=backend, **options)(x).sum().backward()
    assert len(expected) == 3
    for parameter, wanted in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, wanted, atol=1e-4, rtol=1e-4)
