"""Whose code a function is: a released version of a package, which its version names, or the user's own.

An editable installation, or a package without a version, is the user's own: its code may change at any time.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import metadata
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

PYTHON = "python " + sys.version.split()[0]
OURS = "sardonyx"
"""Our own code counts as released: `own_code` tells its states apart."""
_IGNORED_MODULES = ("torch._dynamo", "torch._inductor", "torch.testing", "torch.distributed", "torch.onnx")
"""Parts of torch that have no say in what a model computes when it is exported."""


@cache
def _site_packages() -> tuple[str, ...]:
    """The folders that packages are installed to."""
    found = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    found |= {path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")}
    return tuple(sorted((path + os.sep for path in found), key=len, reverse=True))


@cache
def origin_of_file(path: str) -> str | None:
    """The package that a source file belongs to, with its version: 'torch 2.13.0'; None for the user's own."""
    if path.startswith("<frozen"):
        return PYTHON
    for site in _site_packages():
        if path.startswith(site):
            return _release_of(path[len(site) :].split(os.sep)[0].split(".")[0])
    if path.startswith(_OUR_FOLDER):
        return OURS
    return PYTHON if path.startswith(_STDLIB) else None


_STDLIB = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))
_OUR_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


@cache
def _release_of(package: str) -> str | None:
    """The distributions that a top-level package comes from, with their versions; None if one has none."""
    origins = [_origin(metadata.distribution(name)) for name in _distributions(package)]
    return None if None in origins else " ".join(map(str, origins)) or None


def _origin(distribution: metadata.Distribution) -> str | None:
    """Name and version; for what comes from no index where it comes from, and None if that is the user's folder."""
    came_from = distribution.read_text("direct_url.json") or ""
    if "dir_info" in came_from:
        return None
    return f"{distribution.name} {distribution.version} {came_from}".rstrip()


@cache
def _distributions(package: str) -> list[str]:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:  # its distribution has another name
        return sorted({found.name for found in metadata.distributions() if _provides(found, package)})
    return [package]


def _provides(distribution: metadata.Distribution, package: str) -> bool:
    """Whether a distribution installed a package; `packages_distributions` would take ten times as long to tell."""
    installed = "\n" + (distribution.read_text("RECORD") or distribution.read_text("top_level.txt") or "")
    return any(f"\n{package}{end}" in installed for end in ("/", ".", "\n"))


@cache
def origin_of_module(name: str) -> str | None:
    """The package that a module belongs to, with its version; None for the user's own."""
    if name == "__main__":
        return None
    if name.partition(".")[0] in sys.stdlib_module_names:
        return PYTHON
    while name:  # parts of a compiled module have no file, and belong to what is around them
        file = getattr(sys.modules.get(name), "__file__", None)
        if file:
            return origin_of_file(file)
        name = name.rpartition(".")[0]
    return None


def origin_of_function(function: FunctionType) -> str | None:
    """The package that a function's code belongs to; that of generated code by the names it sees."""
    file = function.__code__.co_filename
    if not file.startswith("<") or file.startswith("<frozen"):
        return origin_of_file(file)
    home = function.__globals__.get("__name__", "")
    return PYTHON if home.startswith("namedtuple_") else origin_of_module(home)


def is_importable_by_name(thing: Any) -> bool:
    """Whether what stands under a class's or function's name, in its module, which is released, is the thing itself."""
    if origin_of_module(getattr(thing, "__module__", None) or "") is None:
        return False
    found: Any = sys.modules.get(getattr(thing, "__module__", None) or "")
    for name in getattr(thing, "__qualname__", "").split("."):
        found = vars(found).get(name) if isinstance(found, (type, ModuleType)) else None
    return found is thing


@cache
def file_state(module: str) -> tuple[int, int] | None:
    """Size and time of a module's file: an installed one that was edited has the version it had before."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if not file:
        return None
    found = os.stat(file)
    return found.st_size, found.st_mtime_ns


# What was replaced at run time


def functions_by_name(held: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Which function stands under which name: differs if one was replaced, by whatever other."""
    return sorted((name, told) for name, value in list(held.items()) if (told := _describe_callable(value)))


