"""CUDA graphs, with an imitation of CUDA: a graph reads and writes the memory that it was recorded with."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import torch

from sardonyx.engines import cuda_graphs
from sardonyx.engines.cuda_driver import CaptureError
from sardonyx.engines.cuda_graphs import GraphRunner
from sardonyx.errors import EngineError

CPU = torch.device("cpu")


class Graph:
    """A function over fixed memory."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.work, self.launches, self.closed = work, 0, False

    def launch(self, stream: Any) -> None:
        assert not self.closed
        self.launches += 1
        self.work()

    def close(self) -> None:
        self.closed = True


class Session:
    """x · w + 1 of two inputs, in a stream of its own; counts what it executes."""

    allocates_in_torch = True
    is_device_only = False
    placement: ClassVar[dict[str, Counter[str]]] = {}

    def __init__(self) -> None:
        self.executed = 0
        self.launched: Callable[[], object] | None = None
        self.memory = torch.zeros(1000)

    def __call__(self, inputs: Sequence[Any]) -> list[torch.Tensor]:
        self.executed += 1
        result = self._value(inputs)
        if self.allocates_in_torch:
            return [result]
        own = self.memory[: result.numel()].view(result.shape)
        return [own.copy_(result)]

    def launch(self, inputs: Sequence[Any], outputs: Sequence[torch.Tensor]) -> None:
        self.launched = lambda: outputs[0].copy_(self._value(inputs))

    def _value(self, inputs: Sequence[Any]) -> torch.Tensor:
        x, w, *rest = inputs
        return x * w + 1 + sum(rest)

    def close(self) -> None:
        """It has nothing to free."""


