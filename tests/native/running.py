"""A model run by onnxruntime as it is, and with native kernels in the place of all that can be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias
from unittest import mock

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from sardonyx import Options
from sardonyx.native.partition import DOMAIN, KernelPlan, Library, plan_kernels
from sardonyx.native.select import Choice
from sardonyx.toolchain import compiler

Feeds: TypeAlias = Mapping[str, np.ndarray]

_NEWEST = 24
"""An opset that every onnxruntime under test knows."""
TOLERANCES = {np.dtype(np.float16): 4e-3, np.dtype(ml_dtypes.bfloat16): 3e-2, np.dtype(np.float64): 1e-12}
"""Of the largest number; 1e-5 for what is not here."""


def model_of(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, tuple[int, Sequence[int | str]]],
    outputs: Sequence[str],
    initializers: Mapping[str, np.ndarray] | None = None,
    *,
    opset: int = 21,
) -> onnx.ModelProto:
    """A model with the sizes of everything inferred; outputs have the types that the operators give."""
    known = {name: helper.make_tensor_value_info(name, kind, dims) for name, (kind, dims) in inputs.items()}
    graph = helper.make_graph(
        nodes,
        "g",
        list(known.values()),
        [known.get(name, onnx.ValueInfoProto(name=name)) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in (initializers or {}).items()],
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return inferred(helper.make_model(graph, opset_imports=opsets, ir_version=10))


def inferred(model: onnx.ModelProto) -> onnx.ModelProto:
    return onnx.shape_inference.infer_shapes(model, data_prop=True, strict_mode=False)


@dataclass
class Together:
    """Models whose kernels are in one library: one call of the compiler serves all of them."""

    choice: Choice = "all"
    library: Library = field(default_factory=Library)
    _plans: dict[str, KernelPlan] = field(default_factory=dict)
    _built: Path | None = None

    def add(self, name: str, model: onnx.ModelProto) -> str | None:
        """Take a model in; why nothing of it is a kernel, if so."""
        taken = ir.from_proto(model)
        found = plan_kernels(taken, choice=self.choice, library=self.library)
        if not found.parts:
            return next(iter(found.rejected.values()), "nothing to do")
        self._plans[name] = found
        return None

    @property
    def names(self) -> list[str]:
        return list(self._plans)

    def build(self, *, quickly: bool = False) -> Path:
        """Compile, and put the kernels into the models. Quickly: with less care for the speed of the result."""
        flags = tuple("-O1" if quickly and flag == "-O3" else flag for flag in compiler.FLAGS)
        with mock.patch.object(compiler, "FLAGS", flags):
            self._built = compiler.build_library(self.library.source, Options.of())
        for found in self._plans.values():
            found.splice()
        return self._built

    def groups(self, name: str) -> list[list[str]]:
        return self._plans[name].groups

    def model(self, name: str) -> onnx.ModelProto:
        """The model with its kernels."""
        proto = ir.to_proto(self._plans[name].model)
        kernels = [node for node in proto.graph.node if node.domain.startswith(DOMAIN)]
        assert kernels, f"{name} has no kernel"
        if len(kernels) == len(proto.graph.node):
            for opset in proto.opset_import:
                if not opset.domain:
                    opset.version = min(opset.version, _NEWEST)
        proto.ir_version = min(proto.ir_version, 10)
        return proto

    def session(self, name: str, *, threads: int = 1) -> onnxruntime.InferenceSession:
        return session_of(self.model(name), library=self._built, threads=threads)

    def run(self, name: str, feeds: Feeds, *, threads: int = 1) -> list[np.ndarray]:
        return run(self.session(name, threads=threads), feeds)


def session_of(
    model: onnx.ModelProto,
    *,
    library: Path | None = None,
    threads: int = 1,
    providers: Sequence[str] = ("CPUExecutionProvider",),
) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    if library is not None:
        options.register_custom_ops_library(str(library))
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=list(providers))


def run(session: onnxruntime.InferenceSession, feeds: Feeds) -> list[np.ndarray]:
    """A session's outputs; numbers that numpy does not know travel as their bits."""
    given = {
        x.name: onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(
            _contiguous(feeds[x.name]).view(np.uint16), TensorProto.BFLOAT16
        )
        if feeds[x.name].dtype == ml_dtypes.bfloat16
        else onnxruntime.OrtValue.ortvalue_from_numpy(_contiguous(feeds[x.name]))
        for x in session.get_inputs()
    }
    outputs = session.run_with_ort_values([x.name for x in session.get_outputs()], given)
    return [_array(value) for value in outputs]


def _contiguous(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(array.shape)


def _array(value: onnxruntime.OrtValue) -> np.ndarray:
    if value.element_type() == TensorProto.BFLOAT16:
        import torch

        if 0 in value.shape():
            return np.zeros(value.shape(), ml_dtypes.bfloat16)
        seen = torch.from_dlpack(value._ortvalue.to_dlpack())
        return seen.view(torch.int16).numpy().view(ml_dtypes.bfloat16).copy()
    return value.numpy()


def difference(
    found: np.ndarray, wanted: np.ndarray, *, tolerance: float | None = None, least: float = 0.0
) -> str | None:
    """How two arrays differ; None if they do not. Real numbers by the largest of what is wanted, or `least`."""
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return f"{found.dtype}{found.shape} instead of {wanted.dtype}{wanted.shape}"
    if found.dtype.kind not in "fV" or not found.size:
        unequal = found != wanted
        return f"{int(unequal.sum())} of {found.size} differ" if unequal.any() else None
    tolerance = TOLERANCES.get(found.dtype, 1e-5) if tolerance is None else tolerance
    a, b = found.astype(np.float64), wanted.astype(np.float64)
    finite = np.isfinite(b)
    if not np.array_equal(np.where(finite, 0, a), np.where(finite, 0, b), equal_nan=True):
        return f"{a[~finite][:4]} instead of {b[~finite][:4]}"
    largest = float(np.abs(b[finite]).max(initial=least))
    error = float(np.abs(a[finite] - b[finite]).max(initial=0.0))
    if not error <= tolerance * largest + np.finfo(np.float32).tiny:
        return f"error {error:.3g} where the largest is {largest:.3g}"
    return None


def compare(
    model: onnx.ModelProto, feeds: Feeds, *, choice: Choice = "all", threads: int = 1, tolerance: float | None = None
) -> list[np.ndarray]:
    """Run a model both ways; the results with kernels, which agree with those without."""
    together = Together(choice)
    why = together.add("model", model)
    assert why is None, why
    together.build(quickly=True)
    found = together.run("model", feeds, threads=threads)
    for a, b, output in zip(found, run(session_of(model), feeds), model.graph.output, strict=True):
        differs = difference(a, b, tolerance=tolerance)
        assert differs is None, f"{output.name}: {differs}"
    return found


def operators_in(model: onnx.ModelProto) -> list[str]:
    """What is left of a model: its operators, with a word for every kernel."""
    return ["kernel" if node.domain.startswith(DOMAIN) else node.op_type for node in model.graph.node]
