"""The C++ compiler: which there is, how it is called, and a cache of what it built."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sardonyx.cache.disk import default_cache
from sardonyx.cache.machine import key_of
from sardonyx.errors import MissingDependency, SardonyxError
from sardonyx.options import Options

FLAGS = (
    *("-std=c++17", "-O3", "-fwrapv", "-fno-math-errno", "-fno-trapping-math"),
    *("-fvisibility=hidden", "-fPIC", "-shared"),
)
"""No -ffast-math: a library built with it changes how the thread that loads it rounds denormals."""


class CompilerError(SardonyxError, RuntimeError):
    """The C++ compiler refused a source; the error carries what it said."""


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler."""

    path: str
    version: str

    def build(self, source: str, library: Path, *, flags: tuple[str, ...] = ("-march=native",)) -> None:
        """Compile a source to a shared library; the source stays beside it."""
        text = library.with_suffix(".cpp")
        text.write_text(source)
        command = [self.path, *FLAGS, *flags, str(text), "-o", str(library)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CompilerError(f"{self.path} failed with status {done.returncode}:\n{done.stderr[:4000]}")


@cache
def find() -> Compiler:
    """The compiler that CXX names, else g++ or clang++."""
    wanted = os.environ.get("CXX")
    for name in [wanted] if wanted else ["g++", "clang++", "c++"]:
        path = shutil.which(name)
        if path:
            said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
            return Compiler(path, said.splitlines()[0] if said else "")
    raise MissingDependency(
        f"there is no C++ compiler{f' {wanted!r}, which CXX names' if wanted else ''}",
        hint="install g++ or clang++, or let CXX name one",
    )


def built(source: str, options: Options) -> Path:
    """The library of a source: built before, or now. Its folder has the source too."""
    compiler = find()
    cache = default_cache(options)

    def make(folder: Path) -> None:
        compiler.build(source, folder / _LIBRARY)

    if cache is None:
        return _in_process(compiler, source)
    key = key_of(compiler=compiler.path, version=compiler.version, flags=" ".join(FLAGS), source=source)
    return cache.get_or_make(key, make, {"what": "kernels", "compiler": compiler.version}) / _LIBRARY


_LIBRARY = "kernels.so"


@cache
def _in_process(compiler: Compiler, source: str) -> Path:
    """The library of a source, for as long as the process runs."""
    folder = tempfile.mkdtemp(prefix="sardonyx-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    compiler.build(source, Path(folder) / _LIBRARY)
    return Path(folder) / _LIBRARY
