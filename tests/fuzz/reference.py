"""What eager gives, how much of that rounding alone can change, and how another result differs from it.

A program with a comparison, a cast to integers or an index in it can turn the last bit of a float into any difference.
So eager runs again with noise of a few units in the last place after every operator that rounds: an element that moves
with the noise is compared as loosely as it moves, or not at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from tests.ops.check import TOLERANCE

NOISY_RUNS = 6
CONFIRMING_RUNS = 60
_ULPS = 4
_SPREADS = 8
"""How many times as far as the noise moved an element a result may be off."""

_EXACT_NAMES = """
abs neg clone copy_ _to_copy where maximum minimum fmax fmin cat stack index index_put index_put_ gather
scatter masked_fill masked_fill_ fill_ fill zero_ zeros ones full zeros_like ones_like full_like relu relu_
clamp clamp_ clamp_min clamp_max sign floor ceil round trunc amax amin max min sort topk median kthvalue
cummax cummin detach constant_pad_nd flip roll select_scatter slice_scatter tril triu repeat index_select
index_fill index_fill_ masked_scatter take embedding new_zeros new_empty empty empty_like lift_fresh
nan_to_num positive threshold hardtanh diag_embed eye arange scalar_tensor index_copy index_copy_ scatter_
tril_ neg_ abs_ copysign isin
"""
_EXACT = frozenset(_EXACT_NAMES.split())
"""Operators that do not round."""
_SUM_PRODUCTS = frozenset(
    ["mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "convolution", "linear"]
)
"""Operators whose zeros have the sign that the order of their sums gives, and whose terms can cancel."""
_SUMS = frozenset({"sum", "nansum", "mean", "cumsum", "trace"})
"""Operators that give 0.0 or -0.0 for a sum of negative zeros."""
_CHOOSING_NAMES = """
maximum minimum fmax fmin clamp clamp_ clamp_min clamp_max amax amin aminmax max min sort topk median kthvalue
cummax cummin hardtanh max_pool1d max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices
adaptive_max_pool2d adaptive_max_pool3d
"""
_CHOOSING = frozenset(_CHOOSING_NAMES.split())
"""Operators that give 0.0 or -0.0 where they choose among both."""
_NORMS = frozenset({"native_layer_norm", "native_group_norm"})
"""Operators that subtract a mean, so that what is left of equal elements is the rounding of the mean."""
_DERIVATIVES = frozenset({"glu_backward", "silu_backward", "gelu_backward", "mish_backward", "logit_backward"})
"""Operators that multiply a gradient by a sum of terms that can cancel."""
_LOGARITHMS = frozenset({"_log_softmax", "log_sigmoid_forward"})
"""Operators whose zeros are logarithms of numbers just below one."""
_LIMITED = frozenset({"prod", "cumprod", "gelu", "histc"})
"""Operators of which torch's results are wrong at limits: products and counts in half precision, gelu of infinity and
where tanh is −1."""


def _squares_overflow(x: Tensor) -> bool:
    """Whether a norm's sums depend on their order: torch gives zeros or NaN, by kernel."""
    return x.dtype in _SINGLE_OR_LESS and float(x.double().square().sum()) > torch.finfo(torch.float32).max


def _elu_backward(grad: Tensor, alpha: float, scale: float, input_scale: float, is_result: bool, x: Tensor) -> Tensor:
    slope = x + alpha * scale if is_result else alpha * scale * torch.exp(x * input_scale)
    return torch.where(x <= 0, grad * input_scale * slope, grad * scale)


def _shrink_backward(grad: Tensor, x: Tensor, bound: float) -> Tensor:
    return torch.where((x >= -bound) & (x <= bound), 0, grad)


