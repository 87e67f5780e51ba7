"""CUDA graphs: a session's kernels recorded once per shape, and launched together from then on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from operator import is_
from typing import Any, Protocol

import torch

from sardonyx import fork
from sardonyx.cache.lru import LRU
from sardonyx.engines import cuda_driver
from sardonyx.engines.contiguous import is_contiguous
from sardonyx.engines.cuda_driver import CaptureError
from sardonyx.engines.engine import Runner
from sardonyx.errors import EngineError
from sardonyx.telemetry.report import Recordings

MAX_SHAPES = 32
"""Shapes remembered per session, each with at most one graph; the least recently used is freed first."""
_CALLS_BEFORE = 2
"""Plain calls before a shape is recorded: in the first two, ONNX Runtime allocates its memory and chooses kernels."""
_ATTEMPTS = 2
"""How often recording a shape may fail."""
_REPLACEMENTS = 8
"""How often the graph of a shape is recorded again because a weight was replaced."""
_ELSEWHERE = "an input is on another device"
_address = torch.Tensor.data_ptr


class StreamRunner(Protocol):
    """A runner whose work goes to a stream of its own."""

    allocates_in_torch: bool
    """Whether torch allocates the results, rather than the session."""
    placement: Mapping[str, Counter[str]]
    is_device_only: bool
    """Whether its kernels are known to use no memory of the host."""

    def __call__(self, inputs: Sequence[Any]) -> list[torch.Tensor]:
        """Run once, ordered with torch's current stream."""

    def launch(self, inputs: Sequence[Any], outputs: Sequence[torch.Tensor]) -> None:
        """Give the work of a call to the runner's stream, whatever else is in it."""

    def close(self) -> None:
        """Free its resources."""


class Launchable(Protocol):
    """A recorded graph."""

    def launch(self, stream: Any) -> None:
        """Run once."""

    def close(self) -> None:
        """Free it."""


class Recorder(Protocol):
    """What records: CUDA, or an imitation of it in tests."""

    def record(self, run: Callable[[], object]) -> Launchable:
        """Return the work that `run` gives to the session's stream; raises `CaptureError`."""

    def current_stream(self) -> Any:
        """Return torch's current stream."""

    def is_capturing(self) -> bool:
        """Whether the caller is recording a graph."""

    def wait(self, stream: Any, other: Any) -> None:
        """Let a stream wait for the work given to another one so far."""

    def synchronize(self, stream: Any) -> None:
        """Wait until the work of a stream is done."""


class CudaRecorder:
    """Records the work of a CUDA stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._index = stream.device.index
        self._streams: dict[int, torch.cuda.Stream] = {}

    def record(self, run: Callable[[], object]) -> cuda_driver.Graph:
        """Record the session's stream."""
        return cuda_driver.capture(self._stream, run)

    def current_stream(self) -> torch.cuda.Stream:
        """Return torch's current stream on the session's device, the same object for the same stream."""
        handle: int = torch._C._cuda_getCurrentRawStream(self._index)
        stream = self._streams.get(handle)
        if stream is None:
            stream = self._streams[handle] = torch.cuda.current_stream(self._stream.device)
        return stream

    def is_capturing(self) -> bool:
        """Whether torch's current stream is being captured."""
        return torch.cuda.is_current_stream_capturing()

    def wait(self, stream: torch.cuda.Stream, other: torch.cuda.Stream) -> None:
        """Order two streams by an event."""
        stream.wait_stream(other)

    def synchronize(self, stream: torch.cuda.Stream) -> None:
        """Wait for a stream."""
        stream.synchronize()


