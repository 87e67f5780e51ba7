"""CUDA graphs by the driver's own functions.

`torch.cuda.graph` leaves torch's random generator unusable when a capture fails, and does not tell what was captured.
"""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch

_NON_BLOCKING = 1
_THREAD_LOCAL = 1
"""Capture mode in which other threads may allocate memory meanwhile."""
_MEMCPY, _HOST = 1, 3
"""Types of graph nodes."""
_DEVICE_MEMORY = 2
_POINTER_MEMORY_TYPE = 2


class CaptureError(Exception):
    """Work of a stream cannot be captured as a graph; the message says why."""


class _Memcpy(ctypes.Structure):
    """CUDA_MEMCPY3D."""

    _fields_ = [
        *((f"src_{name}", c_size_t) for name in ("x", "y", "z", "lod")),
        ("src_type", c_uint),
        *((f"src_{name}", c_void_p) for name in ("host", "device", "array", "reserved")),
        *((f"src_{name}", c_size_t) for name in ("pitch", "height")),
        *((f"dst_{name}", c_size_t) for name in ("x", "y", "z", "lod")),
        ("dst_type", c_uint),
        *((f"dst_{name}", c_void_p) for name in ("host", "device", "array", "reserved")),
        *((f"dst_{name}", c_size_t) for name in ("pitch", "height")),
        *((name, c_size_t) for name in ("width", "rows", "depth")),
    ]


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


@cache
def _runtimes() -> list[Any]:
    """Return the CUDA runtimes that are loaded: torch's, and ONNX Runtime's if that is another one."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    paths = {line.split()[-1] for line in maps.splitlines() if "/libcudart" in line}
    return [ctypes.CDLL(path) for path in sorted(paths)]


def _check(code: int, what: str) -> None:
    if code:
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(c_int(code), byref(name))
        raise CaptureError(f"{what}: {(name.value or b'error').decode()} ({code})")


_idle_streams: dict[torch.device, list[torch.cuda.Stream]] = {}


def private_stream(owner: object, device: torch.device) -> torch.cuda.Stream:
    """Return a stream that nothing else uses while its owner is alive: work of others must not be captured.

    Torch's own streams are shared.
    """
    device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    idle = _idle_streams.setdefault(device, [])
    stream = idle.pop() if idle else _new_stream(device)
    weakref.finalize(owner, idle.append, stream)
    return stream


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    with torch.cuda.device(device):
        torch.cuda.current_stream().query()  # makes the device's context current
        handle = c_void_p()
        _check(_driver().cuStreamCreate(byref(handle), _NON_BLOCKING), "cuStreamCreate")
        return torch.cuda.ExternalStream(handle.value or 0, device)  # type: ignore[no-untyped-call]  # torch's


class Graph:
    """An instantiated CUDA graph."""

    def __init__(self, graph: c_void_p) -> None:
        self._exec = c_void_p()
        _check(_driver().cuGraphInstantiateWithFlags(byref(self._exec), graph, c_uint64(0)), "cuGraphInstantiate")

    def launch(self, stream: torch.cuda.Stream) -> None:
        """Run once, as the next work of a stream."""
        _check(_driver().cuGraphLaunch(self._exec, c_void_p(stream.cuda_stream)), "cuGraphLaunch")

    def close(self) -> None:
        """Free the graph, which must have ended."""
        if self._exec:
            _driver().cuGraphExecDestroy(self._exec)
            self._exec = c_void_p()

    __del__ = close


def capture(stream: torch.cuda.Stream, run: Callable[[], object]) -> Graph:
    """Return the work that `run` gives to the stream as a graph; nothing is executed.

    Raises `CaptureError` also if a replay would read or write memory of the host, or call a function there: ONNX
    Runtime frees such memory after a call.
    """
    with torch.cuda.device(stream.device), _captured(stream, run) as graph:
        for node in _nodes(graph):
            _require_device_only(node)
        return Graph(graph)


@contextmanager
def _captured(stream: torch.cuda.Stream, run: Callable[[], object]) -> Iterator[c_void_p]:
    driver, handle, graph = _driver(), c_void_p(stream.cuda_stream), c_void_p()
    _check(driver.cuStreamBeginCapture_v2(handle, _THREAD_LOCAL), "cuStreamBeginCapture")
    try:
        with _no_garbage_collection():
            run()
    except Exception as error:
        driver.cuStreamEndCapture(handle, byref(graph))
        _forget_errors()
        raise CaptureError(_first_line(error)) from error
    code = driver.cuStreamEndCapture(handle, byref(graph))
    _forget_errors()
    _check(code, "cuStreamEndCapture")
    try:
        yield graph
    finally:
        driver.cuGraphDestroy(graph)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collect no garbage: a session that is freed waits for the device and frees memory, which fails in a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _forget_errors() -> None:
    """Clear the runtime's last error, which the next kernel launch of anyone would report as its own."""
    for runtime in _runtimes():
        runtime.cudaGetLastError()


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]


def _nodes(graph: c_void_p) -> list[c_void_p]:
    count = c_size_t()
    _check(_driver().cuGraphGetNodes(graph, None, byref(count)), "cuGraphGetNodes")
    nodes = (c_void_p * count.value)()
    _check(_driver().cuGraphGetNodes(graph, nodes, byref(count)), "cuGraphGetNodes")
    return [c_void_p(node) for node in nodes]


def _require_device_only(node: c_void_p) -> None:
    kind = c_int()
    _check(_driver().cuGraphNodeGetType(node, byref(kind)), "cuGraphNodeGetType")
    if kind.value == _HOST:
        raise CaptureError("it calls a function of the host")
    if kind.value == _MEMCPY:
        copy = _Memcpy()
        _check(_driver().cuGraphMemcpyNodeGetParams(node, byref(copy)), "cuGraphMemcpyNodeGetParams")
        for memory, address in ((copy.src_type, copy.src_device), (copy.dst_type, copy.dst_device)):
            if memory != _DEVICE_MEMORY and not _is_device_memory(address):
                raise CaptureError("it copies between host and device")


def _is_device_memory(address: int | None) -> bool:
    kind = c_uint()
    unknown = _driver().cuPointerGetAttribute(byref(kind), _POINTER_MEMORY_TYPE, c_uint64(address or 0))
    return not unknown and kind.value == _DEVICE_MEMORY
