"""What goes wrong gives one clear error; what was allocated is freed. The stand-in is told how to fail."""

from __future__ import annotations

import ctypes
import gc
import json
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from sardonyx.engines.onnx_mlir import OnnxMlir
from sardonyx.errors import EngineError, MissingDependency, OptionError
from sardonyx.options import Options
from tests.memory import growth

from .hanging import cut_off, ended, expire, hanging
from .jobs import ADD, NASTY, QUOTED, SCALE, TO_FILE, built, job_of


def failing(standin: str, how: str, folder: Path, **options: object) -> EngineError:
    """The error of compiling and loading with a failure injected; nothing may be left behind by the compiler."""
    with pytest.raises(EngineError) as caught:
        built(job_of(ADD, compiler_path=standin, compile_options=f"--standin-fail={how}", **options), folder)
    assert caught.value.hint
    return caught.value


# The compiler


def test_a_bad_exit_shows_status_command_and_log(standin: str, tmp_path: Path) -> None:
    error = failing(standin, "exit", tmp_path)
    first, command, *said = error.what.splitlines()
    assert first == "onnx-mlir failed with exit status 3"
    assert command.startswith(f"  command: {standin} --standin-fail=exit --EmitLib --tag=")
    assert said[-1] == "    loc(unknown): error: the stand-in was told to fail"
    assert list(tmp_path.iterdir()) == []


def test_a_compiler_that_leaves_no_library(standin: str, tmp_path: Path) -> None:
    error = failing(standin, "silent", tmp_path)
    assert "exited with status 0 but wrote no library" in error.what
    assert "(empty)" in error.what
    assert list(tmp_path.iterdir()) == []


def test_a_compiler_that_crashes(standin: str, tmp_path: Path) -> None:
    error = failing(standin, "crash", tmp_path)
    assert "onnx-mlir was killed by SIGSEGV" in error.what
    assert "about to crash" in error.what
    assert list(tmp_path.iterdir()) == []


def test_a_compiler_that_takes_too_long_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, folder = hanging(tmp_path / "onnx-mlir"), tmp_path / "artifact"
    cut_off(monkeypatch, slow, expire)
    with pytest.raises(EngineError) as caught:
        built(job_of(ADD, compiler_path=str(slow), engine_options={"timeout": 100}), folder)
    assert "timed out after 100 s" in caught.value.what
    assert "about to hang" in caught.value.what
    assert caught.value.hint == 'raise it with engine_options={"timeout": seconds}'
    assert ended(slow)
    assert list(folder.iterdir()) == []


def test_an_interrupt_kills_the_compiler_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, folder = hanging(tmp_path / "onnx-mlir"), tmp_path / "artifact"
    cut_off(monkeypatch, slow, lambda process, timeout: signal.raise_signal(signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what runs behind it ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            built(job_of(ADD, compiler_path=str(slow)), folder)
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended(slow)
    assert list(folder.iterdir()) == []


def test_a_program_that_cannot_be_started(tmp_path: Path) -> None:
    program = tmp_path / "onnx-mlir"
    program.write_bytes(b"\x7fELF and no more")
    program.chmod(0o755)
    with pytest.raises(EngineError, match="cannot be started"):
        built(job_of(ADD, compiler_path=str(program)), tmp_path / "artifact")


def test_a_path_that_is_no_program(tmp_path: Path) -> None:
    with pytest.raises(MissingDependency, match="nowhere' is not an executable"):
        OnnxMlir().identity(Options(compiler_path=str(tmp_path / "nowhere")))


# The library


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("signature-input-rank", r"inputs have f32 \[2, 3, 1\] where the model has 'x': torch.float32 \[2, 3\]"),
        ("signature-input-type", r"its inputs have f64 \[2, 3\]"),
        ("signature-input-count", "it has 3 inputs, the model 2"),
        ("signature-output-rank", r"its outputs have f32 \[2, 3, 1\]"),
        ("signature-output-type", r"its outputs have f64 \[2, 3\]"),
        ("signature-text", "invalid input signature in the library: b'no JSON'"),
        ("symbol", "has no function run_main_graph_m"),
        ("tag", "has no function run_main_graph_m"),
        ("truncated", "cannot be loaded: .*/m[0-9a-f]+.so: "),
    ],
)
def test_a_library_that_is_not_the_models(standin: str, tmp_path: Path, how: str, reason: str) -> None:
    error = failing(standin, how, tmp_path)
    with pytest.raises(EngineError, match=reason):
        raise error


