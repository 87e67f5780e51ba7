"""A sample of PyTorch's database in eager and through sardonyx, and how the two compare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from sardonyx.errors import CaptureError, SardonyxError

from .database import SEED, over_tensors, over_tensors_of_all, samples
from .distribution import distributions_differ
from .edges import CANCELLING, EDGES, is_elementwise, largest_finite, orders_or_maps
from .ways import CAPTURED, COMPILED, Way, way_of

UNINITIALIZED = frozenset({"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"})
"""Operators whose values torch does not promise; shapes and dtypes are still compared."""

ANY_OF_TIES = frozenset({"topk", "sort", "argsort", "kthvalue", "median", "nanmedian", "mode"})
"""Operators whose second result is the place of any of several equal elements; only its shape is compared."""

EITHER_ZERO = frozenset(
    {
        *("maximum", "minimum", "max", "min", "fmax", "fmin", "clamp", "clamp_max", "clamp_min"),
        *("nn.functional.relu6", "nn.functional.softshrink"),
    }
)
"""Operators that may give 0.0 or -0.0 where they choose among both: torch itself does so by the size of the tensor."""

REMAINDERS = frozenset({"fmod", "remainder", "__rmod__"})
"""Operators whose vectorized kernels in torch give NaN where the quotient overflows: the truth is that of its scalar
kernels, which call C's fmod and are exact."""

POLES_AT_INTEGERS = frozenset({"polygamma", "special.polygamma"})
"""Operators that are infinite at the integers up to zero, where torch gives what the rounding of pi leaves."""

FACTOR_IF_COMPLETED = frozenset({"linalg.cholesky_ex"})
"""Operators whose factor is unspecified for matrices of which the second result says that they have none."""

TOLERANCE = {
    torch.float16: (4e-3, 4e-3),
    torch.bfloat16: (3e-2, 3e-2),
    torch.float32: (1e-4, 2e-5),
    torch.float64: (1e-7, 1e-8),
    torch.complex64: (1e-4, 2e-5),
    torch.complex128: (1e-7, 1e-8),
}
"""Relative and absolute, by dtype; engines sum in another order than torch."""


_NO_KERNEL = "Could not run 'aten::"
"""What torch says of an operator that it has not for a kind of tensor, as sparse ones on our device."""


@dataclass
class Outcome:
    """What became of one operator in one dtype, or of one of its samples: counts, and what went wrong."""

    operator: str
    dtype: str
    passed: int = 0
    """Samples that ran through ONNX with eager's values, dtypes and shapes."""
    empty: int = 0
    """Samples that are right, but whose result has no elements: they prove little."""
    random: int = 0
    """Of those that passed: samples that are random, with eager's distribution but other numbers."""
    shape_only: int = 0
    """Of those that passed: samples of uninitialised memory, judged by shape and dtype."""
    strides: int = 0
    """Of those that passed: samples that are laid out in memory in another way."""
    refused: int = 0
    """Samples that were not run through ONNX."""
    rejected: int = 0
    """Samples that torch itself rejects: they say nothing about us."""
    wrong: list[str] = field(default_factory=list)
    crashed: list[str] = field(default_factory=list)
    reasons: dict[str, int] = field(default_factory=dict)
    """Why samples were refused, and how many."""
    seconds: float = 0.0
    way: str = COMPILED
    """How the samples were run; see `ways`."""

    @property
    def verdict(self) -> str:
        if self.wrong or self.crashed:
            return "WRONG" if self.wrong else "crash"
        if self.refused:
            return "partly" if self.passed else "in torch"
        return "passes" if self.passed else "only empty" if self.empty else "no samples"

    @property
    def has_samples(self) -> bool:
        return any((self.passed, self.empty, self.refused, self.rejected, self.wrong, self.crashed))

    def refuse(self, reason: str) -> None:
        """Count a sample that was not run through ONNX."""
        self.refused += 1
        self.reasons[reason] = self.reasons.get(reason, 0) + 1

    def add(self, other: Outcome) -> None:
        """Take in what became of further samples."""
        for reason, count in other.reasons.items():
            self.reasons[reason] = self.reasons.get(reason, 0) + count
        for name, value in vars(other).items():
            if isinstance(value, (int, float, list)):
                setattr(self, name, getattr(self, name) + value)

    def as_json(self) -> dict[str, Any]:
        """Without what is zero or empty."""
        return {key: value for key, value in {**asdict(self), "verdict": self.verdict}.items() if value}

    @classmethod
    def of_json(cls, line: dict[str, Any]) -> Outcome:
        """As it was before `as_json`, without what a sweep adds."""
        names = {field.name for field in fields(cls)}
        return cls(**{key: value for key, value in line.items() if key in names})


