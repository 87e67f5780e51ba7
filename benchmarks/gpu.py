"""How sardonyx does in float16 on one CUDA GPU: `python -m benchmarks.gpu --json PATH`.

Engines take turns. Measures time on the wall and on the host, error, copies between host and device, and where each
node runs.
`--device cpu` tries the program itself, in float32, on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import torch
from torch import nn

from benchmarks import models
from benchmarks.machine import describe
from benchmarks.tables import Table, milliseconds, say
from sardonyx.doors.dynamo import sardonyx as backend
from sardonyx.telemetry.verify import difference
from sardonyx.timing import in_turns

Args: TypeAlias = tuple[torch.Tensor, ...]
Entry: TypeAlias = dict[str, Any]
"""What one engine did with one model; `failed` holds the reason where it did not."""

_CALLS = 30
_ROUNDS = 60
_WARM_CALLS = 5  # CUDA graphs are recorded in the second and third
_LLAMA = {"layers": 4, "hidden": 2048, "heads": 32, "kv_heads": 8, "intermediate": 8192, "vocab": 32000}

MODELS: Mapping[str, Callable[[], models.Case]] = {
    "bert-base 8×128": partial(models.bert, batch=8),
    "bert-base 1×128": models.bert,
    "llama 4×2048, 512 tokens": partial(models.llama, 512, **_LLAMA),
    "llama 4×2048, 1 token after 1024": partial(models.llama_step, 1024, **_LLAMA),
    "resnet50 16": partial(models.resnet50, batch=16),
    "resnet50 1": models.resnet50,
    "vit-base 8": partial(models.vit, batch=8),
    "whisper-base encoder": models.whisper_encoder,
}


def _sardonyx(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend=backend, options={"fallback": "error", **options})


def _channels_last(model: nn.Module) -> nn.Module:
    """A copy with convolutions in the layout that inductor is fastest with; others are as they were."""
    moved: nn.Module = copy.deepcopy(model).to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's
    return moved


def _inductor(model: nn.Module, mode: str | None = None) -> Any:
    return torch.compile(_channels_last(model), mode=mode)


ENGINES: Mapping[str, Callable[[nn.Module], Any]] = {
    "eager": lambda model: model,
    "inductor": _inductor,
    "inductor reduce-overhead": partial(_inductor, mode="reduce-overhead"),
    "inductor max-autotune": partial(_inductor, mode="max-autotune"),
    "sardonyx": _sardonyx,
}


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(call: Callable[[], object], calls: int = _CALLS) -> Entry:
    """Median seconds until the host has its hands free."""
    hosts = []
    for _ in range(calls):
        _synchronize()
        started = time.perf_counter()
        call()
        hosts.append(time.perf_counter() - started)
    return {"host_seconds": median(hosts)}


def copies(call: Callable[[], object]) -> dict[str, int]:
    """Copies that the device made during a call, by kind."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    _synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        call()
        _synchronize()
    counted: Counter[str] = Counter()
    for event in profile.key_averages():
        if event.key.startswith("Memcpy"):
            counted[event.key] += event.count
    return dict(counted)


def crossing(counted: Mapping[str, int]) -> int:
    """How many of the copies went between host and device."""
    return sum(count for name, count in counted.items() if "HtoD" in name or "DtoH" in name)


def providers(model: nn.Module, args: Args) -> dict[str, dict[str, int]]:
    """Nodes by operator, for each execution provider, as ONNX Runtime's own profile of a call has them."""
    with tempfile.TemporaryDirectory() as folder:
        _profiled_call(model, args, str(Path(folder) / "profile"))
        gc.collect()  # a session writes its profile when it ends
        files = list(Path(folder).iterdir())
        if not files:
            raise RuntimeError("the session is still alive, and wrote no profile")
        return _by_provider(event for file in files for event in json.loads(file.read_text()))


def _profiled_call(model: nn.Module, args: Args, prefix: str) -> None:
    torch._dynamo.reset()
    _sardonyx(model, session_options={"enable_profiling": True, "profile_file_prefix": prefix})(*args)
    _synchronize()
    torch._dynamo.reset()


def _by_provider(events: Any) -> dict[str, dict[str, int]]:
    counted: dict[str, Counter[str]] = {}
    for event in events:
        told = event.get("args", {})
        if event.get("cat") == "Node" and "provider" in told and event["name"].endswith("_kernel_time"):
            counted.setdefault(told["provider"], Counter())[told["op_name"]] += 1
    return {provider: dict(operators) for provider, operators in counted.items()}


def attempt(work: Callable[[], Entry]) -> Entry:
    """What the work gives, or why it failed."""
    try:
        return work()
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        return {"failed": f"{type(error).__name__}: {error}"}


def prepare(model: nn.Module, args: Args, engine: str, eager: torch.Tensor, exact: torch.Tensor) -> Entry:
    """Compile and compare; the call is in the entry."""
    started = time.perf_counter()
    compiled = ENGINES[engine](model)
    compiled(*args)
    _synchronize()
    first = time.perf_counter() - started
    for _ in range(_WARM_CALLS):
        compiled(*args)
    result = compiled(*args).clone()  # inductor's CUDA graphs write their next result over this one
    return {
        "call": lambda: compiled(*args),
        "first_call_seconds": first,
        "error_vs_eager": difference(result, eager),
        "error_vs_float32": difference(result.float(), exact),
        "rms_error_vs_float32": _rms_error(result, exact),
        "result_device": str(result.device),
    }


