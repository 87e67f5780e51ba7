"""Choose the precision of a file's layers: candidates are files too, which run in the engine on calibration inputs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import onnx_ir as ir
import torch

from sardonyx.dtypes import to_onnx
from sardonyx.engines import Engine, Job, Runner
from sardonyx.errors import OptionError
from sardonyx.options import Options
from sardonyx.precision.calibration import is_symmetric
from sardonyx.precision.file_graph import Packed, key_of_weight, matrix_of
from sardonyx.precision.layers import Layer, alone
from sardonyx.precision.metric import relative_error
from sardonyx.precision.plan import FLOAT32, INTEGERS, Plan, Type
from sardonyx.precision.rounding import round_int4, usable_rows
from sardonyx.precision.search import AS_FAST, LayerTrials, path
from sardonyx.precision.smoothing import smoothing_channels
from sardonyx.precision.standard_operators import (
    int4_block,
    int4_constants,
    int8_constants,
    layers_of_file,
    lower_file,
    supported,
)
from sardonyx.precision.static_scales import Range, joined, quantized_values, range_of
from sardonyx.run.file_weights import extract_weights
from sardonyx.run.layer_trials import LayerBench
from sardonyx.run.precision_subject import WANTED, Candidate, Subject, scores_of

Fit = Callable[[ir.Model], Any]
"""Makes a model fit the engine's kernels, in place, as when the file is loaded."""


