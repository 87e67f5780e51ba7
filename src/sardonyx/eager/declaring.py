"""`eager.declare`: operators of the device by those of ONNX, or by functions, added while the process runs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from sardonyx.eager import device
from sardonyx.eager.dispatch import BODIES
from sardonyx.eager.variants import COMPOSED, variant_of
from sardonyx.errors import DeclarationError
from sardonyx.translate import declared, table
from sardonyx.translate.declared import Node, SignatureOnly

log = logging.getLogger(__name__)

_given: set[str] = set()
"""Operators whose bodies were declared, and not written here."""


def declare(operators: Mapping[str, Node | SignatureOnly], *, replace: bool = False) -> None:
    """Say what operators are, by their qualified names: compositions of ONNX's operators, or functions.

    A composition is an entry of the table that compiled and exported graphs are translated by, too. In-place and `out=`
    variants follow from it and cannot be declared themselves. `SignatureOnly(function)` is what runs on the device
    alone. An operator that has a translation is declared again only with `replace=True`; models that were compiled
    before stay as they are.

    >>> from sardonyx.eager import nodes
    >>> declare({"aten::special_spherical_bessel_j0": nodes.Sin("x")}, replace=True)
    >>> declare({"aten::sin.out": nodes.Sin("self")})
    Traceback (most recent call last):
    sardonyx.errors.DeclarationError: aten::sin.out writes to out, and a declaration says what an operator returns
      next: declare 'aten::sin': its in-place and out= variants follow from it
    >>> table.remove("aten::special_spherical_bessel_j0")
    """
    bodies = {name: x for name, x in operators.items() if isinstance(x, SignatureOnly)}
    values = {name: x for name, x in operators.items() if isinstance(x, Node)}
    if len(bodies) + len(values) < len(operators):
        wrong = next(name for name in operators if name not in bodies and name not in values)
        raise DeclarationError(f"{wrong} is declared as {operators[wrong]!r}", hint="use sardonyx.eager.nodes")
    for name, signature in bodies.items():
        _check_body(table.operator_of(name), signature, replace)
    for name in () if replace else sorted(values.keys() & table.names()):
        raise DeclarationError(f"{name} has a translation already", hint="replace=True puts this one in its place")
    declared.declare(values, replace=replace)
    for name in values:
        _use_translation(name)
    _use_bodies(bodies)
    device.forget()


def _use_translation(name: str) -> None:
    """Let the device run the translation of an operator, where it can."""
    operator = table.operator_of(name)
    if name in _given:
        _given.discard(name)
        BODIES.pop(name, None)
    COMPOSED.pop(name, None)
    why_not = device.hindrance(operator)
    if why_not is not None:
        log.warning("%s: what is declared holds for compiled and exported graphs alone: %s", name, why_not)
    else:
        device.add(operator)


def _use_bodies(bodies: Mapping[str, SignatureOnly]) -> None:
    for name, signature in bodies.items():
        if signature.function is not None:
            BODIES[name] = signature.function
            _given.add(name)
            device.add(table.operator_of(name))


def _check_body(operator: Any, signature: SignatureOnly, replace: bool) -> None:
    name = operator.name()
    why_not = None if name in BODIES else device.hindrance(operator)
    if signature.function is None:
        if why_not is None and name not in BODIES and not _is_translated(operator):
            raise DeclarationError(f"the device has no body for {name}", hint="SignatureOnly(function) gives it one")
    elif why_not is not None:
        raise DeclarationError(f"a body of {name} would never be called: {why_not}")
    elif name in BODIES and not replace:
        raise DeclarationError(f"the device has a body for {name}", hint="replace=True puts this one in its place")


def _is_translated(operator: Any) -> bool:
    variant = variant_of(operator)
    functional = None if variant is None else variant.functional
    return functional is not None and (functional is not operator or table.find(operator) is not None)
