"""Shape rules: Python functions that return the shapes of an operator's results.

A rule is called with sizes in torch's fake kernel and in ONNX's shape inference. For the library, which runs without
Python, it is traced to C++ with symbols that record operations; at a condition, both branches are traced.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from sardonyx.customop.signature import Attribute, Signature, Tensor, is_unnamed
from sardonyx.customop.symbols import (
    MARK,
    SYMBOLS,
    Path,
    Sizes,
    TensorListSizes,
    broadcast_symbols,
    conditions_code,
    message_code,
    shape_code,
)
from sardonyx.errors import DeclarationError

Rule: TypeAlias = Callable[..., Any]
_MAX_PATHS = 4096


def broadcast(*shapes: Any) -> Any:
    """Return the broadcast of shapes.

    >>> broadcast((2, 1), (3,))
    (2, 3)
    """
    if any(isinstance(shape, Sizes) for shape in shapes):
        return functools.reduce(broadcast_symbols, shapes)
    if any(isinstance(dim, UnknownSize) for shape in shapes for dim in shape):
        columns = itertools.zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1)
        return tuple(functools.reduce(_broadcast_dim, column) for column in columns)[::-1]
    return tuple(torch.broadcast_shapes(*(tuple(shape) for shape in shapes)))  # type: ignore[no-untyped-call]


def _broadcast_dim(a: Any, b: Any) -> Any:
    """Broadcast two dims, of which some may be unknown."""
    if isinstance(a, UnknownSize) and isinstance(b, UnknownSize):
        return a if a.name is not None and a.name == b.name else UnknownSize()
    if isinstance(a, UnknownSize) or isinstance(b, UnknownSize):
        unknown, known = (a, b) if isinstance(a, UnknownSize) else (b, a)
        return unknown if known == 1 else known
    if 1 not in (a, b) and a != b:
        raise ValueError(f"sizes {a} and {b} cannot be broadcast")
    return b if a == 1 else a


# Calling a rule


class ShapeRule:
    """A shape rule and its signature."""

    def __init__(self, signature: Signature, rule: Rule | None) -> None:
        self.signature = signature
        self._rule = _same_as_first(signature) if rule is None else by_position(rule, signature)
        self._parameters = parameter_names(self._rule, {p.name for p in signature.parameters}, "the shape rule")

    def __call__(self, arguments: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        """Return the sizes of every result: numbers, and None where only the kernel knows.

        `arguments` has shapes for tensors, None for absent ones, a list for a tensor list; and the attributes.
        """
        result = self._rule(**{name: arguments[name] for name in self._parameters})
        shapes = [tuple(_check_dim(dim) for dim in shape) for shape in self._shapes(result)]
        self._check_ranks(shapes)
        for tensor, shape in zip(self.signature.outputs, shapes, strict=True):
            for axis, dim in enumerate(shape):
                if type(dim) is int and dim < 0:
                    message = f"its shape rule gives {tensor.name} the size {dim} in dimension {axis}"
                    raise ValueError(f"{self.signature.qualified}: {message}")
        return shapes

    def needs(self, name: str) -> bool:
        """Return whether the rule takes a parameter."""
        return name in self._parameters

    def _shapes(self, result: Any) -> Sequence[Any]:
        outputs = self.signature.outputs
        shapes = [result] if len(outputs) == 1 else result
        if not isinstance(shapes, (tuple, list)) or len(shapes) != len(outputs):
            raise self._error(f"returns {result!r} for {len(outputs)} results")
        for tensor, shape in zip(outputs, shapes, strict=True):
            if not isinstance(shape, (tuple, list, Sizes)):
                raise self._error(f"returns {shape!r} for {tensor.name}, which is not a shape")
        return shapes

    def _check_ranks(self, shapes: Sequence[Any]) -> None:
        for tensor, shape in zip(self.signature.outputs, shapes, strict=True):
            if tensor.rank is not None and not isinstance(shape, Sizes) and len(shape) != tensor.rank:
                raise self._error(f"returns {len(shape)} sizes for {tensor.name}, and the signature says {tensor.rank}")

    def _error(self, message: str) -> DeclarationError:
        return DeclarationError(f"{self.signature.qualified}: the shape rule {message}".replace(MARK, ""))

    # Tracing to C++

    def cpp(self) -> str:
        """Return the body of a C++ function of `inputs`, `variadic`, `attributes` and `outputs`."""
        paths, pending = [], [Path([])]
        while pending:
            path = pending.pop()
            paths.append((path, self._trace(path)))
            pending += path.alternatives()
            if len(paths) > _MAX_PATHS:
                raise self._error(f"has more than {_MAX_PATHS} paths")
        return conditions_code(paths, 0, "  ")

    def _trace(self, path: Path) -> str:
        arguments = {name: self._symbol(name, path) for name in self._parameters}
        try:
            shapes = self._shapes(self._rule(**arguments))
            if not path.decisions:  # otherwise it depends on the inputs, and is checked at the call
                self._check_ranks(shapes)
            return " ".join(f"outputs[{i}] = {shape_code(shape)};" for i, shape in enumerate(shapes))
        except DeclarationError:
            raise
        except (ValueError, AssertionError, LookupError, ArithmeticError, RuntimeError) as error:
            return f"fail({message_code(str(error) or 'its shape rule rejects these sizes')});"
        except Exception as error:
            raise DeclarationError(
                self._error(f"cannot be translated to C++: {error}").what,
                hint="a rule can use +, -, *, //, %, comparisons and conditions; a size only the kernel knows is None",
            ) from error

    def _symbol(self, name: str, path: Path) -> Any:
        parameters: list[Tensor | Attribute] = [*self.signature.inputs, *self.signature.attributes]
        parameter = next(p for p in parameters if p.name == name)
        if isinstance(parameter, Tensor):
            index = self.signature.inputs.index(parameter)
            if parameter.kind == "variadic":
                return TensorListSizes(index, path, parameter.rank)
            if parameter.kind == "optional" and not path.decide(f"present(inputs[{index}])"):
                return None
            return Sizes(f"inputs[{index}]", path, parameter.rank)
        return SYMBOLS[parameter.type](f"attributes[{self.signature.attributes.index(parameter)}]", path)


def parameter_names(function: Callable[..., Any], known: set[str], what: str) -> list[str]:
    """Return the parameter names of a function, each of which must be known."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise DeclarationError(f"{what} is {function!r}, not a Python function") from None
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return sorted(known)
    if any(p.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL) for p in parameters):
        raise DeclarationError(f"{what} has positional-only parameters", hint="arguments are passed by name")
    names = [p.name for p in parameters if p.name in known or p.default is inspect.Parameter.empty]
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        raise DeclarationError(f"{what} takes {unknown!r}", hint=f"it can take {', '.join(sorted(known))}")
    return names


