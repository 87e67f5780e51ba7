"""Check operators: compare torch, ONNX Runtime and a reference, for every dtype, and for sizes and strides."""

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
from sardonyx.customop.project import Project, snake_case
from sardonyx.customop.signature import Attribute, Signature, Tensor
from sardonyx.customop.torch_registration import bind_arguments
from sardonyx.doors.export import export
from sardonyx.engines.ortvalue import from_torch, reader
from sardonyx.errors import DeclarationError
from sardonyx.toolchain.operator_libraries import libraries_of

Status: TypeAlias = Literal["passed", "failed", "skipped"]
Choice: TypeAlias = Mapping[str, str]

_TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5, torch.float64: 1e-7}
"""Relative and absolute tolerance by dtype; other dtypes must be equal."""


@dataclass(frozen=True)
class CheckResult:
    """The result of one check."""

    operator: str
    check: str
    example: int
    """Number of the call, from 1."""
    types: str
    result: Status
    detail: str


class _Skipped(Exception):
    """A check does not apply; the message says why."""


def check_project(project: Project) -> Iterator[CheckResult]:
    """Check every operator of a project."""
    for op in project.operators:
        name = op.signature.qualified
        try:
            calls, reference = _calls(project, op), project.function("reference", op)
        except (DeclarationError, _NoInputs) as error:
            yield CheckResult(name, "inputs", 0, "", "failed", str(error))
            continue
        if project.function("examples", op) is None:
            yield CheckResult(name, "inputs", 0, "", "passed", f"random: {calls[0].describe()}")
        for number, call in enumerate(calls, start=1):
            yield from _check_call(op, call, number, reference)


def _check_call(
    op: CustomOp, call: _OpCall, number: int, reference: Callable[..., Any] | None
) -> Iterator[CheckResult]:
    choices = op.signature.choices

    def outcome(check: str, choice: Choice, check_function: Callable[[], str]) -> CheckResult:
        types = ", ".join(choice.values())
        try:
            return CheckResult(op.signature.qualified, check, number, types, "passed", check_function())
        except _Skipped as reason:
            return CheckResult(op.signature.qualified, check, number, types, "skipped", str(reason))
        except Exception as error:
            return CheckResult(op.signature.qualified, check, number, types, "failed", _format_error(error))

    for choice in choices:
        typed_call = call.with_dtypes(choice)
        if reference is not None:
            yield outcome("reference", choice, partial(_check_reference, typed_call, reference))
        yield outcome("onnxruntime", choice, partial(_check_onnxruntime, typed_call))
    typed_call = call.with_dtypes(choices[0])
    yield outcome("strides", choices[0], partial(_check_strides, typed_call))
    yield outcome("dynamic shapes", choices[0], partial(_check_dynamic_shapes, typed_call))
    if number == 1:
        yield outcome("opcheck", choices[0], partial(_opcheck, typed_call))
    if number == 1 and op.differentiable:
        double = _float64_choice(op.signature)
        yield outcome("gradcheck", double or {}, partial(_gradcheck, call, double))


def _format_error(error: Exception) -> str:
    text = str(error).strip() if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}".strip()
    return " ".join(line.strip() for line in text.splitlines() if line.strip())[:500]


# Calls


@dataclass(frozen=True)
class _OpCall:
    op: CustomOp
    by_name: Mapping[str, Any]

    @property
    def signature(self) -> Signature:
        return self.op.signature

    def __call__(self) -> list[torch.Tensor]:
        args, kwargs = self.arguments()
        with torch.no_grad():
            return _as_list(self.op.operator(*args, **kwargs))

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        names = [p.name for p in self.signature.parameters]
        positional = len(names) - self.signature.keyword_only
        return (
            tuple(self.by_name[name] for name in names[:positional]),
            {name: self.by_name[name] for name in names[positional:]},
        )

    def describe(self) -> str:
        return ", ".join(f"{name} {_describe_value(value)}" for name, value in self.by_name.items())

    def with_tensors(self, change: Callable[[Tensor, torch.Tensor], torch.Tensor]) -> _OpCall:
        arguments = dict(self.by_name)
        for tensor in self.signature.inputs:
            arguments[tensor.name] = pytree.tree_map_only(torch.Tensor, partial(change, tensor), arguments[tensor.name])
        return _OpCall(self.op, arguments)

    def with_dtypes(self, choice: Choice) -> _OpCall:
        """Return the call with the dtypes of a choice; tensors with a fixed dtype stay."""
        return self.with_tensors(lambda t, x: x.to(getattr(torch, choice[t.type])) if t.type in choice else x)


