"""`sardonyx.optimize`: apply the rewrite rules to an existing ONNX model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir
import sympy
import torch
from onnx_ir.passes.common import ShapeInferencePass
from torch.utils import _pytree as pytree

from sardonyx import opsets
from sardonyx.capture.regions import Result
from sardonyx.doors.call_arguments import Argument
from sardonyx.doors.program import CallSpec, Program, calibration_calls, calibration_inputs, map_external_weights
from sardonyx.errors import OptionError, SardonyxError
from sardonyx.model_files import UserModel, blame_invalid_model, load_model, quiet_onnx_ir
from sardonyx.native.lower_precision import lower_precision_by
from sardonyx.options import Options
from sardonyx.pipeline import build_file
from sardonyx.run.binding import Binding
from sardonyx.sizes import symbol_of
from sardonyx.telemetry.report import collecting, new_graph_report
from sardonyx.translate import inference


def optimize(
    model: UserModel, *, domains: Sequence[str] | None = None, calibration: Iterable[Any] = (), **options: Any
) -> Program:
    """Apply the rewrite rules of compiled models to an ONNX model, given as a file or in memory.

    The given model is not changed. `opset` converts it to a later opset first: attention, RMS norm and rotary
    embedding, which the rules find in older graphs too, are operators since 23. `domains` are the operator domains,
    in addition to ONNX's own, that the result may use, by default those of the engine. Call the result with the model's
    inputs in order. With `native=True` groups of operators become kernels, as in `sardonyx.export`.

    With `precision` layers become standard operators in fewer bits, as far as results stay within `max_drop` of those
    in float32 in the calls of `calibration`: a tuple of inputs for each, or a dict of inputs by name.

    >>> from sardonyx import export
    >>> model = export(torch.nn.SiLU(), (torch.ones(2),), optimize="none").proto()
    >>> optimize(model)(torch.zeros(2))
    tensor([0., 0.])
    """
    chosen = Options.of(options)
    with blame_invalid_model(model), collecting() as report:
        graph_report = new_graph_report("given", 0)
        with graph_report.stage("load"):
            loaded = _infer_dims(_convert_opset(map_external_weights(load_model(model)), chosen.opset))
        graph_report.operators = sum(1 for _ in loaded.graph.all_nodes())
        device = torch.device("cpu")
        call_spec = _call_spec(loaded)
        feeds = [_calibration_inputs(call_spec, call) for call in calibration_calls(calibration)]
        library = build_file(loaded, device, chosen, graph_report, domains=domains, calibration=feeds)
    return Program(loaded, call_spec, device, chosen, report, library)


@lower_precision_by
def _lower_precision(model: UserModel, calibration: Iterable[Any], options: Options) -> ir.Model:
    """Return a model with layers in lower precision, and otherwise as it is."""
    return optimize(
        model,
        calibration=calibration,
        precision=options.precision,
        max_drop=options.max_drop,
        int4_block=options.int4_block,
        metric=options.metric,
        cache_dir=options.cache_dir,
        optimize="none",
    ).model


def _calibration_inputs(call_spec: CallSpec, call: Any) -> list[torch.Tensor]:
    """Return the inputs in order of a call: a tuple, a dict by name, or a tensor."""
    if not isinstance(call, Mapping):
        return calibration_inputs(call_spec, (call,) if isinstance(call, torch.Tensor) else tuple(call), {})
    names = [argument.path for argument in call_spec.arguments]
    if set(call) != set(names):
        raise OptionError(
            f"a call of calibration= has the inputs {sorted(call)}, and the model takes {names}",
            hint="give all inputs of the model by name",
        )
    return calibration_inputs(call_spec, [torch.as_tensor(call[name]) for name in names], {})


def _convert_opset(model: ir.Model, wanted: int | None) -> ir.Model:
    """Convert the model to the requested opset, or to the oldest that the rules support."""
    opset = model.graph.opset_imports.get("", opsets.OLDEST)
    target = max(opset, wanted or opsets.OLDEST)
    if target == opset:
        return model
    try:
        return ir.from_proto(onnx.version_converter.convert_version(ir.to_proto(model), target))
    except Exception as error:
        raise SardonyxError(
            f"the model has opset {opset}, and onnx cannot convert it to {target}: {error}",
            hint="export it again with a later opset",
        ) from error


def _infer_dims(model: ir.Model) -> ir.Model:
    """Infer shapes, and set the sizes that the rules read: integers, and a symbol for every named size."""
    with quiet_onnx_ir():
        model = ShapeInferencePass()(model).model
    graph = model.graph
    values = [*graph.inputs, *graph.initializers.values()]
    values += [output for node in graph.all_nodes() for output in node.outputs]
    for value in values:
        if value.shape is not None and value.shape.has_unknown_dim():
            continue
        if value.shape is not None:
            inference.set_dims(value, tuple(map(_dim, value.shape)))
    return model


def _dim(size: int | ir.SymbolicDim) -> int | sympy.Expr:
    return size if isinstance(size, int) else symbol_of(str(size.value))


def _call_spec(model: ir.Model) -> CallSpec:
    """Return a call spec with positional inputs and a tensor or a tuple of tensors as the result."""
    inputs, outputs = len(model.graph.inputs), len(model.graph.outputs)
    in_spec = pytree.tree_structure(((0,) * inputs, {}))
    out_spec = pytree.tree_structure(0 if outputs == 1 else (0,) * outputs)
    arguments = [_argument(value) for value in model.graph.inputs]
    names = [argument.path for argument in arguments]
    binding = Binding(tuple(range(inputs)), tuple(map(Result, range(outputs))))
    return CallSpec(in_spec, out_spec, names, arguments, binding)


def _argument(value: ir.Value) -> Argument:
    """Return the argument of an input, with the sizes that the model declares."""
    sizes = None if value.shape is None else [dim if isinstance(dim, int) else None for dim in value.shape]
    return Argument(str(value.name), "tensor", sizes=sizes)