def check(name: str, op: Any, dtype: torch.dtype, count: int | None = None) -> Outcome:
    """Run an operator's samples, all or `count` of them; never raises."""
    outcome = Outcome(name, str(dtype).removeprefix("torch."))
    try:
        given = samples(op, dtype, count)
    except Exception as error:
        outcome.reasons[f"no samples: {_line(error)}"] = 1
        return outcome
    for index, sample in enumerate(given):
        outcome.add(check_sample(outcome.operator, outcome.dtype, index, op, sample))
    return outcome


@dataclass
class _Case:
    """A sample, and what torch gives for it; `outcome` says so where torch rejects it."""

    op: Any
    sample: Any
    index: int
    outcome: Outcome
    expected: Any = None
    is_random: bool = False

    def __post_init__(self) -> None:
        self.arguments = (self.sample.input, tuple(self.sample.args), dict(self.sample.kwargs))
        self.tensors = _tensors(self.arguments)
        self.function = over_tensors(self.op, self.arguments)
        try:
            self.expected, self.is_random = run_eager(self.function, self.tensors)
        except Exception:
            self.outcome.rejected = 1


def check_sample(name: str, dtype: str, index: int, op: Any, sample: Any, way: Way | None = None) -> Outcome:
    """Run one sample, through `torch.compile` unless another way is given; never raises."""
    case = _Case(op, sample, index, Outcome(name, dtype))
    return case.outcome if case.outcome.rejected else _checked_alone(case, way or way_of(COMPILED))


def check_samples(
    name: str, dtype: str, op: Any, numbered: Sequence[tuple[int, Any]], way: str, executor: str | None = None
) -> list[Outcome]:
    """Run several samples, where the way captures graphs as one function: an outcome for each; never raises.

    Random ones run by themselves, since the seed is theirs; so does each where the function of all of them raises.
    """
    cases = [_Case(op, sample, index, Outcome(name, dtype)) for index, sample in numbered]
    settled = [case for case in cases if not case.outcome.rejected]
    together = [case for case in settled if not case.is_random] if way in CAPTURED else []
    results = _run_together(op, together, CAPTURED[way]) if len(together) > 1 else None
    if results is not None:
        for case, actual in zip(together, results, strict=True):
            _judge(case, actual)
        settled = [case for case in settled if case.is_random]
    for case in settled:
        _checked_alone(case, way_of(way, executor))
    return [case.outcome for case in cases]


def _run_together(op: Any, cases: Sequence[_Case], capture: Callable[..., Callable[..., Any]]) -> list[Any] | None:
    """The results of all as one function; None where that raises."""
    function = over_tensors_of_all(op, [case.arguments for case in cases])
    try:
        return list(_seeded(capture(function), [tensor for case in cases for tensor in case.tensors]))
    except Exception:
        return None


def _checked_alone(case: _Case, way: Way) -> Outcome:
    try:
        run = way(case.op, case.arguments)
        actual = _seeded(run, case.tensors)
    except Exception as error:
        _classify(case.outcome, case.index, error)
        return case.outcome
    return _judge(case, actual, run)


