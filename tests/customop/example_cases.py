"""The examples of custom operators, and how each is tried."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
