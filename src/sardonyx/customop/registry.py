"""The operators declared in this process, and the libraries that models with them need."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from sardonyx.customop import source
from sardonyx.errors import CompilerError, DeclarationError
from sardonyx.options import Options
from sardonyx.toolchain import compiler
from sardonyx.toolchain.operator_libraries import DECLARED, joint_library

if TYPE_CHECKING:
    from sardonyx.customop.declaration import CustomOp

log = logging.getLogger(__name__)

_DECLARED = cast("dict[tuple[str, str], CustomOp]", DECLARED)
"""By ONNX domain and name."""
_LOCK = threading.RLock()


@contextmanager
def replace_while_registering(op: CustomOp) -> Iterator[None]:
    """Unregister operators of the same ONNX or torch name, run the block, and add the operator.

    If the block fails, what it registered is undone, and the name is free.
    """
    key = (op.domain, op.name)
    with _LOCK:
        for other, before in list(_DECLARED.items()):
            if other == key or before.signature.qualified == op.signature.qualified:
                log.info("%s is redeclared", op.signature.qualified)
                remove(before)
        try:
            yield
        except BaseException:
            op.withdraw()
            raise
        _DECLARED[key] = op


def remove(op: CustomOp) -> None:
    """Unregister an operator."""
    with _LOCK:
        if _DECLARED.get((op.domain, op.name)) is op:
            del _DECLARED[op.domain, op.name]
            op.withdraw()


def find(domain: str, name: str) -> CustomOp:
    """Return the operator of this domain and name."""
    try:
        return _DECLARED[domain, name]
    except KeyError:
        raise DeclarationError(
            f"{domain}::{name} is not declared in this process", hint="import the module that declares it first"
        ) from None


def declared() -> list[CustomOp]:
    """Return all declared operators."""
    return list(_DECLARED.values())


def library(*ops: CustomOp) -> Path:
    """Return one library with all of these operators: ONNX Runtime accepts one library per domain.

    It loads the library of each operator, so that equal names in kernels do not collide.
    """
    return joint_library(ops)


def build_joint_library(ops: Sequence[CustomOp]) -> Path:
    """Build a library that loads those of several operators."""
    return compiler.build_library(
        source.joint_source([op.library for op in ops]), Options.of({}), common=source.common()
    )


def build_operator_library(op: CustomOp) -> Path:
    """Build the library of an operator. Without a GPU it omits the CUDA kernel, but nvcc checks that it compiles."""
    cuda, options = source.cuda([op.operator_source]), Options.of({})
    has_gpu = torch.cuda.is_available()
    with _explain_errors(op, "the kernel", on_gpu=False):
        library = compiler.build_library(
            source.library([op.operator_source]),
            options,
            flags=op.flags,
            common=source.common(),
            cuda=cuda if has_gpu else "",
        )
    if cuda and not has_gpu and compiler.find_nvcc() is not None:
        with _explain_errors(op, "the kernel for the GPU", on_gpu=True):
            compiler.check_cuda(cuda, options)
    op.serve(library)
    return library


@contextmanager
def _explain_errors(op: CustomOp, what: str, *, on_gpu: bool) -> Iterator[None]:
    """Name the operator in compiler errors, and show the kernel's declaration if the error is in generated code."""
    try:
        yield
    except CompilerError as error:
        declared = source.kernel_declaration(op.signature, on_gpu=on_gpu)
        hint = f"the kernel must be declared as: {declared}" if source.GLUE in error.log else None
        message = f"{op.signature.qualified}: {what} does not compile"
        raise CompilerError(message, error.log, hint=hint) from None
