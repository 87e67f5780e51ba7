"""Finding and calling onnx-mlir: a program on this machine, or one in a container."""

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
"""What the compiler reads, in the folder that it also writes to."""
_INSIDE = "/sardonyx"
"""That folder, as a container sees it."""
_PLACES = "/usr/local/bin/bin:/workdir/onnx-mlir/build/Release/bin:/workdir/onnx-mlir/build/Debug/bin"
"""Where the images of the onnx-mlir project have the compiler, beside what is on their PATH."""
_OURS = ("o", "tag", "Emit")
"""Flags that the engine gives by itself."""
_LOG_LINES, _LOG_CHARACTERS = 40, 4000
"""How much of the compiler's log an error shows: its end."""
_TO_ASK = 60
"""Seconds for a question, as for a version."""
_BY_HAND = 'the option dump="folder" keeps the model, to try the command by hand'


@dataclass(frozen=True)
class Settings:
    """What `compile_options` and `engine_options` say."""

    flags: tuple[str, ...] = ()
    timeout: float = 3600
    """Seconds that a compilation may take."""
    container: str | None = None
    """`podman` or `docker`, or the path of one."""
    container_options: tuple[str, ...] = ()
    """More arguments for its `run`."""
    binary: str | None = None
    """The compiler's path in the image."""
    socket: str | None = None
    """Where the daemon listens, as `unix:///var/run/docker.sock`."""
    host_paths: Mapping[str, str] = field(default_factory=dict)
    """Folders of the container that this process runs in, and what they are on the host."""

    @classmethod
    def of(cls, options: Options) -> Settings:
        """The settings that these options give, checked."""
        given = dict(options.engine_options or {})
        for name, value in given.items():
            if name not in _CHECKS:
                raise OptionError(
                    f"onnx-mlir has no engine option {name!r}", hint="known engine options: " + ", ".join(_CHECKS)
                )
            if not _CHECKS[name](value):
                raise OptionError(f"the engine option {name!r} is {value!r}")
        if "container_options" in given:
            given["container_options"] = tuple(given["container_options"])
        return cls(flags=_flags(options.compile_options), **given)


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
        if flag.startswith("-") and (name in _OURS or name.startswith("Emit")):
            raise OptionError(f"compile_options has {flag!r}, which the engine gives by itself", hint="leave it out")
    return flags


class Compiler(ABC):
    """An onnx-mlir that can be called."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    @property
    @abstractmethod
    def version(self) -> str:
        """What it says of itself, in a line."""

    @abstractmethod
    def identity(self) -> str:
        """What tells it from any other compiler."""

    @abstractmethod
    def command(self, folder: Path, stem: str) -> list[str]:
        """The command that compiles the model in a folder to a library of that name beside it."""

    def stop(self) -> None:  # noqa: B027  # a plain program has died with its process group
        """End what goes on after the command was killed."""

    def _arguments(self, folder: str, stem: str) -> list[str]:
        return [*self.settings.flags, "--EmitLib", f"--tag={stem}", "-o", f"{folder}/{stem}", f"{folder}/{MODEL}"]


class Binary(Compiler):
    """A program on this machine."""

    def __init__(self, path: Path, settings: Settings) -> None:
        super().__init__(settings)
        self.path = path

    @property
    def version(self) -> str:
        """The first line that it prints about its version."""
        return next(iter(_version(*self._file()).splitlines()), "unknown version")

    def identity(self) -> str:
        """All that it says of its version, the hash of the program, and the flags that it takes from elsewhere."""
        # onnx-mlir reads flags from this variable by itself, so it decides what is compiled.
        flags = os.environ.get("ONNX_MLIR_FLAGS", "")
        return "\n".join((_version(*self._file()), _digest(*self._file()), flags))

    def _file(self) -> tuple[Path, int, int]:
        status = self.path.stat()
        return self.path, status.st_size, status.st_mtime_ns

    def command(self, folder: Path, stem: str) -> list[str]:
        """The program and its arguments; no shell reads them."""
        return [str(self.path), *self._arguments(str(folder), stem)]


@cache
def _digest(path: Path, size: int, changed: int) -> str:
    """The hash of a program, as long as the file stays the same."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@cache
