"""`sardonyx.custom_op`: one declaration, and the operator is in torch, in ONNX and in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from sardonyx.customop import registry
from sardonyx.customop.composition import Composition
from sardonyx.customop.in_onnx import InOnnx, for_torch_onnx, translation
from sardonyx.customop.in_torch import Fake, InTorch, add_fake, known_to_backward
from sardonyx.customop.python_kernel import PythonKernel
from sardonyx.customop.shapes import ShapeRule, by_position, wanted
from sardonyx.customop.signature import NEWEST_VERSION, Dtypes, Identity, Signature, is_name, parse
from sardonyx.customop.source import Kernel, Part
from sardonyx.errors import DeclarationError
from sardonyx.translate import table


def custom_op(
    signature: str | Any,
    *,
    cpp: str | Path | None = None,
    python: Callable[..., Any] | None = None,
    onnx: Callable[..., Any] | None = None,
    cuda: str | Path | None = None,
    shape: Callable[..., Any] | None = None,
    dtypes: Dtypes = None,
    backward: Callable[..., Any] | CustomOp | None = None,
    domain: str | None = None,
    name: str | None = None,
    version: int = 1,
    doc: str = "",
    flags: Sequence[str] = (),
    inline: bool = True,
) -> CustomOp:
    """Declare an operator once for torch (`torch.ops.<domain>.<name>`), ONNX and ONNX Runtime.

    `signature` is a torch schema in which a tensor may have a type and a rank: `Tensor<int64>`, `Tensor<T, 4>`. Types
    that are not dtypes are type variables; `dtypes` gives their dtypes: a list for all, a dict with a list for each, or
    a list of dicts with a dtype for each; a tensor without a type has the type T. Pass an existing operator,
    `torch.ops.mylib.op`, instead of a signature to add its ONNX and ONNX Runtime parts, and `shape` as its fake kernel
    if it has none. Unnamed parameters (`_0`), which torch has for C++ functions, are matched by position.

    The kernel is one of: `cpp`, the source of a C++ function with the operator's name, or the path of its file;
    `python`, a function of tensors; `onnx`, a function that composes ONNX operators, which are inlined into a model, or
    with `inline=False` become an ONNX function. In addition to `cpp`, `cuda` is CUDA C++ for the GPU: the same function
    with a `cudaStream_t` as the last parameter; it is built if nvcc is installed. `flags` are passed to the C++
    compiler, for example include paths.

    `shape` is a function of sizes and attributes, by parameter name, that returns the sizes of the results; None is a
    size that only the kernel knows. Without it the result has the sizes of the first tensor. `backward` is a function,
    or another declaration, of `grad`, tensors, results and attributes, by parameter name; it returns a gradient for
    each tensor. Without one, a backward through the operator is an `AutogradError`.

    The ONNX domain and name are those in torch, unless `domain` and `name` say otherwise. `version` is the version of
    the domain that introduced the operator, and that models import.

    >>> double = custom_op("example::Double(Tensor x) -> Tensor", python=lambda x: x * 2)
    >>> double(torch.ones(2))
    tensor([2., 2.])
    """
    existing = None if isinstance(signature, str) else _overload(signature)
    parsed = parse(signature if existing is None else str(existing._schema), dtypes)
    _check_sides(parsed, (cpp, python, onnx), has_gpu_alone=cuda is not None and cpp is None)
    identity = _identity(parsed, domain, name, version)
    given = _Given(
        parsed,
        identity,
        ShapeRule(parsed, shape),
        None if cpp is None else Kernel.of(cpp, parsed.qualified, 1),
        None if cuda is None else Kernel.of(cuda, parsed.qualified, 1),
        None if python is None else by_position(python, parsed),
        None if onnx is None else _composition(parsed, identity, onnx, inline),
        _gradient(parsed, backward, existing),
        doc,
        tuple(flags),
    )
    return CustomOp(given, existing, fake=shape is not None)


def _check_sides(signature: Signature, sides: Sequence[object], *, has_gpu_alone: bool) -> None:
    if sum(side is not None for side in sides) != 1:
        raise DeclarationError(f"{signature.qualified} needs one of cpp, python and onnx: what computes it")
    if has_gpu_alone:
        raise DeclarationError(
            f"{signature.qualified} has a kernel for the GPU and none for the CPU", hint="give cpp too"
        )


def _identity(signature: Signature, domain: str | None, name: str | None, version: int) -> Identity:
    if isinstance(version, bool) or not isinstance(version, int) or not 1 <= version <= NEWEST_VERSION:
        raise DeclarationError(
            f"{signature.qualified} has the version {version!r}", hint=f"use an integer from 1 to {NEWEST_VERSION}"
        )
    if name is not None and not is_name(name):
        raise DeclarationError(f"{signature.qualified} has the name {name!r} in ONNX", hint="use letters and digits")
    return Identity(domain or signature.namespace, name or signature.name, version)


def _overload(operator: Any) -> Any:
    if isinstance(operator, torch._ops.OpOverloadPacket):
        return operator.default
    if isinstance(operator, torch._ops.OpOverload):
        return operator
    raise DeclarationError(
        f"an operator is declared by {type(operator).__name__}", hint="use a signature, or an operator of torch.ops"
    )


_BUILDERS = ("op", "g")
"""What the first parameter of a composition may be called; torch's symbolic functions have g."""


