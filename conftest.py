"""For tests and for examples in docstrings alike."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

EAGER = ("tests/eager", "tests/onnx_ops", "src/sardonyx/eager")
SHARED = "SARDONYX_TESTS_SHARED"
"""The variable that names a folder for all processes of a run."""


def pytest_configure(config: pytest.Config) -> None:
    """Prepare what every process of a run has in common, before modules are imported."""
    _share_a_cache(config)
    # pytest puts its handlers on every logger that does not propagate, and torch writes a log of each compilation where
    # there is a handler: a fifth of the time of a short test
    logging.getLogger("torch.__trace").propagate = True


def _share_a_cache(config: pytest.Config) -> None:
    """Let processes share what is compiled without options: the device's core takes longest, and is built once."""
    if SHARED not in os.environ:  # neither a process of xdist nor one that a test started
        os.environ[SHARED] = folder = tempfile.mkdtemp(prefix="sardonyx-tests-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    os.environ["XDG_CACHE_HOME"] = os.environ[SHARED]  # an Options object reads no variable of ours


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the device's tests to tests/test_eager.py, unless the command line names them.

    A registered device stays for the life of the process, and the other tests are not about it.
    """
    if collection_path not in [config.rootpath / folder for folder in EAGER]:
        return None
    asked = [Path(config.invocation_params.dir, argument.partition("::")[0]).resolve() for argument in config.args]
    return None if any(collection_path in (path, *path.parents) for path in asked) else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest, so that several processes end at the same time."""
    items.sort(key=lambda item: item.path.name != "test_eager.py")


def pytest_collection_finish() -> None:
    """Take what is loaded by now out of garbage collection: dynamo collects after each compilation."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests of the device the processes ran that tests/test_eager.py started."""
    for report in terminalreporter.getreports("passed"):
        for name, result in report.user_properties:
            if name.startswith("executor "):
                terminalreporter.write_line(f"{name}: {result}")


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What tests compile is kept for other tests of the same process, and never in the user's own folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SARDONYX_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True, scope="session")
def no_measured_guards() -> Iterator[None]:
    """Keep dynamo from measuring guards for its logs: it empties the processor's caches first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._dynamo.guards, "profile_guard_manager", lambda *ignored: 0.0)
        yield
