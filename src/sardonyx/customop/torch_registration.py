"""Register an operator in torch: schema, kernels, fake kernel and autograd."""

from __future__ import annotations

import ctypes
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._library import custom_ops, simple_registry
from torch._library.utils import Kernel

from sardonyx.customop.shapes import ShapeRule
from sardonyx.customop.signature import Attribute, Signature, Tensor
from sardonyx.errors import AutogradError, DeclarationError

Arguments = Mapping[str, Any]


def bind_arguments(signature: Signature, args: Sequence[Any], kwargs: Arguments) -> dict[str, Any]:
    """Return the arguments by parameter name, with defaults filled in."""
    arguments: dict[str, Any] = dict(zip((p.name for p in signature.parameters), args, strict=False)) | dict(kwargs)
    for parameter in signature.parameters:
        arguments.setdefault(parameter.name, parameter.default if isinstance(parameter, Attribute) else None)
    return arguments


def resolve_dtypes(signature: Signature, arguments: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the first choice of dtypes for the type variables that matches the tensors."""
    choices: Sequence[Mapping[str, str]] = signature.choices
    for tensor in signature.inputs:
        for dtype in _dtypes(arguments[tensor.name]):
            name = str(dtype).removeprefix("torch.")
            allowed = dict.fromkeys(choice.get(tensor.type, tensor.type) for choice in choices)
            if name not in allowed:
                raise TypeError(f"{signature.qualified}: {tensor.name} is {name}, and can be {', '.join(allowed)}")
            choices = [choice for choice in choices if choice.get(tensor.type, tensor.type) == name]
    return choices[0]


def _dtypes(value: Any) -> list[torch.dtype]:
    tensors = value if isinstance(value, (list, tuple)) else [value]
    return [x if isinstance(x, torch.dtype) else x.dtype for x in tensors if x is not None]


def sizes_of(signature: Signature, arguments: Arguments) -> dict[str, Any]:
    """Return the arguments with shapes in place of tensors."""

    def shape(value: Any) -> Any:
        return tuple(value.shape) if isinstance(value, torch.Tensor) else value

    result = dict(arguments)
    for tensor in signature.inputs:
        value = arguments[tensor.name]
        result[tensor.name] = [shape(x) for x in value] if isinstance(value, (list, tuple)) else shape(value)
        if tensor.rank is not None:
            _check_rank(signature, tensor, value)
    return result


def _check_rank(signature: Signature, tensor: Tensor, value: Any) -> None:
    for x in value if isinstance(value, (list, tuple)) else [value]:
        if x is not None and x.dim() != tensor.rank:
            raise ValueError(
                f"{signature.qualified}: {tensor.name} has {x.dim()} dimensions, and must have {tensor.rank}"
            )


_THIS_FILE = os.path.normcase(os.path.abspath(__file__))
"""torch calls inspect to locate a fake kernel, which scans every module unless the file is in its cache."""


class TorchRegistration:
    """An operator's registrations in torch's dispatcher, until `close`."""

    def __init__(self, signature: Signature, shapes: ShapeRule) -> None:
        self._signature = signature
        self._library: Any = torch.library.Library(signature.namespace, "FRAGMENT")  # type: ignore[no-untyped-call]
        self._kernels: ctypes.CDLL | None = None
        try:
            self._library.define(signature.schema(), tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise DeclarationError(f"torch rejects {signature.qualified}: {error}") from error
        register_fake(signature.qualified, FakeKernel(signature, shapes), self._library)

    @property
    def operator(self) -> Any:
        """`torch.ops.<namespace>.<name>`."""
        return getattr(getattr(torch.ops, self._signature.namespace), self._signature.name)

    def add_library(self, path: Path) -> None:
        """Register the kernels of a library."""
        self._kernels = ctypes.CDLL(str(path))
        self._kernels.sardonyx_register_torch.restype = ctypes.c_char_p
        missing = self._kernels.sardonyx_register_torch(_libtorch("cpu"), _libtorch("cuda"))
        if missing is not None:
            raise DeclarationError(
                f"{self._signature.qualified}: torch {torch.__version__} lacks {missing.decode()}",
                hint="custom operators need torch 2.11 or newer",
            )
        if all(t.kind != "required" for t in self._signature.inputs):
            self.add_function(self._select_backend, "BackendSelect")

    def _select_backend(self, /, *args: Any, **kwargs: Any) -> Any:
        """Select the kernel where there may be no tensor argument to dispatch on."""
        tensors = tensors_of(self._signature, bind_arguments(self._signature, args, kwargs))
        key = torch._C.DispatchKey.CUDA if any(x.is_cuda for x in tensors) else torch._C.DispatchKey.CPU
        return self.operator.default.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)

    def add_function(self, function: Callable[..., Any], key: str = "CompositeExplicitAutograd") -> None:
        """Register a Python function as a kernel."""
        self._library.impl(self._signature.name, function, key)

    def add_gradient(self, backward: Callable[..., Any], parameters: Sequence[str]) -> None:
        """Make it differentiable; `backward` takes its parameters by name."""
        gradient = _Gradient(self._signature, backward, parameters)
        torch.library.register_autograd(
            self._signature.qualified, gradient.backward, setup_context=gradient.setup, lib=self._library
        )

    def refuse_gradients(self) -> None:
        """Make a backward through it an error; torch alone only warns, and omits the gradient."""
        signature = self._signature
        if all(any(can_have_gradient(signature, t) for t in side) for side in (signature.inputs, signature.outputs)):
            kernel = NoGradient(signature, self.operator.default)
            self._library.impl(signature.name, kernel, "Autograd", with_keyset=True)

    def close(self) -> None:
        """Unregister it from torch."""
        if self._kernels is not None:
            self._kernels.sardonyx_unregister_torch()
            self._kernels = None
        self._library._destroy()


class FakeKernel:
    """The shape rule as a fake kernel."""

    def __init__(self, signature: Signature, shapes: ShapeRule) -> None:
        self._signature, self._shapes = signature, shapes

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Return empty tensors with the shapes and dtypes of the results."""
        signature = self._signature
        arguments = bind_arguments(signature, args, kwargs)
        choice = resolve_dtypes(signature, arguments)
        first = next(iter(tensors_of(signature, arguments)), None)
        device = torch.device("cpu") if first is None else first.device
        results = []
        for tensor, shape in zip(signature.outputs, self._shapes(sizes_of(signature, arguments)), strict=True):
            sizes = [torch.library.get_ctx().new_dynamic_size() if dim is None else dim for dim in shape]
            results.append(torch.empty(sizes, dtype=signature.dtype_of(tensor, choice), device=device))
        return results[0] if len(results) == 1 else tuple(results)


def register_fake(name: str, fake: Callable[..., Any], library: Any) -> None:
    """Register a fake kernel for the lifetime of the library."""
    inspect.modulesbyfile.setdefault(_THIS_FILE, __name__)
    torch.library.register_fake(name, lambda *args, **kwargs: fake(*args, **kwargs), lib=library)


def add_fake_kernel(operator: Any, fake: Callable[..., Any]) -> Callable[[], None]:
    """Give an existing operator a fake kernel if it has none; return a function that removes it."""
    name = operator.name()
    declared = custom_ops.OPDEFS.get(name)  # torch.library.custom_op registers one that raises
    if declared is not None and declared._abstract_fn is None:
        declared.register_fake(fake)
        return lambda: setattr(declared, "_abstract_fn", None)
    if _has_fake(name):
        return lambda: None
    if operator._can_decompose():
        return _trace_as_one(operator, fake)
    library = torch.library.Library(operator.namespace, "FRAGMENT")  # type: ignore[no-untyped-call]
    register_fake(name, fake, library)
    return library._destroy


def _has_fake(name: str) -> bool:
    has_meta = torch._C._dispatch_has_kernel_for_dispatch_key(name, "Meta")
    return has_meta or simple_registry.singleton.find(name).fake_impl.kernel is not None


_AUTOGRAD_KEYS = [key for name, key in torch._C.DispatchKey.__members__.items() if name.startswith("Autograd")]


def _trace_as_one(operator: Any, fake: Callable[..., Any]) -> Callable[[], None]:
    """Make tracing treat an operator as one that torch would decompose; return a function that undoes it.

    torch treats every C++ function registered without a dispatch key as a composite, and gives it no fake kernel. Calls
    outside of tracing do not change.
    """

    def below_autograd(*args: Any, **kwargs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*args, **kwargs)

    kernels: dict[Any, Any] = dict.fromkeys(_AUTOGRAD_KEYS, below_autograd)
    kernels[torch._C.DispatchKey.CompositeImplicitAutograd] = lambda *_, **__: NotImplemented
    before, fakes = dict(operator.py_kernels), simple_registry.singleton.find(operator.name()).fake_impl.kernels
    fake_kernel = Kernel(fake, _THIS_FILE)

    def restore() -> None:
        fakes.remove(fake_kernel)
        operator.py_kernels = before
        operator._dispatch_cache.clear()

    fakes.append(fake_kernel)
    operator.py_kernels = before | kernels
    operator._dispatch_cache.clear()
    return restore


def _libtorch(part: str) -> bytes:
    return str(Path(torch.__file__).parent / "lib" / f"libtorch_{part}.so").encode()


def tensors_of(signature: Signature, arguments: Arguments) -> list[torch.Tensor]:
    """Return the tensors among the arguments, in the order of the signature."""
    tensors: list[torch.Tensor] = []
    for tensor in signature.inputs:
        value = arguments[tensor.name]
        tensors += value if isinstance(value, (list, tuple)) else [] if value is None else [value]
    return tensors


GRAD = "grad"
"""What a backward calls the gradient of the result; of several results, followed by `_` and the result's name."""


def backward_arguments(signature: Signature) -> dict[str, str]:
    """Return the names that a backward can take, and what each is."""
    keyword_only = signature.parameters[len(signature.parameters) - signature.keyword_only :]
    if any(isinstance(p, Tensor) for p in keyword_only):
        raise DeclarationError(
            f"{signature.qualified} has a backward, and keyword-only tensors",
            hint="torch computes no gradients for those: put them before the star",
        )
    names = {p.name: "input" if isinstance(p, Tensor) else "attribute" for p in signature.parameters}
    names |= {t.name: "output" for t in signature.outputs}
    gradients = [GRAD] if len(signature.outputs) == 1 else [f"{GRAD}_{t.name}" for t in signature.outputs]
    return names | dict.fromkeys(gradients, "gradient")


class _Gradient:
    """Adapts a backward that takes its arguments by name to torch's autograd interface."""

    def __init__(self, signature: Signature, backward: Callable[..., Any], parameters: Sequence[str]) -> None:
        self._signature, self._backward = signature, backward
        kinds = backward_arguments(signature)
        self._saved = [name for name in parameters if kinds[name] in ("input", "output")]
        self._attributes = [name for name in parameters if kinds[name] == "attribute"]
        self._gradients = {name: i for i, name in enumerate(n for n, kind in kinds.items() if kind == "gradient")}
        self._gradients = {name: i for name, i in self._gradients.items() if name in parameters}
        self._positional = signature.parameters[: len(signature.parameters) - signature.keyword_only]

    def setup(self, ctx: Any, inputs: Sequence[Any], output: Any, keyword_only_inputs: Arguments | None = None) -> None:
        arguments = bind_arguments(self._signature, inputs, keyword_only_inputs or {})
        outputs = output if isinstance(output, (tuple, list)) else [output]
        arguments |= {t.name: x for t, x in zip(self._signature.outputs, outputs, strict=True)}
        ctx.attributes = {name: arguments[name] for name in self._attributes}
        ctx.saved_names = []
        tensors: list[Any] = []
        for name in self._saved:
            value = arguments[name]
            is_list = isinstance(value, (list, tuple))
            ctx.saved_names.append((name, len(value) if is_list else None))
            tensors += value if is_list else [value]
        ctx.save_for_backward(*tensors)

    def backward(self, ctx: Any, *grads: torch.Tensor) -> Any:
        saved = list(ctx.saved_tensors)
        arguments = dict(ctx.attributes)
        for name, count in ctx.saved_names:
            arguments[name] = saved.pop(0) if count is None else [saved.pop(0) for _ in range(count)]
        arguments |= {name: grads[i] for name, i in self._gradients.items()}
        gradients = self._by_name(self._backward(**arguments))
        needs_grad = ctx.needs_input_grad  # without omitted trailing defaults
        pairs = zip(self._positional, needs_grad, strict=False)
        results = tuple(_match_structure(gradients.get(parameter.name), needed) for parameter, needed in pairs)
        return results[0] if len(results) == 1 else results

    def _by_name(self, result: Any) -> Arguments:
        if isinstance(result, Mapping):
            unknown = set(result) - {t.name for t in self._signature.inputs}
            if unknown:
                raise RuntimeError(
                    f"{self._signature.qualified}: its backward returns gradients for unknown tensors {sorted(unknown)}"
                )
            return result
        signature = self._signature
        gradients = result if isinstance(result, tuple) else (result,)
        real = [t for t in signature.inputs if can_have_gradient(signature, t)]
        for tensors in (signature.inputs, real):
            if len(gradients) == len(tensors):
                return {t.name: x for t, x in zip(tensors, gradients, strict=True)}
        raise RuntimeError(
            f"{signature.qualified}: its backward returns {len(gradients)} of {len(signature.inputs)} gradients"
        )


def _match_structure(gradient: Any, needed: Any) -> Any:
    """Return a gradient as torch expects it: a list for a list argument."""
    return [None] * len(needed) if gradient is None and isinstance(needed, list) else gradient


def can_have_gradient(signature: Signature, tensor: Tensor) -> bool:
    """Return whether a tensor can be of floating point."""
    return any(getattr(torch, name).is_floating_point for name in signature.types.get(tensor.type, (tensor.type,)))


class NoGradient:
    """The autograd kernel of an operator without a backward: forward calls work, a backward is an error."""

    def __init__(self, signature: Signature, operator: Any) -> None:
        self._signature, self._operator = signature, operator

    def __call__(self, keys: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Compute; if an argument requires grad, the results raise the error in a backward."""
        below = keys & torch._C._after_autograd_keyset
        if not torch.is_grad_enabled() or not (_require_grad(args) or _require_grad(kwargs.values())):
            return self._operator.redispatch(below, *args, **kwargs)
        tensors = tensors_of(self._signature, bind_arguments(self._signature, args, kwargs))

        def compute() -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return self._operator.redispatch(below, *args, **kwargs)

        return _Undifferentiable.apply(compute, self._signature.qualified, *tensors)  # type: ignore[no-untyped-call]


def _require_grad(arguments: Iterable[Any]) -> bool:
    return any(
        x.requires_grad if isinstance(x, torch.Tensor) else isinstance(x, (list, tuple)) and _require_grad(x)
        for x in arguments
    )


class _Undifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compute: Callable[[], Any], name: str, *tensors: torch.Tensor) -> Any:
        ctx.name = name
        return compute()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AutogradError(
            f"{ctx.name} has no gradient: it was declared without backward",
            hint="declare it with backward=, or call it under torch.no_grad()",
        )
