"""Collect the source of a user's classes and functions, with the imports and globals that they need."""

from __future__ import annotations

import ast
import inspect
import site
import symtable
import sys
import sysconfig
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch


class CannotRebuild(Exception):
    """An object cannot be rebuilt from source; the text says why."""


def is_user_module(name: str) -> bool:
    """Whether a module is user code, and not installed."""
    if name == "__main__":
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is not None and not any(Path(file).resolve().is_relative_to(root) for root in _package_folders())


@cache
def _package_folders() -> frozenset[Path]:
    """Return the folders of installed packages: the standard library, site-packages, and this package."""
    libraries = [sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    roots = [*libraries, site.getusersitepackages()]
    others = [Path(torch.__file__).parents[1], Path(__file__).parents[1]]
    return frozenset(path.resolve() for path in (*map(Path, roots), *others))


class Sources:
    """Source that defines classes and functions, each after its dependencies."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        """Definitions by name, in order; a name has one definition."""
        self._known: set[tuple[str, str]] = set()
        self._postponed = False

    def text(self) -> str:
        """Return the complete source."""
        return "\n\n".join(dict.fromkeys(self._texts.values()))

    def future(self) -> list[str]:
        """Return the `__future__` import of annotations, if a file has it."""
        return ["from __future__ import annotations", ""] if self._postponed else []

    def name_of(self, definition: Any) -> str:
        """Add a class or function to the source, and return its name there."""
        module = sys.modules.get(definition.__module__)
        local = definition.__qualname__.rpartition("<locals>.")[2]
        _check_closure(definition)
        if module is None:
            raise CannotRebuild(f"the module of {definition.__qualname__} is not loaded")
        if local == definition.__qualname__:
            self._add_global(module, local.partition(".")[0])
        elif "." in local or not local.isidentifier():
            raise CannotRebuild(f"{definition.__qualname__} has no source of its own")
        else:
            self._add_local(module, local, definition)
        return str(local)

    def _add_local(self, module: ModuleType, name: str, definition: Any) -> None:
        """Add a definition inside a function, after the globals and local base classes that it needs."""
        if (module.__name__, definition.__qualname__) in self._known:
            return
        self._known.add((module.__name__, definition.__qualname__))
        for base in getattr(definition, "__bases__", ()):
            if is_user_module(base.__module__):
                self.name_of(base)
        try:
            text = textwrap.dedent(inspect.getsource(definition))
        except (OSError, TypeError) as error:
            raise CannotRebuild(f"{definition.__qualname__} has no source: {error}") from error
        self._define(module, name, text)

    def _add_global(self, module: ModuleType, name: str) -> None:
        """Add the definition of a module-level name."""
        if (module.__name__, name) in self._known:
            return
        self._known.add((module.__name__, name))
        lines, statements = _top_level_statements(module)
        statement = statements.get(name)
        if statement is None:
            raise CannotRebuild(f"{module.__name__} does not define {name} by a single statement")
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            self._import(module, name, statement)
            return
        decorators = getattr(statement, "decorator_list", [])
        first = min([statement.lineno, *(x.lineno for x in decorators)])
        self._define(module, name, "\n".join(lines[first - 1 : statement.end_lineno]) + "\n")

    def _define(self, module: ModuleType, name: str, text: str) -> None:
        _, top = _top_level_statements(module)
        self._postponed |= "annotations" in top and getattr(top["annotations"], "module", "") == "__future__"
        for other in sorted(_free_names(text) - {name}):
            if other in top:
                self._add_global(module, other)
            elif other in vars(module) and not other.startswith("__"):
                raise CannotRebuild(f"{name} needs {other}, which {module.__name__} defines indirectly")
        self._put(name, text)

    def _import(self, module: ModuleType, name: str, statement: ast.Import | ast.ImportFrom) -> None:
        alias = next(x for x in statement.names if (x.asname or x.name.partition(".")[0]) == name)
        value = getattr(module, name, None)
        source = statement.module if isinstance(statement, ast.ImportFrom) else alias.name
        theirs = isinstance(statement, ast.ImportFrom) and bool(statement.level)
        if not theirs and not is_user_module(source or "") and not is_user_module((source or "").partition(".")[0]):
            names = f" as {alias.asname}" if alias.asname else ""
            start = f"from {source} import" if isinstance(statement, ast.ImportFrom) else "import"
            self._put(name, f"{start} {alias.name}{names}")
        elif not isinstance(value, (type, FunctionType)) or self.name_of(value) != name:
            raise CannotRebuild(f"{module.__name__} imports {name}, which is not a class or function of that name")

    def _put(self, name: str, text: str) -> None:
        if self._texts.setdefault(name, text) != text:
            raise CannotRebuild(f"two definitions are named {name}")


def _check_closure(definition: Any) -> None:
    """Raise for closures over local variables, whose values have no source."""
    inner = vars(definition).values() if isinstance(definition, type) else [definition]
    for function in map(inspect.unwrap, (getattr(x, "__func__", getattr(x, "fget", x)) for x in inner)):
        code = getattr(function, "__code__", None)
        free = set(code.co_freevars) - {"__class__"} if code is not None else set()
        if free:
            raise CannotRebuild(f"{definition.__qualname__} reads {', '.join(sorted(free))} of the enclosing function")


def _top_level_statements(module: ModuleType) -> tuple[list[str], dict[str, ast.stmt]]:
    """Return the lines of a module, and for each module-level name the last statement that binds it."""
    try:
        text = inspect.getsource(module)
    except (OSError, TypeError) as error:
        raise CannotRebuild(f"{module.__name__} has no source: {error}") from error
    statements: dict[str, ast.stmt] = {}
    for statement in ast.parse(text).body:
        statements |= dict.fromkeys(_bound_names(statement), statement)
    return text.splitlines(), statements


def _bound_names(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield statement.name
    elif isinstance(statement, (ast.Import, ast.ImportFrom)):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in statement.names)
    elif isinstance(statement, ast.Assign):
        yield from (x.id for target in statement.targets for x in ast.walk(target) if isinstance(x, ast.Name))
    elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        yield statement.target.id


def _free_names(text: str) -> set[str]:
    """Return the names that a source reads and does not define."""
    names: set[str] = set()
    tables = [symtable.symtable(text, "source", "exec")]
    while tables:
        table = tables.pop()
        is_top = table.get_type() == "module"
        names |= {x.get_name() for x in table.get_symbols() if x.is_referenced() and (is_top or x.is_global())}
        tables += table.get_children()
    return names