def _judge(case: _Case, actual: Any, run: Callable[..., Any] | None = None) -> Outcome:
    """Compare a result with torch's; `run` gives further results of a sample that is random."""
    op, sample, outcome, expected, tensors = case.op, case.sample, case.outcome, case.expected, case.tensors
    function = case.function
    if op.name in ANY_OF_TIES and not sample.kwargs.get("stable"):
        expected, actual = (_without_ties(sample, result) for result in (expected, actual))
    if op.name in FACTOR_IF_COMPLETED:
        expected, actual = map(_completed, (expected, actual))
    if op.name in POLES_AT_INTEGERS:
        expected = _with_poles(sample.input, expected)
    strides = _strides(expected) != _strides(actual)
    elsewhere = _difference_in_devices(expected, actual)
    comparable = _comparable(op, sample, expected)
    expected, actual = comparable(expected), comparable(actual)
    problem = elsewhere or difference(expected, actual, values=op.name not in UNINITIALIZED)
    if problem and case.is_random and run is not None:
        outcome.random = 1
        ours = _then(run, comparable)
        problem = _random_difference(_then(function, comparable), ours, tensors, expected, actual)
    elif problem:
        truth = truth_of(op.name, _then(function, comparable))
        problem = "" if nearer_to_truth(truth, tensors, expected, actual) else problem
    if problem and outcome.way == COMPILED and _is_dynamos_own(case, _then(function, comparable), actual):
        problem = ""
    if not problem and is_elementwise(op) and op.name not in EITHER_ZERO and sample.name == EDGES:
        problem = _difference_in_zeros(expected, actual)
    if problem:
        outcome.wrong.append(f"sample {case.index}: {problem} for {_describe(case.arguments)}")
    elif not any(t.numel() for t in _tensors(expected)) and _tensors(expected):
        outcome.empty = 1
    else:
        outcome.passed = 1
        outcome.shape_only = int(op.name in UNINITIALIZED)
        outcome.strides = int(strides)
    return outcome


def _is_dynamos_own(case: _Case, function: Callable[..., Any], actual: Any) -> bool:
    """Whether dynamo itself writes the operator such that it gives our result, as it does for addcdiv with a value."""
    if case.is_random:
        return False
    torch._dynamo.reset()
    try:
        theirs = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=False)(*case.tensors)
    except Exception:
        return False
    return not difference(theirs, actual)


def _then(function: Callable[..., Any], after: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda *given: after(function(*given))


def _comparable(op: Any, sample: Any, expected: Any) -> Callable[[Any], Any]:
    """What is compared of a result, on the CPU: all of it, but for samples at the edges of operators that sum."""
    if sample.name != EDGES or orders_or_maps(op):
        return _on_cpu
    is_pairs = op.name == "stft" and not sample.kwargs.get("return_complex")
    scale = largest_finite(_on_cpu(expected)) if CANCELLING.fullmatch(op.name) else None

    def comparable(result: Any) -> Any:
        result = _on_cpu(result)
        complete = torch.view_as_complex(result.contiguous()) if is_pairs else result
        finite = tree_map(_without_infinities, complete)
        return finite if scale is None else finite / scale

    return comparable


def _difference_in_devices(expected: Any, actual: Any) -> str:
    theirs, ours = ([t.device.type for t in _tensors(result)] for result in (expected, actual))
    return "" if theirs == ours else f"results on {', '.join(ours)} instead of {', '.join(theirs)}"


def _on_cpu(result: Any) -> Any:
    return tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf, result)


def run_eager(function: Callable[..., Any], tensors: list[torch.Tensor]) -> tuple[Any, bool]:
    """What torch gives, and whether it drew random numbers for it."""
    torch.manual_seed(SEED)
    before = _rng_state()
    expected = function(*tensors)
    return expected, not torch.equal(before, _rng_state())


def _rng_state() -> torch.Tensor:
    """The state of the random generators of the CPU and of CUDA."""
    state = torch.get_rng_state()
    return torch.cat([state, torch.cuda.get_rng_state()]) if torch.cuda.is_initialized() else state


def _seeded(function: Callable[..., Any], tensors: list[torch.Tensor]) -> Any:
    torch.manual_seed(SEED)
    return function(*tensors)


def _random_difference(
    eager: Callable[..., Any], ours: Callable[..., Any], tensors: list[torch.Tensor], expected: Any, actual: Any
) -> str:
    """How random results differ: in dtype, shape or distribution, or from what the same seed gave before."""
    form = difference(expected, actual, values=False)
    if form or difference(actual, _seeded(ours, tensors)):
        return form or "the same seed gives other numbers"
    widest = max((TOLERANCE.get(t.dtype, (0.0, 0.0)) for t in _tensors(expected)), default=(0.0, 0.0))
    return distributions_differ(lambda: eager(*tensors), lambda: ours(*tensors), widest)