def _describe_value(value: Any) -> str:
    return str(pytree.tree_map_only(torch.Tensor, lambda x: tuple(x.shape), value))


def _as_list(results: Any) -> list[torch.Tensor]:
    return list(results) if isinstance(results, (tuple, list)) else [results]


def _calls(project: Project, op: CustomOp) -> list[_OpCall]:
    examples = project.function("examples", op)
    if examples is None:
        return [_random_call(op)]
    calls = examples()
    if not calls or not all(_is_call(x) for x in calls):
        raise DeclarationError(
            f"the examples of {op.signature.qualified} are not a list of calls",
            hint='a call is a pair (args, kwargs): [((x,), {"factor": 2.0})]',
        )
    return [_OpCall(op, bind_arguments(op.signature, args, kwargs)) for args, kwargs in calls]


def _is_call(x: Any) -> bool:
    return isinstance(x, (tuple, list)) and len(x) == 2 and isinstance(x[0], (tuple, list)) and isinstance(x[1], dict)


class _NoInputs(Exception):
    """The operator accepts none of the random inputs."""


_SIZE = 4
_RANKS = (2, 3, 4, 1)
_ATTRIBUTE_VALUES: Mapping[str, Sequence[Any]] = {
    "int": (1, 2),
    "float": (0.5,),
    "bool": (True,),
    "int[]": ([0],),
    "float[]": ([0.5],),
}
"""Values tried for attributes without a default."""


def _random_call(op: CustomOp) -> _OpCall:
    """Return a random call that torch accepts: all tensors have the same sizes."""
    signature, last_error = op.signature, ""
    required = [a for a in signature.attributes if a.required]
    choice = signature.choices[0]
    for rank, *values in itertools.product(_RANKS, *(_ATTRIBUTE_VALUES.get(a.type, ()) for a in required)):
        arguments = {
            p.name: p.default if isinstance(p, Attribute) else _random_tensors(p, rank) for p in signature.parameters
        }
        call = _OpCall(op, arguments | dict(zip((a.name for a in required), values, strict=True)))
        try:
            call.with_dtypes(choice)()
            return call
        except Exception as error:
            last_error = f": {_format_error(error)}"
    raise _NoInputs(
        f"the operator accepts no random inputs{last_error} "
        f"(next: write a function examples_{snake_case(signature.name)}() that returns a list of calls, (args, kwargs))"
    )


def _random_tensors(tensor: Tensor, rank: int) -> Any:
    tensors = [_random_tensor(tensor, tensor.rank if tensor.rank is not None else rank) for _ in range(2)]
    return tensors if tensor.kind == "variadic" else tensors[0]


def _random_tensor(tensor: Tensor, rank: int) -> torch.Tensor:
    sizes, dtype = [_SIZE] * rank, getattr(torch, tensor.type, torch.float32)
    if isinstance(dtype, torch.dtype) and not dtype.is_floating_point:
        return torch.randint(0, 2 if dtype == torch.bool else _SIZE, sizes).to(dtype)
    return torch.randn(sizes) if not isinstance(dtype, torch.dtype) else torch.randn(sizes).to(dtype)


# Checks


def _check_reference(call: _OpCall, reference: Callable[..., Any]) -> str:
    args, kwargs = call.with_tensors(lambda _, x: x.double() if x.is_floating_point() else x).arguments()
    results, expected = call(), _as_list(reference(*args, **kwargs))
    return _compare(results, [y.to(x.dtype) for x, y in zip(results, expected, strict=False)])


def _check_onnxruntime(call: _OpCall) -> str:
    """Compare with a session that has only the model and its library."""
    module = _CallModule(call)
    return _compare(_run_session(_model(module), module.tensors, call()), call())


def _check_strides(call: _OpCall) -> str:
    def strided(_: Tensor, x: torch.Tensor) -> torch.Tensor:
        return x.repeat_interleave(2, -1)[..., ::2] if x.dim() else x

    return _compare(call.with_tensors(strided)(), call(), exact=True)


def _check_dynamic_shapes(call: _OpCall) -> str:
    """Compare a model with dynamic shapes at twice the sizes it was exported with."""
    torch.manual_seed(0)
    larger = call.with_tensors(lambda _, x: _resample(x, [2 * n if n > 1 else n for n in x.shape]))
    try:
        expected = larger()
    except Exception as error:
        raise _Skipped(f"it rejects twice the size: {_format_error(error)}") from error
    model = _model(_CallModule(call), dynamic=True)
    return _compare(_run_session(model, _CallModule(larger).tensors, expected), expected)


