"""`eager.declare`: add operators of the device at run time, as ONNX nodes or Python functions."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from sardonyx.eager import device
from sardonyx.eager.dispatch import HANDWRITTEN
from sardonyx.eager.variants import COMPOSITES, variant_of
from sardonyx.errors import DeclarationError
from sardonyx.translate import declared, table
from sardonyx.translate.declared import Node, SignatureOnly
from sardonyx.translate.functional import functional_of, mutated_arguments

log = logging.getLogger(__name__)

_DECLARED: set[str] = set()
"""Operators whose implementation was declared, as opposed to built in."""


def declare(operators: Mapping[str, Node | SignatureOnly], *, replace: bool = False) -> None:
    """Declare operators by qualified name, as compositions of ONNX nodes or as functions.

    A composition is also added to the translation table used by compiled and exported graphs. In-place and `out=`
    variants are derived from it and cannot be declared themselves. `SignatureOnly(function)` runs on the device only.
    Replacing an existing translation needs `replace=True`; models compiled before keep the old one.

    >>> from sardonyx.eager import nodes
    >>> declare({"aten::special_spherical_bessel_j0": nodes.Sin("x")}, replace=True)
    >>> declare({"aten::sin.out": nodes.Sin("self")})
    Traceback (most recent call last):
    sardonyx.errors.DeclarationError: aten::sin.out writes to out, but a declaration defines what an operator returns
      next: declare 'aten::sin': its in-place and out= variants follow from it
    >>> table.remove("aten::special_spherical_bessel_j0")
    """
    functions = {name: x for name, x in operators.items() if isinstance(x, SignatureOnly)}
    compositions = {name: x for name, x in operators.items() if isinstance(x, Node)}
    if len(functions) + len(compositions) < len(operators):
        wrong = next(name for name in operators if name not in functions and name not in compositions)
        raise DeclarationError(f"{wrong} is declared as {operators[wrong]!r}", hint="use sardonyx.eager.nodes")
    for name, signature in functions.items():
        _check_function(table.operator_of(name), signature, replace)
    for name in () if replace else sorted(compositions.keys() & table.names()):
        raise DeclarationError(f"{name} has a translation already", hint="pass replace=True to replace it")
    declared.declare(compositions, replace=replace)
    for name in compositions:
        _use_translation(name)
    _use_functions(functions)
    device.clear_caches()


def _use_translation(name: str) -> None:
    operator = table.operator_of(name)
    if name in _DECLARED:
        _DECLARED.discard(name)
        HANDWRITTEN.pop(name, None)
    COMPOSITES.pop(name, None)
    reason = device.why_not_translated(operator)
    if reason is not None:
        log.warning("%s: the declaration applies to compiled and exported graphs only: %s", name, reason)
    else:
        device.register_operator(operator)


def _use_functions(operators: Mapping[str, SignatureOnly]) -> None:
    for name, signature in operators.items():
        if signature.function is not None:
            HANDWRITTEN[name] = signature.function
            _DECLARED.add(name)
            operator = table.operator_of(name)
            device.register_operator(operator)
            kept = [variant.name() for variant in _writing_variants(operator) if variant.name() not in operators]
            if kept:
                log.warning("%s: %s keep their translation; declare them, too", name, " and ".join(kept))


def _check_function(operator: Any, signature: SignatureOnly, replace: bool) -> None:
    name = operator.name()
    reason = None if name in HANDWRITTEN else device.why_not_translated(operator)
    if signature.function is None:
        if reason is None and name not in HANDWRITTEN and not _has_translation(operator):
            raise DeclarationError(
                f"the device has no implementation of {name}", hint="pass one with SignatureOnly(function)"
            )
    elif reason is not None:
        raise DeclarationError(f"the implementation of {name} would never be called: {reason}")
    elif name in HANDWRITTEN and not replace:
        raise DeclarationError(
            f"the device has an implementation of {name} already", hint="pass replace=True to replace it"
        )


def _writing_variants(operator: Any) -> list[Any]:
    """Return the in-place and `out=` variants of an operator that the device translates by it."""
    namespace, _, name = operator._schema.name.partition("::")
    packets = [operator.overloadpacket, getattr(getattr(torch.ops, namespace), f"{name}_", None)]
    overloads = [getattr(packet, each) for packet in packets if packet is not None for each in packet.overloads()]
    written = [x for x in overloads if mutated_arguments(x) and functional_of(x) is operator]
    return [x for x in written if device.why_not_translated(x) is None]


def _has_translation(operator: Any) -> bool:
    variant = variant_of(operator)
    functional = None if variant is None else variant.functional
    return functional is not None and (functional is not operator or table.find(operator) is not None)