def _version(path: Path, size: int, changed: int) -> str:
    """What a program prints about its version, as long as the file stays the same."""
    try:
        asked = subprocess.run([path, "--version"], capture_output=True, text=True, errors="replace", timeout=_TO_ASK)
    except (OSError, subprocess.TimeoutExpired) as error:
        log.info("%s does not tell its version: %s", path, error)
        return ""
    return asked.stdout.strip()


class Container(Compiler):
    """A program in a container image, run by podman or docker."""

    def __init__(self, image: str, settings: Settings) -> None:
        super().__init__(settings)
        if image.startswith("-"):
            raise OptionError(f"compiler_image is {image!r}", hint="use the name of an image")
        self.image, self._program = image, _container_program(settings.container)
        self._name = f"sardonyx-{secrets.token_hex(8)}"

    @property
    def version(self) -> str:
        """The image's name: asking the program in it would take a container."""
        return f"image {self.image}"

    def identity(self) -> str:
        """The image's id, under whatever name; an image that is not here is fetched, as running it would."""
        asked = self._ask("image", "inspect", "--format", "{{.Id}}", self.image)
        if asked.returncode:
            log.warning("%s is not on this machine: fetching it", self.image)
            fetched = self._ask("pull", self.image, timeout=self.settings.timeout)
            if fetched.returncode:
                raise self._not_answered("cannot fetch the image", fetched)
            asked = self._ask("image", "inspect", "--format", "{{.Id}}", self.image)
        if asked.returncode or not asked.stdout.strip():
            raise self._not_answered("does not tell the image's id", asked)
        return f"{asked.stdout.strip()}\n{self.settings.binary}\n{self.settings.container_options}"

    def command(self, folder: Path, stem: str) -> list[str]:
        """A container that sees the folder, and in it a shell with one quoted command."""
        binary = self.settings.binary or "onnx-mlir"
        script = (
            f"test -r {_INSIDE}/{MODEL} || {{ echo {shlex.quote(_UNSEEN)} >&2; exit 66; }}; "
            f"PATH=$PATH:{_PLACES}; exec {shlex.join([binary, *self._arguments(_INSIDE, stem)])}"
        )
        mount = f"{self._on_host(folder)}:{_INSIDE}:rw"
        run = ["run", "--rm", "--name", self._name, "--entrypoint", "sh", *self.settings.container_options]
        return [*self._client(), *run, "-v", mount, self.image, "-c", script]

    def stop(self) -> None:
        """End the container: killing the client leaves it running."""
        with contextlib.suppress(SardonyxError):
            self._ask("kill", self._name)

    def _client(self) -> list[str]:
        if self.settings.socket is None:
            return [self._program]
        where = "--url" if "podman" in Path(self._program).name else "--host"
        return [self._program, where, self.settings.socket]

    def _ask(self, *arguments: str, timeout: float = _TO_ASK) -> subprocess.CompletedProcess[str]:
        command = [*self._client(), *arguments]
        try:
            return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise EngineError(f"{shlex.join(command)} failed: {error}", hint=_DAEMON) from error

    def _not_answered(self, what: str, asked: subprocess.CompletedProcess[str]) -> EngineError:
        said = (asked.stderr or asked.stdout).strip()
        return EngineError(f"{Path(self._program).name} {what} {self.image!r}: {said}", hint=_DAEMON)

    def _on_host(self, folder: Path) -> str:
        """The folder as the daemon knows it, which mounts what the host has."""
        found = str(_mapped(folder.resolve(), self.settings.host_paths))
        if ":" in found:
            raise EngineError(f"a container cannot see the folder {found!r}: its name has a colon", hint=_TEMPORARY)
        return found