@dataclass
class _Recording:
    """A graph, with the memory that it reads and writes."""

    graph: Launchable
    direct: dict[int, int]
    """Inputs that it reads where the caller has them, and their addresses."""
    weights: dict[int, torch.Tensor]
    """Those of them that are weights."""
    buffers: dict[int, torch.Tensor]
    """Copies of the other inputs, at addresses that do not change."""
    outputs: list[torch.Tensor]

    def __post_init__(self) -> None:
        self._weights = list(self.weights.values())
        self._weight_addresses = [self.direct[i] for i in self.weights]
        self._storages = [x.untyped_storage() for x in self._weights]  # a replay may still read a replaced weight
        self._inputs = {i: address for i, address in self.direct.items() if i not in self.weights}

    def moved_inputs(self, inputs: Sequence[Any]) -> bool:
        """Whether an input other than the weights is no longer where the graph reads it."""
        return any(_address(inputs[i]) != at or not is_contiguous(inputs[i]) for i, at in self._inputs.items())

    def replaced_weights(self, inputs: Sequence[Any]) -> bool:
        """Whether a weight is no longer where the graph reads it."""
        given = [inputs[i] for i in self.weights]
        if list(map(_address, given)) != self._weight_addresses:
            return True
        return not all(map(is_, given, self._weights)) and not all(map(is_contiguous, given))

    def replay(self, inputs: Sequence[Any], stream: Any) -> list[torch.Tensor]:
        """Run with these inputs; the results are copies, which the next replay does not overwrite."""
        for i, buffer in self.buffers.items():
            buffer.copy_(inputs[i].detach())
        self.graph.launch(stream)
        return [torch.empty_like(output).copy_(output) for output in self.outputs]


@dataclass
class _Shape:
    """What is known of the calls with some shapes."""

    calls: int = 0
    failures: int = 0
    replacements: int = 0
    recording: _Recording | None = None
    addresses: list[int | None] = field(default_factory=list)
    """Where the inputs are at every call; None for those that moved."""
    results: list[tuple[torch.Size, torch.dtype]] = field(default_factory=list)

    @property
    def is_due(self) -> bool:
        """Whether to record the next call."""
        return self.calls >= _CALLS_BEFORE and self.failures < _ATTEMPTS

    def note_inputs(self, inputs: Sequence[Any], fixed: Set[int]) -> None:
        """Note where the inputs of a call are."""
        addresses = [_address(x) if isinstance(x, torch.Tensor) and is_contiguous(x) else None for x in inputs]
        if self.calls:
            old = self.addresses
            addresses = [new if i in fixed or new == old[i] else None for i, new in enumerate(addresses)]
        self.addresses = addresses

    def note_results(self, outputs: Sequence[torch.Tensor]) -> None:
        """Note what a plain call returned."""
        self.calls += 1
        self.results = [(x.shape, x.dtype) for x in outputs]


