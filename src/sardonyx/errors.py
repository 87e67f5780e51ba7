"""One exception tree: each error carries its cause, the user's source line where known, and the next step."""

from __future__ import annotations


class SardonyxError(Exception):
    """Base class of the errors that this package raises.

    >>> raise SardonyxError("it broke", where="model.py:3", hint="do this instead")
    Traceback (most recent call last):
    sardonyx.errors.SardonyxError: it broke
      at:   model.py:3
      next: do this instead
    """

    def __init__(self, what: str, *, where: str | None = None, hint: str | None = None) -> None:
        self.what, self.where, self.hint = what, where, hint
        lines = [what]
        if where:
            lines.append(f"  at:   {where}")
        if hint:
            lines.append(f"  next: {hint}")
        super().__init__("\n".join(lines))


class OptionError(SardonyxError, ValueError):
    """An option has an unknown name or an unusable value."""


class UnquantizableWeight(OptionError):
    """A weight has NaN or infinity, which integers do not have."""


class UnsupportedOperator(SardonyxError, NotImplementedError):
    """ONNX cannot express an operator, and `fallback="error"` forbids leaving it to torch."""


class CaptureError(SardonyxError, RuntimeError):
    """torch.export cannot trace a model, or the trace cannot be written to a file."""


class MissingDependency(SardonyxError, ImportError):
    """An optional package is needed and not installed."""


class CompilerError(SardonyxError, RuntimeError):
    """A compiler failed; the error carries its output."""

    def __init__(self, message: str, log: str, *, hint: str | None = None) -> None:
        self.log = log
        super().__init__(f"{message}:\n{log[:_MAX_LOG]}", hint=hint)


_MAX_LOG = 4000


class EngineError(SardonyxError, RuntimeError):
    """An engine refused a model, or failed while running it."""


class MissingKernel(EngineError, UnsupportedOperator):
    """An engine has no kernel for an operator of a model, in these dtypes or with these attributes."""


class AutogradError(SardonyxError, RuntimeError):
    """A compiled graph does not support the requested kind of differentiation."""


class VerificationError(SardonyxError, AssertionError):
    """`verify=True` found a result that differs from PyTorch's."""


class DeclarationError(SardonyxError, ValueError):
    """The declaration of a custom operator cannot be used."""


class Unsupported(Exception):
    """ONNX cannot express this call; the text says why. The partitioner turns it into a fallback or an error."""
