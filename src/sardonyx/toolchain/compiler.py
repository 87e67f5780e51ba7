"""Find the C++ and CUDA compilers, call them, and cache the libraries they build."""

from __future__ import annotations

import atexit
import ctypes
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
from sardonyx.errors import CompilerError, MissingDependency
from sardonyx.options import Options
from sardonyx.toolchain import nvrtc

log = logging.getLogger(__name__)

FLAGS = ("-std=c++17", "-O3", "-fwrapv", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden", "-fPIC")
"""No -ffast-math: loading a library built with it turns on flush-to-zero for denormals in the loading thread."""


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler."""

    path: str
    version: str
    arguments: tuple[str, ...] = ()
    """Arguments that CXX has after the program's name."""

    @property
    def command(self) -> tuple[str, ...]:
        """Return the program and its fixed arguments."""
        return (self.path, *self.arguments)

    def compile(self, source: str, object_file: Path, *, flags: tuple[str, ...] = ()) -> Path:
        """Compile a source to an object file; the source file is left next to it."""
        source_file = object_file.with_suffix(".cpp")
        source_file.write_text(source, encoding="utf-8")
        _run_command(*self.command, *FLAGS, *flags, "-c", str(source_file), "-o", str(object_file))
        return object_file

    def link(self, objects: Sequence[Path], library: Path, *links: str) -> None:
        """Link objects into a shared library; `links` are further linker arguments."""
        _run_command(*self.command, "-shared", *map(str, objects), "-o", str(library), *links)


def _run_command(program: str, *arguments: str) -> None:
    try:
        process = subprocess.run([program, *arguments], capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise CompilerError(f"{program} cannot be run", str(error)) from error
    if process.returncode:
        raise CompilerError(f"{program} failed with status {process.returncode}", process.stderr or process.stdout)


@cache
def find() -> Compiler:
    """Return the compiler named by CXX, which may have arguments ("ccache g++"), else g++ or clang++."""
    wanted = os.environ.get("CXX", "").strip()
    for command in [_split_command(wanted)] if wanted else [["g++"], ["clang++"], ["c++"]]:
        path = shutil.which(command[0]) if command else None
        if path:
            return Compiler(path, _version(path, *command[1:]), tuple(command[1:]))
    raise MissingDependency(
        f"no C++ compiler found{f': CXX is {wanted!r}' if wanted else ''}",
        hint="install g++ or clang++, or set CXX",
    )


def _split_command(text: str) -> list[str]:
    """Split a command as a shell does; a path with spaces may be a program itself."""
    if shutil.which(text):
        return [text]
    try:
        return shlex.split(text)
    except ValueError:  # an unclosed quote
        return []


def _version(path: str, *arguments: str) -> str:
    try:
        process = subprocess.run([path, *arguments, "--version"], capture_output=True, errors="replace", check=False)
    except OSError:
        return ""
    return next(iter(process.stdout.splitlines()), "")


@dataclass(frozen=True)
class Nvcc:
    """nvcc for one GPU architecture; the PTX in its output runs on later ones."""

    path: str
    version: str
    architecture: str

    @property
    def command(self) -> tuple[str, ...]:
        """Return the program and its fixed arguments."""
        return (self.path,)

    def compile(self, source: str, object_file: Path, *, flags: tuple[str, ...] = ()) -> Path:
        """Compile CUDA C++ to an object file; the source file is left next to it."""
        source_file = object_file.with_suffix(".cu")
        source_file.write_text(source, encoding="utf-8")
        arguments = ("-std=c++17", "-O3", f"-arch={self.architecture}", *_HOST_FLAGS, *flags)
        _run_command(self.path, *arguments, "-c", str(source_file), "-o", str(object_file))
        return object_file

    def link(self, objects: Sequence[Path], library: Path, *links: str) -> None:
        """Link objects into a shared library, with CUDA's runtime linked statically."""
        _run_command(self.path, "-shared", *map(str, objects), "-o", str(library), *links)


_HOST_FLAGS = ("-Xcompiler", "-fPIC,-fvisibility=hidden")


def find_nvcc() -> str | None:
    """Return the path of nvcc, or None without a CUDA toolkit."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc") or shutil.which("nvcc", path=f"{home}/bin")


@cache
def nvcc() -> Nvcc:
    """Return nvcc for the local GPU, or for `DEFAULT_ARCHITECTURE` without one."""
    path = find_nvcc()
    if path is None:
        raise MissingDependency(
            "nvcc was not found, and custom operators with CUDA source need it",
            hint="install the CUDA toolkit, or set CUDA_HOME",
        )
    lines = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout.splitlines()
    version = next((line for line in lines if "release" in line), "")
    return Nvcc(path, version, gpu_architecture() or DEFAULT_ARCHITECTURE)


DEFAULT_ARCHITECTURE = "sm_80"
"""Used without a local GPU: its PTX runs on all later ones."""


def gpu_architecture() -> str | None:
    """Return the architecture of the GPU that torch sees, or None."""
    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def build_cuda_library(source: str, options: Options, *, architecture: str) -> Path:
    """Return the library of kernels for a GPU, from the cache or built now; the source is next to it.

    NVRTC compiles the device code of the source, and the C++ compiler its host code, which includes the result.
    """
    compiler, device_compiler = find(), nvrtc.find()

    def make(folder: Path) -> None:
        image = device_compiler.compile(source, architecture)
        if architecture == gpu_architecture():
            _check_runs(image.cubin)
        images = {"kernels.cubin": image.cubin, "kernels.ptx": image.ptx}
        for name, content in images.items():
            (folder / name).write_bytes(content)
        kernels = compiler.compile(source, folder / "kernels.o", flags=(f"-I{folder}",))
        compiler.link([kernels], folder / _LIBRARY, "-ldl")
        for name in ("kernels.o", *images):
            (folder / name).unlink()
        _check_loads(folder / _LIBRARY)

    identity = (architecture, device_compiler.version)
    return _cached_build(compiler, options, make, {"what": "kernels"}, identity, source) / _LIBRARY


def check_cuda(source: str, options: Options) -> None:
    """Compile CUDA C++ to find errors, without a GPU to run it; a successful result is cached."""
    gpu = nvcc()

    def make(folder: Path) -> None:
        gpu.compile(source, folder / "gpu.o").unlink()

    _cached_build(gpu, options, make, {"what": "source for the GPU"}, (gpu.architecture,), source)


def build_library(
    source: str,
    options: Options,
    *,
    flags: tuple[str, ...] = (),
    links: tuple[str, ...] = (),
    common: str = "",
    cuda: str = "",
) -> Path:
    """Return the library built from a source for this processor, from the cache or built now; the source is next to it.

    `common` is source shared by many libraries: it is compiled once, in parallel with the first of them.
    `cuda` is CUDA C++ linked into the library. `links` are linker arguments for other libraries.
    """
    compiler = find()
    flags = ("-march=native", *flags)
    gpu = nvcc() if cuda else None

    def make(folder: Path) -> None:
        with ThreadPoolExecutor(2) as pool:
            other_objects = [pool.submit(_common_object, compiler, common, options)] if common else []
            other_objects += [pool.submit(gpu.compile, cuda, folder / "gpu.o")] if gpu else []
            kernels = compiler.compile(source, folder / "kernels.o", flags=flags)
            objects = [kernels, *(future.result() for future in other_objects)]
            (gpu or compiler).link(objects, folder / _LIBRARY, *links)
        for object_file in folder.glob("*.o"):
            object_file.unlink()
        if not links:  # linked libraries may be loaded in this process only
            _check_loads(folder / _LIBRARY)

    arguments = (*flags, *links)
    folder = _cached_build(compiler, options, make, {"what": "kernels"}, arguments, source, common, cuda, repr(gpu))
    return folder / _LIBRARY


_LIBRARY = "kernels.so"


def _common_object(compiler: Compiler, source: str, options: Options) -> Path:
    flags = ("-O1",)  # compiles a second faster than -O3, and calls cost the same

    def make(folder: Path) -> None:
        compiled = compiler.compile(source, folder / _OBJECT, flags=flags)
        compiler.link([compiled], folder / _LIBRARY)
        (folder / _LIBRARY).unlink()

    return _cached_build(compiler, options, make, {"what": "object"}, flags, source) / _OBJECT


_OBJECT = "common.o"

_LOAD_SCRIPT = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"


def _check_loads(library: Path) -> None:
    """Load a library in another process before caching it, so that one that fails or crashes is an error here."""
    command = [sys.executable, "-I", "-S", "-c", _LOAD_SCRIPT, str(library)]
    process = subprocess.run(command, capture_output=True, check=False)
    if process.returncode:
        lines = process.stderr.decode(errors="replace").strip().splitlines() or [f"status {process.returncode}"]
        reason = lines[-1].replace(str(library), library.name)
        raise CompilerError("the built library cannot be loaded", reason, hint=_CHECK_COMPILER)


def _check_runs(cubin: bytes) -> None:
    """Load machine code on the local GPU, so that a driver that refuses it is an error here."""
    torch.cuda.current_stream().query()  # makes the device's context current
    driver, module = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    code = driver.cuModuleLoadData(ctypes.byref(module), cubin)
    if code:
        name = ctypes.c_char_p()
        driver.cuGetErrorName(code, ctypes.byref(name))
        reason = f"cuModuleLoadData: {(name.value or b'error').decode()} ({code})"
        raise CompilerError(
            "the GPU's driver refuses the kernels", reason, hint="update the driver, or use native=False"
        )
    driver.cuModuleUnload(module)


_CHECK_COMPILER = (
    "check that CXX is a compiler for this machine, and that cache_dir and TMPDIR are not on noexec mounts"
)


def _is_noexec(folder: Path) -> bool:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return hasattr(os, "ST_NOEXEC") and bool(os.statvfs(existing).f_flag & os.ST_NOEXEC)


def _library_cache(options: Options) -> DiskCache | None:
    """Return the disk cache, or None where it is on a noexec mount."""
    cache = default_cache(options)
    if cache is None or not _is_noexec(cache.root):
        return cache
    if cache.root not in _WARNED_NOEXEC:
        _WARNED_NOEXEC.add(cache.root)
        log.warning("the cache in %s is on a noexec mount: libraries are rebuilt in each process", cache.root)
    return None


_WARNED_NOEXEC: set[Path] = set()


def _temporary_folder() -> Path:
    """Create a folder that is removed when the process exits."""
    folder = Path(tempfile.mkdtemp(prefix="sardonyx-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    if _is_noexec(folder):
        raise CompilerError(
            "libraries cannot be loaded from the temporary folder",
            f"{folder.parent} is on a noexec mount",
            hint='set TMPDIR or options={"cache_dir": ...} to a folder on another mount',
        )
    return folder


def _cached_build(
    compiler: Compiler | Nvcc,
    options: Options,
    make: Callable[[Path], None],
    metadata: Mapping[str, str],
    flags: tuple[str, ...],
    *sources: str,
) -> Path:
    """Return a folder filled by `make`, from the disk cache or, without one, kept for the life of the process."""
    key = key_of_source(
        compiler=repr(compiler.command),
        version=compiler.version,
        flags=" ".join((*FLAGS, *flags)),
        sources=repr(sources),
    )
    cache = _library_cache(options)
    if cache is not None:
        return cache.get_or_make(key, make, {**metadata, "compiler": compiler.version})
    with _LOCKS[key]:
        if key not in _BUILT:
            folder = _temporary_folder()
            make(folder)
            _BUILT[key] = folder
        return _BUILT[key]


_BUILT: dict[str, Path] = {}
_LOCKS: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