class GraphRunner(Runner):
    """Calls a session, and replays CUDA graphs of it for shapes that repeat.

    The addresses of its memory are part of a graph. Inputs that stay where they are, as weights do, are read in place,
    so edits are seen; a weight that moves is recorded again; any other input that moves is copied into a buffer.

    Graphs write to memory that the session considers free. Calls are therefore ordered, by a lock and from stream to
    stream, and results do not stay in the session's memory once there is a graph.
    """

    def __init__(
        self, runner: StreamRunner, recorder: Recorder, device: torch.device, inputs: int, fixed: Set[int]
    ) -> None:
        self._runner, self._recorder, self._device, self._fixed = runner, recorder, device, fixed
        self._varying = [i for i in range(inputs) if i not in fixed]
        self._shapes = LRU[_Shape](MAX_SHAPES, self._free)
        self._last_stream: Any = None
        self._graphs_exist = False
        self._lock = fork.Lock()
        self.recordings: Recordings = Recordings()
        self.placement = runner.placement

    def __call__(self, inputs: Sequence[torch.Tensor | int]) -> list[torch.Tensor]:
        """Run once."""
        key = self._key(inputs)
        with self._lock:
            if self._recorder.is_capturing():
                return self._run_in_graph_of_caller(key, inputs)
            stream = self._recorder.current_stream()
            self._order(stream)
            if key is None:
                return self._run(inputs)
            shape = self._shapes.get(key)
            if shape is None:
                shape = _Shape()
                self._shapes.put(key, shape)
            outputs = self._replay(shape, inputs, stream)
            if outputs is None:
                shape.note_inputs(inputs, self._fixed)
                if shape.is_due:
                    self._record(shape, inputs)
                    outputs = self._replay(shape, inputs, stream)
            if outputs is None:
                outputs = self._run(inputs)
                shape.note_results(outputs)
            return outputs

    def close(self) -> None:
        """Free the graphs and the session."""
        with self._lock:
            self._shapes.clear()
            self._runner.close()

    def _key(self, inputs: Sequence[Any]) -> tuple[Any, ...] | None:
        """Return the shapes and integers of a call; None if it has inputs whose values a graph would contain."""
        key: list[Any] = []
        for i in self._varying:
            x = inputs[i]
            if not isinstance(x, torch.Tensor):
                key.append(x)
            elif x.device == self._device and x.numel():
                key.append(x.shape)
            else:
                self.recordings.refuse("an input is empty" if x.device == self._device else _ELSEWHERE)
                return None
        return tuple(key)

    def _order(self, stream: Any) -> None:
        """Let the stream wait for the one that used the session's memory last."""
        if stream is self._last_stream:
            return
        if self._last_stream is not None:
            self._recorder.wait(stream, self._last_stream)
        self._last_stream = stream

    def _run(self, inputs: Sequence[Any]) -> list[torch.Tensor]:
        outputs = self._runner(inputs)
        return [x.clone() for x in outputs] if self._graphs_exist and not self._runner.allocates_in_torch else outputs

    def _run_in_graph_of_caller(self, key: tuple[Any, ...] | None, inputs: Sequence[Any]) -> list[torch.Tensor]:
        """Let the caller record the session's kernels, if it is known that they use no memory of the host."""
        shape = self._shapes.get(key) if key is not None else None
        if shape is None or shape.recording is None:
            raise EngineError(
                "a CUDA graph is being recorded, and it is not known whether it can be replayed: "
                + (self.recordings.refused or "these shapes were not called before"),
                hint=f"call the model {_CALLS_BEFORE + 1} times with these shapes before you record it",
            )
        return self._run(inputs)

    def _replay(self, shape: _Shape, inputs: Sequence[Any], stream: Any) -> list[torch.Tensor] | None:
        """Replay the recording of a shape; None if there is none that reads these inputs.

        The many weights are checked while the device works, and results of old weights are dropped: a graph has no
        effect but its results.
        """
        recording = shape.recording
        if recording is None:
            return None
        if recording.moved_inputs(inputs):
            self._free(shape)
            return None
        try:
            outputs = recording.replay(inputs, stream)
        except CaptureError as error:  # such as no memory for the graph
            self._free(shape)
            shape.failures += 1
            self.recordings.refuse(str(error))
            return None
        if recording.replaced_weights(inputs):
            self._note_replacement(shape)
            return None
        self.recordings.replays += 1
        return outputs

    def _note_replacement(self, shape: _Shape) -> None:
        """Free the recording of a shape, one of whose weights was replaced."""
        self._free(shape)
        shape.replacements += 1
        if shape.replacements > _REPLACEMENTS:
            shape.failures = _ATTEMPTS
            self.recordings.refuse("weights keep being replaced")

    def _record(self, shape: _Shape, inputs: Sequence[Any]) -> None:
        """Record the calls of a shape; nothing is executed.

        If that fails, a plain call follows, in which ONNX Runtime frees the memory of the host that it set aside.
        """
        if any(inputs[i].device != self._device for i in self._fixed):
            shape.failures = _ATTEMPTS
            self.recordings.refuse(_ELSEWHERE)
            return
        direct = {i: address for i, address in enumerate(shape.addresses) if address is not None}
        weights = {i: inputs[i] for i in self._fixed if i in direct}
        moving = {i: x for i, x in enumerate(inputs) if isinstance(x, torch.Tensor) and i not in direct}
        with torch.inference_mode(False):  # calls in and outside of inference mode write to them
            buffers = {i: torch.empty(x.shape, dtype=x.dtype, device=x.device) for i, x in moving.items()}
            results = [torch.empty(sizes, dtype=dtype, device=self._device) for sizes, dtype in shape.results]
        feeds = [buffers.get(i, x) for i, x in enumerate(inputs)]
        try:
            graph = self._recorder.record(lambda: self._runner.launch(feeds, results))
        except CaptureError as error:
            shape.failures += 1
            self.recordings.refuse(str(error))
            return
        self._graphs_exist = self._runner.is_device_only = True
        self.recordings.recorded += 1
        shape.recording = _Recording(graph, direct, weights, buffers, results)

    def _free(self, shape: _Shape) -> None:
        if shape.recording is not None:
            self._recorder.synchronize(self._last_stream)
            shape.recording.graph.close()
            shape.recording = None
