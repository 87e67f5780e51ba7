"""Load files of torch.export.save without executing code in them.

`torch.export.load` unpickles, loads libraries, evaluates sizes as Python and imports modules that a file names. A file
that needs any of this is refused: users who trust it can load it in a factory.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import pickle
import re
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.utils._sympy import functions as torch_sympy

from sardonyx.errors import SardonyxError
from sardonyx.model_files import capture_logs

_TRUST = "if you trust it, use file.py:factory, a function that returns torch.export.load(path).module()"
_WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
_PICKLED = ("custom_obj_", "opaque_obj_")
"""Name prefixes of archive members with pickled objects."""
_FACTORIES = frozenset({"builtins", "collections"})
"""Modules that may define the factory of a defaultdict."""
_FUNCTIONS = frozenset(
    {
        *(*torch_sympy.__all__, "Integer", "Rational", "Symbol", "Float", "Add", "Mul", "Pow", "Max", "Min", "Mod"),
        *("Abs", "floor", "ceiling", "sqrt", "Eq", "Ne", "Equality", "Unequality", "And", "Or", "Not"),
        *("GreaterThan", "LessThan", "StrictGreaterThan", "StrictLessThan"),
    }
)
"""Functions in sizes that torch writes, as printed by sympy.srepr."""
_OF_TEXT = {"Symbol": re.compile(r"\w+"), "Float": re.compile(r"-?[0-9.e+-]+")}
"""Functions whose first argument may be text: for others, sympy would evaluate text."""
_ARITHMETIC = (
    *(
        ast.Expression,
        ast.Constant,
        ast.Name,
        ast.Load,
        ast.Call,
        ast.keyword,
        ast.BoolOp,
        ast.BinOp,
        ast.UnaryOp,
        ast.Compare,
    ),
    *(ast.boolop, ast.operator, ast.unaryop, ast.cmpop),
)


def load(path: str) -> torch.export.ExportedProgram:
    """Load an exported program."""
    messages: list[str] = []
    try:
        _check(Path(path))
        with capture_logs(messages, "torch.export"), _only_weights():
            return torch.export.load(path)
    except SardonyxError:
        raise
    except pickle.UnpicklingError as error:
        raise SardonyxError(f"{path} has pickled objects, which would run as code", hint=_TRUST) from error
    except Exception as error:
        unknown = re.search(r"Deserializing (\S+)\.(\w+) in pytree", "\n".join(messages))
        if unknown is not None and _import_installed(unknown[1]):
            with _only_weights():
                return torch.export.load(path)
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise SardonyxError(
            f"{path} cannot be read by torch.export.load: {messages[-1] if messages else first}",
            hint=f"write it with torch.export.save of torch {torch.__version__} or older",
        ) from error


@contextmanager
def _only_weights() -> Iterator[None]:
    """While active, torch.load behaves as with weights_only=True."""
    before = os.environ.get(_WEIGHTS_ONLY)
    os.environ[_WEIGHTS_ONLY] = "1"
    try:
        yield
    finally:
        os.environ.pop(_WEIGHTS_ONLY)
        if before is not None:
            os.environ[_WEIGHTS_ONLY] = before


def _import_installed(name: str) -> bool:
    """Import an installed module, which may register classes with torch; ignores the working directory."""
    if name in sys.modules:
        return False
    before, here = sys.path[:], Path.cwd()
    sys.path[:] = [x for x in before if x and Path(x).resolve() != here]
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    finally:
        sys.path[:] = before
    return True


def _check(path: Path) -> None:
    """Raise if reading the file would run code that is in it."""
    with zipfile.ZipFile(path) as archive:
        twice = [name for name, count in Counter(archive.namelist()).items() if count > 1]
        if twice:
            raise SardonyxError(f"{path} has {twice[0]!r} twice", hint="write it again with torch.export.save")
        for name in archive.namelist():
            if "aotinductor" in PurePosixPath(name).parts:
                raise SardonyxError(f"{path} has a compiled library, which would run as code", hint=_TRUST)
            if PurePosixPath(name).name.startswith(_PICKLED):
                raise SardonyxError(f"{path} has pickled objects, which would run as code", hint=_TRUST)
            if name.endswith(".json"):
                _check_graph(path, json.loads(archive.read(name)))


def _check_graph(path: Path, graph: Any) -> None:
    for entry in _dicts(graph):
        size = entry.get("expr_str")
        if isinstance(size, str) and not _is_arithmetic(size):
            raise SardonyxError(f"{path} has {size!r} instead of a size", hint=_TRUST)
        module = entry.get("default_factory_module")
        if isinstance(module, str) and module not in _FACTORIES:
            raise SardonyxError(f"{path} would import the module {module!r}", hint=_TRUST)
        if "__enum__" in entry and str(entry.get("fqn")).partition(":")[0] not in sys.modules:
            raise SardonyxError(f"{path} would import the module of {entry.get('fqn')!r}", hint=_TRUST)


def _dicts(content: Any) -> Iterator[dict[str, Any]]:
    """Iterate over all objects in JSON, and in JSON inside its strings, as call specs are written."""
    pending = [content]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            yield value
            pending += value.values()
        elif isinstance(value, list):
            pending += value
        elif isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
            try:
                pending.append(json.loads(value))
            except ValueError:
                continue


def _is_arithmetic(text: str) -> bool:
    try:
        nodes = list(ast.walk(ast.parse(text, mode="eval")))
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    names = {id(x) for node in nodes if isinstance(node, ast.Call) for x in _texts(node)}
    return all(isinstance(node, _ARITHMETIC) and (id(node) in names or _is_harmless(node)) for node in nodes)


def _texts(call: ast.Call) -> list[ast.expr]:
    """Return the argument of a call that may be text: the name of a symbol, or the digits of a number."""
    match call:
        case ast.Call(func=ast.Name(id=name), args=[ast.Constant(value=str(text)), *_]) if name in _OF_TEXT:
            return call.args[:1] if _OF_TEXT[name].fullmatch(text) else []
    return []


def _is_harmless(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, (bool, int, float))
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS
    return True