def test_a_run_that_fails_tells_errno(standin: str, tmp_path: Path) -> None:
    run = built(job_of(ADD, compiler_path=standin, compile_options="--standin-fail=null"), tmp_path)
    with pytest.raises(EngineError, match=r"failed at run time \(errno 22: Invalid argument\)"):
        run([torch.zeros(2, 3)] * 2)
    assert alive(tmp_path) == (0, 0, 0)


def test_constants_in_a_file_need_a_way_to_load_them(standin: str, tmp_path: Path) -> None:
    job = job_of(SCALE, {"w": torch.ones(3)}, compiler_path=standin, compile_options=f"{TO_FILE} --standin-fail=loader")
    with pytest.raises(EngineError, match="does not export a function to load them"):
        built(job, tmp_path)


def test_an_artifact_without_a_library(standin: str, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="has 0 libraries"):
        OnnxMlir().load(job_of(ADD, compiler_path=standin), tmp_path)


# Memory and threads


def opened(folder: Path) -> ctypes.CDLL:
    (library,) = folder.glob("*.so")
    return ctypes.CDLL(str(library))


def alive(folder: Path) -> tuple[int, int, int]:
    """How many tensors, lists and blocks of data the library's runtime holds."""
    names = ("standin_tensors", "standin_lists", "standin_blocks")
    tensors, lists, blocks = (ctypes.c_int64.in_dll(opened(folder), name).value for name in names)
    return tensors, lists, blocks


def test_nothing_is_leaked_or_freed_twice(standin: str, tmp_path: Path) -> None:
    run = built(job_of(ADD, compiler_path=standin), tmp_path)
    x = torch.randn(2, 3)
    (held,) = run([x, x])
    for _ in range(5000):
        run([x, x])
    assert alive(tmp_path) == (1, 0, 1)
    view = held[0]
    del held
    assert alive(tmp_path) == (1, 0, 1)
    torch.testing.assert_close(view, (x + x)[0], rtol=0, atol=0)
    del view
    assert alive(tmp_path) == (0, 0, 0)


def test_an_input_that_a_result_claims_to_own_stays_torchs(standin: str, tmp_path: Path) -> None:
    text = "(float[2] x) => (float[2] y) { y = Identity(x) }"
    run = built(job_of(text, compiler_path=standin, compile_options="--standin-fail=ownership"), tmp_path)
    x = torch.randn(2)
    assert torch.equal(run([x])[0], x)
    assert alive(tmp_path) == (0, 0, 0)


def test_memory_does_not_grow(standin: str, tmp_path: Path) -> None:
    text = "(float[N,1000] x) => (float[N,1000] y, float[N,1000] z) { y = Relu(x) z = Identity(x) }"
    run, x = built(job_of(text, compiler_path=standin, compile_options="-O3"), tmp_path), torch.randn(50, 1000)

    def call() -> None:
        for _ in range(300):
            run([x])

    assert growth(call) < 20_000_000  # 120 MB would be the results


