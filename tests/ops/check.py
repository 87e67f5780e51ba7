"""One operator of PyTorch's database: its samples in eager and through sardonyx, and how they compare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from sardonyx.errors import UnsupportedOperator
from sardonyx.translate import table

MOST_SAMPLES = 400
"""Some operators have tens of thousands: those after this many are not looked at."""

UNINITIALIZED = frozenset({"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"})
"""Operators whose values torch does not promise; shapes and dtypes are still compared."""

ANY_OF_TIES = frozenset({"topk", "sort", "argsort", "kthvalue", "median", "nanmedian", "mode"})
"""Operators whose second result is the place of any of several equal elements; only its shape is compared."""

TOLERANCE = {
    torch.float16: (4e-3, 4e-3),
    torch.bfloat16: (3e-2, 3e-2),
    torch.float32: (1e-4, 2e-5),
    torch.float64: (1e-7, 1e-8),
}
"""Relative and absolute, by dtype; engines sum in another order than torch."""


@dataclass
class Outcome:
    """What became of one operator in one dtype."""

    operator: str
    dtype: str
    passed: int = 0
    empty: int = 0
    """Samples that are right, but whose result has no elements: they prove little."""
    refused: int = 0
    wrong: list[str] = field(default_factory=list)
    crashed: list[str] = field(default_factory=list)
    reasons: dict[str, int] = field(default_factory=dict)
    strides: int = 0
    """Samples that are right but laid out in memory in another way."""

    @property
    def verdict(self) -> str:
        if self.wrong or self.crashed:
            return "WRONG" if self.wrong else "crash"
        if self.refused:
            return "partly" if self.passed else "in torch"
        return "passes" if self.passed or self.empty else "no samples"

    def refuse(self, reason: str) -> None:
        """Count a sample that was not run through ONNX."""
        self.refused += 1
        self.reasons[reason] = self.reasons.get(reason, 0) + 1

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict}


def operators() -> dict[str, Any]:
    """Every entry of PyTorch's operator database by name, variants as `name.variant`."""
    from torch.testing._internal.common_methods_invocations import op_db

    return {".".join(filter(None, (op.name, op.variant_test_name))): op for op in op_db}


def in_own_table(op: Any) -> bool:
    """Whether our own table has an operator of this name, in any overload."""
    own = {name.split("::")[1].split(".")[0].lstrip("_") for name in table.names()}
    known = (op.name.split(".")[-1], op.aten_name, *(alias.name for alias in op.aliases))
    return any(name.lstrip("_") in own for name in known)


