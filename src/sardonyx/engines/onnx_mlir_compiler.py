"""Find and call the onnx-mlir compiler: a local binary, or one in a container."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import textwrap
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from sardonyx.errors import EngineError, MissingDependency, OptionError, SardonyxError
from sardonyx.options import Options

log = logging.getLogger(__name__)

MODEL = "model.onnx"
"""The compiler's input file, in the folder that it also writes to."""
_CONTAINER_FOLDER = "/sardonyx"
"""Where that folder is mounted in a container."""
_IMAGE_PATHS = "/usr/local/bin/bin:/workdir/onnx-mlir/build/Release/bin:/workdir/onnx-mlir/build/Debug/bin"
"""Where images of the onnx-mlir project have the compiler, besides PATH."""
_RESERVED_FLAGS = ("o", "tag", "Emit")
"""Flags that the engine sets itself."""
_LOG_LINES, _LOG_CHARACTERS = 40, 4000
"""How much of the end of the compiler's log an error shows."""
_QUERY_TIMEOUT = 60
"""Seconds that a query, such as that of a version, may take."""
_DUMP_HINT = 'use dump="folder" to save the model and run the command manually'


@dataclass(frozen=True)
class Settings:
    """What `compile_options` and `engine_options` specify."""

    flags: tuple[str, ...] = ()
    timeout: float = 3600
    """Time limit of a compilation, in seconds."""
    container: str | None = None
    """`podman` or `docker`, or the path of one."""
    container_options: tuple[str, ...] = ()
    """More arguments for the container's `run`."""
    binary: str | None = None
    """The compiler's path in the image."""
    socket: str | None = None
    """The daemon's socket, as `unix:///var/run/docker.sock`."""
    host_paths: Mapping[str, str] = field(default_factory=dict)
    """Maps folders of the container that this process runs in to folders of the host."""

    @classmethod
    def from_options(cls, options: Options) -> Settings:
        """Return the settings in these options, validated."""
        engine_options = dict(options.engine_options or {})
        for name, value in engine_options.items():
            if name not in _CHECKS:
                raise OptionError(
                    f"onnx-mlir has no engine option {name!r}", hint="known engine options: " + ", ".join(_CHECKS)
                )
            if not _CHECKS[name](value):
                raise OptionError(f"invalid engine option {name!r}: {value!r}")
        if "container_options" in engine_options:
            engine_options["container_options"] = tuple(engine_options["container_options"])
        return cls(flags=_flags(options.compile_options), **engine_options)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


_CHECKS: Mapping[str, Callable[[Any], bool]] = {
    "timeout": lambda value: isinstance(value, (int, float)) and value > 0,
    "container": _is_text,
    "container_options": lambda value: not isinstance(value, str) and all(map(_is_text, value)),
    "binary": _is_text,
    "socket": _is_text,
    "host_paths": lambda value: isinstance(value, Mapping) and all(map(_is_text, (*value, *value.values()))),
}


def _flags(text: str) -> tuple[str, ...]:
    flags = tuple(shlex.split(text))
    for flag in flags:
        name = flag.lstrip("-").partition("=")[0]
        if flag.startswith("-") and (name in _RESERVED_FLAGS or name.startswith("Emit")):
            raise OptionError(f"compile_options has {flag!r}, which the engine sets itself", hint="remove it")
    return flags


class Compiler(ABC):
    """An onnx-mlir compiler."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    @property
    @abstractmethod
    def version(self) -> str:
        """Its version, in one line."""

    @abstractmethod
    def identity(self) -> str:
        """Return what distinguishes it from every other compiler."""

    @abstractmethod
    def command(self, folder: Path, stem: str) -> list[str]:
        """Return the command that compiles the model in `folder` to a library named `stem` in the same folder."""

    def stop(self) -> None:  # noqa: B027  # a local binary died with its process group
        """Stop what still runs after the command was killed."""

    def _arguments(self, folder: str, stem: str) -> list[str]:
        return [*self.settings.flags, "--EmitLib", f"--tag={stem}", "-o", f"{folder}/{stem}", f"{folder}/{MODEL}"]


class Binary(Compiler):
    """A compiler on this machine."""

    def __init__(self, path: Path, settings: Settings) -> None:
        super().__init__(settings)
        self.path = path

    @property
    def version(self) -> str:
        """The first line of its output for --version."""
        return next(iter(_version(*self._file()).splitlines()), "unknown version")

    def identity(self) -> str:
        """Return its version, the hash of the binary, and the flags in ONNX_MLIR_FLAGS."""
        # onnx-mlir reads flags from this variable, so they affect what is compiled.
        flags = os.environ.get("ONNX_MLIR_FLAGS", "")
        return "\n".join((_version(*self._file()), _digest(*self._file()), flags))

    def _file(self) -> tuple[Path, int, int]:
        status = self.path.stat()
        return self.path, status.st_size, status.st_mtime_ns

    def command(self, folder: Path, stem: str) -> list[str]:
        """Return the binary and its arguments; no shell interprets them."""
        return [str(self.path), *self._arguments(str(folder), stem)]


@cache
def _digest(path: Path, size: int, changed: int) -> str:
    """Return the hash of a binary; cached while the file is unchanged."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@cache
