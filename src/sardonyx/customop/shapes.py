"""The shape rule: a Python function that says what an operator's results look like.

It is called with sizes in torch's fake kernel and in ONNX's shape inference. For the library, which runs where there is
no Python, it is called with symbols that write down what is done with them, as C++; where it decides something, both
ways are followed.
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
    Several,
    Sizes,
    broadcast_symbols,
    conditions,
    message,
    written,
)
from sardonyx.errors import DeclarationError

Rule: TypeAlias = Callable[..., Any]
_MOST_PATHS = 4096


def broadcast(*shapes: Any) -> Any:
    """The shape that tensors of these shapes have together.

    >>> broadcast((2, 1), (3,))
    (2, 3)
    """
    if any(isinstance(shape, Sizes) for shape in shapes):
        return functools.reduce(broadcast_symbols, shapes)
    if any(isinstance(dim, Unknown) for shape in shapes for dim in shape):
        columns = itertools.zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1)
        return tuple(functools.reduce(_together, column) for column in columns)[::-1]
    return tuple(torch.broadcast_shapes(*(tuple(shape) for shape in shapes)))  # type: ignore[no-untyped-call]


def _together(a: Any, b: Any) -> Any:
    """The size that sizes have together, of which some are unknown."""
    if isinstance(a, Unknown) and isinstance(b, Unknown):
        return a if a.name is not None and a.name == b.name else Unknown()
    if isinstance(a, Unknown) or isinstance(b, Unknown):
        unknown, known = (a, b) if isinstance(a, Unknown) else (b, a)
        return unknown if known == 1 else known
    if 1 not in (a, b) and a != b:
        raise ValueError(f"sizes {a} and {b} do not go together")
    return b if a == 1 else a


# Calling it


class ShapeRule:
    """A rule and the signature it belongs to."""

    def __init__(self, signature: Signature, rule: Rule | None) -> None:
        self.signature = signature
        self._rule = _like_the_first(signature) if rule is None else by_position(rule, signature)
        self._wanted = wanted(self._rule, {p.name for p in signature.parameters}, "the shape rule")

    def __call__(self, given: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        """The sizes of every result: numbers, and None where only the kernel will know.

        `given` has sizes for tensors, None for one that is absent, a list for several; and the attributes.
        """
        result = self._rule(**{name: given[name] for name in self._wanted})
        shapes = [tuple(_dim(dim) for dim in shape) for shape in self._shapes(result)]
        self._check_ranks(shapes)
        for tensor, shape in zip(self.signature.outputs, shapes, strict=True):
            for place, dim in enumerate(shape):
                if type(dim) is int and dim < 0:
                    said = f"its shape rule gives {tensor.name} the size {dim} in dimension {place}"
                    raise ValueError(f"{self.signature.qualified}: {said}")
        return shapes

    def needs(self, name: str) -> bool:
        """Whether the rule asks for a parameter."""
        return name in self._wanted

    def _shapes(self, result: Any) -> Sequence[Any]:
        outputs = self.signature.outputs
        shapes = [result] if len(outputs) == 1 else result
        if not isinstance(shapes, (tuple, list)) or len(shapes) != len(outputs):
            raise self._error(f"gives {result!r} for {len(outputs)} results")
        for tensor, shape in zip(outputs, shapes, strict=True):
            if not isinstance(shape, (tuple, list, Sizes)):
                raise self._error(f"gives {shape!r} for {tensor.name}, which is not a shape")
        return shapes

    def _check_ranks(self, shapes: Sequence[Any]) -> None:
        for tensor, shape in zip(self.signature.outputs, shapes, strict=True):
            if tensor.rank is not None and not isinstance(shape, Sizes) and len(shape) != tensor.rank:
                raise self._error(f"gives {tensor.name} {len(shape)} sizes, and the signature says {tensor.rank}")

    def _error(self, what: str) -> DeclarationError:
        return DeclarationError(f"{self.signature.qualified}: the shape rule {what}".replace(MARK, ""))

    # Writing it down

    def cpp(self) -> str:
        """The body of a C++ function of `inputs`, `variadic`, `attributes` and `outputs`."""
        paths, unfollowed = [], [Path([])]
        while unfollowed:
            path = unfollowed.pop()
            paths.append((path, self._follow(path)))
            unfollowed += path.others()
            if len(paths) > _MOST_PATHS:
                raise self._error(f"decides so much that it takes more than {_MOST_PATHS} ways")
        return conditions(paths, 0, "  ")

    def _follow(self, path: Path) -> str:
        """The statements at the end of a way."""
        given = {name: self._symbol(name, path) for name in self._wanted}
        try:
            shapes = self._shapes(self._rule(**given))
            if not path.taken:  # else it is so for some inputs only, and left to the call
                self._check_ranks(shapes)
            return " ".join(f"outputs[{i}] = {written(shape)};" for i, shape in enumerate(shapes))
        except DeclarationError:
            raise
        except (ValueError, AssertionError, LookupError, ArithmeticError, RuntimeError) as error:
            return f"fail({message(str(error) or 'its shape rule refuses these sizes')});"
        except Exception as error:
            raise DeclarationError(
                self._error(f"cannot be written in C++: {error}").what,
                hint="a rule adds, subtracts, multiplies, divides by //, takes %, compares and decides; where only the "
                "kernel can tell a size, it gives None",
            ) from error

    def _symbol(self, name: str, path: Path) -> Any:
        places: list[Tensor | Attribute] = [*self.signature.inputs, *self.signature.attributes]
        found = next(p for p in places if p.name == name)
        if isinstance(found, Tensor):
            index = self.signature.inputs.index(found)
            if found.kind == "variadic":
                return Several(index, path, found.rank)
            if found.kind == "optional" and not path.decide(f"present(inputs[{index}])"):
                return None
            return Sizes(f"inputs[{index}]", path, found.rank)
        return SYMBOLS[found.type](f"attributes[{self.signature.attributes.index(found)}]", path)


def wanted(function: Callable[..., Any], known: set[str], what: str) -> list[str]:
    """The names that a function takes, each of which has to be known."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise DeclarationError(f"{what} is {function!r}, which is not a Python function") from None
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return sorted(known)
    if any(p.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL) for p in parameters):
        raise DeclarationError(f"{what} takes something by its place", hint="it is given everything by name")
    names = [p.name for p in parameters if p.name in known or p.default is inspect.Parameter.empty]
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        raise DeclarationError(f"{what} takes {unknown!r}", hint=f"it can take {', '.join(sorted(known))}")
    return names