class Recorder:
    """Records what a session launches, unless it is told to fail."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.graphs: list[Graph] = []
        self.failures: list[str] = []
        self.stream = "default"
        self.waits: list[tuple[str, str]] = []
        self.capturing = False

    def record(self, run: Callable[[], object]) -> Graph:
        if self.failures:
            raise CaptureError(self.failures.pop(0))
        run()
        assert self.session.launched is not None
        self.graphs.append(Graph(self.session.launched))
        return self.graphs[-1]

    def current_stream(self) -> str:
        return self.stream

    def is_capturing(self) -> bool:
        return self.capturing

    def wait(self, stream: str, other: str) -> None:
        self.waits.append((stream, other))

    def synchronize(self, stream: str) -> None:
        """Everything is done already."""


class Setup:
    """A runner over a session and a recorder; the weight is input 1."""

    def __init__(self) -> None:
        self.session = Session()
        self.recorder = Recorder(self.session)
        self.runner = GraphRunner(self.session, self.recorder, CPU, 3, frozenset({1}))
        self.weight = torch.full((3,), 2.0)

    def __call__(self, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        return self.runner([x, self.weight, *(rest or (0,))])[0]

    @property
    def alive(self) -> int:
        return sum(not graph.closed for graph in self.recorder.graphs)


@pytest.fixture
def setup() -> Setup:
    return Setup()


def value(x: torch.Tensor, w: float = 2.0) -> torch.Tensor:
    return x * w + 1


def test_a_shape_is_recorded_after_two_calls_and_replayed_from_then_on(setup: Setup) -> None:
    for count in range(6):
        x = torch.full((2, 3), float(count))
        torch.testing.assert_close(setup(x), value(x))
    assert setup.session.executed == 2
    assert [graph.launches for graph in setup.recorder.graphs] == [4]
    assert (setup.runner.recordings.recorded, setup.runner.recordings.replays) == (1, 4)


def test_results_are_not_overwritten_by_later_calls(setup: Setup) -> None:
    inputs = [torch.full((2, 3), float(count)) for count in range(6)]
    results = [setup(x) for x in inputs]
    for x, result in zip(inputs, results, strict=True):
        torch.testing.assert_close(result, value(x))


def test_inputs_that_stay_in_place_are_not_copied(setup: Setup) -> None:
    x = torch.zeros(2, 3)
    for count in range(5):
        x.fill_(float(count))
        torch.testing.assert_close(setup(x), value(x))
    recording = next(shape.recording for _, shape in setup.runner._shapes.items())
    assert recording is not None
    assert not recording.buffers


def test_an_input_that_moves_after_the_recording_is_copied_and_the_old_one_is_left_alone(setup: Setup) -> None:
    x = torch.ones(2, 3)
    for _ in range(3):
        setup(x)
    others = [torch.full((2, 3), float(count)) for count in range(3)]  # alive at once, so at other addresses
    for other in others:
        torch.testing.assert_close(setup(other), value(other))
    assert len(setup.recorder.graphs) == 2
    assert setup.alive == 1
    torch.testing.assert_close(x, torch.ones(2, 3))


def test_inputs_that_are_not_contiguous(setup: Setup) -> None:
    for count in range(5):
        x = torch.arange(6.0).add(count).view(3, 2).t()
        torch.testing.assert_close(setup(x), value(x))
    assert setup.session.executed == 2


def test_an_edited_weight_is_seen(setup: Setup) -> None:
    x = torch.ones(2, 3)
    for _ in range(3):
        setup(x)
    setup.weight.fill_(5.0)
    torch.testing.assert_close(setup(x), value(x, 5.0))
    assert len(setup.recorder.graphs) == 1


def test_a_replaced_weight_is_recorded_again(setup: Setup) -> None:
    x = torch.ones(2, 3)
    old = setup.weight
    for _ in range(3):
        setup(x)
    setup.weight = torch.full((3,), 7.0)
    for _ in range(3):
        torch.testing.assert_close(setup(x), value(x, 7.0))
    assert len(setup.recorder.graphs) == 2
    assert setup.alive == 1
    torch.testing.assert_close(old, torch.full((3,), 2.0))


def test_weights_that_are_replaced_at_every_call_end_the_recording(setup: Setup) -> None:
    x = torch.ones(2, 3)
    weights = [torch.full((3,), float(count)) for count in range(30)]
    for count, weight in enumerate(weights):
        setup.weight = weight
        torch.testing.assert_close(setup(x), value(x, float(count)))
    assert setup.runner.recordings.recorded < 12
    assert "weights keep being replaced" in str(setup.runner.recordings)


def test_shapes_and_integers_have_graphs_of_their_own(setup: Setup) -> None:
    for _ in range(4):
        for rows in (1, 2, 5):
            for number in (0, 3):
                x = torch.randn(rows, 3)
                torch.testing.assert_close(setup(x, number), value(x) + number)
    assert len(setup.recorder.graphs) == 6


def test_the_least_recently_used_graph_is_freed(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "MAX_SHAPES", 4)
    setup = Setup()
    for rows in range(1, 11):
        for _ in range(3):
            x = torch.randn(rows, 3)
            torch.testing.assert_close(setup(x), value(x))
    assert len(setup.recorder.graphs) == 10
    assert setup.alive == 4
    setup.runner.close()
    assert setup.alive == 0


def test_a_failed_recording_is_tried_once_more_and_reported(setup: Setup) -> None:
    setup.recorder.failures = ["it copies between host and device"] * 5
    for _ in range(6):
        x = torch.randn(2, 3)
        torch.testing.assert_close(setup(x), value(x))
    assert len(setup.recorder.failures) == 3
    assert setup.session.executed == 6
    assert str(setup.runner.recordings).endswith("not recorded: it copies between host and device")


def test_a_graph_that_cannot_be_launched_is_freed(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(self: Graph, stream: Any) -> None:
        raise CaptureError("cuGraphLaunch: CUDA_ERROR_OUT_OF_MEMORY (2)")

    monkeypatch.setattr(Graph, "launch", no_memory)
    for _ in range(8):
        x = torch.randn(2, 3)
        torch.testing.assert_close(setup(x), value(x))
    assert setup.alive == 0
    assert len(setup.recorder.graphs) == 2
    assert "OUT_OF_MEMORY" in str(setup.runner.recordings)


def test_nothing_is_executed_while_recording(setup: Setup) -> None:
    for _ in range(3):
        setup(torch.ones(2, 3))
    assert setup.session.executed == 2
    assert [graph.launches for graph in setup.recorder.graphs] == [1]


def test_calls_wait_for_the_device_until_a_recording_shows_that_they_need_not(setup: Setup) -> None:
    setup.recorder.failures = ["it copies between host and device"]
    for _ in range(3):
        setup(torch.ones(2, 3))
    assert setup.session.executed == 3  # a plain call follows the failed recording
    assert not setup.session.is_device_only
    setup(torch.ones(2, 3))
    assert setup.session.is_device_only


def test_an_input_on_another_device_is_not_recorded(setup: Setup) -> None:
    setup.runner = GraphRunner(setup.session, setup.recorder, torch.device("cuda", 0), 3, frozenset({1}))
    for _ in range(4):
        setup(torch.ones(2, 3))
    assert not setup.recorder.graphs
    assert "another device" in str(setup.runner.recordings)


def test_empty_inputs_are_not_recorded(setup: Setup) -> None:
    for _ in range(4):
        assert setup(torch.ones(0, 3)).shape == (0, 3)
    assert not setup.recorder.graphs


def test_another_stream_waits_for_the_last(setup: Setup) -> None:
    for stream in ("default", "default", "side", "side", "default"):
        setup.recorder.stream = stream
        setup(torch.ones(2, 3))
    assert setup.recorder.waits == [("side", "default"), ("default", "side")]


def test_results_leave_the_sessions_memory_once_there_is_a_graph(setup: Setup) -> None:
    setup.session.allocates_in_torch = False
    for _ in range(3):
        setup(torch.ones(2, 3))
    kept = setup(torch.full((4, 3), 3.0))  # another shape: a plain call
    setup.session.memory.fill_(-1.0)  # a graph may write there at any time
    torch.testing.assert_close(kept, torch.full((4, 3), 7.0))


def test_inside_a_graph_of_the_caller(setup: Setup) -> None:
    setup.recorder.capturing = True
    with pytest.raises(EngineError, match="not called before"):
        setup(torch.ones(2, 3))
    setup.recorder.capturing = False
    for _ in range(3):
        setup(torch.ones(2, 3))
    setup.recorder.capturing = True
    executed = setup.session.executed
    torch.testing.assert_close(setup(torch.ones(2, 3)), torch.full((2, 3), 3.0))
    assert setup.session.executed == executed + 1


def test_calls_in_and_outside_of_inference_mode(setup: Setup) -> None:
    for count in range(6):
        with torch.inference_mode(count % 2 == 0):
            x = torch.full((2, 3), float(count))
            torch.testing.assert_close(setup(x), value(x))
    assert setup.session.executed == 2


def test_inputs_that_require_grad_leave_no_graph_behind(setup: Setup) -> None:
    for count in range(5):
        x = torch.full((2, 3), float(count), requires_grad=True)
        with torch.no_grad():
            setup(x)
    result = setup(x)
    assert not result.requires_grad


def test_threads(setup: Setup) -> None:
    wrong: list[str] = []

    def work(seed: int) -> None:
        for count in range(50):
            x = torch.full((1 + count % 3, 3), float(seed * 100 + count))
            if not torch.equal(setup(x), value(x)):
                wrong.append(f"{seed}, {count}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
