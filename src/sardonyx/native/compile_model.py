"""`sardonyx.native.compile`, and its steps: compile parts of an ONNX model to a library of kernels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from sardonyx.errors import OptionError
from sardonyx.model_files import UserModel
from sardonyx.native.load_model import load_inferred_model
from sardonyx.native.lower_precision import lower_precision
from sardonyx.native.measure import Feeds, GroupBounds, Measurement, Progress, random_inputs
from sardonyx.native.model import NativeModel
from sardonyx.native.partition import KernelPlan, Library, plan_kernels
from sardonyx.native.processor import Processor
from sardonyx.native.report import NativeReport, report_of, with_measurements
from sardonyx.native.select import BoundedRegion, Choice
from sardonyx.native.targets import Target, target_of
from sardonyx.options import Options


@dataclass(frozen=True)
class Generated:
    """The C++ source of a model's kernels, not built."""

    source: str
    domain: str
    """The domain of the kernels, unique to this library."""
    report: NativeReport
    """The nodes of each kernel."""


def compile(
    model: UserModel,
    *,
    select: Choice = "auto",
    inputs: Sequence[str] = (),
    outputs: Sequence[str] = (),
    target: str = "cpu",
    measure: bool | Feeds = False,
    processor: str | None = None,
    progress: Progress | None = None,
    calibration: Iterable[Any] = (),
    **options: Any,
) -> NativeModel:
    """Compile parts of an ONNX model to a library of custom operators that a stock onnxruntime loads.

    The model is a path, bytes, an `onnx.ModelProto`, an `onnx_ir.Model`, or the result of `sardonyx.export` or
    `sardonyx.optimize`. It is not modified.

    `select` chooses the nodes: "auto" those expected to run faster, "all" everything that can be lowered; a list of
    node names; a predicate of an `onnx_ir.Node`; `scope(name)` for a module of the exported model. Or `inputs` and
    `outputs` name the values that bound a region. A node selected by name that cannot be lowered is an error.

    With `measure` each kernel is timed against the nodes it replaces, as onnxruntime optimizes them, and dropped if it
    is slower: on the given inputs by name, or on random ones for True. `processor` selects another processor than this
    machine's: "x86-64-v3". With `target="cuda"` kernels are for onnxruntime's CUDA provider, built by NVRTC for this
    machine's GPU, or for the architecture in `processor`: "sm_90". `progress` is called with a line for each step.
    Further options are those of `Options`: `cache_dir` is where libraries are cached; with `precision` layers become
    standard operators in fewer bits first, as `sardonyx.optimize` makes them by the calls of `calibration`.

    >>> import torch, sardonyx
    >>> program = sardonyx.export(torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Sigmoid()).eval(), (torch.ones(2),))
    >>> compiled = compile(program)
    >>> compiled.report.kernels[0].operators
    ['Tanh', 'Sigmoid']
    >>> compiled.session().run(None, {"input": torch.zeros(2).numpy()})[0].tolist()
    [0.5, 0.5]
    """
    report_progress = progress or _silent
    compile_options, kernel_target = Options.of(options), target_of(target)
    kernel_target.compiler_version()
    built_for = kernel_target.processor(processor)
    if measure is not False and kernel_target.name != "cpu":
        raise OptionError(
            f"measure supports CPU kernels only, and target is {kernel_target.name!r}", hint="omit measure"
        )
    report_progress("reading the model")
    if compile_options.precision != "float32":
        model = lower_precision(model, calibration, compile_options)
    elif not isinstance(calibration, Sized) or len(calibration):
        compile_options.require_precision("calibration")
    original = load_inferred_model(model)
    choice = _choice(select, inputs, outputs)
    report_progress("choosing what becomes kernels")
    plan = _plan(original.clone(), choice, kernel_target)
    report = report_of(plan, choice)
    if measure is not False and plan.parts:
        feeds = random_inputs(original.graph) if measure is True else measure
        plan, report = _measure(original, plan, feeds, built_for, compile_options, choice, report_progress)
    return _finish(plan, report, built_for, compile_options, report_progress)


def generate(
    model: UserModel,
    *,
    select: Choice = "auto",
    inputs: Sequence[str] = (),
    outputs: Sequence[str] = (),
    target: str = "cpu",
) -> Generated:
    """Return the C++ or CUDA C++ that `compile` would build for a model, and its report, without a compiler."""
    choice = _choice(select, inputs, outputs)
    plan = _plan(load_inferred_model(model), choice, target_of(target))
    return Generated(plan.source if plan.parts else "", plan.library.domain, report_of(plan, choice))