_UNSEEN = "sardonyx: the container does not see the folder that was mounted"
_DAEMON = 'see that the daemon runs; in a container mount its socket, or name it: engine_options={"socket": "unix://…"}'
_TEMPORARY = "choose another cache_dir, or another temporary folder by the environment variable TMPDIR"


def _mapped(folder: Path, host_paths: Mapping[str, str]) -> Path:
    for inside in sorted(host_paths, key=len, reverse=True):
        if folder.is_relative_to(inside):
            return Path(host_paths[inside]) / folder.relative_to(inside)
    if host_paths:
        raise EngineError(
            f"the engine option 'host_paths' does not say what {folder} is on the host", hint=f"add it, or {_TEMPORARY}"
        )
    return folder


def _container_program(wanted: str | None) -> str:
    names = (wanted,) if wanted else ("podman", "docker")
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise MissingDependency(
            f"a compiler_image is given, and there is no {' or '.join(names)}",
            hint='install one, or name it: engine_options={"container": "/path/of/docker"}',
        )
    return found


def find(options: Options) -> Compiler:
    """The compiler that the options name: in an image, at a path, or on PATH."""
    settings = Settings.of(options)
    if options.compiler_image:
        return Container(options.compiler_image, settings)
    wanted = os.path.expanduser(options.compiler_path or "onnx-mlir")
    found = shutil.which(wanted)
    if found is None:
        raise MissingDependency(
            f"compiler_path is {wanted!r}, which is no program"
            if options.compiler_path
            else "no onnx-mlir is on PATH, and neither compiler_path nor compiler_image is given",
            hint='compiler_image="ghcr.io/onnxmlir/onnx-mlir" compiles in a container; docs/onnx-mlir.md tells more',
        )
    return Binary(Path(found).absolute(), settings)


def build(compiler: Compiler, folder: Path, stem: str) -> Path:
    """Compile the model in a folder; the library, beside it. The compiler and its children never outlive this."""
    command, written = compiler.command(folder, stem), folder / "compiler.log"
    began = time.monotonic()
    with written.open("wb") as file:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=folder,
                start_new_session=True,  # a group of its own, so that all of it can be killed
            )
        except OSError as error:
            raise EngineError(f"onnx-mlir cannot be started: {error}\n  command: {shlex.join(command)}") from error
    try:
        status = process.wait(compiler.settings.timeout)
    except BaseException as error:
        _kill(process)
        compiler.stop()
        if isinstance(error, subprocess.TimeoutExpired):
            what = f"did not finish in {compiler.settings.timeout:g} s, and was stopped"
            raise _failed(what, command, written, 'engine_options={"timeout": seconds} gives it longer') from None
        raise
    library = folder / f"{stem}.so"
    if status:
        raise _failed(_ended(status), command, written, _hint(written))
    if not library.is_file() or not library.stat().st_size:
        raise _failed(f"ended well and left no library {library.name}", command, written, _BY_HAND)
    log.info("onnx-mlir took %.1f s", time.monotonic() - began)
    return library


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _ended(status: int) -> str:
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"failed with exit status {status}"


def _hint(written: Path) -> str:
    if _UNSEEN in _end_of(written):
        return 'mounts need paths of the host: engine_options={"host_paths": {"/tmp": "what /tmp is on the host"}}'
    return _BY_HAND


def _failed(what: str, command: Sequence[str], written: Path, hint: str) -> EngineError:
    said = textwrap.indent(_end_of(written) or "(nothing)", "    ")
    return EngineError(f"onnx-mlir {what}\n  command: {shlex.join(command)}\n  the end of its log:\n{said}", hint=hint)


def _end_of(written: Path) -> str:
    with written.open("rb") as file:
        file.seek(max(0, written.stat().st_size - _LOG_CHARACTERS))
        text = file.read().decode(errors="replace")
    return "\n".join(text.rstrip().splitlines()[-_LOG_LINES:])