def by_position(function: Callable[..., Any], signature: Signature, skip: int = 0) -> Callable[..., Any]:
    """A function that takes unnamed parameters under names of its own, as one that takes them as `_0`, `_1`, ….

    Its own names are those that are not the signature's, in the order of the unnamed parameters, after `skip` others.
    """
    try:
        declared = inspect.signature(function)
    except (TypeError, ValueError):
        return function  # which `wanted` refuses
    parameters = declared.parameters
    known = {p.name for p in signature.parameters}
    unnamed = [p.name for p in signature.parameters if is_unnamed(p.name) and p.name not in parameters]
    own = [p.name for p in list(parameters.values())[skip:] if p.name not in known and _is_asked_for(p)]
    names = dict(zip(own, unnamed, strict=False))
    if not names:
        return function
    back = {theirs: ours for ours, theirs in names.items()}

    def renamed(*args: Any, **given: Any) -> Any:
        return function(*args, **{back.get(name, name): value for name, value in given.items()})

    made = [p.replace(name=names.get(p.name, p.name)) for p in parameters.values()]
    renamed.__signature__ = declared.replace(parameters=made)  # type: ignore[attr-defined]
    return renamed


def _is_asked_for(parameter: inspect.Parameter) -> bool:
    by_name = parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return by_name and parameter.default is inspect.Parameter.empty


def _like_the_first(signature: Signature) -> Rule:
    if not signature.inputs or len(signature.outputs) != 1 or signature.inputs[0].kind != "required":
        raise DeclarationError(f"{signature.qualified} needs a shape rule", hint="shape=lambda x: x, for instance")
    first = signature.inputs[0].name

    def rule(**given: Any) -> Any:
        return given[first]

    only = inspect.Parameter(first, inspect.Parameter.KEYWORD_ONLY)
    rule.__signature__ = inspect.Signature([only])  # type: ignore[attr-defined]
    return rule


def _dim(dim: Any) -> Any:
    if dim is None or isinstance(dim, (int, torch.SymInt, Unknown)):
        return dim
    raise DeclarationError(f"the shape rule gives {dim!r} for a size, which is no integer")


class CannotTell(Exception):
    """A rule's way depends on a size that is not known yet."""


class Unknown:
    """A size that is not known while a model is only being looked at; arithmetic with it is unknown too."""

    def __init__(self, name: str | None = None) -> None:
        self.name = name

    def _unknown(self, *_: Any) -> Unknown:
        return Unknown()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _unknown
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __neg__ = _unknown

    def _cannot_tell(self, *_: Any) -> bool:
        raise CannotTell

    __bool__ = __lt__ = __le__ = __gt__ = __ge__ = __index__ = _cannot_tell

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Unknown) and other.name is not None and other.name == self.name:
            return True
        raise CannotTell

    __hash__ = None  # type: ignore[assignment]
