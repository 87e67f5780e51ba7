"""`sardonyx doctor`: check the installation, and say how to fix problems."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, distribution, distributions, version
from pathlib import Path

import click
import torch
from packaging.requirements import Requirement
from rich.filesize import decimal
from rich.text import Text

from sardonyx.cache.disk import DiskCache, cache_folder
from sardonyx.cli._messages import example, print_result, progress_bar, table
from sardonyx.cli._parameters import as_json
from sardonyx.doors.export import export
from sardonyx.engines import engines
from sardonyx.errors import SardonyxError
from sardonyx.options import Options
from sardonyx.toolchain import compiler, nvrtc

_LITTLE_MEMORY = 2**30
_LITTLE_DISK = 2**30


@dataclass(frozen=True)
class Finding:
    """The result of one check. It is a problem if it has a fix; with `breaks`, sardonyx does not work until fixed."""

    part: str
    what: str
    says: str
    fix: str = ""
    breaks: bool = False
    absent: bool = False
    """Whether it is missing, but optional."""


Findings = Iterator[Finding]


@click.command(epilog=example("sardonyx doctor", "sardonyx doctor --json"))
@as_json
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """Check the installation, and say what is wrong and how to fix it.

    The exit code is 1 if the default engine cannot work.
    """
    findings = [finding for check in progress_bar(CHECKS, "checking", as_json) for finding in check()]
    problems = [finding for finding in findings if finding.fix]
    broken = any(finding.breaks for finding in problems)
    print_result(
        {"findings": [asdict(x) for x in findings], "problems": [asdict(x) for x in problems], "broken": broken},
        as_json,
        table(["", "", "", ""], [(_mark(x), x.part, x.what, x.says) for x in findings]),
        "",
        *[line for x in problems for line in (f"{x.what}: {x.says}", f"  next: {x.fix}")],
        _verdict(problems, broken),
    )
    ctx.exit(int(broken))


def _mark(finding: Finding) -> Text:
    if not finding.fix:
        return Text("-", "dim") if finding.absent else Text("ok", "green")
    return Text("broken", "red") if finding.breaks else Text("note", "yellow")


def _verdict(problems: list[Finding], broken: bool) -> str:
    if broken:
        return "sardonyx does not work here until the above is fixed"
    return "sardonyx works here" + (f"; {len(problems)} thing(s) could be better" if problems else "")


def packages() -> Findings:
    """Check Python and the versions of required packages."""
    yield Finding("python", "python", f"{platform.python_version()}, {sys.executable}")
    for needed in _requirements():
        if not needed.marker:
            yield _package(needed)


def _requirements() -> list[Requirement]:
    try:
        return [Requirement(text) for text in distribution("sardonyx").requires or ()]
    except PackageNotFoundError:
        return []  # run from source, without metadata


def _package(needed: Requirement) -> Finding:
    fix = f"pip install --upgrade '{needed.name}{needed.specifier}'"
    try:
        installed = version(needed.name)
    except PackageNotFoundError:
        return Finding("package", needed.name, "not installed", fix, breaks=True)
    if installed not in needed.specifier and not needed.specifier.contains(installed, prereleases=True):
        return Finding("package", needed.name, f"{installed}, but {needed.specifier} is needed", fix, breaks=True)
    return Finding("package", needed.name, installed)


def extras() -> Findings:
    """Check the optional packages."""
    packages_by_extra: dict[str, list[str]] = defaultdict(list)
    for needed in _requirements():
        named = re.search(r"extra == ['\"](\w+)['\"]", str(needed.marker or ""))
        if named:
            packages_by_extra[named[1]].append(needed.name)
    for extra, names in packages_by_extra.items():
        missing = [name for name in names if not _installed(name)]
        says = f"not installed: {', '.join(missing)}; pip install 'sardonyx[{extra}]'" if missing else ", ".join(names)
        yield Finding("extra", extra, says, absent=bool(missing))


def _installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def conflicts() -> Findings:
    """Find modules that two packages have installed over each other."""
    owners: dict[str, set[str]] = defaultdict(set)
    for package in distributions():
        for file in package.files or ():
            if len(file.parts) == 2 and file.name == "__init__.py":
                owners[file.parts[0]].add(package.metadata["Name"])
    for module, names in sorted(owners.items()):
        if len(names) > 1 and not module.endswith(".dist-info"):
            listed = " ".join(sorted(names))
            fix = f"pip uninstall {listed}, then pip install the one that you need"
            breaks = module in ("torch", "onnx", "onnxruntime")
            yield Finding("clash", module, f"installed by {listed}, one over the other", fix, breaks)


def all_engines() -> Findings:
    """Check all engines; onnxruntime is the default one."""
    for engine in engines():
        if engine.installed:
            yield Finding("engine", engine.name, engine.version or "")
        else:
            fix = 'pip install "sardonyx[cpu]", or "sardonyx[gpu]" for CUDA' if engine.name == Options().engine else ""
            yield Finding("engine", engine.name, engine.reason, fix, breaks=bool(fix), absent=True)


_LIST = "import json, onnxruntime as o; print(json.dumps(o.get_available_providers()))"
_TRY = """
import sys, onnxruntime as o
from onnx import helper as h
x, y = (h.make_tensor_value_info(n, 1, [1]) for n in "xy")
g = h.make_graph([h.make_node("Neg", ["x"], ["y"])], "g", [x], [y])
m = h.make_model(g, opset_imports=[h.make_opsetid("", 18)], ir_version=8)
s = o.SessionOptions()
s.log_severity_level = 4
sys.exit(sys.argv[1] not in o.InferenceSession(m.SerializeToString(), s, providers=[sys.argv[1]]).get_providers())
"""


def providers() -> Findings:
    """Check that the execution providers of onnxruntime can be loaded, each in its own process, which may crash."""
    listed = _python(_LIST)
    if listed.returncode:
        message = (listed.stderr.strip().splitlines() or ["onnxruntime does not list them"])[-1]
        yield Finding("provider", "all", f"unknown: {message}", absent=True)
        return
    for name in json.loads(listed.stdout.splitlines()[-1]):
        done = _python(_TRY, name)
        if done.returncode == 0:
            yield Finding("provider", name, "loads")
        else:
            message = (done.stderr.strip().splitlines() or ["it is listed, but a session does not use it"])[-1]
            fix = "install what it needs; for CUDA, the libraries that `pip install 'onnxruntime-gpu[cuda,cudnn]'` has"
            breaks = name == "CPUExecutionProvider"
            yield Finding("provider", name, f"does not load: {message}", fix, breaks)


def _python(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-c", program, *arguments], capture_output=True, text=True, check=False
    )


def compilers() -> Findings:
    """Check the compilers for native kernels and custom operators."""
    try:
        cxx = compiler.find()
        yield Finding("compiler", "C++", f"{cxx.version}, {cxx.path}")
    except SardonyxError as error:
        yield Finding("compiler", "C++", f"{error.what}: no native kernels", error.hint or "install g++")
    if not torch.cuda.is_available():
        yield Finding("compiler", "nvcc", "not needed: torch sees no GPU", absent=True)
        return
    try:
        found = nvrtc.find()
        yield Finding("compiler", "NVRTC", f"{found.version}, {found.path}")
    except SardonyxError as error:
        yield Finding("compiler", "NVRTC", f"{error.what}: no native kernels on the GPU", error.hint or "install NVRTC")
    try:
        yield Finding("compiler", "nvcc", compiler.nvcc().path)
    except SardonyxError as error:
        yield Finding("compiler", "nvcc", error.what, error.hint or "install CUDA's toolkit")


def cache_state() -> Findings:
    """Check the folder of the disk cache."""
    options = Options.of()
    if options.cache_dir == "" or not options.cache_bytes:
        yield Finding("cache", "folder", "disabled", absent=True)
        return
    cache = DiskCache(cache_folder(options.cache_dir), options.cache_bytes)
    try:
        cache.check()
    except SardonyxError as error:
        yield Finding("cache", "folder", error.what, error.hint or "choose another by SARDONYX_CACHE_DIR")
        return
    existing = next(path for path in (cache.root, *cache.root.parents) if path.exists())
    if not os.access(existing, os.W_OK):
        yield Finding("cache", "folder", f"{existing} cannot be written", "choose another by SARDONYX_CACHE_DIR")
        return
    yield Finding("cache", "folder", f"{cache.root}, {decimal(cache.size())} of {decimal(cache.limit)}")
    free = shutil.disk_usage(existing).free
    fix = "free space with sardonyx cache prune --limit 0" if free < _LITTLE_DISK else ""
    yield Finding("cache", "disk", f"{decimal(free)} free", fix)


def memory() -> Findings:
    """Check the free memory."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return
    meminfo = {match[1]: int(match[2]) * 1024 for match in re.finditer(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}
    free = meminfo.get("MemAvailable", 0)
    fix = "close other programs: large models do not fit" if free < _LITTLE_MEMORY else ""
    yield Finding("memory", "free", f"{decimal(free)} of {decimal(meminfo.get('MemTotal', 0))}", fix)


def trial() -> Findings:
    """Export, run and verify a small model."""
    x = torch.linspace(-1, 1, 8)
    try:
        program = export(torch.nn.GELU().eval(), (x,), verify=True)
        yield Finding(
            "trial", "a small model", f"exported, run by {Options().engine}, and verified: {program.report.nodes} node"
        )
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        fix = getattr(error, "hint", None) or "sardonyx --debug export torch.nn:GELU shows where"
        yield Finding("trial", "a small model", lines[0], fix, breaks=True)


CHECKS: list[Callable[[], Findings]] = [
    packages,
    extras,
    conflicts,
    all_engines,
    providers,
    compilers,
    cache_state,
    memory,
    trial,
]
"""All checks, in order."""