def _composition(signature: Signature, identity: Identity, function: Callable[..., Any], inline: bool) -> Composition:
    function = by_position(function, signature, skip=1)
    parameters = {p.name for p in signature.parameters}
    names = wanted(function, parameters.union(_BUILDERS), f"the composition of {signature.qualified}")
    if names[:1] not in ([name] for name in _BUILDERS) or not parameters.issuperset(names[1:]):
        raise DeclarationError(
            f"the composition of {signature.qualified} does not take op first", hint="onnx=lambda op, x: op.Mul(x, x)"
        )
    return Composition(signature, identity, function, names[1:], inline)


@dataclass(frozen=True)
class _Backward:
    """A function that computes gradients, and the names of what it takes."""

    function: Callable[..., Any]
    wanted: Sequence[str]


def _gradient(signature: Signature, backward: Callable[..., Any] | CustomOp | None, existing: Any) -> _Backward | None:
    if backward is None:
        return None
    if existing is not None:
        raise DeclarationError(f"{signature.qualified} is an operator of torch already, which has its own gradient")
    known = set(known_to_backward(signature))
    what = f"the backward of {signature.qualified}"
    if not isinstance(backward, CustomOp):
        return _Backward(backward, wanted(backward, known, what))
    names = [p.name for p in backward.signature.parameters]
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        raise DeclarationError(f"{what} takes {unknown!r}", hint=f"it can take {', '.join(sorted(known))}")
    gives = [t.name.removeprefix("grad_") for t in backward.signature.outputs]
    by_name = set(gives) <= {t.name for t in signature.inputs}

    def function(**given: Any) -> Any:
        results = backward(**given)
        results = results if isinstance(results, tuple) else (results,)
        return dict(zip(gives, results, strict=True)) if by_name else results

    return _Backward(function, names)


@dataclass(frozen=True)
class _Given:
    """What an operator was declared with."""

    signature: Signature
    identity: Identity
    shapes: ShapeRule
    kernel: Kernel | None
    cuda: Kernel | None
    python: Callable[..., Any] | None
    composition: Composition | None
    backward: _Backward | None
    doc: str
    flags: tuple[str, ...]


