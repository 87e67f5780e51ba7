"""An operator in torch: its schema, its kernels, what it does with fake tensors, and its gradient."""

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

Named = Mapping[str, Any]


def bound(signature: Signature, args: Sequence[Any], kwargs: Named) -> dict[str, Any]:
    """Arguments by the names of their parameters, defaults filled in."""
    given: dict[str, Any] = dict(zip((p.name for p in signature.parameters), args, strict=False)) | dict(kwargs)
    for parameter in signature.parameters:
        given.setdefault(parameter.name, parameter.default if isinstance(parameter, Attribute) else None)
    return given


def choice_of(signature: Signature, given: Mapping[str, Any]) -> Mapping[str, str]:
    """The dtypes that type variables stand for, for tensors of these dtypes: the first choice that goes with them."""
    left: Sequence[Mapping[str, str]] = signature.choices
    for tensor in signature.inputs:
        for dtype in _dtypes(given[tensor.name]):
            name = str(dtype).removeprefix("torch.")
            allowed = dict.fromkeys(choice.get(tensor.type, tensor.type) for choice in left)
            if name not in allowed:
                raise TypeError(f"{signature.qualified}: {tensor.name} is {name}, and can be {', '.join(allowed)}")
            left = [choice for choice in left if choice.get(tensor.type, tensor.type) == name]
    return left[0]


def _dtypes(value: Any) -> list[torch.dtype]:
    tensors = value if isinstance(value, (list, tuple)) else [value]
    return [x if isinstance(x, torch.dtype) else x.dtype for x in tensors if x is not None]


def sizes_of(signature: Signature, given: Named) -> dict[str, Any]:
    """Sizes in place of tensors, attributes as they are."""

    def one(value: Any) -> Any:
        return tuple(value.shape) if isinstance(value, torch.Tensor) else value

    found = dict(given)
    for tensor in signature.inputs:
        value = given[tensor.name]
        found[tensor.name] = [one(x) for x in value] if isinstance(value, (list, tuple)) else one(value)
        if tensor.rank is not None:
            _check_rank(signature, tensor, value)
    return found


def _check_rank(signature: Signature, tensor: Tensor, value: Any) -> None:
    for x in value if isinstance(value, (list, tuple)) else [value]:
        if x is not None and x.dim() != tensor.rank:
            raise ValueError(
                f"{signature.qualified}: {tensor.name} has {x.dim()} dimensions, and must have {tensor.rank}"
            )


_HERE = os.path.normcase(os.path.abspath(__file__))
"""torch asks inspect from where a fake kernel is registered, which looks through every module unless it knows."""


class InTorch:
    """What is registered in torch's dispatcher for one operator, until `close`."""

    def __init__(self, signature: Signature, shapes: ShapeRule) -> None:
        self._signature = signature
        self._library: Any = torch.library.Library(signature.namespace, "FRAGMENT")  # type: ignore[no-untyped-call]
        self._kernels: ctypes.CDLL | None = None
        try:
            self._library.define(signature.schema(), tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise DeclarationError(f"torch does not take {signature.qualified}: {error}") from error
        register_fake(signature.qualified, Fake(signature, shapes), self._library)

    @property
    def operator(self) -> Any:
        """`torch.ops.<namespace>.<name>`."""
        return getattr(getattr(torch.ops, self._signature.namespace), self._signature.name)

    def add_library(self, path: Path) -> None:
        """Let a library that was built for it compute."""
        self._kernels = ctypes.CDLL(str(path))
        self._kernels.sardonyx_into_torch.restype = ctypes.c_char_p
        lacking = self._kernels.sardonyx_into_torch(_libtorch("cpu"), _libtorch("cuda"))
        if lacking is not None:
            raise DeclarationError(
                f"{self._signature.qualified}: torch {torch.__version__} has no {lacking.decode()}",
                hint="torch 2.11 or newer has what custom operators need",
            )
        if all(t.kind != "required" for t in self._signature.inputs):
            self.add_function(self._on_the_device, "BackendSelect")

    def _on_the_device(self, /, *args: Any, **kwargs: Any) -> Any:
        """Choose the kernel where there may be no tensor by which torch could."""
        given = tensors_of(self._signature, bound(self._signature, args, kwargs))
        key = torch._C.DispatchKey.CUDA if any(x.is_cuda for x in given) else torch._C.DispatchKey.CPU
        return self.operator.default.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)

    def add_function(self, function: Callable[..., Any], key: str = "CompositeExplicitAutograd") -> None:
        """Let a Python function compute."""
        self._library.impl(self._signature.name, function, key)

    def add_gradient(self, backward: Callable[..., Any], wanted: Sequence[str]) -> None:
        """Make it differentiable: `backward` takes what it asks for by name."""
        gradient = _Gradient(self._signature, backward, wanted)
        torch.library.register_autograd(
            self._signature.qualified, gradient.backward, setup_context=gradient.setup, lib=self._library
        )

    def refuse_gradients(self) -> None:
        """Make a backward through it an error; torch alone warns, and leaves the gradient out."""
        signature = self._signature
        if all(any(can_have_gradient(signature, t) for t in side) for side in (signature.inputs, signature.outputs)):
            kernel = NoGradient(signature, self.operator.default)
            self._library.impl(signature.name, kernel, "Autograd", with_keyset=True)

    def close(self) -> None:
        """Take it out of torch again."""
        if self._kernels is not None:
            self._kernels.sardonyx_out_of_torch()
            self._kernels = None
        self._library._destroy()


