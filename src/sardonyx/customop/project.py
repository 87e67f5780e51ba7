"""Projects of custom operators: written from templates, found, and imported."""

from __future__ import annotations

import importlib
import keyword
import re
import sys
import tomllib
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from string import Template
from types import ModuleType
from typing import Any

from sardonyx.customop import registry
from sardonyx.customop.declaration import CustomOp
from sardonyx.errors import DeclarationError, SardonyxError

# Writing one

_FILES = {
    "pyproject.toml": "pyproject.toml.in",
    "README.md": "README.md.in",
    "{package}/__init__.py": "declaration.py.in",
    "{package}/kernel.cpp": "kernel.cpp.in",
    "tests/test_{package}.py": "test.py.in",
}


def create(name: str, *, domain: str | None = None, folder: Path | None = None) -> list[Path]:
    """Write a project for an operator of this name; the files it has."""
    package = snake_case(name)
    domain = domain or package
    for what, text in (("the operator's name", name), ("the domain", domain)):
        if not re.fullmatch(r"[A-Za-z]\w*", text, re.ASCII) or keyword.iskeyword(text):
            raise DeclarationError(f"{what} is {text!r}", hint="use letters, digits and _, as in GroupNorm")
    if package in sys.stdlib_module_names or keyword.iskeyword(package):
        raise DeclarationError(f"a package for {name} would be called {package}, as one of Python's own is")
    folder = folder or Path(package)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DeclarationError(f"{folder} exists already", hint="name an empty folder, or a new one, with --folder")
    words = {"name": name, "package": package, "domain": domain}
    written = [(folder / where.format(**words), filled(template, words)) for where, template in _FILES.items()]
    for path, text in written:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return [path for path, _ in written]


def filled(template: str, words: dict[str, str]) -> str:
    """The text of a template."""
    text = resources.files("sardonyx.customop").joinpath("templates", template).read_text(encoding="utf-8")
    return Template(text).substitute(words)


def snake_case(name: str) -> str:
    """The name of a module for an operator.

    >>> snake_case("GroupNorm"), snake_case("RMSNorm2d"), snake_case("scale")
    ('group_norm', 'rms_norm2d', 'scale')
    """
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


# Reading one


@dataclass(frozen=True)
class Project:
    """Modules that were imported, and the operators that they declare."""

    name: str
    version: str
    modules: tuple[ModuleType, ...]
    operators: tuple[CustomOp, ...]

    def function(self, kind: str, op: CustomOp) -> Callable[..., Any] | None:
        """The function `<kind>_<operator>` of the modules, or `<kind>` where there is one operator."""
        name = op.signature.name
        found = self._find(f"{kind}_{name}") or self._find(f"{kind}_{snake_case(name)}")
        if found is not None:
            return found
        found = self._find(kind)
        if found is not None and len(self.operators) > 1:
            raise DeclarationError(
                f"{self.name} has a function {kind!r} and {len(self.operators)} operators",
                hint=f"call it {kind}_{snake_case(name)}, for instance",
            )
        return found

    def _find(self, name: str) -> Callable[..., Any] | None:
        found = (getattr(module, name, None) for module in self.modules)
        return next((function for function in found if callable(function)), None)


@dataclass(frozen=True)
class _Place:
    """Modules to import, and the folder they are found from."""

    names: tuple[str, ...]
    root: Path


def load(where: str) -> Project:
    """Import what declares operators: a project's folder, a file, or a module by its name."""
    place = _place(where)
    tops = {name.partition(".")[0] for name in place.names}
    for top in tops:
        _make_way(top, place.root)
    before = registry.declared()
    for name in place.names:
        _import(name, place.root)
    made = tuple(op for op in registry.declared() if not any(op is known for known in before))
    if not made:
        raise DeclarationError(f"{where} declares no operators", hint="it has to call sardonyx.custom_op when imported")
    modules = tuple(module for name, module in list(sys.modules.items()) if name.partition(".")[0] in tops)
    name = place.names[0].rpartition(".")[2] if len(place.names) == 1 else place.root.name
    return Project(re.sub(r"\W", "_", name), _version(place.root), modules, made)


_KINDS = "name a project's folder, a .py file, or a module"


def _place(where: str) -> _Place:
    path = Path(where).resolve()
    if path.is_dir():
        return _in_folder(path)
    if path.is_file() and path.suffix == ".py":
        return _with_packages(path.stem, path.parent)
    if path.exists():
        raise DeclarationError(f"{where} is no folder, no .py file and no module", hint=_KINDS)
    if path.suffix != ".py" and re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", where):
        with _searching(Path.cwd()):
            if find_spec(where.partition(".")[0]) is not None:
                return _Place((where,), Path.cwd())
    raise DeclarationError(f"there is no {where}", hint=_KINDS)


def _in_folder(folder: Path) -> _Place:
    if (folder / "__init__.py").exists():
        return _with_packages(folder.name, folder.parent)
    for root in (folder, folder / "src"):
        packages = sorted(p.parent.name for p in root.glob("*/__init__.py") if p.parent.name not in ("tests", "test"))
        if packages:
            return _Place(tuple(packages), root)
    files = sorted(path.stem for path in folder.glob("*.py") if not re.match(r"(test_|conftest$|setup$)", path.stem))
    if not files:
        raise DeclarationError(f"{folder} has no Python package and no .py file", hint="begin with: sardonyx op new")
    return _Place(tuple(files), folder)


def _with_packages(name: str, root: Path) -> _Place:
    """A module by the name it has in the packages around it."""
    while (root / "__init__.py").exists():
        name, root = f"{root.name}.{name}", root.parent
    return _Place((name.removesuffix(".__init__"),), root)


def _version(root: Path) -> str:
    for folder in (root, root.parent):
        if (folder / "pyproject.toml").is_file():
            told = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
            return str(told.get("project", {}).get("version", _FIRST))
    return _FIRST


_FIRST = "0.1.0"
_IMPORTED: set[str] = set()
"""The names that were imported here, and may be again."""


class _searching:
    """Lets Python find modules in a folder."""

    def __init__(self, root: Path) -> None:
        self._root = str(root)

    def __enter__(self) -> None:
        sys.path.insert(0, self._root)
        importlib.invalidate_caches()

    def __exit__(self, *_: object) -> None:
        sys.path.remove(self._root)


def _make_way(top: str, root: Path) -> None:
    """Forget a module that was imported here, so that it is imported anew; another of its name is in the way."""
    if top in sys.modules and top not in _IMPORTED:
        raise DeclarationError(
            f"{top} is in {root}, and {getattr(sys.modules[top], '__file__', 'Python')} has its name",
            hint="give it another name",
        )
    for known in [name for name in sys.modules if name.partition(".")[0] == top]:
        del sys.modules[known]
    _IMPORTED.add(top)


def _import(name: str, root: Path) -> None:
    try:
        with _searching(root):
            importlib.import_module(name)
    except SardonyxError:
        raise
    except (Exception, SystemExit) as error:
        raise DeclarationError(
            f"{name} cannot be imported: {type(error).__name__}: {error}", where=_line_of(error, root)
        ) from error


def _line_of(error: BaseException, root: Path) -> str | None:
    """The last line of the user's that led to an error."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).is_relative_to(root)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else None
