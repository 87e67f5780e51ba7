"""The C++ compiler: which there is, how it is called, and a cache of what it built."""

from __future__ import annotations

import atexit
import logging
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from sardonyx.cache.disk import DiskCache, default_cache
from sardonyx.cache.machine import key_of_source
from sardonyx.errors import MissingDependency, SardonyxError
from sardonyx.options import Options

log = logging.getLogger(__name__)

FLAGS = ("-std=c++17", "-O3", "-fwrapv", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden", "-fPIC")
"""No -ffast-math: a library built with it changes how the thread that loads it rounds denormals."""


class CompilerError(SardonyxError, RuntimeError):
    """The C++ compiler refused a source; the error carries what it said."""

    def __init__(self, what: str, log: str, *, hint: str | None = None) -> None:
        self.log = log
        super().__init__(f"{what}:\n{log[:_LONGEST_LOG]}", hint=hint)


_LONGEST_LOG = 4000


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler."""

    path: str
    version: str
    arguments: tuple[str, ...] = ()
    """What CXX says after the name of the program."""

    @property
    def command(self) -> tuple[str, ...]:
        """What every call begins with."""
        return (self.path, *self.arguments)

    def compile(self, source: str, made: Path, *, flags: tuple[str, ...] = ()) -> Path:
        """Compile a source to an object; the source stays beside it."""
        text = made.with_suffix(".cpp")
        text.write_text(source, encoding="utf-8")
        _call(*self.command, *FLAGS, *flags, "-c", str(text), "-o", str(made))
        return made

    def link(self, objects: Sequence[Path], library: Path, *links: str) -> None:
        """Make a shared library of objects, and of others that `links` name."""
        _call(*self.command, "-shared", *map(str, objects), "-o", str(library), *links)


def _call(program: str, *arguments: str) -> None:
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise CompilerError(f"{program} cannot be run", str(error)) from error
    if done.returncode:
        raise CompilerError(f"{program} failed with status {done.returncode}", done.stderr or done.stdout)


@cache
def find() -> Compiler:
    """The compiler that CXX names, with arguments as in "ccache g++", else g++ or clang++."""
    wanted = os.environ.get("CXX", "").strip()
    for command in [_command(wanted)] if wanted else [["g++"], ["clang++"], ["c++"]]:
        path = shutil.which(command[0]) if command else None
        if path:
            return Compiler(path, _version(path, *command[1:]), tuple(command[1:]))
    raise MissingDependency(
        f"there is no C++ compiler{f' {wanted!r}, which CXX names' if wanted else ''}",
        hint="install g++ or clang++, or let CXX name one",
    )


def _command(text: str) -> list[str]:
    """A program and its arguments, as a shell splits them; a path with spaces in it may be a program too."""
    if shutil.which(text):
        return [text]
    try:
        return shlex.split(text)
    except ValueError:  # a quote without its end
        return []


def _version(path: str, *arguments: str) -> str:
    """The first line of what a program says of its version."""
    try:
        done = subprocess.run([path, *arguments, "--version"], capture_output=True, errors="replace", check=False)
    except OSError:
        return ""
    return next(iter(done.stdout.splitlines()), "")


@dataclass(frozen=True)
class Nvcc:
    """NVIDIA's compiler, for GPUs of an architecture and, by way of PTX, for later ones."""

    path: str
    version: str
    architecture: str

    @property
    def command(self) -> tuple[str, ...]:
        """What every call begins with."""
        return (self.path,)

    def compile(self, source: str, made: Path, *, flags: tuple[str, ...] = ()) -> Path:
        """Compile CUDA C++ to an object; the source stays beside it."""
        text = made.with_suffix(".cu")
        text.write_text(source, encoding="utf-8")
        architecture = f"-arch={self.architecture}"
        _call(self.path, "-std=c++17", "-O3", architecture, *_TO_HOST, *flags, "-c", str(text), "-o", str(made))
        return made

    def link(self, objects: Sequence[Path], library: Path, *links: str) -> None:
        """Make a shared library of objects, with CUDA's runtime inside."""
        _call(self.path, "-shared", *map(str, objects), "-o", str(library), *links)


_TO_HOST = ("-Xcompiler", "-fPIC,-fvisibility=hidden")


@cache
def nvcc(architecture: str | None = None) -> Nvcc:
    """The compiler that CUDA's toolkit has, for an architecture: by default that of the GPU here, if there is one."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    path = shutil.which("nvcc") or shutil.which("nvcc", path=f"{home}/bin")
    if path is None:
        raise MissingDependency(
            "kernels for the GPU need nvcc", hint="install CUDA's toolkit, or let CUDA_HOME name it"
        )
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout.splitlines()
    version = next((line for line in said if "release" in line), "")
    return Nvcc(path, version, architecture or gpu_here() or _OLDEST_GPU)


_OLDEST_GPU = "sm_80"
"""What is built for where no GPU is: PTX of it runs on all later ones."""


def gpu_here() -> str | None:
    """The architecture of the GPU that torch sees; None if there is none."""
    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def built_for_gpu(source: str, options: Options, *, architecture: str) -> Path:
    """The library of a source in CUDA C++: built before, or now. Its folder has the source too."""
    gpu = nvcc(architecture)
    flags = ("--expt-relaxed-constexpr", "-diag-suppress=177")  # not every source uses every function of its headers

    def make(folder: Path) -> None:
        made = gpu.compile(source, folder / "kernels.o", flags=flags)
        gpu.link([made], folder / _LIBRARY)
        made.unlink()
        _check_loads(folder / _LIBRARY)

    return _kept(gpu, options, make, {"what": "kernels"}, (architecture, *flags), source) / _LIBRARY


def built(
    source: str,
    options: Options,
    *,
    flags: tuple[str, ...] = (),
    links: tuple[str, ...] = (),
    common: str = "",
    cuda: str = "",
) -> Path:
    """The library of a source, for this processor: built before, or now. Its folder has the source too.

    `common` is the source of what many libraries have in common: it is compiled once, at the same time as the first.
    `cuda` is CUDA C++ that belongs to it. `links` name other libraries that it needs.
    """
    compiler = find()
    flags = ("-march=native", *flags)
    gpu = nvcc() if cuda else None

    def make(folder: Path) -> None:
        with ThreadPoolExecutor(2) as pool:
            beside = [pool.submit(_object, compiler, common, options)] if common else []
            beside += [pool.submit(gpu.compile, cuda, folder / "gpu.o")] if gpu else []
            own = compiler.compile(source, folder / "kernels.o", flags=flags)
            (gpu or compiler).link([own, *(made.result() for made in beside)], folder / _LIBRARY, *links)
        for made in folder.glob("*.o"):
            made.unlink()
        if not links:  # what it needs besides is known only to the process that has loaded it
            _check_loads(folder / _LIBRARY)

    told = (*flags, *links)
    return _kept(compiler, options, make, {"what": "kernels"}, told, source, common, cuda, repr(gpu)) / _LIBRARY


_LIBRARY = "kernels.so"


def _object(compiler: Compiler, source: str, options: Options) -> Path:
    flags = ("-O1",)  # a second sooner, and calls cost the same

    def make(folder: Path) -> None:
        made = compiler.compile(source, folder / _OBJECT, flags=flags)
        compiler.link([made], folder / _LIBRARY)
        (folder / _LIBRARY).unlink()

    return _kept(compiler, options, make, {"what": "object"}, flags, source) / _OBJECT


_OBJECT = "common.o"

_LOAD = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"


def _check_loads(library: Path) -> None:
    """Load a library in another process before it is kept: one that cannot be, or that crashes, is an error here."""
    done = subprocess.run([sys.executable, "-I", "-S", "-c", _LOAD, str(library)], capture_output=True, check=False)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines() or [f"status {done.returncode}"]
        why = said[-1].replace(str(library), library.name)
        raise CompilerError("the library that was built cannot be loaded", why, hint=_CHECK_COMPILER)


_CHECK_COMPILER = (
    "see whether CXX names a compiler for this machine, and whether cache_dir and TMPDIR allow executables"
)


def _is_noexec(folder: Path) -> bool:
    """Whether a folder, which need not exist yet, is on a mount from which no library can be loaded."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return hasattr(os, "ST_NOEXEC") and bool(os.statvfs(existing).f_flag & os.ST_NOEXEC)


def _library_cache(options: Options) -> DiskCache | None:
    """The disk cache, unless no library can be loaded from it."""
    cache = default_cache(options)
    if cache is None or not _is_noexec(cache.root):
        return cache
    if cache.root not in _NOEXEC:
        _NOEXEC.add(cache.root)
        log.warning("the cache in %s is on a noexec mount: libraries are built anew in each process", cache.root)
    return None


_NOEXEC: set[Path] = set()


def _temporary_folder() -> Path:
    """A folder that lasts as long as the process."""
    folder = Path(tempfile.mkdtemp(prefix="sardonyx-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    if _is_noexec(folder):
        raise CompilerError(
            "no library can be loaded from where it would be built",
            f"{folder.parent} is on a noexec mount",
            hint='let TMPDIR, or options={"cache_dir": ...}, name a folder on another',
        )
    return folder


def _kept(
    compiler: Compiler | Nvcc,
    options: Options,
    make: Callable[[Path], None],
    about: Mapping[str, str],
    flags: tuple[str, ...],
    *sources: str,
) -> Path:
    """A folder with what `make` makes: kept on disk, or for as long as the process runs."""
    key = key_of_source(
        compiler=repr(compiler.command),
        version=compiler.version,
        flags=" ".join((*FLAGS, *flags)),
        sources=repr(sources),
    )
    cache = _library_cache(options)
    if cache is not None:
        return cache.get_or_make(key, make, {**about, "compiler": compiler.version})
    with _LOCKS[key]:
        if key not in _MADE:
            folder = _temporary_folder()
            make(folder)
            _MADE[key] = folder
        return _MADE[key]


_MADE: dict[str, Path] = {}
_LOCKS: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