class Fake:
    """The shape rule as a fake kernel: what results look like, without computing them."""

    def __init__(self, signature: Signature, shapes: ShapeRule) -> None:
        self._signature, self._shapes = signature, shapes

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Empty tensors of the results' sizes and dtypes."""
        signature = self._signature
        given = bound(signature, args, kwargs)
        chosen = choice_of(signature, given)
        first = next(iter(tensors_of(signature, given)), None)
        device = torch.device("cpu") if first is None else first.device
        results = []
        for tensor, shape in zip(signature.outputs, self._shapes(sizes_of(signature, given)), strict=True):
            sizes = [torch.library.get_ctx().new_dynamic_size() if dim is None else dim for dim in shape]
            results.append(torch.empty(sizes, dtype=signature.dtype_of(tensor, chosen), device=device))
        return results[0] if len(results) == 1 else tuple(results)


def register_fake(name: str, fake: Callable[..., Any], library: Any) -> None:
    """Register a fake kernel for as long as the library lives."""
    inspect.modulesbyfile.setdefault(_HERE, __name__)
    torch.library.register_fake(name, lambda *args, **kwargs: fake(*args, **kwargs), lib=library)


def add_fake(operator: Any, fake: Callable[..., Any]) -> Callable[[], None]:
    """Give an operator that other code registered a fake kernel, if it has none; what takes it away again."""
    name = operator.name()
    declared = custom_ops.OPDEFS.get(name)  # of torch.library.custom_op, which registers one that only raises
    if declared is not None and declared._abstract_fn is None:
        declared.register_fake(fake)
        return lambda: setattr(declared, "_abstract_fn", None)
    if _has_fake(name):
        return lambda: None
    if operator._can_decompose():
        return _keep_whole(operator, fake)
    library = torch.library.Library(operator.namespace, "FRAGMENT")  # type: ignore[no-untyped-call]
    register_fake(name, fake, library)
    return library._destroy


def _has_fake(name: str) -> bool:
    """Whether there is a kernel that tells what results look like."""
    has_meta = torch._C._dispatch_has_kernel_for_dispatch_key(name, "Meta")
    return has_meta or simple_registry.singleton.find(name).fake_impl.kernel is not None


_AUTOGRAD_KEYS = [key for name, key in torch._C.DispatchKey.__members__.items() if name.startswith("Autograd")]


def _keep_whole(operator: Any, fake: Callable[..., Any]) -> Callable[[], None]:
    """Trace an operator as one that torch takes for a composition of others, and gives no fake kernel; the way back.

    It does so for every C++ function that is registered without a dispatch key. Calls outside of tracing stay the same.
    """

    def below_autograd(*args: Any, **kwargs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*args, **kwargs)

    kernels: dict[Any, Any] = dict.fromkeys(_AUTOGRAD_KEYS, below_autograd)
    kernels[torch._C.DispatchKey.CompositeImplicitAutograd] = lambda *_, **__: NotImplemented
    before, fakes = dict(operator.py_kernels), simple_registry.singleton.find(operator.name()).fake_impl.kernels
    known = Kernel(fake, _HERE)

    def restore() -> None:
        fakes.remove(known)
        operator.py_kernels = before
        operator._dispatch_cache.clear()

    fakes.append(known)
    operator.py_kernels = before | kernels
    operator._dispatch_cache.clear()
    return restore


def _libtorch(part: str) -> bytes:
    return str(Path(torch.__file__).parent / "lib" / f"libtorch_{part}.so").encode()


def tensors_of(signature: Signature, given: Named) -> list[torch.Tensor]:
    """The tensors among the arguments, in the order of the signature."""
    found: list[torch.Tensor] = []
    for tensor in signature.inputs:
        value = given[tensor.name]
        found += value if isinstance(value, (list, tuple)) else [] if value is None else [value]
    return found


GRAD = "grad"
"""What a backward calls the gradient of the result, or, where there are several, with the result's name after it."""