_SCALAR_KERNELS: Mapping[str, Callable[..., Tensor]] = {
    "elu_backward": _elu_backward,
    "hardshrink_backward": _shrink_backward,
    "hardswish_backward": lambda grad, x: torch.where(x < 3, torch.where(x <= -3, 0, grad * (x / 3 + 0.5)), grad),
    "hardtanh_backward": lambda grad, x, low, high: torch.where((x <= low) | (x >= high), 0, grad),
    "softshrink_backward": _shrink_backward,
}
"""Operators whose vectorized kernels in torch give other results for NaN: what their scalar kernels compute, which have
the last elements of a tensor, small tensors, and all on a GPU."""
_SINGLE_OR_LESS = frozenset({torch.float16, torch.bfloat16, torch.float32})


class RoundingNoise(TorchDispatchMode):
    """Multiplies what each operator that rounds gives by a random number within a few ulps of one.

    With every other seed, equal elements of a result stay equal: a difference of two is then still zero.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)
        self._keeps_equal = bool(seed % 2)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = self._called(func, args, kwargs or {})
        if func.overloadpacket.__name__ in _CHOOSING and not func._schema.is_mutable and _has_both_zeros(args):
            return tree_map(self._with_any_zeros, result)
        if func.is_view or func.overloadpacket.__name__ in _EXACT:
            return result
        if func._schema.is_mutable:
            for written in result if isinstance(result, (tuple, list)) else [result]:
                self._disturb(written)
            return result
        disturbed = tree_map(self._disturbed, result)
        if func.overloadpacket.__name__ in _NORMS:
            return (self._off_by_mean(disturbed[0], args[0], result[2]), *disturbed[1:])
        if func.overloadpacket.__name__ in _DERIVATIVES:
            return self._off_by_factor(disturbed, args[0])
        if func.overloadpacket.__name__ in _LOGARITHMS:
            return tree_map(self._just_below_zero, disturbed)
        if func.overloadpacket.__name__ in _SUM_PRODUCTS:
            return self._with_any_zeros(self._off_by_terms(disturbed, func, args, kwargs or {}))
        if func.overloadpacket.__name__ in _SUMS:
            return tree_map(self._with_any_zeros, disturbed)
        return disturbed

    def _called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator; with every other seed, those that are wrong at limits compute in double precision.

        Those with two kinds of kernels use the other one.
        """
        name = func.overloadpacket.__name__
        if self._keeps_equal and name in _SCALAR_KERNELS:
            return _SCALAR_KERNELS[name](*args)
        result = func(*args, **kwargs)
        if self._keeps_equal and name in _NORMS and _squares_overflow(args[0]):
            return tree_map(lambda x: torch.full_like(x, math.nan), result)
        if not self._keeps_equal or name not in _LIMITED or result.dtype not in _SINGLE_OR_LESS:
            return result
        kwargs = {**kwargs, "dtype": torch.float64} if "dtype" in kwargs else kwargs
        return func(args[0].double(), *args[1:], **kwargs).to(result.dtype)

    def _off_by_mean(self, normalized: Tensor, x: Tensor, factors: Tensor) -> Tensor:
        """With noise as large as that of the mean, times the reciprocal deviation; what is no larger may be zero."""
        if not x.numel():
            return normalized
        eps = torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps
        most = _ULPS * eps * x.abs().max().double() * factors.abs().max().double()
        noise = self._noise(normalized.shape)
        moved = normalized.double() + noise * most
        return torch.empty_like(normalized).copy_(torch.where((moved.abs() <= most) & (noise > 0), 0.0, moved))

    def _off_by_factor(self, derivative: Tensor, gradient: Tensor) -> Tensor:
        """With noise of some ulps of the gradient."""
        if not gradient.numel() or not derivative.is_floating_point():
            return derivative
        most = _ULPS * torch.finfo(derivative.dtype).eps * gradient.abs().nan_to_num(0, 0, 0).max().double()
        moved = derivative.double() + self._noise(derivative.shape) * most
        return torch.empty_like(derivative).copy_(moved)

    def _off_by_terms(self, result: Tensor, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        """With noise of some ulps of the sum of the terms' absolute values: they can cancel.

        With every other seed equal results stay equal, without this noise.
        """
        if self._keeps_equal or not result.is_floating_point():
            return result
        sizes, weights = tree_map(lambda x: x.abs() if isinstance(x, Tensor) else x, (args, kwargs))
        most = _ULPS * torch.finfo(result.dtype).eps * func(*sizes, **weights).double().nan_to_num(0, 0, 0).abs()
        return torch.empty_like(result).copy_(result.double() + self._noise(result.shape) * most)

    def _noise(self, shape: Sequence[int]) -> Tensor:
        return torch.rand(shape, generator=self._generator, dtype=torch.float64) * 2 - 1

    def _noise_by_value(self, x: Tensor) -> Tensor:
        values, places = x.double().unique(return_inverse=True)
        return self._noise(values.shape)[places]

    def _with_any_zeros(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        return torch.where(x == 0, x * self._signs(x), x)

    def _just_below_zero(self, x: Tensor) -> Tensor:
        below = (x == 0) & (self._noise(x.shape) > 0)
        return x.masked_fill(below, -(torch.finfo(x.dtype).eps ** 2))

    def _signs(self, x: Tensor) -> Tensor:
        return (torch.randint(0, 2, x.shape, generator=self._generator) * 2 - 1).to(x.dtype)

    def _disturb(self, x: Any) -> None:
        if isinstance(x, Tensor) and x.is_floating_point() and _is_dense(x):
            x.copy_(self._disturbed(x))

    def _disturbed(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        noise = self._noise_by_value(x) if self._keeps_equal else self._noise(x.shape)
        moved = x.double() * (1 + noise * (_ULPS * torch.finfo(x.dtype).eps))
        return torch.empty_like(x).copy_(moved)


def _has_both_zeros(args: tuple[Any, ...]) -> bool:
    """Whether 0.0 and -0.0 are among the operands."""
    tensors = [x for x in args if isinstance(x, Tensor) and x.is_floating_point()]
    zeros = [x[x == 0].signbit() for x in tensors]
    numbers = [math.copysign(1, x) < 0 for x in args if isinstance(x, (int, float)) and x == 0]
    signs = {*(sign for found in zeros for sign in found.unique().tolist()), *numbers}
    return len(signs) == 2


def _is_dense(x: Tensor) -> bool:
    """Whether no two elements share memory."""
    return not any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True))


@dataclass
class Run:
    """What a call gave, the inputs after it, and the gradients of those that require them."""

    results: list[Tensor]
    inputs: list[Tensor]
    gradients: list[Tensor | None]
    aliases: list[bool]
    """For each result and each input: whether they share memory."""

    @property
    def tensors(self) -> list[Tensor | None]:
        """Everything that is compared by value."""
        return [*self.results, *self.inputs, *self.gradients]


def run(function: Callable[..., Sequence[Tensor]], arguments: Sequence[Tensor]) -> Run:
    """Call a function and differentiate its floating-point results."""
    leaves = [x for x in arguments if x.requires_grad]
    results = list(function(*arguments))
    losses = [_weighted_sum(x) for x in results if x.requires_grad and x.numel()]
    gradients: list[Tensor | None] = [None] * len(leaves)
    if losses:
        gradients = list(torch.autograd.grad(torch.stack(losses).sum(), leaves, allow_unused=True))
    aliases = [_share(x, y) for x in results for y in arguments]
    return Run([x.detach() for x in results], [x.detach() for x in arguments], gradients, aliases)


def _weighted_sum(x: Tensor) -> Tensor:
    """A sum in which each element weighs differently."""
    return (x.double() * torch.linspace(0.5, 1.5, x.numel(), dtype=torch.float64).reshape(x.shape)).sum()


def _share(x: Tensor, y: Tensor) -> bool:
    return bool(x.numel()) and x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


class Reference:
    """Eager's run, and runs with noise, made when they are needed."""

    def __init__(self, function: Callable[..., Sequence[Tensor]], arguments: Callable[[], Sequence[Tensor]]) -> None:
        self._function, self._arguments = function, arguments
        self.run = run(function, arguments())
        self._noisy: list[Run] = []

    def difference(self, other: Run) -> str:
        """How a run differs from eager's in dtypes, shapes and values, in a line; empty where it does not."""
        form = _difference_in_form(self.run, other)
        return form or next(filter(None, map(self._difference_at, range(len(other.tensors)), other.tensors)), "")

    def difference_in_layout(self, other: Run, *, dynamic: bool | None) -> str:
        """How strides and aliases differ from eager's, and from those that `torch.compile` itself gives.

        Capturing an edit of a view as a function may give other strides, whatever the backend.
        """
        problem = _difference_in_layout(self.run, other)
        if not problem:
            return ""
        torch._dynamo.reset()
        captured = torch.compile(self._function, backend="aot_eager", dynamic=dynamic)
        return _difference_in_layout(run(captured, self._arguments()), other)

    def _difference_at(self, at: int, actual: Tensor | None) -> str:
        expected = self.run.tensors[at]
        if expected is None or actual is None:
            return _difference_of_zero_gradients(at, expected, actual)
        off = ~_is_close(actual, expected)
        for runs in (NOISY_RUNS, CONFIRMING_RUNS):
            if off.any():
                off &= ~self._explained(at, actual, expected, runs)
        if not off.any():
            return ""
        where = off.nonzero()[0].tolist()
        got, wanted = actual[tuple(where)].item(), expected[tuple(where)].item()
        return f"{self._name(at)}{where} is {got!r} instead of {wanted!r}; {int(off.sum())} of {off.numel()} are off"

    def _name(self, at: int) -> str:
        for name, tensors in (("result", self.run.results), ("input", self.run.inputs)):
            if at < len(tensors):
                return f"{name} {at}"
            at -= len(tensors)
        return f"gradient {at}"

    def _explained(self, at: int, actual: Tensor, expected: Tensor, runs: int) -> Tensor:
        """Which elements may be what they are by rounding alone."""
        while len(self._noisy) < runs:
            with RoundingNoise(len(self._noisy)):
                self._noisy.append(run(self._function, self._arguments()))
        moved = [noisy.tensors[at] for noisy in self._noisy]
        if any(x is None or x.shape != expected.shape for x in moved):
            return torch.ones_like(expected, dtype=torch.bool)
        values = torch.stack([x for x in moved if x is not None])
        if not expected.is_floating_point():
            return (values != expected).any(0)
        infinite = (values.isinf() != expected.isinf()) | (values.isinf() & (values != expected))
        appeared = ((values.isnan() != expected.isnan()) | infinite).any(0)
        spread = (values.double() - expected.double()).abs().nan_to_num(0, 0).amax(0)
        return appeared | ((actual.double() - expected.double()).abs() <= _SPREADS * spread)


def _difference_in_form(expected: Run, actual: Run) -> str:
    for at, (theirs, ours) in enumerate(zip(expected.tensors, actual.tensors, strict=True)):
        if theirs is None or ours is None:
            continue
        for what in ("dtype", "shape"):
            if getattr(theirs, what) != getattr(ours, what):
                return f"tensor {at} has {what} {getattr(ours, what)} instead of {getattr(theirs, what)}"
    return ""


def _difference_in_layout(expected: Run, actual: Run) -> str:
    for at, (theirs, ours) in enumerate(zip(expected.results, actual.results, strict=True)):
        if _strides(theirs) != _strides(ours):
            return f"result {at} has strides {ours.stride()} instead of {theirs.stride()} for {list(theirs.shape)}"
    return "" if expected.aliases == actual.aliases else "other results share memory with inputs"


def _strides(x: Tensor) -> list[int]:
    """Those that say where elements are."""
    return [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1] if x.numel() else []


def _difference_of_zero_gradients(at: int, expected: Tensor | None, actual: Tensor | None) -> str:
    """A gradient that is not there is zero."""
    there = expected if actual is None else actual
    return f"gradient {at} is only on one side" if there is not None and bool(there.any()) else ""


def _is_close(actual: Tensor, expected: Tensor) -> Tensor:
    rtol, atol = TOLERANCE.get(expected.dtype, (0.0, 0.0))
    return torch.isclose(actual, expected, rtol=rtol, atol=atol, equal_nan=True)
