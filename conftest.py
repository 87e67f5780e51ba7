"""For tests and for examples in docstrings alike."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

EAGER = ("tests/eager", "src/sardonyx/eager")
SHARED = "SARDONYX_TESTS_SHARED"
"""The variable that tells processes started by tests which folder they share."""


def pytest_configure() -> None:
    """Keep pytest's handlers off torch's log of compilations.

    It puts them on every logger that does not propagate, and torch writes a log that has handlers: graphs as text and
    JSON, a fifth of the time of a short test.
    """
    logging.getLogger("torch.__trace").propagate = True


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
        shared = _shared(tmp_path_factory)
        patch.setenv(SHARED, str(shared))
        patch.setenv("SARDONYX_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("XDG_CACHE_HOME", str(shared / "home"))  # an Options object reads no variable
        yield


@pytest.fixture(autouse=True, scope="session")
def no_measured_guards_and_absent_devices() -> Iterator[None]:
    """Spare what torch does for its own logs and for devices that are not there: a third of a short test's time."""
    with pytest.MonkeyPatch.context() as patch:
        # it empties the processor's caches before it measures
        patch.setattr(torch._dynamo.guards, "profile_guard_manager", lambda *ignored: 0.0)
        for device in (torch.cuda, torch.xpu, torch.mtia):
            if not device.is_available():
                patch.setattr(device, "manual_seed_all", lambda seed: None)  # which writes down who called it
        yield


def _shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for all processes of a run: the device's core, which takes long to build, is built once."""
    if SHARED in os.environ:
        return Path(os.environ[SHARED])
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