def _resample(x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Return a tensor of these sizes with values drawn from another."""
    if not x.numel():
        return x
    return x.flatten()[torch.randint(x.numel(), (*sizes,))]


def _opcheck(call: _OpCall) -> str:
    args, kwargs = call.arguments()
    with torch.enable_grad():
        if call.op.differentiable:
            args, kwargs = call.with_tensors(_require_grad).arguments()
        tests = torch.library.opcheck(call.op.operator, args, kwargs)
    return f"{len(tests)} tests"


def _float64_choice(signature: Signature) -> Choice | None:
    """Return the choice for a gradient check, if there are float64 kernels."""
    floats = {t.type for t in signature.inputs if _is_floating(signature, t.type)}
    double = (c for c in signature.choices if all(c.get(kind, kind) == "float64" for kind in floats))
    return next(double, None) if floats else None


def _is_floating(signature: Signature, kind: str) -> bool:
    return any(getattr(torch, name).is_floating_point for name in signature.types.get(kind, (kind,)))


def _gradcheck(call: _OpCall, choice: Choice | None) -> str:
    if choice is None:
        raise _Skipped("it has no float64 kernels, which finite differences need")
    with torch.enable_grad():
        args, kwargs = call.with_dtypes(choice).with_tensors(_require_grad).arguments()
        leaves_before, spec = pytree.tree_flatten((args, kwargs))
        positions = [i for i, x in enumerate(leaves_before) if isinstance(x, torch.Tensor) and x.requires_grad]

        def function(*tensors: torch.Tensor) -> Any:
            leaves = dict(enumerate(leaves_before)) | dict(zip(positions, tensors, strict=True))
            args, kwargs = pytree.tree_unflatten(list(leaves.values()), spec)
            results = _as_list(call.op.operator(*args, **kwargs))
            return tuple(x for x in results if x.is_floating_point())

        torch.autograd.gradcheck(function, [leaves_before[i] for i in positions])
    return f"{len(positions)} tensor{'s' * (len(positions) != 1)}"


def _require_grad(_: Tensor, x: torch.Tensor) -> torch.Tensor:
    return x.detach().clone().requires_grad_() if x.is_floating_point() else x


def _compare(results: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], *, exact: bool = False) -> str:
    """Return the largest difference; raise an error if it exceeds the tolerance."""
    if len(results) != len(expected):
        raise AssertionError(f"{len(results)} results, expected {len(expected)}")
    worst = 0.0
    for x, y in zip(results, expected, strict=True):
        tolerance = 0.0 if exact else _TOLERANCE.get(x.dtype, 0.0)
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance, equal_nan=True)
        gap = (x.double() - y.double()).abs()
        worst = max(worst, float(gap[gap.isfinite()].max()) if gap.isfinite().any() else 0.0)
    return f"largest difference {worst:.1e}" if worst else "equal"


# ONNX Runtime


class _CallModule(torch.nn.Module):
    def __init__(self, call: _OpCall) -> None:
        super().__init__()
        self._op = call.op
        self._leaves, self._spec = pytree.tree_flatten(call.arguments())
        self.tensors = [x for x in self._leaves if isinstance(x, torch.Tensor)]

    def forward(self, tensors: list[torch.Tensor]) -> Any:
        remaining = iter(tensors)
        leaves = [next(remaining) if isinstance(x, torch.Tensor) else x for x in self._leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        return self._op.operator(*args, **kwargs)


def _model(module: _CallModule, *, dynamic: bool = False) -> bytes:
    sizes = [dict.fromkeys(range(x.dim()), Dim.AUTO) for x in module.tensors]
    program = export(module.eval(), (module.tensors,), dynamic_shapes=(sizes,) if dynamic else None, fallback="error")
    serialised: bytes = program.proto().SerializeToString()
    return serialised


def _run_session(model: bytes, tensors: Sequence[torch.Tensor], like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    for library in libraries_of(model):
        options.register_custom_ops_library(str(library))
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    feeds = {x.name: from_torch(t) for x, t in zip(session.get_inputs(), tensors, strict=True)}
    values = session._sess.run_with_ort_values(feeds, [x.name for x in session.get_outputs()], None)
    return [reader(x.dtype, x.device)(values, i) for i, x in enumerate(like)]