def test_a_library_is_closed_after_its_last_result(standin: str, tmp_path: Path) -> None:
    run, x = built(job_of(ADD, compiler_path=standin), tmp_path), torch.randn(2, 3)
    (z,) = run([x, x])
    del run
    gc.collect()
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    del z
    gc.collect()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_other_threads_run_during_a_call(standin: str, tmp_path: Path) -> None:
    run = built(job_of(ADD, compiler_path=standin, compile_options="--standin-wait"), tmp_path)
    library, x = opened(tmp_path), torch.ones(2, 3)

    def let_go() -> None:
        while not ctypes.c_int64.in_dll(library, "standin_runs").value:
            time.sleep(0.01)
        ctypes.c_int.in_dll(library, "standin_go").value = 1

    threading.Thread(target=let_go, daemon=True).start()
    assert torch.equal(run([x, x])[0], x + x)  # with the GIL held it would wait in vain, and fail


def test_libraries_with_constants_are_loaded_by_several_threads(standin: str, tmp_path: Path) -> None:
    options = {"compiler_path": standin, "compile_options": TO_FILE}
    jobs = [job_of(SCALE, {"w": torch.full((3,), float(i))}, **options) for i in range(3)]
    got: dict[int, float] = {}

    def work(number: int) -> None:
        got[number] = built(jobs[number], tmp_path / str(number))([torch.ones(1, 3)])[0][0, 0].item()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {0: 0.0, 1: 1.0, 2: 2.0}


# Options


def test_flags_reach_the_compiler_as_they_are(standin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recorded = tmp_path / "argv"
    job = job_of(ADD, compiler_path=standin, compile_options=f"-O3 {QUOTED} --standin-argv={recorded}")
    built(job, tmp_path / "artifact")
    assert json.loads(recorded.read_text())[: 1 + len(NASTY)] == ["-O3", *NASTY]
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.parametrize("flag", ["-o elsewhere", "--tag=mine", "--EmitONNXIR", "-EmitObj"])
def test_flags_that_the_engine_gives_are_refused(standin: str, flag: str) -> None:
    with pytest.raises(OptionError, match="which the engine sets itself"):
        OnnxMlir().identity(Options(compiler_path=standin, compile_options=flag))


def test_unbalanced_quotes_are_refused(standin: str) -> None:
    with pytest.raises(OptionError, match="No closing quotation"):
        OnnxMlir().identity(Options(compiler_path=standin, compile_options="--name='x"))


@pytest.mark.parametrize(
    "given",
    [{"timout": 3}, {"timeout": 0}, {"timeout": "long"}, {"container_options": "--tty"}, {"host_paths": "/a:/b"}],
)
def test_wrong_engine_options_are_refused(standin: str, given: dict[str, object]) -> None:
    with pytest.raises(OptionError, match=next(iter(given))):
        OnnxMlir().identity(Options(compiler_path=standin, engine_options=given))


# What is there


def test_identity_tells_compilers_and_flags_apart(
    standin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "onnx-mlir"
    other.write_text(Path(standin).read_text() + "# another\n")
    other.chmod(0o755)
    identity = OnnxMlir().identity
    found = [identity(Options(compiler_path=p, compile_options=f)) for p in (standin, str(other)) for f in ("", "-O3")]
    monkeypatch.setenv("ONNX_MLIR_FLAGS", "-O1")  # which onnx-mlir reads by itself
    found.append(identity(Options(compiler_path=standin)))
    assert len(set(found)) == 5
    assert "version 0.0.0-standin" in found[0]
    monkeypatch.delenv("ONNX_MLIR_FLAGS")
    assert identity(Options(compiler_path=standin)) == found[0]


def test_probe_finds_a_compiler_on_the_path(standin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SARDONYX_COMPILER_PATH", raising=False)
    monkeypatch.delenv("SARDONYX_COMPILER_IMAGE", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    missing = OnnxMlir().probe()
    assert (missing.installed, missing.reason) == (
        False,
        "onnx-mlir is not on PATH, and neither compiler_path nor compiler_image is set",
    )
    monkeypatch.setenv("PATH", f"{Path(standin).parent}:/usr/bin:/bin")
    assert OnnxMlir().probe().version == "onnx-mlir version 0.0.0-standin"


def test_probe_finds_the_compiler_that_the_environment_names(standin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SARDONYX_COMPILER_PATH", standin)
    assert OnnxMlir().probe().installed
