"""An operator in torch: everything that torch's own operators do."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from sardonyx.customop import CustomOp
from tests.memory import growth

from .operators import DTYPES, faulty, filled, mix, positive, scale, weigh

X = torch.linspace(-3, 3, 24).reshape(4, 6)
CALLS: dict[str, tuple[Callable[[], CustomOp], Callable[[], tuple[Any, ...]], dict[str, Any]]] = {
    "one tensor": (scale, lambda: (X,), {"factor": -1.5}),
    "without dimensions": (scale, lambda: (torch.tensor(2.5),), {}),
    "empty": (scale, lambda: (torch.zeros(0, 3),), {}),
    "not contiguous": (scale, lambda: (X.T[1:, ::2],), {}),
    "whole numbers": (scale, lambda: (torch.arange(6),), {"factor": 3.0}),
    "two": (weigh, lambda: (X, torch.arange(6.0)), {}),
    "several": (mix, lambda: (X, 3, [X + 1, X * 2]), {"axes": [4, 5], "flip": True}),
    "absent": (mix, lambda: (None, 3, [X]), {}),
    "open": (positive, lambda: (X[0],), {}),
    "none": (filled, lambda: ([2, 3],), {"step": 2}),
    "one or none": (filled, lambda: ([4], torch.ones(1)), {}),
    "never wrong": (faulty, lambda: (torch.ones(3), "not at all"), {}),
}
EVERY = pytest.mark.parametrize("name", CALLS)


@EVERY
def test_torchs_own_check_finds_nothing_wrong(name: str) -> None:
    op, args, kwargs = CALLS[name]
    found = torch.library.opcheck(op().operator, args(), kwargs)
    assert set(found.values()) == {"SUCCESS"}


@EVERY
def test_with_inputs_that_require_gradients_too(name: str) -> None:
    op, args, kwargs = CALLS[name]
    given = [a.requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args_of(args)]
    assert set(torch.library.opcheck(op().operator, tuple(given), kwargs).values()) == {"SUCCESS"}


def args_of(make: Callable[[], tuple[Any, ...]]) -> list[Any]:
    return [a.clone() if isinstance(a, torch.Tensor) else a for a in make()]


# Numbers


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype: str) -> None:
    x = (torch.arange(-8, 9) / 4).to(getattr(torch, dtype))
    result = scale()(x, factor=3.0)
    assert result.dtype == x.dtype
    assert torch.equal(result, (x.double() * 3).to(x.dtype))


@pytest.mark.parametrize(
    "value", [65504.0, 65520.0, 1e-8, 6e-8, 2**-24 * 1.5, 0.1, 1 / 3, float("inf"), float("nan"), -0.0]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_types_round_as_torch_rounds(dtype: torch.dtype, value: float) -> None:
    factor = torch.tensor(value, dtype=torch.float32).item()
    result = scale()(torch.ones(1, dtype=dtype), factor=factor)
    torch.testing.assert_close(result, torch.tensor([factor]).to(dtype), rtol=0, atol=0, equal_nan=True)
    if factor == 0:
        assert result.signbit().item()


@pytest.mark.parametrize(
    "x",
    [
        X.T,
        X[::2, 1::2],
        X.expand(3, 4, 6),
        X[:, 2],
        X.flip(0).T,
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.zeros(3, 0, 2).permute(2, 0, 1),
        torch.tensor(3.0),
    ],
)
def test_whatever_the_strides(x: torch.Tensor) -> None:
    result = scale()(x)
    assert torch.equal(result, x * 2)
    assert result.is_contiguous()


def test_optional_tensors_lists_and_attributes() -> None:
    total, first, counts = mix()(X, 3, [X + 1, X * 2], "sum", flip=True, axes=[7, 8], offsets=[1.0, 2.0])
    torch.testing.assert_close(total, X * 3 + X + 1 + X * 2 + 3)
    assert torch.equal(first, X + 1)
    assert counts.tolist() == [2, 1, 8]
    total, _, counts = mix()(None, 3, [X])
    torch.testing.assert_close(total, X + 0.5)
    assert counts.tolist() == [1, 0, -1]


def test_a_result_whose_size_only_the_kernel_knows() -> None:
    assert positive()(torch.tensor([1, -2, 3, 0, 5])).tolist() == [1, 3, 5]
    assert positive()(torch.tensor([-1.0])).shape == (0,)


def test_without_any_tensor() -> None:
    assert filled()([2, 2], step=3).tolist() == [[0.0, 3.0], [6.0, 9.0]]
    assert filled()([2], torch.ones(1)).tolist() == [1.0, 2.0]
    twice, only = filled(), scale()
    compiled = torch.compile(lambda x: twice([3]) + only(x), backend="sardonyx", options={"fallback": "error"})
    assert compiled(torch.ones(3)).tolist() == [2.0, 3.0, 4.0]


def test_sixty_four_tensors_but_not_sixty_five() -> None:
    total, _, _ = mix()(None, 1, [torch.ones(2)] * 63, offsets=[])
    assert total.tolist() == [63.0, 63.0]
    with pytest.raises(RuntimeError, match="tried::Mix: it has more than 64 tensors"):
        mix()(None, 1, [torch.ones(2)] * 64)


# Gradients


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (scale, lambda: (leaf(3, 2),)),
        (scale, lambda: (leaf(3, 2).T,)),
        (weigh, lambda: (leaf(4, 3), leaf(3))),
        (weigh, lambda: (leaf(4, 3).detach(), leaf(3))),
        (mix, lambda: (leaf(3), 2, [leaf(3), leaf(3)])),
        (mix, lambda: (None, 2, [leaf(3)])),
    ],
)
def test_gradients_are_those_of_finite_differences(op: Callable[[], CustomOp], args: Callable[[], Any]) -> None:
    with torch.enable_grad():
        given = args()
        flat = [x for a in given for x in (a if isinstance(a, list) else [a])]
        where = [i for i, x in enumerate(flat) if isinstance(x, torch.Tensor) and x.requires_grad]

        def function(*leaves: torch.Tensor) -> Any:
            parts = list(flat)
            for i, x in zip(where, leaves, strict=True):
                parts[i] = x
            again = iter(parts)
            results = op()(*[[next(again) for _ in a] if isinstance(a, list) else next(again) for a in given])
            return results[:2] if isinstance(results, tuple) else results

        assert torch.autograd.gradcheck(function, [flat[i] for i in where])


def test_a_backward_that_is_a_function_can_be_differentiated_again() -> None:
    with torch.enable_grad():
        assert torch.autograd.gradgradcheck(lambda x: scale()(x * x), (leaf(3),))


def test_whole_numbers_among_the_results_have_no_gradient() -> None:
    with torch.enable_grad():
        total, _, counts = mix()(leaf(3), 2, [leaf(3)])
    assert (total.requires_grad, counts.requires_grad) == (True, False)


# Ways to call it


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))
        self.scale, self.weigh, self.mix = scale(), weigh(), mix()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total, _, _ = self.mix(self.weigh(x, self.weight), 2, [self.scale(x, factor=0.5), x])
        return total.relu() + 1


@pytest.mark.parametrize("backend", ["inductor", "sardonyx"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_it_gives_the_same_results_and_gradients(backend: str, dynamic: bool) -> None:
    module = Module()
    options = {"fallback": "error"} if backend == "sardonyx" else None
    compiled = torch.compile(module, backend=backend, fullgraph=True, dynamic=dynamic, options=options)  # type: ignore[arg-type]
    with torch.enable_grad():
        for rows in (4, 7) if dynamic else (4,):
            x = torch.randn(rows, 6, requires_grad=True)
            expected = torch.autograd.grad(module(x).square().sum(), (x, module.weight))
            found = torch.autograd.grad(compiled(x).square().sum(), (x, module.weight))
            torch.testing.assert_close(compiled(x), module(x))
            torch.testing.assert_close(found, expected)


def test_a_size_may_be_marked_as_dynamic() -> None:
    module = Module()
    compiled = torch.compile(module, backend="sardonyx", fullgraph=True, options={"fallback": "error"})
    x = torch.randn(4, 6)
    torch._dynamo.mark_dynamic(x, 0)
    for given in (x, torch.randn(9, 6), torch.randn(2, 6)):
        torch.testing.assert_close(compiled(given), module(given))


def test_an_open_size_is_compiled_too() -> None:
    only, twice = positive(), scale()

    def function(x: torch.Tensor) -> torch.Tensor:
        return twice(only(x)) + 1

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(function, backend="sardonyx", fullgraph=True, options={"fallback": "error"})
        for x in (X[0], X.flatten(), -X[3]):
            torch.testing.assert_close(compiled(x), function(x))


def test_exported_it_stays_one_call() -> None:
    module = Module()
    program = torch.export.export(module, (X,), dynamic_shapes={"x": {0: torch.export.Dim("n")}})
    assert sum("tried" in str(n.target) for n in program.graph.nodes) == 3
    x = torch.randn(9, 6)
    torch.testing.assert_close(program.module()(x), module(x))


def test_in_inference_mode() -> None:
    with torch.inference_mode():
        result = scale()(X.T)
    assert result.is_inference()
    assert torch.equal(result.clone(), X.T * 2)


def test_under_autocast_it_computes_in_what_it_is_given() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert scale()(X).dtype == torch.float32
        assert scale()(X @ X.T).dtype == torch.bfloat16


def test_over_a_batch_it_is_called_for_each() -> None:
    assert torch.equal(torch.vmap(lambda x: scale()(x))(X), X * 2)


def test_on_the_meta_device_it_only_tells_the_sizes() -> None:
    result = weigh()(torch.empty(3, 5, device="meta"), torch.empty(5, device="meta"))
    assert (result.shape, result.device.type) == ((3, 5), "meta")


def test_a_subclass_sees_the_call() -> None:
    class Seen(torch.Tensor):
        calls: list[Any] = []  # noqa: RUF012

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            cls.calls.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    result = scale()(X.as_subclass(Seen))
    assert isinstance(result, Seen)
    assert Seen.calls == [scale().operator]


def test_a_module_that_uses_it_can_be_copied() -> None:
    module = Module()
    assert torch.equal(copy.deepcopy(module)(X), module(X))


def test_from_eight_threads_at_once() -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        x = torch.full((100,), float(number))
        results = [mix()(x, 2, [x, scale()(x)], offsets=[1.0])[0] for _ in range(200)]
        wrong.extend(number for result in results if not torch.equal(result, x * 5 + 1))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_thousands_of_calls_keep_no_memory() -> None:
    x = torch.ones(64, 64).T

    def call() -> None:
        for _ in range(1000):
            mix()(x, 2, [x, x], "sum", axes=[1, 2, 3], offsets=[0.5] * 50)
            with pytest.raises(RuntimeError):
                mix()(x, 2, [x, x], "a text that is too long to be held in place")

    assert growth(call) < 1 << 20
