"""Every operator that ONNX Runtime's eager mode had, in every variant that torch has of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sardonyx.eager.variants import variant_of

X = torch.tensor([[0.5, -0.25, 0.75], [-0.5, 0.125, 0.9]])
Y = torch.tensor([[0.1, 0.4, -0.75], [0.5, 2.0, 0.9]])
AXES = (-1, False)
UNARY = (
    *("abs", "acos", "asin", "asinh", "atan", "atanh", "ceil", "cos", "cosh", "erf", "exp", "floor", "hardsigmoid"),
    *("neg", "reciprocal", "round", "sigmoid", "sign", "sin", "sinh", "tan", "tanh", "relu", "selu", "isinf", "isnan"),
    *("hardshrink", "softshrink", "gelu", "t", "zeros_like", "squeeze", "nonzero", "argmax"),
)
OTHERS: dict[str, tuple[Any, ...]] = {
    "acosh": (X.abs() + 1,),
    "log": (X.abs(),),
    "sqrt": (X.abs(),),
    "det": (torch.eye(3) * 2,),
    "addmm": (torch.ones(2, 2), X, Y.t()),
    "sum.dim_IntList": (X, [0]),
    "threshold_backward": (X, Y, 0.0),
    "fmod.Tensor": (X, Y),
    "fmod.Scalar": (X, 0.3),
    "gelu_backward": (X, Y),
    "max": (X,),
    "max.dim": (X, 1),
    "min": (X,),
    "min.dim": (X, 1),
    **{
        f"{name}.{kind}": (X, other)
        for name in ("ne", "eq", "lt", "gt")
        for kind, other in (("Tensor", Y), ("Scalar", 0.5))
    },
    "bitwise_and.Tensor": (X > 0, Y > 0),
    "masked_select": (X, X > 0),
    "_softmax": (X, *AXES),
    "_softmax_backward_data": (X, torch.softmax(Y, -1), -1, torch.float32),
    "_log_softmax": (X, *AXES),
    "_log_softmax_backward_data": (X, torch.log_softmax(Y, -1), -1, torch.float32),
    "squeeze.dim": (X[None], 0),
    "unsqueeze": (X, 1),
    "mm": (X, Y.t()),
    "cat": ([X, Y], 1),
    "equal": (X, X),
    "view": (X, [3, 2]),
    "_reshape_alias": (X, [3, 2], [2, 1]),
    "slice.Tensor": (X, 1, 0, 2),
    "as_strided": (X, [2, 2], [1, 1]),
}
CASES = {**dict.fromkeys(UNARY, (X,)), **OTHERS}


def operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def on(device: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    def moved(x: Any) -> Any:
        if isinstance(x, list) and x and isinstance(x[0], torch.Tensor):
            return [moved(y) for y in x]
        return x.to(device).clone() if isinstance(x, torch.Tensor) else x

    return tuple(moved(x) for x in args)


def variants() -> Iterator[tuple[str, Any]]:
    """The functional operator, and those that compute it in place and into `out=`."""
    for name in CASES:
        functional = operator(name)
        yield name, functional
        packet = name.partition(".")[0]
        for other in (packet, f"{packet}_"):
            overloads = getattr(torch.ops.aten, other).overloads() if hasattr(torch.ops.aten, other) else ()
            for overload in overloads:
                candidate = getattr(getattr(torch.ops.aten, other), overload)
                found = variant_of(candidate)
                if found is not None and found.kind != "functional" and found.functional is functional:
                    yield f"{other}.{overload}", candidate


@pytest.mark.parametrize(("name", "candidate"), variants(), ids=lambda value: value if isinstance(value, str) else "")
def test_it_gives_the_cpus_result(name: str, candidate: Any) -> None:
    found = variant_of(candidate)
    functional = candidate if found is None or found.kind == "functional" else found.functional
    args = next(args for case, args in CASES.items() if operator(case) is functional)
    expected = functional(*on("cpu", args))
    if found is not None and found.kind == "in place" and expected.dtype != args[0].dtype:
        expected = expected.to(args[0].dtype)
    given, outs = on("ort", args), {}
    if found is not None and found.kind == "out":
        several = expected if isinstance(expected, tuple) else (expected,)
        outs = {n: torch.empty(0, dtype=e.dtype, device="ort") for n, e in zip(found.written, several, strict=True)}
    result = candidate(*given, **outs)
    if isinstance(expected, bool):
        assert result is expected
        return
    pairs = zip(*(r if isinstance(r, tuple) else (r,) for r in (result, expected)), strict=True)
    for got, wanted in pairs:
        assert got.device.type == "ort"
        torch.testing.assert_close(got.cpu(), wanted)
    if found is not None and found.kind == "in place":
        assert result is given[0]
        torch.testing.assert_close(given[0].cpu(), expected)


def test_the_operators_that_only_have_a_side_effect() -> None:
    x = torch.empty(2, 3, device="ort")
    assert x.fill_(3).tolist() == [[3] * 3] * 2
    assert x.zero_().tolist() == [[0] * 3] * 2
    assert x.copy_(X.to("ort")).tolist() == X.tolist()
    assert torch.empty_strided((2, 3), (1, 2), device="ort").stride() == (1, 2)
    assert torch.ops.aten._copy_from_and_resize(x, torch.empty(0, device="ort")).tolist() == X.tolist()
    assert x.clone().resize_(3).tolist() == X.flatten()[:3].tolist()
