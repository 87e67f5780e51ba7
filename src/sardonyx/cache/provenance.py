"""The origin of code: a released package, identified by its version, or the user's own code.

An editable installation or a package without a version counts as user code: it may change at any time.
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
"""Our own code counts as released; `own_code` identifies its version."""
_IGNORED_MODULES = ("torch._dynamo", "torch._inductor", "torch.testing", "torch.distributed", "torch.onnx")
"""Parts of torch that do not affect what an exported model computes."""


@cache
def _site_packages() -> tuple[str, ...]:
    """Return the folders that packages are installed in."""
    folders = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    folders |= {path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")}
    return tuple(sorted((path + os.sep for path in folders), key=len, reverse=True))


@cache
def origin_of_file(path: str) -> str | None:
    """Return the package and version that a source file belongs to, as 'torch 2.13.0'; None for user code."""
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
    """Return the distributions of a top-level package with their versions; None if one is not released."""
    origins = [_origin(metadata.distribution(name)) for name in _distributions(package)]
    return None if None in origins else " ".join(map(str, origins)) or None


def _origin(distribution: metadata.Distribution) -> str | None:
    """Return name and version, and the URL if it was not installed from an index; None for a local folder."""
    url = distribution.read_text("direct_url.json") or ""
    if "dir_info" in url:
        return None
    return f"{distribution.name} {distribution.version} {url}".rstrip()


@cache
def _distributions(package: str) -> list[str]:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:  # its distribution has another name
        return sorted({other.name for other in metadata.distributions() if _provides(other, package)})
    return [package]


def _provides(distribution: metadata.Distribution, package: str) -> bool:
    """Whether a distribution installed a package; `packages_distributions` takes ten times as long."""
    installed = "\n" + (distribution.read_text("RECORD") or distribution.read_text("top_level.txt") or "")
    return any(f"\n{package}{end}" in installed for end in ("/", ".", "\n"))


@cache
def origin_of_module(name: str) -> str | None:
    """Return the package and version that a module belongs to; None for user code."""
    if name == "__main__":
        return None
    if name.partition(".")[0] in sys.stdlib_module_names:
        return PYTHON
    while name:  # submodules of a compiled module have no file: use the parent
        file = getattr(sys.modules.get(name), "__file__", None)
        if file:
            return origin_of_file(file)
        name = name.rpartition(".")[0]
    return None


def origin_of_function(function: FunctionType) -> str | None:
    """Return the package that a function's code belongs to; for generated code, that of its globals."""
    file = function.__code__.co_filename
    if not file.startswith("<") or file.startswith("<frozen"):
        return origin_of_file(file)
    module = function.__globals__.get("__name__", "")
    return PYTHON if module.startswith("namedtuple_") else origin_of_module(module)


def is_importable_by_name(thing: Any) -> bool:
    """Whether a class or function is what its qualified name refers to in its module, which is released."""
    if origin_of_module(getattr(thing, "__module__", None) or "") is None:
        return False
    value: Any = sys.modules.get(getattr(thing, "__module__", None) or "")
    for name in getattr(thing, "__qualname__", "").split("."):
        value = vars(value).get(name) if isinstance(value, (type, ModuleType)) else None
    return value is thing


@cache
def file_state(module: str) -> tuple[int, int] | None:
    """Return size and time of a module's file: an edited installed file keeps its version number."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if not file:
        return None
    status = os.stat(file)
    return status.st_size, status.st_mtime_ns


# Monkeypatches


def functions_by_name(namespace: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return a description of each function in a namespace, which changes if one is replaced."""
    described = ((name, _describe_callable(value)) for name, value in list(namespace.items()))
    return sorted((name, text) for name, text in described if text)


def _describe_callable(value: Any) -> str:
    if isinstance(value, FunctionType):
        return f"{value.__module__} {value.__qualname__} {value.__code__.co_firstlineno}"
    if isinstance(value, (staticmethod, classmethod)):
        return _describe_callable(value.__func__)
    if isinstance(value, functools.partial):
        return f"partial {_describe_callable(value.func)} {len(value.args)} {sorted(value.keywords)}"
    return value.__qualname__ if isinstance(value, BuiltinFunctionType) else ""


def monkeypatches(packages: Iterable[str]) -> Iterator[tuple[str, str | None]]:
    """Find callables in modules and classes of these packages that come from unrelated packages or user code.

    Each is yielded with its qualified name and its origin; None for user code.
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
    """Return the origin of a callable; None if any part of it is user code."""
    kind = type(thing)
    if kind is functools.partial:
        return _origin_of_callable(thing.func)
    if kind is MethodType:
        return _origin_of_callable(thing.__func__)
    if issubclass(kind, type):
        return origin_of_module(thing.__module__)
    if kind is not FunctionType:
        return origin_of_module(kind.__module__)
    if thing.__closure__ and any(map(_holds_user_function, thing.__closure__)):  # a decorated user function
        return None
    return origin_of_function(thing)


def _holds_user_function(cell: CellType) -> bool:
    try:
        inside = cell.cell_contents
    except ValueError:  # it is empty
        return False
    return type(inside) is FunctionType and origin_of_function(inside) is None


def _callables(module: str, namespace: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Iterate over functions in a module, its classes and their dicts, and over classes and objects of user code."""
    for name, value in list(namespace.items()):
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


def _class_callables(name: str, owner: type) -> Iterator[tuple[str, Any]]:
    for attribute, value in list(vars(owner).items()):
        kind = type(value)
        if kind is staticmethod or kind is classmethod:
            value, kind = value.__func__, type(value.__func__)
        elif kind is property:
            value, kind = value.fget, type(value.fget)
        if kind is dict:
            yield from _dict_callables(f"{name}.{attribute}", value)
        elif kind not in _DATA and (kind in _CALLABLES or not _is_released(kind)):
            yield f"{name}.{attribute}", value


def _dict_callables(name: str, values: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    for value in list(values.values()):
        kind = type(value)
        if kind not in _DATA and (kind in _CALLABLES or not _is_released(kind)):
            yield name, value


_CALLABLES = frozenset({FunctionType, functools.partial, MethodType})
_DATA = frozenset({str, int, bool, float, type(None), list, tuple, set, frozenset, ModuleType, BuiltinFunctionType})


def _is_released(kind: type) -> bool:
    """Whether a type is not user code; some types written in C name modules that do not exist."""
    module = kind.__module__
    return module not in sys.modules or module.startswith("_cython_") or origin_of_module(module) is not None


@cache
def _allowed_distributions(package: str) -> frozenset[str]:
    """Return the distributions whose code may be in a package: its own, Python, ours and its requirements."""
    names = {*_distributions(package), "python", OURS}
    for distribution in _distributions(package):
        for requirement in metadata.requires(distribution) or ():
            name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
            names |= {name, name.replace("-", "_"), name.lower()}
    return frozenset(names)