def _describe_callable(value: Any) -> str:
    if isinstance(value, FunctionType):
        return f"{value.__module__} {value.__qualname__} {value.__code__.co_firstlineno}"
    if isinstance(value, (staticmethod, classmethod)):
        return _describe_callable(value.__func__)
    if isinstance(value, functools.partial):
        return f"partial {_describe_callable(value.func)} {len(value.args)} {sorted(value.keywords)}"
    return value.__qualname__ if isinstance(value, BuiltinFunctionType) else ""


def monkeypatches(packages: Iterable[str]) -> Iterator[tuple[str, str | None]]:
    """What stands in modules and classes of these packages, and belongs to none that the package knows of.

    Each with where it stands, and what it is; None for the user's own.
    """
    known = {package: _allowed_distributions(package) for package in packages}
    for name, module in list(sys.modules.items()):
        relatives = known.get(name.partition(".")[0])
        if relatives is None or not isinstance(module, ModuleType) or name.startswith(_IGNORED_MODULES):
            continue
        for where, thing in _callables(name, vars(module)):
            origin = _origin_of_callable(thing)
            if origin is None:
                yield f"{name}.{where}", None
            elif origin.partition(" ")[0] not in relatives:
                yield f"{name}.{where}", f"{origin} {_describe_callable(thing)}"


def _origin_of_callable(thing: Any) -> str | None:
    """Whose code something is that can be called; the user's own if any part of it is."""
    kind = type(thing)
    if kind is functools.partial:
        return _origin_of_callable(thing.func)
    if kind is MethodType:
        return _origin_of_callable(thing.__func__)
    if issubclass(kind, type):
        return origin_of_module(thing.__module__)
    if kind is not FunctionType:
        return origin_of_module(kind.__module__)
    if thing.__closure__ and any(
        map(_holds_user_function, thing.__closure__)
    ):  # a decorator's, of a function of the user's
        return None
    return origin_of_function(thing)


def _holds_user_function(cell: CellType) -> bool:
    try:
        inside = cell.cell_contents
    except ValueError:  # it is empty
        return False
    return type(inside) is FunctionType and origin_of_function(inside) is None


def _callables(module: str, held: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The functions in a module, in its classes, and in dicts of either; classes and objects of the user's own."""
    for name, value in list(held.items()):
        kind = type(value)
        if kind in _DATA:
            continue
        if issubclass(kind, type):
            if value.__module__ == module:
                yield from _class_callables(name, value)
            elif not _is_released(value):
                yield name, value
        elif kind is dict:
            yield from _dict_callables(name, value)
        elif kind in _CALLABLES or not _is_released(kind):
            yield name, value
        elif kind.__module__.partition(".")[0] == module.partition(".")[0] and kind.__dictoffset__:
            for attribute, inside in list(object.__getattribute__(value, "__dict__").items()):
                if type(inside) is dict:
                    yield from _dict_callables(f"{name}.{attribute}", inside)


def _class_callables(name: str, held: type) -> Iterator[tuple[str, Any]]:
    for attribute, value in list(vars(held).items()):
        kind = type(value)
        if kind is staticmethod or kind is classmethod:
            value, kind = value.__func__, type(value.__func__)
        elif kind is property:
            value, kind = value.fget, type(value.fget)
        if kind is dict:
            yield from _dict_callables(f"{name}.{attribute}", value)
        elif kind not in _DATA and (kind in _CALLABLES or not _is_released(kind)):
            yield f"{name}.{attribute}", value


def _dict_callables(name: str, held: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for value in list(held.values()):
        kind = type(value)
        if kind not in _DATA and (kind in _CALLABLES or not _is_released(kind)):
            yield name, value


_CALLABLES = frozenset({FunctionType, functools.partial, MethodType})
_DATA = frozenset({str, int, bool, float, type(None), list, tuple, set, frozenset, ModuleType, BuiltinFunctionType})


def _is_released(kind: type) -> bool:
    """Whether a type is not the user's own; some that are written in C name modules that there are not."""
    module = kind.__module__
    return module not in sys.modules or module.startswith("_cython_") or origin_of_module(module) is not None


@cache
def _allowed_distributions(package: str) -> frozenset[str]:
    """What may stand in a package: its own, Python's, ours, and that of the packages that it says it can use."""
    names = {*_distributions(package), "python", OURS}
    for distribution in _distributions(package):
        for requirement in metadata.requires(distribution) or ():
            name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
            names |= {name, name.replace("-", "_"), name.lower()}
    return frozenset(names)
