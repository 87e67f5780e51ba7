"""Without a backward: a backward through the operator is an error, and everything else is as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import sardonyx
from sardonyx.customop import CustomOp
from sardonyx.errors import AutogradError

from .operators import positive

MESSAGE = r"has no gradient: it was declared without backward\n  next: declare it with backward="


@pytest.fixture(scope="module")
def mixed() -> CustomOp:
    """Tensors of every kind, by position and by name, and results of which one is a whole number."""
    return sardonyx.custom_op(
        "ungradable::Mixed(Tensor x, Tensor? bias=None, *, Tensor? weight=None, Tensor[] more)"
        " -> (Tensor y, Tensor<int64> count)",
        python=lambda x, bias, weight, more: (
            sum(more, x * (1 if weight is None else weight) + (0 if bias is None else bias)),
            torch.tensor(len(more)),
        ),
        shape=lambda x: (x, ()),
    )


def leaf(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(3, dtype=dtype, requires_grad=True)


X = torch.ones(3)
CALLS: dict[str, Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "a tensor": lambda: ((leaf(),), {"more": []}),
    "an optional tensor": lambda: ((X, leaf()), {"more": []}),
    "a tensor by name alone": lambda: ((X,), {"weight": leaf(), "more": []}),
    "one of a list": lambda: ((X,), {"more": [X, leaf()]}),
    "one that is computed": lambda: ((leaf() * 2,), {"more": []}),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_backward_raises(mixed: CustomOp, name: str) -> None:
    with torch.enable_grad():
        args, kwargs = CALLS[name]()
        y, count = mixed(*args, **kwargs)
        assert (y.requires_grad, count.requires_grad) == (True, False)
        with pytest.raises(AutogradError, match="ungradable::Mixed " + MESSAGE):
            y.sum().backward()


@pytest.mark.parametrize("name", CALLS)
def test_without_gradients_nothing_is_different(mixed: CustomOp, name: str) -> None:
    args, kwargs = CALLS[name]()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y, count = mixed(*args, **kwargs)
        assert not y.requires_grad
        assert count == len(kwargs["more"])


def test_tensors_that_require_none_have_none(mixed: CustomOp) -> None:
    with torch.enable_grad():
        assert not mixed(X, more=[X])[0].requires_grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_in_every_floating_dtype(mixed: CustomOp, dtype: torch.dtype) -> None:
    with torch.enable_grad(), pytest.raises(AutogradError, match=MESSAGE):
        mixed(leaf(dtype), more=[])[0].sum().backward()


def test_a_kernel_in_cpp_and_a_composition_raise_too() -> None:
    composed = sardonyx.custom_op("ungradable::Composed(Tensor x) -> Tensor", onnx=lambda op, x: op.Abs(x))
    with torch.enable_grad():
        for op in (positive(), composed):
            with pytest.raises(AutogradError, match=MESSAGE):
                op(leaf()).sum().backward()


def test_whole_numbers_have_no_gradient_to_refuse() -> None:
    counted = sardonyx.custom_op(
        "ungradable::Counted(Tensor x) -> Tensor<int64>", python=lambda x: (x > 0).sum(), shape=lambda: ()
    )
    with torch.enable_grad():
        x = leaf()
        (x * counted(x)).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3.0] * 3


def test_a_second_backward_through_a_declared_backward_raises() -> None:
    backward = sardonyx.custom_op("ungradable::SquareBackward(Tensor grad, Tensor x) -> Tensor grad_x",
                                  python=lambda grad, x: 2 * grad * x)  # fmt: skip
    square = sardonyx.custom_op("ungradable::Square(Tensor x) -> Tensor", python=lambda x: x * x, backward=backward)
    with torch.enable_grad():
        x = leaf()
        (first,) = torch.autograd.grad(square(x).sum(), x, create_graph=True)
        assert first.tolist() == [2.0] * 3
        with pytest.raises(AutogradError, match="ungradable::SquareBackward " + MESSAGE):
            first.sum().backward()


@pytest.mark.filterwarnings("ignore:Error detected in")  # torch's own, with the traceback of the forward
def test_compiled_for_training_it_raises_and_for_inference_it_runs(mixed: CustomOp) -> None:
    def function(x: torch.Tensor) -> Any:
        return mixed(x * 2, more=[x])[0]

    compiled = torch.compile(function, backend="sardonyx", options={"fallback": "error"})
    assert compiled(leaf()).tolist() == [3.0] * 3  # under the tests' no_grad
    with torch.enable_grad(), pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="ungradable::Mixed has no"):
        compiled(leaf())


def test_exported_it_runs_whatever_requires_gradients(mixed: CustomOp) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> Any:
            return mixed(x, weight=self.weight * 2, more=[])[0]

    with torch.enable_grad():
        assert sardonyx.export(Model().eval(), (X,))(X).tolist() == [2.0] * 3
