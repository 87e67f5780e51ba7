"""Files of torch.export.save, read without running what they hold.

`torch.export.load` unpickles, loads libraries, evaluates sizes as Python and imports modules that a file names. A file
that needs any of this is refused: whoever trusts it loads it in a factory of their own.
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

_TRUST = "if you trust it, give file.py:factory, a function that returns torch.export.load(path).module()"
_WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
_PICKLED = ("custom_obj_", "opaque_obj_")
"""How members of an archive are called that hold pickled objects."""
_FACTORIES = frozenset({"builtins", "collections"})
"""Modules from which the factory of a defaultdict may come."""
_FUNCTIONS = frozenset(
    {
        *(*torch_sympy.__all__, "Integer", "Rational", "Symbol", "Float", "Add", "Mul", "Pow", "Max", "Min", "Mod"),
        *("Abs", "floor", "ceiling", "sqrt", "Eq", "Ne", "Equality", "Unequality", "And", "Or", "Not"),
        *("GreaterThan", "LessThan", "StrictGreaterThan", "StrictLessThan"),
    }
)
"""What torch writes sizes with, as sympy.srepr prints them."""
_OF_TEXT = {"Symbol": re.compile(r"\w+"), "Float": re.compile(r"-?[0-9.e+-]+")}
"""Those whose first argument is a text: sympy evaluates a text that any other is given."""
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
    """The exported program of a file."""
    said: list[str] = []
    try:
        _check(Path(path))
        with capture_logs(said, "torch.export"), _only_weights():
            return torch.export.load(path)
    except SardonyxError:
        raise
    except pickle.UnpicklingError as error:
        raise SardonyxError(f"{path} has pickled objects, which would run as code", hint=_TRUST) from error
    except Exception as error:
        unknown = re.search(r"Deserializing (\S+)\.(\w+) in pytree", "\n".join(said))
        if unknown is not None and _import_installed(unknown[1]):
            with _only_weights():
                return torch.export.load(path)
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise SardonyxError(
            f"{path} cannot be read by torch.export.load: {said[-1] if said else first}",
            hint=f"write it by torch.export.save, with torch {torch.__version__} or older",
        ) from error


@contextmanager
def _only_weights() -> Iterator[None]:
    """While active, torch.load unpickles tensors and containers alone, whatever its caller asks for."""
    before = os.environ.get(_WEIGHTS_ONLY)
    os.environ[_WEIGHTS_ONLY] = "1"
    try:
        yield
    finally:
        os.environ.pop(_WEIGHTS_ONLY)
        if before is not None:
            os.environ[_WEIGHTS_ONLY] = before


def _import_installed(name: str) -> bool:
    """Import a module that tells torch of its classes; one in the working folder is none that was installed."""
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
            raise SardonyxError(f"{path} has {twice[0]!r} twice", hint="write it anew by torch.export.save")
        for name in archive.namelist():
            if "aotinductor" in PurePosixPath(name).parts:
                raise SardonyxError(f"{path} has a compiled library, which would run as code", hint=_TRUST)
            if PurePosixPath(name).name.startswith(_PICKLED):
                raise SardonyxError(f"{path} has pickled objects, which would run as code", hint=_TRUST)
            if name.endswith(".json"):
                _check_graph(path, json.loads(archive.read(name)))


def _check_graph(path: Path, graph: Any) -> None:
    for held in _dicts(graph):
        size = held.get("expr_str")
        if isinstance(size, str) and not _is_arithmetic(size):
            raise SardonyxError(f"{path} has {size!r} in the place of a size", hint=_TRUST)
        module = held.get("default_factory_module")
        if isinstance(module, str) and module not in _FACTORIES:
            raise SardonyxError(f"{path} would import the module {module!r}", hint=_TRUST)
        if "__enum__" in held and str(held.get("fqn")).partition(":")[0] not in sys.modules:
            raise SardonyxError(f"{path} would import the module of {held.get('fqn')!r}", hint=_TRUST)


def _dicts(held: Any) -> Iterator[dict[str, Any]]:
    """Every object in JSON, and in the JSON that its texts hold: specs of arguments are written that way."""
    waiting = [held]
    while waiting:
        found = waiting.pop()
        if isinstance(found, dict):
            yield found
            waiting += found.values()
        elif isinstance(found, list):
            waiting += found
        elif isinstance(found, str) and found.lstrip()[:1] in ("[", "{"):
            try:
                waiting.append(json.loads(found))
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
    """The argument of a call that may be a text: the name of a symbol, the digits of a number."""
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