def _version(path: Path, size: int, changed: int) -> str:
    """Return a binary's output for --version; cached while the file is unchanged."""
    try:
        result = subprocess.run(
            [path, "--version"], capture_output=True, text=True, errors="replace", timeout=_QUERY_TIMEOUT
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        log.info("%s --version failed: %s", path, error)
        return ""
    return result.stdout.strip()


class Container(Compiler):
    """A compiler in a container image, run by podman or docker."""

    def __init__(self, image: str, settings: Settings) -> None:
        super().__init__(settings)
        if image.startswith("-"):
            raise OptionError(f"invalid compiler_image {image!r}", hint="use the name of an image")
        self.image, self._program = image, _container_program(settings.container)
        self._name = f"sardonyx-{secrets.token_hex(8)}"

    @property
    def version(self) -> str:
        """The image's name; asking the compiler would start a container."""
        return f"image {self.image}"

    def identity(self) -> str:
        """Return the image's id; pull the image if it is missing, as running it would."""
        inspected = self._query("image", "inspect", "--format", "{{.Id}}", self.image)
        if inspected.returncode:
            log.warning("%s is not on this machine: pulling it", self.image)
            pulled = self._query("pull", self.image, timeout=self.settings.timeout)
            if pulled.returncode:
                raise self._query_error("cannot pull the image", pulled)
            inspected = self._query("image", "inspect", "--format", "{{.Id}}", self.image)
        if inspected.returncode or not inspected.stdout.strip():
            raise self._query_error("cannot inspect the image", inspected)
        return f"{inspected.stdout.strip()}\n{self.settings.binary}\n{self.settings.container_options}"

    def command(self, folder: Path, stem: str) -> list[str]:
        """Return a command that mounts the folder in a container and runs the compiler there in a shell."""
        binary = self.settings.binary or "onnx-mlir"
        script = (
            f"test -r {_CONTAINER_FOLDER}/{MODEL} || {{ echo {shlex.quote(_MOUNT_NOT_VISIBLE)} >&2; exit 66; }}; "
            f"PATH=$PATH:{_IMAGE_PATHS}; exec {shlex.join([binary, *self._arguments(_CONTAINER_FOLDER, stem)])}"
        )
        mount = f"{self._on_host(folder)}:{_CONTAINER_FOLDER}:rw"
        run = ["run", "--rm", "--name", self._name, "--entrypoint", "sh", *self.settings.container_options]
        return [*self._client(), *run, "-v", mount, self.image, "-c", script]

    def stop(self) -> None:
        """Kill the container, which keeps running after its client was killed."""
        with contextlib.suppress(SardonyxError):
            self._query("kill", self._name)

    def _client(self) -> list[str]:
        if self.settings.socket is None:
            return [self._program]
        flag = "--url" if "podman" in Path(self._program).name else "--host"
        return [self._program, flag, self.settings.socket]

    def _query(self, *arguments: str, timeout: float = _QUERY_TIMEOUT) -> subprocess.CompletedProcess[str]:
        command = [*self._client(), *arguments]
        try:
            return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise EngineError(f"{shlex.join(command)} failed: {error}", hint=_DAEMON_HINT) from error

    def _query_error(self, what: str, result: subprocess.CompletedProcess[str]) -> EngineError:
        message = (result.stderr or result.stdout).strip()
        return EngineError(f"{Path(self._program).name} {what} {self.image!r}: {message}", hint=_DAEMON_HINT)

    def _on_host(self, folder: Path) -> str:
        """Return the folder's path on the host, which the daemon needs for a mount."""
        path = str(_host_path(folder.resolve(), self.settings.host_paths))
        if ":" in path:
            raise EngineError(f"a folder with a colon in its path cannot be mounted: {path!r}", hint=_FOLDER_HINT)
        return path


_MOUNT_NOT_VISIBLE = "sardonyx: the mounted folder is not visible in the container"
_DAEMON_HINT = (
    'check that the daemon runs; in a container mount its socket, or set engine_options={"socket": "unix://…"}'
)
_FOLDER_HINT = "set another cache_dir, or another temporary folder with the environment variable TMPDIR"


def _host_path(folder: Path, host_paths: Mapping[str, str]) -> Path:
    for inside in sorted(host_paths, key=len, reverse=True):
        if folder.is_relative_to(inside):
            return Path(host_paths[inside]) / folder.relative_to(inside)
    if host_paths:
        raise EngineError(
            f"the engine option 'host_paths' has no entry for {folder}", hint=f"add it, or {_FOLDER_HINT}"
        )
    return folder


def _container_program(configured: str | None) -> str:
    names = (configured,) if configured else ("podman", "docker")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        raise MissingDependency(
            f"compiler_image is set, but there is no {' or '.join(names)}",
            hint='install one, or set engine_options={"container": "/path/of/docker"}',
        )
    return path


def find_compiler(options: Options) -> Compiler:
    """Return the compiler that the options select: in an image, at a path, or on PATH."""
    settings = Settings.from_options(options)
    if options.compiler_image:
        return Container(options.compiler_image, settings)
    name = os.path.expanduser(options.compiler_path or "onnx-mlir")
    path = shutil.which(name)
    if path is None:
        raise MissingDependency(
            f"compiler_path {name!r} is not an executable"
            if options.compiler_path
            else "onnx-mlir is not on PATH, and neither compiler_path nor compiler_image is set",
            hint='compiler_image="ghcr.io/onnxmlir/onnx-mlir" compiles in a container; see docs/onnx-mlir.md',
        )
    return Binary(Path(path).absolute(), settings)


def run_compiler(compiler: Compiler, folder: Path, stem: str) -> Path:
    """Compile the model in a folder and return the library; kill the compiler and its children if interrupted."""
    command, log_path = compiler.command(folder, stem), folder / "compiler.log"
    start = time.monotonic()
    with log_path.open("wb") as file:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=folder,
                start_new_session=True,  # a new process group, so that children can be killed too
            )
        except OSError as error:
            raise EngineError(f"onnx-mlir cannot be started: {error}\n  command: {shlex.join(command)}") from error
    try:
        status = process.wait(compiler.settings.timeout)
    except BaseException as error:
        _kill(process)
        compiler.stop()
        if isinstance(error, subprocess.TimeoutExpired):
            what = f"timed out after {compiler.settings.timeout:g} s"
            raise _compile_error(what, command, log_path, 'raise it with engine_options={"timeout": seconds}') from None
        raise
    library = folder / f"{stem}.so"
    if status:
        raise _compile_error(_describe_status(status), command, log_path, _hint(log_path))
    if not library.is_file() or not library.stat().st_size:
        raise _compile_error(f"exited with status 0 but wrote no library {library.name}", command, log_path, _DUMP_HINT)
    log.info("onnx-mlir took %.1f s", time.monotonic() - start)
    return library


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _describe_status(status: int) -> str:
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"failed with exit status {status}"


def _hint(log_path: Path) -> str:
    if _MOUNT_NOT_VISIBLE in _log_tail(log_path):
        return 'mounts need host paths: engine_options={"host_paths": {"/tmp": "path of /tmp on the host"}}'
    return _DUMP_HINT


def _compile_error(what: str, command: Sequence[str], log_path: Path, hint: str) -> EngineError:
    tail = textwrap.indent(_log_tail(log_path) or "(empty)", "    ")
    return EngineError(f"onnx-mlir {what}\n  command: {shlex.join(command)}\n  the end of its log:\n{tail}", hint=hint)


def _log_tail(log_path: Path) -> str:
    with log_path.open("rb") as file:
        file.seek(max(0, log_path.stat().st_size - _LOG_CHARACTERS))
        text = file.read().decode(errors="replace")
    return "\n".join(text.rstrip().splitlines()[-_LOG_LINES:])
