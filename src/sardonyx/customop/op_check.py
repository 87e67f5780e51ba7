"""Trying an operator: torch, ONNX Runtime and a reference against each other, for every type, size and stride."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch.export import Dim
from torch.utils import _pytree as pytree

from sardonyx.customop.declaration import CustomOp
from sardonyx.customop.in_torch import bound
from sardonyx.customop.project import Project, snake_case
from sardonyx.customop.signature import Attribute, Signature, Tensor
from sardonyx.doors.export import export
from sardonyx.engines.ortvalue import from_torch, reader
from sardonyx.errors import DeclarationError
from sardonyx.toolchain.operator_libraries import libraries_of

Result: TypeAlias = Literal["passed", "failed", "skipped"]
Choice: TypeAlias = Mapping[str, str]

_TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5, torch.float64: 1e-7}
"""Relative and absolute, of results by their type; others are exact."""


@dataclass(frozen=True)
class Outcome:
    """What came of one check."""

    operator: str
    check: str
    example: int
    """Which of the calls, from 1."""
    types: str
    result: Result
    detail: str


class _Skipped(Exception):
    """A check that cannot be made, and why."""


def trials(project: Project) -> Iterator[Outcome]:
    """Check every operator of a project."""
    for op in project.operators:
        name = op.signature.qualified
        try:
            calls, reference = _calls(project, op), project.function("reference", op)
        except (DeclarationError, _CannotMakeUp) as error:
            yield Outcome(name, "inputs", 0, "", "failed", str(error))
            continue
        if project.function("examples", op) is None:
            yield Outcome(name, "inputs", 0, "", "passed", f"made up: {calls[0].described()}")
        for number, call in enumerate(calls, start=1):
            yield from _tried(op, call, number, reference)


def _tried(op: CustomOp, call: _Call, number: int, reference: Callable[..., Any] | None) -> Iterator[Outcome]:
    choices = op.signature.choices

    def outcome(check: str, choice: Choice, made: Callable[[], str]) -> Outcome:
        types = ", ".join(choice.values())
        try:
            return Outcome(op.signature.qualified, check, number, types, "passed", made())
        except _Skipped as reason:
            return Outcome(op.signature.qualified, check, number, types, "skipped", str(reason))
        except Exception as error:
            return Outcome(op.signature.qualified, check, number, types, "failed", _shown(error))

    for choice in choices:
        typed = call.of(choice)
        if reference is not None:
            yield outcome("reference", choice, partial(_against_reference, typed, reference))
        yield outcome("onnxruntime", choice, partial(_against_ort, typed))
    typed = call.of(choices[0])
    yield outcome("strides", choices[0], partial(_strided, typed))
    yield outcome("dynamic shapes", choices[0], partial(_other_sizes, typed))
    if number == 1:
        yield outcome("opcheck", choices[0], partial(_opcheck, typed))
    if number == 1 and op.differentiable:
        double = _in_double(op.signature)
        yield outcome("gradcheck", double or {}, partial(_gradcheck, call, double))


def _shown(error: Exception) -> str:
    text = str(error).strip() if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}".strip()
    return " ".join(line.strip() for line in text.splitlines() if line.strip())[:500]


# Calls


@dataclass(frozen=True)
class _Call:
    """An operator and what it is called with, by name."""

    op: CustomOp
    given: Mapping[str, Any]

    @property
    def signature(self) -> Signature:
        return self.op.signature

    def __call__(self) -> list[torch.Tensor]:
        args, kwargs = self.arguments()
        with torch.no_grad():
            return _listed(self.op.operator(*args, **kwargs))

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        names = [p.name for p in self.signature.parameters]
        by_position = len(names) - self.signature.keyword_only
        return (
            tuple(self.given[name] for name in names[:by_position]),
            {name: self.given[name] for name in names[by_position:]},
        )

    def described(self) -> str:
        return ", ".join(f"{name} {_sizes_or_value(value)}" for name, value in self.given.items())

    def with_tensors(self, made: Callable[[Tensor, torch.Tensor], torch.Tensor]) -> _Call:
        """The same with other tensors."""
        given = dict(self.given)
        for tensor in self.signature.inputs:
            given[tensor.name] = pytree.tree_map_only(torch.Tensor, partial(made, tensor), given[tensor.name])
        return _Call(self.op, given)

    def of(self, choice: Choice) -> _Call:
        """The same in other types; tensors whose type the signature fixes stay."""
        return self.with_tensors(lambda t, x: x.to(getattr(torch, choice[t.type])) if t.type in choice else x)


def _sizes_or_value(value: Any) -> str:
    return str(pytree.tree_map_only(torch.Tensor, lambda x: tuple(x.shape), value))


def _listed(results: Any) -> list[torch.Tensor]:
    return list(results) if isinstance(results, (tuple, list)) else [results]


def _calls(project: Project, op: CustomOp) -> list[_Call]:
    examples = project.function("examples", op)
    if examples is None:
        return [_made_up(op)]
    found = examples()
    if not found or not all(_is_call(x) for x in found):
        raise DeclarationError(
            f"the examples of {op.signature.qualified} are no list of calls",
            hint='a call is a pair of arguments and arguments by name: [((x,), {"factor": 2.0})]',
        )
    return [_Call(op, bound(op.signature, args, kwargs)) for args, kwargs in found]


def _is_call(x: Any) -> bool:
    return isinstance(x, (tuple, list)) and len(x) == 2 and isinstance(x[0], (tuple, list)) and isinstance(x[1], dict)


class _CannotMakeUp(Exception):
    """Nothing that was made up is something the operator takes."""


_SIZE = 4
_RANKS = (2, 3, 4, 1)
_VALUES: Mapping[str, Sequence[Any]] = {
    "int": (1, 2),
    "float": (0.5,),
    "bool": (True,),
    "int[]": ([0],),
    "float[]": ([0.5],),
}
"""What is tried for attributes that have no default."""


def _made_up(op: CustomOp) -> _Call:
    """A call from the signature alone: tensors whose sizes are all the same, until torch takes one."""
    signature, refused = op.signature, ""
    lacking = [a for a in signature.attributes if a.required]
    choice = signature.choices[0]
    for rank, *values in itertools.product(_RANKS, *(_VALUES.get(a.type, ()) for a in lacking)):
        given = {p.name: p.default if isinstance(p, Attribute) else _tensors(p, rank) for p in signature.parameters}
        call = _Call(op, given | dict(zip((a.name for a in lacking), values, strict=True)))
        try:
            call.of(choice)()
            return call
        except Exception as error:
            refused = f": {_shown(error)}"
    raise _CannotMakeUp(
        f"no inputs can be made up from the signature{refused} "
        f"(next: write a function examples_{snake_case(signature.name)}() that gives a list of calls, (args, kwargs))"
    )


def _tensors(tensor: Tensor, rank: int) -> Any:
    made = [_random(tensor, tensor.rank if tensor.rank is not None else rank) for _ in range(2)]
    return made if tensor.kind == "variadic" else made[0]


def _random(tensor: Tensor, rank: int) -> torch.Tensor:
    sizes, dtype = [_SIZE] * rank, getattr(torch, tensor.type, torch.float32)
    if isinstance(dtype, torch.dtype) and not dtype.is_floating_point:
        return torch.randint(0, 2 if dtype == torch.bool else _SIZE, sizes).to(dtype)
    return torch.randn(sizes) if not isinstance(dtype, torch.dtype) else torch.randn(sizes).to(dtype)


# Checks


def _against_reference(call: _Call, reference: Callable[..., Any]) -> str:
    """In double precision, whatever the operator computes in."""
    args, kwargs = call.with_tensors(lambda _, x: x.double() if x.is_floating_point() else x).arguments()
    found, expected = call(), _listed(reference(*args, **kwargs))
    return _agree(found, [y.to(x.dtype) for x, y in zip(found, expected, strict=False)])


def _against_ort(call: _Call) -> str:
    """A session that knows nothing but the model and its library."""
    once = _Once(call)
    return _agree(_in_ort(_model(once), once.tensors, call()), call())


def _strided(call: _Call) -> str:
    def strided(_: Tensor, x: torch.Tensor) -> torch.Tensor:
        return x.repeat_interleave(2, -1)[..., ::2] if x.dim() else x

    return _agree(call.with_tensors(strided)(), call(), exact=True)


def _other_sizes(call: _Call) -> str:
    """A model for any size, at sizes that are twice those it was exported with."""
    torch.manual_seed(0)
    larger = call.with_tensors(lambda _, x: _resampled(x, [2 * n if n > 1 else n for n in x.shape]))
    try:
        expected = larger()
    except Exception as error:
        raise _Skipped(f"it does not take twice the size: {_shown(error)}") from error
    model = _model(_Once(call), dynamic=True)
    return _agree(_in_ort(model, _Once(larger).tensors, expected), expected)


def _resampled(x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """A tensor of these sizes with values that the other has."""
    if not x.numel():
        return x
    return x.flatten()[torch.randint(x.numel(), (*sizes,))]


def _opcheck(call: _Call) -> str:
    args, kwargs = call.arguments()
    with torch.enable_grad():
        if call.op.differentiable:
            args, kwargs = call.with_tensors(_wanting_gradient).arguments()
        tests = torch.library.opcheck(call.op.operator, args, kwargs)
    return f"{len(tests)} tests"


def _in_double(signature: Signature) -> Choice | None:
    """The types of a gradient check, if there are kernels for them."""
    floats = {t.type for t in signature.inputs if _floating(signature, t.type)}
    double = (c for c in signature.choices if all(c.get(kind, kind) == "float64" for kind in floats))
    return next(double, None) if floats else None


def _floating(signature: Signature, kind: str) -> bool:
    return any(getattr(torch, name).is_floating_point for name in signature.types.get(kind, (kind,)))


def _gradcheck(call: _Call, choice: Choice | None) -> str:
    if choice is None:
        raise _Skipped("it has no kernels for float64, which differences need")
    with torch.enable_grad():
        args, kwargs = call.of(choice).with_tensors(_wanting_gradient).arguments()
        given, spec = pytree.tree_flatten((args, kwargs))
        places = [i for i, x in enumerate(given) if isinstance(x, torch.Tensor) and x.requires_grad]

        def function(*tensors: torch.Tensor) -> Any:
            leaves = dict(enumerate(given)) | dict(zip(places, tensors, strict=True))
            args, kwargs = pytree.tree_unflatten(list(leaves.values()), spec)
            results = _listed(call.op.operator(*args, **kwargs))
            return tuple(x for x in results if x.is_floating_point())

        torch.autograd.gradcheck(function, [given[i] for i in places])
    return f"{len(places)} tensor{'s' * (len(places) != 1)}"


def _wanting_gradient(_: Tensor, x: torch.Tensor) -> torch.Tensor:
    return x.detach().clone().requires_grad_() if x.is_floating_point() else x


def _agree(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], *, exact: bool = False) -> str:
    """The largest difference; an error where it is too large."""
    if len(found) != len(expected):
        raise AssertionError(f"{len(found)} results, and {len(expected)} are expected")
    worst = 0.0
    for x, y in zip(found, expected, strict=True):
        tolerance = 0.0 if exact else _TOLERANCE.get(x.dtype, 0.0)
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance, equal_nan=True)
        gap = (x.double() - y.double()).abs()
        worst = max(worst, float(gap[gap.isfinite()].max()) if gap.isfinite().any() else 0.0)
    return f"largest difference {worst:.1e}" if worst else "equal"


# ONNX Runtime


class _Once(torch.nn.Module):
    """A call as a model of its tensors."""

    def __init__(self, call: _Call) -> None:
        super().__init__()
        self._op = call.op
        self._given, self._spec = pytree.tree_flatten(call.arguments())
        self.tensors = [x for x in self._given if isinstance(x, torch.Tensor)]

    def forward(self, tensors: list[torch.Tensor]) -> Any:
        left = iter(tensors)
        given = [next(left) if isinstance(x, torch.Tensor) else x for x in self._given]
        args, kwargs = pytree.tree_unflatten(given, self._spec)
        return self._op.operator(*args, **kwargs)


def _model(once: _Once, *, dynamic: bool = False) -> bytes:
    sizes = [dict.fromkeys(range(x.dim()), Dim.AUTO) for x in once.tensors]
    program = export(once.eval(), (once.tensors,), dynamic_shapes=(sizes,) if dynamic else None, fallback="error")
    serialised: bytes = program.proto().SerializeToString()
    return serialised


def _in_ort(model: bytes, tensors: Sequence[torch.Tensor], like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    for library in libraries_of(model):
        options.register_custom_ops_library(str(library))
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    feeds = {x.name: from_torch(t) for x, t in zip(session.get_inputs(), tensors, strict=True)}
    found = session._sess.run_with_ort_values(feeds, [x.name for x in session.get_outputs()], None)
    return [reader(x.dtype, x.device)(found, i) for i, x in enumerate(like)]
