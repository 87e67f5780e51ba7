"""Operators that are declared in this process, and the libraries that models with them need."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from sardonyx.customop import source
from sardonyx.errors import DeclarationError
from sardonyx.options import Options
from sardonyx.toolchain import compiler
from sardonyx.toolchain.operator_libraries import DECLARED, joint_library

if TYPE_CHECKING:
    from sardonyx.customop.declaration import CustomOp

log = logging.getLogger(__name__)

_DECLARED = cast("dict[tuple[str, str], CustomOp]", DECLARED)
"""By domain and name in ONNX."""
_CHANGING = threading.RLock()


@contextmanager
def replacing(op: CustomOp) -> Iterator[None]:
    """Around what registers an operator: those of its name, in ONNX or in torch, are withdrawn before.

    Where it fails, what was registered so far is withdrawn too, and the name is free.
    """
    key = (op.domain, op.name)
    with _CHANGING:
        for other, before in list(_DECLARED.items()):
            if other == key or before.signature.qualified == op.signature.qualified:
                log.info("%s is declared anew", op.signature.qualified)
                remove(before)
        try:
            yield
        except BaseException:
            op.withdraw()
            raise
        _DECLARED[key] = op


def remove(op: CustomOp) -> None:
    """Forget an operator."""
    with _CHANGING:
        if _DECLARED.get((op.domain, op.name)) is op:
            del _DECLARED[op.domain, op.name]
            op.withdraw()


def find(domain: str, name: str) -> CustomOp:
    """The operator of this domain and name."""
    try:
        return _DECLARED[domain, name]
    except KeyError:
        raise DeclarationError(
            f"{domain}::{name} is not declared in this process", hint="import what declares it before what uses it"
        ) from None


def declared() -> list[CustomOp]:
    """Every operator that is declared."""
    return list(_DECLARED.values())


def library(*ops: CustomOp) -> Path:
    """One library with all of these operators: ONNX Runtime takes no two for operators of one domain.

    Each stays in its own, where names that kernels share do not meet.
    """
    return joint_library(ops)


def joined(ops: Sequence[CustomOp]) -> Path:
    """A library that loads those of several operators."""
    return compiler.build_library(source.joint([op.library for op in ops]), Options.of({}), common=source.common())


def built(op: CustomOp) -> Path:
    """The library of an operator. Without a GPU the kernel for it is not part of that, but nvcc looks for errors."""
    cuda, options = source.cuda([op.part]), Options.of({})
    able = torch.cuda.is_available()
    with _explained(op, "the kernel", on_gpu=False):
        made = compiler.build_library(
            source.library([op.part]), options, flags=op.flags, common=source.common(), cuda=cuda if able else ""
        )
    if cuda and not able and compiler.find_nvcc() is not None:
        with _explained(op, "the kernel for the GPU", on_gpu=True):
            compiler.check_cuda(cuda, options)
    op.serve(made)
    return made


@contextmanager
def _explained(op: CustomOp, what: str, *, on_gpu: bool) -> Iterator[None]:
    """Name the operator in a compiler's error, and how a kernel is declared where the error is in our code."""
    try:
        yield
    except compiler.CompilerError as error:
        declared = source.calling(op.signature, on_gpu=on_gpu)
        hint = f"the kernel is declared as: {declared}" if source.GLUE in error.log else None
        said = f"{op.signature.qualified}: {what} does not compile"
        raise compiler.CompilerError(said, error.log, hint=hint) from None