def by_position(function: Callable[..., Any], signature: Signature, skip: int = 0) -> Callable[..., Any]:
    """Return a function with its own names for unnamed parameters renamed to `_0`, `_1`, ....

    These are the names that the signature lacks, in the order of the unnamed parameters, after the first `skip`.
    """
    try:
        declared = inspect.signature(function)
    except (TypeError, ValueError):
        return function  # which `wanted` refuses
    parameters = declared.parameters
    known = {p.name for p in signature.parameters}
    unnamed = [p.name for p in signature.parameters if is_unnamed(p.name) and p.name not in parameters]
    own_names = [p.name for p in list(parameters.values())[skip:] if p.name not in known and _is_required(p)]
    names = dict(zip(own_names, unnamed, strict=False))
    if not names:
        return function
    to_own = {theirs: ours for ours, theirs in names.items()}

    def renamed(*args: Any, **arguments: Any) -> Any:
        return function(*args, **{to_own.get(name, name): value for name, value in arguments.items()})

    renamed_parameters = [p.replace(name=names.get(p.name, p.name)) for p in parameters.values()]
    renamed.__signature__ = declared.replace(parameters=renamed_parameters)  # type: ignore[attr-defined]
    return renamed


def _is_required(parameter: inspect.Parameter) -> bool:
    by_name = parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return by_name and parameter.default is inspect.Parameter.empty


def _same_as_first(signature: Signature) -> Rule:
    if not signature.inputs or len(signature.outputs) != 1 or signature.inputs[0].kind != "required":
        raise DeclarationError(f"{signature.qualified} needs a shape rule", hint="for instance shape=lambda x: x")
    first = signature.inputs[0].name

    def rule(**arguments: Any) -> Any:
        return arguments[first]

    parameter = inspect.Parameter(first, inspect.Parameter.KEYWORD_ONLY)
    rule.__signature__ = inspect.Signature([parameter])  # type: ignore[attr-defined]
    return rule


def _check_dim(dim: Any) -> Any:
    if dim is None or isinstance(dim, (int, torch.SymInt, UnknownSize)):
        return dim
    raise DeclarationError(f"the shape rule returns the size {dim!r}, which is not an integer")


class UnknownSizeError(Exception):
    """A condition of a rule depends on an unknown size."""


class UnknownSize:
    """A size unknown during shape inference; arithmetic with it is unknown too."""

    def __init__(self, name: str | None = None) -> None:
        self.name = name

    def _unknown(self, *_: Any) -> UnknownSize:
        return UnknownSize()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _unknown
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __neg__ = _unknown

    def _raise(self, *_: Any) -> bool:
        raise UnknownSizeError

    __bool__ = __lt__ = __le__ = __gt__ = __ge__ = __index__ = _raise

    def __eq__(self, other: object) -> bool:
        if isinstance(other, UnknownSize) and other.name is not None and other.name == self.name:
            return True
        raise UnknownSizeError

    __hash__ = None  # type: ignore[assignment]
