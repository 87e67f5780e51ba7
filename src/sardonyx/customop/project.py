"""Projects of custom operators: create from templates, locate and import."""

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

# Creating a project

_FILES = {
    "pyproject.toml": "pyproject.toml.in",
    "README.md": "README.md.in",
    "{package}/__init__.py": "declaration.py.in",
    "{package}/kernel.cpp": "kernel.cpp.in",
    "tests/test_{package}.py": "test.py.in",
}


def create(name: str, *, domain: str | None = None, folder: Path | None = None) -> list[Path]:
    """Write a project for an operator of this name; return its files."""
    package = snake_case(name)
    domain = domain or package
    for what, text in (("the operator's name", name), ("the domain", domain)):
        if not re.fullmatch(r"[A-Za-z]\w*", text, re.ASCII) or keyword.iskeyword(text):
            raise DeclarationError(f"{what} is {text!r}", hint="use letters, digits and _, as in GroupNorm")
    if package in sys.stdlib_module_names or keyword.iskeyword(package):
        raise DeclarationError(
            f"a package for {name} would be called {package}, which is a module or keyword of Python"
        )
    folder = folder or Path(package)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DeclarationError(f"{folder} exists already", hint="choose an empty or new folder with --folder")
    variables = {"name": name, "package": package, "domain": domain}
    written = [
        (folder / where.format(**variables), render_template(template, variables)) for where, template in _FILES.items()
    ]
    for path, text in written:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return [path for path, _ in written]


def render_template(template: str, variables: dict[str, str]) -> str:
    """Return a template with its variables substituted."""
    text = resources.files("sardonyx.customop").joinpath("templates", template).read_text(encoding="utf-8")
    return Template(text).substitute(variables)


def snake_case(name: str) -> str:
    """Return the name of a module for an operator.

    >>> snake_case("GroupNorm"), snake_case("RMSNorm2d"), snake_case("scale")
    ('group_norm', 'rms_norm2d', 'scale')
    """
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


# Loading a project


@dataclass(frozen=True)
class Project:
    """Imported modules, and the operators they declare."""

    name: str
    version: str
    modules: tuple[ModuleType, ...]
    operators: tuple[CustomOp, ...]

    def function(self, kind: str, op: CustomOp) -> Callable[..., Any] | None:
        """Return the function `<kind>_<operator>` of the modules, or `<kind>` if there is one operator."""
        name = op.signature.name
        function = self._find(f"{kind}_{name}") or self._find(f"{kind}_{snake_case(name)}")
        if function is not None:
            return function
        function = self._find(kind)
        if function is not None and len(self.operators) > 1:
            raise DeclarationError(
                f"{self.name} has a function {kind!r} and {len(self.operators)} operators",
                hint=f"call it {kind}_{snake_case(name)}, for instance",
            )
        return function

    def _find(self, name: str) -> Callable[..., Any] | None:
        candidates = (getattr(module, name, None) for module in self.modules)
        return next((function for function in candidates if callable(function)), None)


@dataclass(frozen=True)
class _ModuleLocation:
    names: tuple[str, ...]
    root: Path


def load(where: str) -> Project:
    """Import a project that declares operators: a folder, a file, or a module by name."""
    location = _locate(where)
    packages = {name.partition(".")[0] for name in location.names}
    for package in packages:
        _forget_module(package, location.root)
    before = registry.declared()
    for name in location.names:
        _import(name, location.root)
    operators = tuple(op for op in registry.declared() if not any(op is known for known in before))
    if not operators:
        raise DeclarationError(f"{where} declares no operators", hint="it must call sardonyx.custom_op when imported")
    modules = tuple(module for name, module in list(sys.modules.items()) if name.partition(".")[0] in packages)
    name = location.names[0].rpartition(".")[2] if len(location.names) == 1 else location.root.name
    return Project(re.sub(r"\W", "_", name), _version(location.root), modules, operators)


_HINT = "pass a project folder, a .py file, or a module name"


def _locate(where: str) -> _ModuleLocation:
    path = Path(where).resolve()
    if path.is_dir():
        return _locate_in_folder(path)
    if path.is_file() and path.suffix == ".py":
        return _locate_module(path.stem, path.parent)
    if path.exists():
        raise DeclarationError(f"{where} is not a folder, .py file or module", hint=_HINT)
    if path.suffix != ".py" and re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", where):
        with _on_sys_path(Path.cwd()):
            if find_spec(where.partition(".")[0]) is not None:
                return _ModuleLocation((where,), Path.cwd())
    raise DeclarationError(f"there is no {where}", hint=_HINT)


def _locate_in_folder(folder: Path) -> _ModuleLocation:
    if (folder / "__init__.py").exists():
        return _locate_module(folder.name, folder.parent)
    for root in (folder, folder / "src"):
        packages = sorted(p.parent.name for p in root.glob("*/__init__.py") if p.parent.name not in ("tests", "test"))
        if packages:
            return _ModuleLocation(tuple(packages), root)
    files = sorted(path.stem for path in folder.glob("*.py") if not re.match(r"(test_|conftest$|setup$)", path.stem))
    if not files:
        raise DeclarationError(
            f"{folder} has no Python package and no .py file", hint="create one with: sardonyx op new"
        )
    return _ModuleLocation(tuple(files), folder)


def _locate_module(name: str, root: Path) -> _ModuleLocation:
    """Return the location of a module by its full name in the packages around it."""
    while (root / "__init__.py").exists():
        name, root = f"{root.name}.{name}", root.parent
    return _ModuleLocation((name.removesuffix(".__init__"),), root)


def _version(root: Path) -> str:
    for folder in (root, root.parent):
        if (folder / "pyproject.toml").is_file():
            settings = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
            return str(settings.get("project", {}).get("version", _DEFAULT_VERSION))
    return _DEFAULT_VERSION


_DEFAULT_VERSION = "0.1.0"
_IMPORTED: set[str] = set()
"""Names imported here, which may be imported again."""


class _on_sys_path:
    def __init__(self, root: Path) -> None:
        self._root = str(root)

    def __enter__(self) -> None:
        sys.path.insert(0, self._root)
        importlib.invalidate_caches()

    def __exit__(self, *_: object) -> None:
        sys.path.remove(self._root)


def _forget_module(package: str, root: Path) -> None:
    """Remove a module imported here before, so that it is imported again; a foreign module of that name is an error."""
    if package in sys.modules and package not in _IMPORTED:
        raise DeclarationError(
            f"{package} is in {root}, and {getattr(sys.modules[package], '__file__', 'Python')} has its name",
            hint="rename it",
        )
    for known in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[known]
    _IMPORTED.add(package)


def _import(name: str, root: Path) -> None:
    try:
        with _on_sys_path(root):
            importlib.import_module(name)
    except SardonyxError:
        raise
    except (Exception, SystemExit) as error:
        raise DeclarationError(
            f"{name} cannot be imported: {type(error).__name__}: {error}", where=_line_of(error, root)
        ) from error


def _line_of(error: BaseException, root: Path) -> str | None:
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).is_relative_to(root)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else None