def _rms_error(result: torch.Tensor, exact: torch.Tensor) -> float:
    """The root of the mean squared error, relative to that of the exact numbers."""
    error, size = (float(torch.linalg.vector_norm(x.double())) for x in (result.double() - exact, exact))
    return error / size


def take_turns(entries: Sequence[Entry]) -> None:
    """Add to each entry the seconds of its call until the device is done, by the median of many turns."""

    def awaited(call: Callable[[], object]) -> Callable[[], object]:
        def run() -> None:
            call()
            _synchronize()

        return run

    _synchronize()
    for entry, walls in zip(entries, in_turns([awaited(e["call"]) for e in entries], rounds=_ROUNDS), strict=True):
        entry |= {"wall_seconds": median(walls), "wall_all": walls}


def _copies(call: Callable[[], object]) -> Entry:
    counted = copies(call)
    return {"copies": counted, "host_copies": crossing(counted)}


def _exact(model: nn.Module, args: Args) -> torch.Tensor:
    """The result in float32, with the same rounded weights and arguments."""
    wide = copy.deepcopy(model).float()
    result: torch.Tensor = wide(*(x.float() if x.is_floating_point() else x for x in args))
    return result


def _on(device: str, case: models.Case) -> models.Case:
    dtype = torch.float16 if device == "cuda" else torch.float32
    model, args = case
    moved = tuple(x.to(device, dtype if x.is_floating_point() else x.dtype) for x in args)
    return model.to(device, dtype), moved


def _study(name: str, device: str, engines: Sequence[str], table: Table) -> Entry:
    """Every engine on one model, told as it goes."""
    model, args = _on(device, models.make(MODELS[name]))
    exact, eager = _exact(model, args), model(*args).clone()
    torch._dynamo.reset()
    found = {engine: attempt(partial(prepare, model, args, engine, eager, exact)) for engine in engines}
    studied: Entry = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "engines": found}
    take_turns([entry for entry in found.values() if "call" in entry])
    for engine, entry in found.items():
        call = entry.pop("call", None)
        if call is not None:
            entry |= {**timed(call), "profile": attempt(partial(_copies, call))}
        table.add(name, engine, *_cells(entry))
        say(f"{name}: {engine}: {_line(entry)}")
    studied["providers"] = attempt(lambda: dict(providers(model, args)))
    say(f"{name}: sardonyx nodes by provider: {studied['providers']}")
    return studied


def _cells(entry: Entry) -> tuple[str, ...]:
    if "failed" in entry:
        return ("failed", "", "", "", "", "", "")
    return (
        milliseconds(entry["wall_seconds"]),
        milliseconds(entry["host_seconds"]),
        f"{entry['first_call_seconds']:.1f}",
        f"{entry['error_vs_eager']:.1e}",
        f"{entry['error_vs_float32']:.1e}",
        f"{entry['rms_error_vs_float32']:.1e}",
        str(entry["profile"].get("host_copies", "unknown")),
    )


def _line(entry: Entry) -> str:
    if "failed" in entry:
        return f"failed: {entry['failed']}"
    wall, host, _, error, _, _, crossed = _cells(entry)
    return f"{wall} ms, {host} ms of it on the host; error {error}; {crossed} copies to or from the host"


def _control(device: str) -> Entry:
    """A copy to the host on purpose, so that a count of zero elsewhere means something."""
    tensor = torch.ones(1000, device=device)
    return _copies(lambda: tensor.cpu())


def _machine(device: str) -> Entry:
    machine = describe()
    if device == "cuda":
        machine |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return {**machine, "device": device, "control": attempt(lambda: _control(device))}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write everything measured; models not measured now stay")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--models", default="", help="only models whose name contains one of these, with commas between"
    )
    parser.add_argument("--engines", default=",".join(ENGINES), help="names, with commas between")
    given = parser.parse_args()
    given.engines = given.engines.split(",")
    unknown = [name for name in given.engines if name not in ENGINES]
    if unknown:
        parser.error(f"unknown engine {unknown[0]!r}; there are {', '.join(ENGINES)}")
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no CUDA GPU; --device cpu tries the program without one")
    return given


def _measured_before(path: Path | None) -> Entry:
    """The models of an existing file: a run of some models keeps what the file has of the others."""
    if path is None or not path.exists():
        return {}
    measured: Entry = json.loads(path.read_text())["models"]
    return measured


def _write(path: Path | None, content: Entry) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    """Study each model and print the table."""
    given = _arguments()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False  # float32 is the measure of error
    content: Entry = {**_machine(given.device), "models": _measured_before(given.json)}
    say(f"a copy to the host on purpose is counted as {content['control'].get('host_copies')}")
    columns = ["model", "engine", "wall ms", "host ms", "first s", "vs eager", "vs float32", "rms", "host copies"]
    table = Table("float16 on the GPU" if given.device == "cuda" else "a try on the CPU", columns, text_columns=2)
    for name in (n for n in MODELS if any(part in n for part in given.models.split(","))):
        with torch.no_grad():
            studied = attempt(partial(_study, name, given.device, given.engines, table))
        if "failed" in studied:
            table.add(name, "", *_cells(studied))
        content["models"][name] = studied
        _write(given.json, content)
        table.end_section()
    table.show()


if __name__ == "__main__":
    main()