def samples(op: Any, dtype: torch.dtype, count: int) -> list[Any]:
    """`count` samples, evenly spread over those the database gives."""
    if dtype not in op.supported_dtypes("cpu"):
        return []
    torch.manual_seed(0)
    found = list(islice(op.sample_inputs("cpu", dtype, requires_grad=False), MOST_SAMPLES))
    if len(found) <= count:
        return found
    return [found[i * (len(found) - 1) // max(count - 1, 1)] for i in range(count)]


def check(name: str, op: Any, dtype: torch.dtype, count: int) -> Outcome:
    """Run an operator's samples; never raises."""
    outcome = Outcome(name, str(dtype).removeprefix("torch."))
    try:
        given = samples(op, dtype, count)
    except Exception as error:
        outcome.reasons[f"no samples: {_line(error)}"] = 1
        return outcome
    for index, sample in enumerate(given):
        _check_sample(outcome, index, op, sample)
    return outcome


def _check_sample(outcome: Outcome, index: int, op: Any, sample: Any) -> None:
    arguments = (sample.input, tuple(sample.args), dict(sample.kwargs))
    leaves, spec = tree_flatten(arguments)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    function = _over_tensors(op, leaves, spec)
    try:
        torch.manual_seed(0)
        expected = function(*tensors)
    except Exception:
        return  # a sample that torch itself refuses says nothing about us
    try:
        actual = compiled(function)(*tensors)
    except Exception as error:
        _classify(outcome, index, error)
        return
    if op.name in ANY_OF_TIES and not sample.kwargs.get("stable"):
        expected, actual = (_without_ties(sample, result) for result in (expected, actual))
    problem = difference(expected, actual, values=op.name not in UNINITIALIZED)
    if problem and not _nearer_to_truth(function, tensors, expected, actual):
        outcome.wrong.append(f"sample {index}: {problem} for {_describe(arguments)}")
    elif not any(t.numel() for t in _tensors(expected)) and _tensors(expected):
        outcome.empty += 1
    else:
        outcome.passed += 1
        outcome.strides += _strides(expected) != _strides(actual)


def _without_ties(sample: Any, result: Any) -> Any:
    """What is left to compare where equal elements may be named in any order."""
    if isinstance(result, tuple):
        return result[0], torch.zeros_like(result[1])
    if not result.dim() or result.dtype != torch.int64:
        return result
    dim = next(iter(sample.args), sample.kwargs.get("dim", -1))
    return torch.take_along_dim(sample.input, result, dim)


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """The function through `torch.compile`, with no operator left to torch."""
    torch._dynamo.reset()
    return torch.compile(
        function, backend="sardonyx", fullgraph=True, dynamic=False, options={"fallback": "error", **options}
    )


def _over_tensors(op: Any, leaves: list[Any], spec: Any) -> Callable[..., Any]:
    """The operator as a function of its tensors alone.

    They are copied first: a view of an input would never leave torch, and so prove nothing.
    """

    def function(*tensors: torch.Tensor) -> Any:
        given = iter(tensors)
        filled = [next(given).clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        first, args, kwargs = tree_unflatten(filled, spec)
        return op.op(first, *args, **kwargs)

    return function


def _classify(outcome: Outcome, index: int, error: BaseException) -> None:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, UnsupportedOperator):
            outcome.refuse(_line(cause).removeprefix("ONNX cannot express "))
            return
        if type(cause).__module__.startswith("torch._dynamo.exc") and type(cause).__name__ != "BackendCompilerFailed":
            outcome.refuse(f"dynamo does not capture it: {_line(cause)}")
            return
        cause = getattr(cause, "inner_exception", None) or cause.__cause__
    outcome.crashed.append(f"sample {index}: {type(error).__name__}: {str(error)[:600]}")


def _line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:200]


def difference(expected: Any, actual: Any, *, values: bool = True) -> str:
    """How a result differs from what torch gave, in a line; empty where it does not."""
    left, right = tree_flatten(expected)[0], tree_flatten(actual)[0]
    if len(left) != len(right):
        return f"{len(right)} results instead of {len(left)}"
    return next(filter(None, (_one_difference(a, b, values) for a, b in zip(left, right, strict=True))), "")


def _one_difference(expected: Any, actual: Any, values: bool) -> str:
    if not isinstance(expected, torch.Tensor):
        return "" if expected == actual or expected != expected else f"{actual!r} instead of {expected!r}"
    for what in ("dtype", "shape"):
        if getattr(expected, what) != getattr(actual, what):
            return f"{what} {getattr(actual, what)} instead of {getattr(expected, what)}"
    return _value_difference(expected, actual) if values else ""


def _value_difference(expected: torch.Tensor, actual: torch.Tensor) -> str:
    rtol, atol = TOLERANCE.get(expected.dtype, (0.0, 0.0))
    try:
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, equal_nan=True, check_stride=False)
    except AssertionError as error:
        return " ".join(str(error).split())[:160]
    return ""


def _nearer_to_truth(function: Callable[..., Any], tensors: list[torch.Tensor], expected: Any, actual: Any) -> bool:
    """Whether the result is as near to the one in double precision as torch's own is."""
    try:
        torch.manual_seed(0)
        truth = function(*(t.double() if t.is_floating_point() else t for t in tensors))
        return all(_as_near(*three) for three in zip(*map(_tensors, (truth, expected, actual)), strict=True))
    except Exception:
        return False


def _as_near(truth: torch.Tensor, expected: torch.Tensor, actual: torch.Tensor) -> bool:
    if not expected.is_floating_point() or expected.dtype != actual.dtype or expected.shape != actual.shape:
        return not difference(expected, actual)
    ours, theirs = ((t.double() - truth).abs() for t in (actual, expected))
    rtol, atol = TOLERANCE[expected.dtype]
    close = ours <= 2 * theirs + atol + rtol * truth.abs()
    same = (truth == actual) | (truth.isnan() & actual.isnan())
    return bool((close | same).all())


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def _strides(tree: Any) -> list[Any]:
    return [t.stride() for t in _tensors(tree) if t.layout == torch.strided and t.numel() > 1]


def _describe(arguments: Any) -> str:
    def one(leaf: Any) -> Any:
        return f"{str(leaf.dtype)[6:]}{list(leaf.shape)}" if isinstance(leaf, torch.Tensor) else leaf

    first, args, kwargs = tree_map(one, arguments)
    return f"{first}, {args}, {kwargs}"[:300]