class CustomOp:
    """An operator declared by `sardonyx.custom_op`. Calling it calls the torch operator."""

    def __init__(self, given: _Given, existing: Any = None, *, fake: bool = False) -> None:
        self._given = given
        self._python = None if given.python is None else PythonKernel(given.signature, given.shapes, given.python)
        if given.kernel is not None:
            self.library  # noqa: B018  # built before anything is registered, so that nothing is where it fails
        self._registered = ExitStack()
        with registry.replacing(self):
            self.operator = self._in_torch() if existing is None else existing
            """`torch.ops.<domain>.<name>.default`."""
            if existing is not None and fake:
                self._registered.callback(add_fake(existing, Fake(given.signature, given.shapes)))
            self._onnx = InOnnx(given.signature, given.identity, given.shapes, given.doc)
            self._registered.callback(self._onnx.close)
            table.register(self.signature.qualified, self._translation())
            self._registered.callback(table.remove, self.signature.qualified)

    @property
    def signature(self) -> Signature:
        """Its parameters and results."""
        return self._given.signature

    @property
    def domain(self) -> str:
        """Its domain in ONNX."""
        return self._given.identity.domain

    @property
    def name(self) -> str:
        """Its name in ONNX."""
        return self._given.identity.name

    @property
    def version(self) -> int:
        """The version of its domain that introduced it."""
        return self._given.identity.version

    @property
    def schema(self) -> Any:
        """Its `onnx.defs.OpSchema`."""
        return self._onnx.schema

    @property
    def part(self) -> Part:
        """What a library needs to know about it."""
        given = self._given
        return Part(given.signature, given.identity, given.shapes, given.kernel, given.cuda)

    @property
    def differentiable(self) -> bool:
        """Whether a gradient was declared."""
        return self._given.backward is not None

    @property
    def has_kernels(self) -> bool:
        """Whether models that use it need a library."""
        return self._given.composition is None

    @property
    def flags(self) -> tuple[str, ...]:
        """Compiler flags in addition to the usual ones."""
        return self._given.flags

    @cached_property
    def library(self) -> Path:
        """The library that has its kernels, for `onnxruntime.SessionOptions.register_custom_ops_library`."""
        if self._given.composition is not None:
            raise DeclarationError(
                f"{self.signature.qualified} is a composition of ONNX's operators and needs no library"
            )
        return registry.built(self)

    @property
    def translations(self) -> dict[Any, Callable[..., Any]]:
        """For `torch.onnx.export(..., custom_translation_table=op.translations)`."""
        return {self.operator: for_torch_onnx(self.signature, self.schema)}

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call it in torch."""
        return self.operator(*args, **kwargs)

    def library_with(self, others: Sequence[CustomOp]) -> Path:
        """One library with its kernels and those of other operators of its domain."""
        return registry.joined([self, *others])

    def serve(self, library: Path) -> None:
        """Let its library call back into this process, if its kernel is a Python function."""
        if self._python is not None:
            self._python.serve(library)

    def close(self) -> None:
        """Unregister it from torch and onnx."""
        registry.remove(self)

    def withdraw(self) -> None:
        """Remove its registrations."""
        self._registered.close()

    def _translation(self) -> Callable[..., Any]:
        composition = self._given.composition
        return translation(self.signature, self._given.identity) if composition is None else composition.translate

    def _in_torch(self) -> Any:
        made = InTorch(self.signature, self._given.shapes)
        self._registered.callback(made.close)
        self._registered.callback(self._retire)
        if self._given.kernel is not None:
            made.add_library(self.library)
        elif self._python is not None:
            made.add_function(self._python)
        elif self._given.composition is not None:
            made.add_function(self._given.composition, "CPU")
        if self._given.backward is not None:
            made.add_gradient(self._given.backward.function, self._given.backward.wanted)
        else:
            made.refuse_gradients()
        return made.operator.default

    def _retire(self) -> None:
        """Say what has become of it where it is called nevertheless, which torch answers by an internal assertion."""

        def gone(*_: Any, **__: Any) -> Any:
            raise RuntimeError(f"{self.signature.qualified} was closed, or declared anew: call the newer one")

        self.operator = gone

    def __deepcopy__(self, memo: Any) -> CustomOp:
        return self  # a copy of a module calls the same operator

    def __reduce__(self) -> tuple[Callable[..., CustomOp], tuple[str, str]]:
        return registry.find, (self.domain, self.name)

    def __repr__(self) -> str:
        return f"CustomOp({self.signature.qualified})"
