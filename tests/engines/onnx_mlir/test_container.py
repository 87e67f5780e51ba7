"""The compiler in a container: what podman or docker is called with, what it sees, and what is quoted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sardonyx.engines.engine import Job
from sardonyx.engines.onnx_mlir import OnnxMlir
from sardonyx.errors import EngineError, MissingDependency, OptionError
from sardonyx.options import Options

from .conftest import script
from .hanging import cut_off, ended, expire, hanging
from .jobs import ADD, NASTY, QUOTED, built, job_of

IMAGE = "ghcr.io/onnxmlir/onnx-mlir"


class Daemon:
    """A stand-in for podman or docker, with an image, and what it was called with."""

    def __init__(self, root: Path) -> None:
        self.root = root
        script(root / "bin" / "onnx-mlir", "standin.py")

    def install(self, name: str) -> str:
        return str(script(self.root / "client" / name, "container.py"))

    @property
    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in (self.root / "calls").read_text().splitlines()]

    @property
    def run(self) -> list[str]:
        """The one call that ran a container."""
        (found,) = [call for call in self.calls if "run" in call]
        return found

    @property
    def mount(self) -> str:
        return self.run[self.run.index("-v") + 1]


@pytest.fixture
def daemon(standin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Daemon:
    root = tmp_path / "daemon"
    monkeypatch.setenv("STANDIN_ROOT", str(root))
    monkeypatch.setenv("PATH", f"{root / 'client'}:/usr/bin:/bin")
    made = Daemon(root)
    made.install("docker")
    return made


def job(**options: object) -> Job:
    return job_of(ADD, compiler_image=IMAGE, **options)


def test_a_model_is_compiled_in_a_container_and_runs_here(daemon: Daemon, tmp_path: Path) -> None:
    x = torch.randn(2, 3)
    run = built(job(compile_options="-O3"), tmp_path / "artifact")
    torch.testing.assert_close(run([x, x])[0], x + x, rtol=0, atol=0)
    verb, remove, name, _, entry, shell, volume, mount, image, flag, line = daemon.run
    assert [verb, remove, name, entry, shell, volume, image, flag] == [
        *["run", "--rm", "--name", "--entrypoint", "sh", "-v", IMAGE, "-c"]
    ]
    assert mount.startswith(f"{tmp_path / 'artifact'}/build-")
    assert mount.endswith(":/sardonyx:rw")
    assert "exec onnx-mlir -O3 --EmitLib --tag=" in line
    assert [path.suffix for path in (tmp_path / "artifact").iterdir()] == [".so"]


def test_flags_are_quoted_for_the_shell_in_the_container(daemon: Daemon, tmp_path: Path) -> None:
    recorded = tmp_path / "argv"
    built(job(compile_options=f"{QUOTED} --standin-argv={recorded}"), tmp_path / "artifact")
    assert json.loads(recorded.read_text())[: len(NASTY)] == NASTY
    assert not list(tmp_path.rglob("pwned"))


def test_podman_comes_before_docker_unless_one_is_chosen(daemon: Daemon, tmp_path: Path) -> None:
    podman = daemon.install("podman")
    Path(podman).write_text("#!/bin/sh\necho podman was called >&2; exit 1\n")
    with pytest.raises(EngineError, match="podman was called"):
        OnnxMlir().identity(Options(compiler_image=IMAGE))
    built(job(engine_options={"container": "docker"}), tmp_path / "artifact")
    assert daemon.run


def test_without_podman_and_docker(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(MissingDependency, match="there is no podman or docker"):
        OnnxMlir().identity(Options(compiler_image=IMAGE))


def test_an_image_is_known_by_its_id_and_fetched_if_needed(daemon: Daemon) -> None:
    identity = OnnxMlir().identity
    first = identity(Options(compiler_image=IMAGE))
    assert first.startswith("sha256:1234\n")
    assert ["pull", IMAGE] in daemon.calls
    (daemon.root / "image").write_text("sha256:5678\n")
    assert identity(Options(compiler_image=IMAGE)) != first
    assert len([call for call in daemon.calls if call[0] == "pull"]) == 1


def test_an_image_that_cannot_be_fetched(daemon: Daemon) -> None:
    with pytest.raises(EngineError, match="cannot pull the image 'nowhere/none': Error: no such image"):
        OnnxMlir().identity(Options(compiler_image="nowhere/none"))


def test_the_compiler_of_an_image_may_be_named(daemon: Daemon, tmp_path: Path) -> None:
    built(job(engine_options={"binary": str(daemon.root / "bin" / "onnx-mlir")}), tmp_path / "artifact")
    assert f"exec {daemon.root}/bin/onnx-mlir --EmitLib" in daemon.run[-1]


def test_more_arguments_for_the_container(daemon: Daemon, tmp_path: Path) -> None:
    built(job(engine_options={"container_options": ["--security-opt", "label=disable"]}), tmp_path / "artifact")
    assert daemon.run[daemon.run.index("--security-opt") + 1] == "label=disable"


@pytest.mark.parametrize(("program", "flag"), [("docker", "--host"), ("podman", "--url")])
def test_the_daemons_socket(daemon: Daemon, tmp_path: Path, program: str, flag: str) -> None:
    daemon.install(program)
    socket = "unix:///run/other.sock"
    built(job(engine_options={"container": program, "socket": socket}), tmp_path / "artifact")
    assert all(call[:2] == [flag, socket] for call in daemon.calls)


def test_inside_a_container_mounts_have_the_hosts_paths(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_HOST", json.dumps({"/home/me/work": str(tmp_path)}))
    built(job(engine_options={"host_paths": {"/": "/wrong", str(tmp_path): "/home/me/work"}}), tmp_path / "artifact")
    assert daemon.mount.startswith("/home/me/work/artifact/build-")


def test_a_folder_that_the_host_does_not_have(daemon: Daemon, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="the mounted folder is not visible") as caught:
        built(job(engine_options={"host_paths": {str(tmp_path): "/home/me/work"}}), tmp_path / "artifact")
    assert "host_paths" in str(caught.value.hint)


def test_a_folder_that_is_not_mapped(daemon: Daemon, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"'host_paths' has no entry for .*artifact"):
        built(job(engine_options={"host_paths": {"/elsewhere": "/home/me/work"}}), tmp_path / "artifact")


def test_a_folder_with_a_colon_cannot_be_mounted(daemon: Daemon, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="a colon in its path"):
        built(job(), tmp_path / "a:b")


def test_an_image_is_no_flag(daemon: Daemon) -> None:
    with pytest.raises(OptionError, match="--privileged"):
        OnnxMlir().identity(Options(compiler_image="--privileged"))


def test_a_container_that_takes_too_long_is_killed_by_its_name(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = hanging(daemon.root / "bin" / "onnx-mlir")
    cut_off(monkeypatch, slow, expire)
    with pytest.raises(EngineError, match="timed out after 100 s"):
        built(job(engine_options={"timeout": 100}), tmp_path / "artifact")
    assert (daemon.root / "killed").read_text() == daemon.run[daemon.run.index("--name") + 1]
    assert ended(slow)


def test_a_failure_in_the_container_shows_its_log(daemon: Daemon, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="the stand-in was told to fail") as caught:
        built(job(compile_options="--standin-fail=exit"), tmp_path / "artifact")
    assert "failed with exit status 3" in caught.value.what
    assert "docker run --rm" in caught.value.what


def test_probe_knows_an_image_that_the_environment_names(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SARDONYX_COMPILER_IMAGE", IMAGE)
    assert OnnxMlir().probe().version == f"image {IMAGE}"
    assert not (daemon.root / "calls").exists()  # starts nothing
