"""Compile CUDA C++ by NVRTC, which every CUDA build of torch brings: neither nvcc nor CUDA's headers are needed."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import re
from collections.abc import Iterator, Mapping
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from sardonyx.errors import CompilerError, MissingDependency
from sardonyx.toolchain.headers import read_header

_STANDARD_HEADERS = ("cmath", "cstdint", "limits", "type_traits")
_LIBRARY = re.compile(r"libnvrtc(-[0-9a-f]+)?\.so(\.[\d.]+)?")
_OPTIONS = ("-std=c++17", "--device-as-default-execution-space", "-DSARDONYX_DEVICE")


@dataclass(frozen=True)
class Image:
    """Compiled device code."""

    cubin: bytes
    """Machine code for the architecture, and for later ones of the same generation."""
    ptx: bytes
    """Assembly, from which the driver generates the code of later generations."""


@dataclass(frozen=True)
class Nvrtc:
    """CUDA's run-time compiler, a library."""

    path: str
    version: str

    def compile(self, source: str, architecture: str) -> Image:
        """Compile device code for an architecture such as sm_90; `SARDONYX_DEVICE` is defined."""
        library, program = _load(self.path), c_void_p()
        headers = _standard_headers()
        texts, names = _strings(headers.values()), _strings(headers)
        created = library.nvrtcCreateProgram(byref(program), source.encode(), b"kernels.cu", len(headers), texts, names)
        if created:
            raise CompilerError("NVRTC cannot start", _error_name(library, created))
        try:
            options = (f"--gpu-architecture={architecture}", *_OPTIONS)
            code = library.nvrtcCompileProgram(program, len(options), _strings(options))
            if code:
                output = _read(library, "ProgramLog", program).decode(errors="replace")
                raise CompilerError(f"{self.version} failed for {architecture}", output or _error_name(library, code))
            return Image(_read(library, "CUBIN", program), _read(library, "PTX", program).rstrip(b"\0"))
        finally:
            library.nvrtcDestroyProgram(byref(program))


@cache
def find() -> Nvrtc:
    """Return the NVRTC that is loaded, else that of torch's packages, else that of the CUDA toolkit."""
    for path in _candidates():
        try:
            library = _load(path)
        except OSError:
            continue
        major, minor = c_int(), c_int()
        library.nvrtcVersion(byref(major), byref(minor))
        return Nvrtc(path, f"NVRTC {major.value}.{minor.value}")
    raise MissingDependency(
        "NVRTC was not found, and GPU kernels need it",
        hint="install a build of torch for CUDA, which brings it, or the package nvidia-cuda-nvrtc",
    )


def _candidates() -> Iterator[str]:
    maps = Path("/proc/self/maps")
    if maps.exists():
        yield from dict.fromkeys(
            line.split()[-1]
            for line in maps.read_text(encoding="utf-8", errors="replace").splitlines()
            if _LIBRARY.fullmatch(line.rpartition("/")[2])
        )
    for folder in _folders():
        yield from sorted(str(path) for path in folder.glob("libnvrtc*.so*") if _LIBRARY.fullmatch(path.name))
    name = ctypes.util.find_library("nvrtc")
    if name is not None:
        yield name


def _folders() -> Iterator[Path]:
    """Yield folders that may have it; first that of torch's version of CUDA, which the driver supports."""
    spec = find_spec("nvidia")
    roots = [Path(root) for root in (spec.submodule_search_locations or ())] if spec is not None else []
    own = f"cu{(torch.version.cuda or '').partition('.')[0]}"
    folders = [folder for root in roots for folder in root.glob("*/lib")]
    yield from sorted(folders, key=lambda folder: (folder.parent.name != own, folder))
    yield Path(torch.__file__).parent / "lib"
    yield Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "lib64")


@cache
def _load(path: str) -> Any:
    """Load NVRTC, after the library of its built-in functions, which it looks up by name only."""
    for builtins in sorted(Path(path).parent.glob("libnvrtc-builtins*.so*")) if os.sep in path else ():
        if ".alt." not in builtins.name:
            ctypes.CDLL(str(builtins))
    return ctypes.CDLL(path)


def _standard_headers() -> Mapping[str, str]:
    text = read_header("sardonyx.toolchain", "nvrtc_std.h")
    return {"nvrtc_std.h": f"#pragma once\n{text}"} | dict.fromkeys(_STANDARD_HEADERS, "#include <nvrtc_std.h>\n")


def _strings(texts: Any) -> ctypes.Array[c_char_p]:
    encoded = [text.encode() for text in texts]
    return (c_char_p * len(encoded))(*encoded)


def _read(library: Any, what: str, program: c_void_p) -> bytes:
    size = c_size_t()
    getattr(library, f"nvrtcGet{what}Size")(program, byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(library, f"nvrtcGet{what}")(program, buffer)
    return buffer.raw


def _error_name(library: Any, code: int) -> str:
    library.nvrtcGetErrorString.restype = c_char_p
    name: bytes = library.nvrtcGetErrorString(code)
    return name.decode()