def known_to_backward(signature: Signature) -> dict[str, str]:
    """The names that a backward can ask for, and what each is."""
    by_name = signature.parameters[len(signature.parameters) - signature.keyword_only :]
    if any(isinstance(p, Tensor) for p in by_name):
        raise DeclarationError(
            f"{signature.qualified} has a backward, and tensors that are given by name alone",
            hint="in torch those have no gradients: put them before the star",
        )
    names = {p.name: "input" if isinstance(p, Tensor) else "attribute" for p in signature.parameters}
    names |= {t.name: "output" for t in signature.outputs}
    gradients = [GRAD] if len(signature.outputs) == 1 else [f"{GRAD}_{t.name}" for t in signature.outputs]
    return names | dict.fromkeys(gradients, "gradient")


class _Gradient:
    """A backward that takes what it asks for by name, as torch calls it."""

    def __init__(self, signature: Signature, backward: Callable[..., Any], wanted: Sequence[str]) -> None:
        self._signature, self._backward = signature, backward
        kinds = known_to_backward(signature)
        self._saved = [name for name in wanted if kinds[name] in ("input", "output")]
        self._attributes = [name for name in wanted if kinds[name] == "attribute"]
        self._gradients = {name: i for i, name in enumerate(n for n, kind in kinds.items() if kind == "gradient")}
        self._gradients = {name: i for name, i in self._gradients.items() if name in wanted}
        self._positional = signature.parameters[: len(signature.parameters) - signature.keyword_only]

    def setup(self, ctx: Any, inputs: Sequence[Any], output: Any, keyword_only_inputs: Named | None = None) -> None:
        """Keep what the backward asks for."""
        given = bound(self._signature, inputs, keyword_only_inputs or {})
        outputs = output if isinstance(output, (tuple, list)) else [output]
        given |= {t.name: x for t, x in zip(self._signature.outputs, outputs, strict=True)}
        ctx.attributes = {name: given[name] for name in self._attributes}
        ctx.kept = []
        tensors: list[Any] = []
        for name in self._saved:
            value = given[name]
            several = isinstance(value, (list, tuple))
            ctx.kept.append((name, len(value) if several else None))
            tensors += value if several else [value]
        ctx.save_for_backward(*tensors)

    def backward(self, ctx: Any, *grads: torch.Tensor) -> Any:
        """Gradients for everything that can be given by position, None for what has none."""
        saved = list(ctx.saved_tensors)
        given = dict(ctx.attributes)
        for name, count in ctx.kept:
            given[name] = saved.pop(0) if count is None else [saved.pop(0) for _ in range(count)]
        given |= {name: grads[i] for name, i in self._gradients.items()}
        found = self._named(self._backward(**given))
        asked = ctx.needs_input_grad  # for what the call had: arguments at the end that are like their defaults are not
        pairs = zip(self._positional, asked, strict=False)
        results = tuple(_like(found.get(parameter.name), needed) for parameter, needed in pairs)
        return results[0] if len(results) == 1 else results

    def _named(self, result: Any) -> Named:
        if isinstance(result, Mapping):
            unknown = set(result) - {t.name for t in self._signature.inputs}
            if unknown:
                raise RuntimeError(f"{self._signature.qualified}: its backward gives a gradient for {sorted(unknown)}")
            return result
        signature = self._signature
        several = result if isinstance(result, tuple) else (result,)
        real = [t for t in signature.inputs if can_have_gradient(signature, t)]
        for tensors in (signature.inputs, real):
            if len(several) == len(tensors):
                return {t.name: x for t, x in zip(tensors, several, strict=True)}
        raise RuntimeError(
            f"{signature.qualified}: its backward gives {len(several)} gradients for {len(signature.inputs)} tensors"
        )


def _like(gradient: Any, needed: Any) -> Any:
    """A gradient as torch wants it: where it passes a list, a list."""
    return [None] * len(needed) if gradient is None and isinstance(needed, list) else gradient


def can_have_gradient(signature: Signature, tensor: Tensor) -> bool:
    """Whether a tensor is of floating point for some choice of dtypes."""
    return any(getattr(torch, name).is_floating_point for name in signature.types.get(tensor.type, (tensor.type,)))


class NoGradient:
    """The autograd kernel of an operator without a backward: it lets calls through, and a backward is an error."""

    def __init__(self, signature: Signature, operator: Any) -> None:
        self._signature, self._operator = signature, operator

    def __call__(self, keys: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Compute; the results have the error as their gradient where an argument requires one."""
        below = keys & torch._C._after_autograd_keyset
        if not torch.is_grad_enabled() or not (_require_grad(args) or _require_grad(kwargs.values())):
            return self._operator.redispatch(below, *args, **kwargs)
        tensors = tensors_of(self._signature, bound(self._signature, args, kwargs))

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
    """Results that depend on tensors in a way of which nobody has said the gradient."""

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