def _without_infinities(leaf: Any) -> Any:
    """NaN for infinities: which of them a sum of products with infinities gives depends on its order.

    For complex numbers so does which of the two parts it is.
    """
    if not isinstance(leaf, torch.Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
        return leaf
    broken = complex("nan+nanj") if leaf.is_complex() else float("nan")
    return torch.where(leaf.isfinite(), leaf, torch.full_like(leaf, broken))


def _with_poles(x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Infinity for the large numbers at integers up to zero."""
    pole = (x <= 0) & (x.double() == x.double().round()) & (result.abs() > 1 / torch.finfo(result.dtype).eps)
    return torch.where(pole, result.sign() * float("inf"), result)


def _completed(result: Any) -> Any:
    """NaN for the factors of matrices that have none."""
    factor, info = result
    return factor.masked_fill(info[..., None, None] != 0, float("nan")), info


def truth_of(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function that gives the truth in double precision."""
    return partial(_one_by_one, function) if name in REMAINDERS else function


def _one_by_one(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    """An elementwise function by torch's scalar kernels, which tensors of one element take."""
    together = torch.broadcast_tensors(*tensors)
    rows = zip(*(x.reshape(-1, 1) for x in together), strict=True)
    return torch.cat([function(*row) for row in rows]).reshape(together[0].shape)


def _without_ties(sample: Any, result: Any) -> Any:
    """What is left to compare where equal elements may be named in any order."""
    if isinstance(result, tuple):
        return result[0], torch.zeros_like(result[1])
    if not result.dim() or result.dtype != torch.int64:
        return result
    dim = next(iter(sample.args), sample.kwargs.get("dim", -1))
    return torch.take_along_dim(sample.input, result, dim)


def _classify(outcome: Outcome, index: int, error: BaseException) -> None:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, NotImplementedError) and (isinstance(cause, SardonyxError) or _NO_KERNEL in str(cause)):
            outcome.refuse(_line(cause).removeprefix("ONNX cannot express "))
            return
        if isinstance(cause, CaptureError):
            outcome.refuse(f"torch.export does not capture it: {_line(cause)}")
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


def _difference_in_zeros(expected: Any, actual: Any) -> str:
    """Zeros of the other sign, which `1 / x`, `atan2` and `signbit` tell apart."""
    for theirs, ours in zip(_tensors(expected), _tensors(actual), strict=True):
        if not theirs.is_floating_point():
            continue
        off = (theirs == 0) & (ours == 0) & (theirs.signbit() != ours.signbit())
        if off.any():
            return f"zeros of the other sign at {off.nonzero()[:4].tolist()}"
    return ""


def _value_difference(expected: torch.Tensor, actual: torch.Tensor) -> str:
    rtol, atol = TOLERANCE.get(expected.dtype, (0.0, 0.0))
    try:
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, equal_nan=True, check_stride=False)
    except AssertionError as error:
        return " ".join(str(error).split())[:160]
    return ""


def nearer_to_truth(function: Callable[..., Any], tensors: list[torch.Tensor], expected: Any, actual: Any) -> bool:
    """Whether the result is as near to the one in double precision, on the CPU, as torch's own is."""
    try:
        torch.manual_seed(0)
        promoted = all(map(_is_integer, tensors)) and all(t.is_floating_point() for t in _tensors(expected))
        truth = function(*(t.cpu().double() if promoted else _widened(t.cpu()) for t in tensors))
        return all(_as_near(*three) for three in zip(*map(_tensors, (truth, expected, actual)), strict=True))
    except Exception:
        return False


def _is_integer(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def _as_near(truth: torch.Tensor, expected: torch.Tensor, actual: torch.Tensor) -> bool:
    if expected.dtype not in TOLERANCE or expected.dtype != actual.dtype or expected.shape != actual.shape:
        return not difference(expected, actual)
    ours, theirs = ((_widened(t) - truth).abs() for t in (actual, expected))
    rtol, atol = TOLERANCE[expected.dtype]
    theirs = torch.where(theirs.isfinite(), theirs, 0)  # where torch overflows, only the truth or torch's own will do
    close = ours <= 2 * theirs + atol + rtol * truth.abs()
    # Half-precision kernels of torch give NaN for some numbers, and infinities may have been made NaN in both results.
    close |= expected.isnan() & (ours <= atol + rtol * truth.abs())
    same = (truth.to(actual.dtype) == actual) | (expected == actual) | (truth.isnan() & actual.isnan())
    same |= ~truth.isfinite() & actual.isnan() & expected.isnan()
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
