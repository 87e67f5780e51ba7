"""Register every operator in torch's dispatcher, as `torch.ops.ort.<operator>`, and in the translation table."""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sardonyx.errors import AutogradError
from sardonyx.onnx_ops.execution import run
from sardonyx.onnx_ops.fake import fake_results
from sardonyx.onnx_ops.nodes import call_error
from sardonyx.onnx_ops.schemas import NAMESPACE, Operator, operators
from sardonyx.onnx_ops.translation import translation
from sardonyx.run.cpu_backed import DEVICES
from sardonyx.translate import table

_registered: list[Any] = []
_lock = threading.Lock()
_HERE = os.path.normcase(os.path.abspath(__file__))
"""torch calls inspect to locate a fake kernel, which scans every module unless the file is in its cache."""


def register() -> None:
    """Make ONNX operators available as `torch.ops.ort.<operator>`, for CPU tensors and the device `ort`.

    `sardonyx.eager.enable()` calls it; repeated calls do nothing.

    >>> register()
    >>> a, b = torch.ones(2, 3), torch.ones(4, 3)
    >>> torch.ops.ort.gemm(a, b, transB=1, alpha=0.5)
    tensor([[1.5000, 1.5000, 1.5000, 1.5000],
            [1.5000, 1.5000, 1.5000, 1.5000]])
    >>> [x.shape for x in torch.ops.ort.layer_normalization(a, torch.ones(3), outputs=[0, 1])]
    [torch.Size([2, 3]), torch.Size([2, 1])]
    """
    with _lock:
        if _registered:
            return
        library: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
        inspect.modulesbyfile.setdefault(_HERE, __name__)
        for operator in operators():
            for overload in operator.overloads():
                _Overload(operator, overload).register(library)
        _register_legacy(library)
        _registered.append(library)


class _Overload:
    def __init__(self, operator: Operator, overload: str) -> None:
        self._operator, self._overload = operator, overload
        self._name = f"{operator.name}.{overload}" if overload else operator.name
        self._returns_list = bool(overload) or operator.outputs[-1].kind == "variadic"

    def register(self, library: Any) -> None:
        """Register the schema, kernels, fake kernel, an autograd error, and the translation."""
        tags = [torch.Tag.pt2_compliant_tag]
        if self._operator.is_random:
            tags.append(torch.Tag.nondeterministic_seeded)
        library.define(self._operator.schema(self._overload), tags=tuple(tags))
        library.impl(self._name, self._on_cpu, "CPU")
        library.impl(self._name, self._on_device, "PrivateUse1")
        qualified = f"{NAMESPACE}::{self._name}"
        torch.library.register_fake(qualified, self._fake, lib=library)
        torch.library.register_autograd(qualified, self._backward, lib=library)
        table.register(qualified, translation(self._operator, as_list=self._returns_list))

    def _on_cpu(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._format_results(run(self._operator, args, kwargs))

    def _on_device(self, /, *args: Any, **kwargs: Any) -> Any:
        devices = set()

        def host(x: Any) -> Any:
            if isinstance(x, torch.Tensor):
                devices.add(x.device)
                return DEVICES[x.device.type].on_host(x) if x.device.type in DEVICES else x
            return [host(y) for y in x] if isinstance(x, (list, tuple)) else x

        args, kwargs = tuple(host(x) for x in args), {name: host(x) for name, x in kwargs.items()}
        if len(devices) > 1:
            raise call_error(self._operator, f"tensors are on {' and '.join(sorted(map(str, devices)))}")
        device = devices.pop()
        hosted = DEVICES[device.type]
        return self._format_results([hosted.on_device(x, device.index) for x in run(self._operator, args, kwargs)])

    def _fake(self, /, *args: Any, **kwargs: Any) -> Any:
        packet = getattr(getattr(torch.ops, NAMESPACE), self._operator.name)
        overload = getattr(packet, self._overload or "default")
        return self._format_results(fake_results(self._operator, overload, args, kwargs))

    def _format_results(self, results: Sequence[torch.Tensor]) -> Any:
        if self._returns_list:
            return list(results)
        return results[0] if len(results) == 1 else tuple(results)

    def _backward(self, ctx: Any, *grads: Any) -> Any:
        raise AutogradError(
            f"{NAMESPACE}::{self._operator.name} has no gradient: ONNX operators have none",
            hint="call it under torch.no_grad(), or use torch operators in the part to be trained",
        )


# Operators of ONNX Runtime's former eager mode


def _register_legacy(library: Any) -> None:
    """Register them as compositions of the other operators, which torch traces and compiles as such."""
    for schema, function in _LEGACY.items():
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(schema.partition("(")[0], function, "CompositeImplicitAutograd")


def _gemm(A: Any, B: Any, C: Any, alpha: float, beta: float, transA: int, transB: int) -> Any:
    return torch.ops.ort.gemm(A, B, C, alpha=alpha, beta=beta, transA=transA, transB=transB)


def _batchnorm_inplace(X: Any, scale: Any, b: Any, input_mean: Any, input_var: Any, epsilon: Any, momentum: Any) -> Any:
    written = X, input_mean, input_var
    results = torch.ops.ort.batch_normalization(
        X, scale, b, input_mean, input_var, outputs=[0, 1, 2], epsilon=epsilon, momentum=momentum, training_mode=1
    )
    for tensor, result in zip(written, results, strict=True):
        tensor.copy_(result)
    return written


def _my_cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> Any:
    return torch.ops.ort.concat(tensors, axis=dim)


_LEGACY: dict[str, Callable[..., Any]] = {
    "gemm.positional(Tensor A, Tensor B, Tensor C, float alpha, float beta, int transA, int transB) -> Tensor": _gemm,
    "batchnorm_inplace(Tensor(a!) X, Tensor scale, Tensor b, Tensor(b!) input_mean, Tensor(c!) input_var, "
    "float epsilon, float momentum) -> (Tensor(a!), Tensor(b!), Tensor(c!))": _batchnorm_inplace,
    "my_cat(Tensor[] tensors, int dim=0) -> Tensor": _my_cat,
}
