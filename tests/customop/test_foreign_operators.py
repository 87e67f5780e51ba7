"""Operators that other code registered in torch: parameters without names, and a shape rule as their fake kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import sardonyx
from sardonyx.customop import CustomOp, broadcast
from sardonyx.errors import CaptureError, DeclarationError


@pytest.fixture(scope="module", autouse=True)
def inferred() -> Iterator[None]:
    """Schemas as torch infers them from C++ functions: parameters and results have numbers for names."""
    library = torch.library.Library("inferred", "DEF")
    library.define("affine(Tensor _0, Tensor _1, float _2) -> Tensor _0")
    library.impl("affine", lambda x, w, b: x * w + b, "CPU")
    library.define("both(Tensor _0, int _1, *, Tensor? _2=None) -> (Tensor _0, Tensor _1)")
    library.impl("both", lambda x, n, *, _2=None: (x[:n] + 0, x[n:] * 2), "CPU")
    library.define("named(Tensor _0, float scale=2.0) -> Tensor")
    library.impl("named", lambda x, scale=2.0: x * scale, "CPU")
    library.define("whole(Tensor _0, Tensor _1, float _2) -> Tensor _0")
    library.impl("whole", whole, "CompositeImplicitAutograd")  # as torch takes C++ that is not given a dispatch key
    yield
    library._destroy()


def whole(x: torch.Tensor, w: torch.Tensor, b: float) -> torch.Tensor:
    x.data_ptr()  # which a tensor has not while it is traced
    return x * w + b


X, W = torch.randn(4, 3), torch.randn(3)


def affine(**given: Any) -> CustomOp:
    return sardonyx.custom_op(torch.ops.inferred.affine, **given)


CPP = """
void affine(In<float> x, In<float> w, Out<float> y, double b, Parallel) {
  for (int64_t i = 0; i < x.size(); ++i) y[i] = x[i] * w[i % w.size()] + b;
}
"""


@pytest.mark.parametrize(
    "given",
    [
        {"cpp": CPP, "shape": lambda x: x, "dtypes": ["float32"]},
        {"python": lambda x, w, b: x * w + b, "shape": lambda x, w: broadcast(x, w), "dtypes": ["float32"]},
        {"onnx": lambda op, x, w, b: op.Add(op.Mul(x, w), b), "shape": lambda x, w, b: x},
        {"onnx": lambda g, _0, _1, _2: g.Add(g.Mul(_0, _1), _2), "shape": lambda _0: _0},
    ],
    ids=["cpp", "python", "onnx", "by number"],
)
def test_parameters_without_names_are_taken_in_their_order(given: dict[str, Any]) -> None:
    op = affine(**given)
    program = sardonyx.export(lambda x, w: torch.ops.inferred.affine(x, w, 0.5), (X, W), dynamic_shapes=({0: "n"}, {}))
    for x in (X, torch.randn(7, 3)):
        torch.testing.assert_close(program(x, W), x * W + 0.5)
    op.close()


def test_several_results_without_names_and_a_tensor_by_name_alone() -> None:
    op = sardonyx.custom_op(
        torch.ops.inferred.both,
        onnx=lambda op, x, n: (
            op.Slice(x, op.constant([0]), op.constant([n])),
            op.Mul(op.Slice(x, op.constant([n]), op.constant([1000])), 2.0),
        ),
        shape=lambda x, n: ((n, *x[1:]), (x[0] - n, *x[1:])),
    )
    assert [t.name for t in op.signature.outputs] == ["output0", "output1"]
    program = sardonyx.export(lambda x: torch.ops.inferred.both(x, 3), (X,))
    torch.testing.assert_close(tuple(program(X)), (X[:3], X[3:] * 2))
    op.close()


def test_names_that_there_are_stay() -> None:
    op = sardonyx.custom_op(
        torch.ops.inferred.named, onnx=lambda op, scale, x: op.Mul(x, scale), shape=lambda scale, x: x
    )
    program = sardonyx.export(lambda x: torch.ops.inferred.named(x, 4.0), (X,))
    torch.testing.assert_close(program(X), X * 4)
    op.close()


def test_a_function_of_too_many_is_refused() -> None:
    with pytest.raises(DeclarationError, match="takes 'more'"):
        affine(onnx=lambda op, x, w, b, more: x)


# Fake kernels


def without_fake_kernels() -> Iterator[tuple[Callable[..., Any], str]]:
    """Operators without a fake kernel, each registered in another way, and their names in an error."""
    yield torch.ops.inferred.affine, "torch.ops.inferred.affine"

    @torch.library.custom_op("inferred::opaque", mutates_args=())
    def opaque(x: torch.Tensor, w: torch.Tensor, b: float) -> torch.Tensor:
        return x * w + b

    yield torch.ops.inferred.opaque, "torch.ops.inferred.opaque"
    yield torch.ops.inferred.whole, "torch.ops.mylib.op"


@pytest.mark.parametrize("way", [0, 1, 2], ids=["Library", "torch.library.custom_op", "without a dispatch key"])
def test_the_shape_rule_is_the_fake_kernel_until_closed(way: int) -> None:
    packet, name = list(without_fake_kernels())[way]

    def traced() -> Any:
        return (
            torch.export.export(Calling(packet), (X, W), strict=False)
            .graph.find_nodes(op="call_function", target=packet.default)[0]
            .meta["val"]
        )

    for _ in range(2):
        with pytest.raises(Exception, match=r"fake impl|affine\.default|data pointer|not allocated"):
            traced()
        op = sardonyx.custom_op(packet, python=lambda x, w, b: x, shape=lambda x, w: broadcast(x, w))
        assert (traced().shape, traced().dtype) == ((4, 3), torch.float32)
        op.close()
    with pytest.raises(CaptureError, match=rf"next: .*shape= to sardonyx.custom_op\({name}, ...\)"):
        sardonyx.export(Calling(packet), (X, W))


class Calling(torch.nn.Module):
    def __init__(self, packet: Any) -> None:
        super().__init__()
        self.packet = packet

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> Any:
        return self.packet(x, w, 0.5)


def test_an_operator_kept_whole_is_differentiated_as_before() -> None:
    op = sardonyx.custom_op(torch.ops.inferred.whole, onnx=lambda op, x, w, b: op.Add(op.Mul(x, w), b),
                            shape=lambda x: x)  # fmt: skip
    calling = Calling(torch.ops.inferred.whole)
    compiled = torch.compile(calling, backend="sardonyx", options={"fallback": "error"})
    torch.testing.assert_close(compiled(X, W), X * W + 0.5)
    torch.testing.assert_close(sardonyx.export(calling, (X, W))(X, W), X * W + 0.5)
    with torch.enable_grad():
        w = W.clone().requires_grad_()
        calling(X, w).sum().backward()
    torch.testing.assert_close(w.grad, X.sum(0))
    op.close()


def test_without_a_shape_rule_nothing_is_made_up() -> None:
    op = affine(python=lambda x, w, b: x)
    with pytest.raises(CaptureError, match="pass shape="):
        sardonyx.export(Calling(torch.ops.inferred.affine), (X, W))
    op.close()


@pytest.mark.parametrize("key", ["fake", "Meta"])
def test_a_fake_kernel_that_there_is_stays(key: str) -> None:
    library = torch.library.Library("inferred", "FRAGMENT")
    library.define(f"doubled_{key}(Tensor x) -> Tensor")

    def fake(x: torch.Tensor) -> torch.Tensor:
        return x.new_empty(2 * x.shape[0])

    if key == "fake":
        torch.library.register_fake("inferred::doubled_fake", fake, lib=library)
    else:
        library.impl("doubled_Meta", fake, "Meta")
    packet = getattr(torch.ops.inferred, f"doubled_{key}")
    op = sardonyx.custom_op(packet, python=lambda x: x, shape=lambda x: x)
    assert packet(torch.empty(3, device="meta")).shape == (6,)
    op.close()
    assert packet(torch.empty(3, device="meta")).shape == (6,)
    library._destroy()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int64, torch.bool])
def test_the_fake_kernel_gives_every_dtype(dtype: torch.dtype) -> None:
    op = affine(python=lambda x, w, b: x, shape=lambda x: x, dtypes=[dtype])
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(2, 3, dtype=dtype)
        assert torch.ops.inferred.affine(x, x, 1.0).dtype == dtype
    op.close()