def convert_graph(
    model: UserModel,
    *,
    select: Choice = "auto",
    inputs: Sequence[str] = (),
    outputs: Sequence[str] = (),
    target: str = "cpu",
) -> ir.Model:
    """Return the model that calls the kernels of `generate`, without building them; it needs their library to run."""
    plan = _plan(load_inferred_model(model), _choice(select, inputs, outputs), target_of(target))
    return _splice(plan)


def _silent(line: str) -> None:
    pass


def _choice(select: Choice, inputs: Sequence[str], outputs: Sequence[str]) -> Choice:
    if not inputs and not outputs:
        return select
    if select != "auto" or not inputs or not outputs:
        raise OptionError(
            "a region needs both inputs= and outputs=, and no select=",
            hint='use compile(..., inputs=["x"], outputs=["y"])',
        )
    return BoundedRegion(tuple(inputs), tuple(outputs))


def _plan(model: ir.Model, choice: Choice, target: Target) -> KernelPlan:
    plan = plan_kernels(model, choice=choice, library=Library(target), branches=True)
    if not plan.parts and choice != "auto":
        node, reason = next(iter(plan.rejected.items()), (None, ""))
        cause = f"{node.op_type} {node.name!r}: {reason}" if node is not None else "no node of the graph is selected"
        raise OptionError(f"no node becomes a kernel; {cause}", hint=_hint(choice))
    return plan


def _hint(choice: Choice) -> str:
    if choice == "all":
        return 'select="auto" leaves such a model unchanged; docs/native-operators.md lists operators with a lowering'
    return 'select="all" takes every node with a lowering, and reports why others have none'


def _build(plan: KernelPlan, processor: Processor, options: Options) -> Path:
    return plan.library.target.build(plan.source, options, processor)


def _splice(plan: KernelPlan) -> ir.Model:
    if plan.parts:
        plan.splice()
        RemoveUnusedNodesPass()(plan.model)
    return plan.model


def _measure(
    original: ir.Model,
    plan: KernelPlan,
    feeds: Feeds,
    processor: Processor,
    options: Options,
    choice: Choice,
    report_progress: Progress,
) -> tuple[KernelPlan, NativeReport]:
    """Return the plan without the kernels that are not faster, and a report with the measurements."""
    _check_feeds(feeds, original.graph)
    planned, bounds = report_of(plan, choice), [GroupBounds(part, plan.model.graph) for part in plan.parts]
    report_progress(f"building {len(plan.parts)} kernels")
    library = _build(plan, processor, options)
    measurement = Measurement(original, _splice(plan), library, feeds)
    measured = measurement.time_parts(bounds, planned.kernels, report_progress)
    kept = {i for i, entry in enumerate(measured) if not entry.why_not}
    before = after = None
    if kept:
        report_progress("measuring the whole model")
        smaller = _plan(original.clone(), choice, plan.library.target).subset(kept)
        library = _build(smaller, processor, options)
        before, after, is_worth_it = Measurement(original, _splice(smaller), library, feeds).time_model()
        if not is_worth_it:
            measured = [replace(entry, why_not=entry.why_not or _NOT_FASTER) for entry in measured]
            kept, after = set(), before
    result = _plan(original.clone(), choice, plan.library.target).subset(kept)
    report = with_measurements(report_of(result, choice), measured, kept)
    return result, replace(report, seconds_before=before, seconds_after=after)


_NOT_FASTER = "the whole model is not faster with the kernels"


def _check_feeds(feeds: Feeds, graph: ir.Graph) -> None:
    missing = {str(x.name) for x in graph.inputs if not x.is_initializer()} - set(feeds)
    if missing:
        raise OptionError(f"measure has no input {min(missing)!r}", hint="pass all inputs of the model by name")


def _finish(
    plan: KernelPlan, report: NativeReport, processor: Processor, options: Options, report_progress: Progress
) -> NativeModel:
    report_progress(f"building {len(plan.parts)} kernels" if plan.parts else "nothing to build")
    library = _build(plan, processor, options) if plan.parts else None
    source, target = plan.source if plan.parts else "", plan.library.target
    return NativeModel(_splice(plan), library, source, target.compiler_version(), processor, report, target.name)