@dataclass(frozen=True)
class FileSubject(Subject):
    """The model of a file, called with calibration inputs."""

    model: ir.Model
    calibration: Sequence[Sequence[torch.Tensor]]
    """The model's inputs in order, for each call."""
    engine: Engine
    options: Options
    domains: frozenset[str]
    fit: Fit
    wanted: Sequence[Type]
    packed: Packed = field(default_factory=dict)
    """What weights became in candidates."""

    share = AS_FAST  # a smaller file that is as fast is worth having
    why_no_trials = "weights are not finite"

    @classmethod
    def of(
        cls,
        model: ir.Model,
        calibration: Sequence[Sequence[torch.Tensor]],
        engine: Engine,
        options: Options,
        domains: frozenset[str],
        fit: Fit,
    ) -> FileSubject:
        """Return a model with checked calibration inputs, and the precisions that the file can have."""
        if not engine.takes_kernels(torch.device("cpu")):
            raise OptionError(
                f"precision={options.precision!r} in a file with the engine {engine.name!r}",
                hint="leave out the engine: layers of files are measured in 'onnxruntime', and run in others too",
            )
        _check_calibration(model, calibration)
        opset = model.graph.opset_imports[""]
        wanted = supported(WANTED[options.precision], opset, domains)
        if options.precision not in (*wanted, "auto"):
            raise OptionError(
                f"precision={options.precision!r} in a file of opset {opset} without the domain 'com.microsoft'",
                hint="use a later opset: blocks of int4 are in opset 21",
            )
        return cls(model, calibration, engine, options, domains, fit, wanted)

    @property
    def in_order(self) -> bool:  # type: ignore[override]  # as the options say
        """Whether layers start in the precision that was asked for: a user of int4 wants a small file."""
        return self.options.precision != "auto"

    def candidate(self, plan: Plan) -> Candidate:
        """Return the file with a plan."""
        model = self.model.clone()
        self.lower(model, plan)
        runner = self.load(model)
        return Candidate(model, [partial(runner, inputs) for inputs in self.calibration])

    def lower(self, model: ir.Model, plan: Plan) -> None:
        """Replace the layers that a plan has in lower precision, in place."""
        layers = layers_of_file(model.graph)
        for layer in layers:
            self.store(layer, plan.type_of(layer.name))
        quantizes = any(layer.convolves and plan.type_of(layer.name) == "int8" for layer in layers)
        ranges = self._ranges if quantizes else {}
        lower_file(model, plan, self.domains, ranges, self.packed, int4_block=self.options.int4_block)

    def store(self, layer: Layer, precision: Type) -> None:
        """Store a weight of integers as the activations of its layer in the calibration calls ask for."""
        key = key_of_weight(layer, precision)
        if layer.convolves or precision not in INTEGERS or key in self.packed:
            return
        weight, x = matrix_of(layer).float(), self._activations[str(layer.x.name)]
        if precision == "int4":
            block = int4_block(layer, self.domains, self.options.int4_block)
            rounded, _ = round_int4(weight, x, block, symmetric=is_symmetric(weight, block))
            self.packed[key] = int4_constants(rounded, self.domains)
        else:
            self.packed[key] = int8_constants(weight, smoothing_channels(weight, x))

    @cached_property
    def _activations(self) -> Mapping[str, torch.Tensor]:
        """Rows that linear layers multiply in all calibration calls, as many as rounding uses, by name."""
        layers = [layer for layer in layers_of_file(self.model.graph) if not layer.convolves]
        names = sorted({str(layer.x.name) for layer in layers})
        calls = [
            {name: usable_rows(x) for name, x in self._values(names, inputs).items()} for inputs in self.calibration
        ]
        return {name: torch.cat([rows[name] for rows in calls]) for name in names}

    @cached_property
    def _ranges(self) -> Mapping[str, Range]:
        """The ranges of the values around convolutions in all calibration calls, by name."""
        sources = quantized_values(layers_of_file(self.model.graph))
        calls = [self._values(sorted(set(sources.values())), inputs) for inputs in self.calibration]
        return {name: joined([range_of(values[source]) for values in calls]) for name, source in sources.items()}

    def load(self, model: ir.Model) -> Runner:
        """Load a session of a model, which is consumed."""
        self.fit(model)
        weights = extract_weights(model)
        data = ir.to_proto(model).SerializeToString()
        return self.engine.load(Job.of(data, model.graph, self.options, weights=weights), None)

    def trials(self, float32: Candidate, progress: Callable[[str], None]) -> Sequence[LayerTrials]:
        """Return what is measured of each layer by itself, with its values in the first call."""
        layers = layers_of_file(self.model.graph)
        if not layers:
            return []
        values = self._values(sorted({str(layer.x.name) for layer in layers}), self.calibration[0])
        bench = _FileBench(self)
        measured = []
        for number, layer in enumerate(layers, 1):
            progress(f"layer {number} of {len(layers)}, {layer.name}")
            x = values[str(layer.x.name)]
            trials = replace(bench.trials(layer, x), share=AS_FAST)
            used = path(trials, trials.worthwhile(self.wanted), in_order=self.in_order)
            measured.append(bench.rounded(layer, x, trials) if "int4" in used else trials)
        return measured

    def _values(self, names: Sequence[str], inputs: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return values of the model in a call, by name."""
        model = self.model.clone()
        values = {str(x.name): fed for x, fed in zip(model.graph.inputs, inputs, strict=True) if x.name in names}
        computed = {str(x.name): x for node in model.graph for x in node.outputs if x.name in names}
        if computed:
            model.graph.outputs[:] = list(computed.values())
            values |= dict(zip(computed, self.load(model)(inputs), strict=True))
        return values

    def logits(self, float32: Candidate) -> frozenset[int]:
        """Return the results that a layer computes."""
        return scores_of(self.model.graph, layers_of_file(self.model.graph))

    def key(self, float32: Candidate) -> Mapping[str, str]:
        """Return the contents of the model and of the calibration inputs."""
        model = self.model.clone()
        weights = extract_weights(model)
        job = Job.of(ir.to_proto(model).SerializeToString(), model.graph, self.options, weights=weights)
        return {"model": job.digest(), "inputs": _digest(self.calibration), "domains": repr(sorted(self.domains))}


def _check_calibration(model: ir.Model, calibration: Sequence[Sequence[torch.Tensor]]) -> None:
    if not calibration:
        raise OptionError(
            "a lower precision of a file is chosen by its results, and there are no inputs to compute them from",
            hint="pass calibration=[...], calls with inputs as in use",
        )
    for inputs in calibration:
        for value, x in zip(model.graph.inputs, inputs, strict=True):
            if value.dtype is not None and to_onnx(x.dtype) != value.dtype:
                raise OptionError(
                    f"the calibration input {value.name!r} is in {x.dtype}, and the model takes {value.dtype}",
                    hint="use inputs as in use",
                )
            if x.dtype.is_floating_point and bool(x.isnan().any()):
                raise OptionError(f"the calibration input {value.name!r} has NaN", hint="use inputs as in use")


def _digest(calibration: Sequence[Sequence[torch.Tensor]]) -> str:
    hashed = hashlib.sha256()
    for inputs in calibration:
        for x in map(torch.as_tensor, inputs):
            hashed.update(f"\0{x.dtype}\0{tuple(x.shape)}\0".encode())
            if x.numel():
                hashed.update(x.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return hashed.hexdigest()


class _FileBench(LayerBench):
    """Runs layers of a file by themselves."""

    def __init__(self, subject: FileSubject) -> None:
        super().__init__(subject.engine, {}, subject.wanted, subject.options, in_order=subject.in_order)
        self._subject = subject

    def _calls(self, layer: Layer, x: torch.Tensor, types: Sequence[Type]) -> Mapping[Type, Callable[[], torch.Tensor]]:
        float32 = self._call(layer, x, FLOAT32)
        calls, ranges = {FLOAT32: float32}, (range_of(x), range_of(float32()))
        for precision in types:
            with suppress(OptionError):  # a weight that is not finite, sums that overflow, a convolution in int4
                if precision == "int8":
                    self._subject.store(layer, precision)
                calls[precision] = self._call(layer, x, precision, ranges)
        return calls

    def rounded(self, layer: Layer, x: torch.Tensor, trials: LayerTrials) -> LayerTrials:
        """Return the trials of a layer whose weight in four bits is rounded by its activations."""
        self._subject.store(layer, "int4")
        error = relative_error(self._call(layer, x, "int4")(), self._call(layer, x, FLOAT32)())
        return replace(trials, trials={**trials.trials, "int4": replace(trials.trials["int4"], error=error)})

    def _call(
        self, layer: Layer, x: torch.Tensor, precision: Type, ranges: Sequence[Range] = ()
    ) -> Callable[[], torch.Tensor]:
        model = alone(layer, tuple(x.shape))
        if precision != FLOAT32:
            (only,) = layers_of_file(model.graph)
            names = (str(only.x.name), str(only.result.name))
            around, packed = dict(zip(names, ranges, strict=bool(ranges))), self._subject.packed
            if key_of_weight(layer, "int4") not in packed:
                packed = packed if precision != "int4" else {}  # a first trial is rounded to the nearest
            plan, block = Plan({only.name: precision}), self._options.int4_block
            lower_file(model, plan, self._subject.domains, around, packed, int4_block=block)
        runner = self._subject.load(model)
        return lambda: runner([x])[0]
