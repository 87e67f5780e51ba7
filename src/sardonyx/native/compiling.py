"""`sardonyx.native.compile`, and the steps it consists of: parts of an ONNX model as kernels of a library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from sardonyx.errors import OptionError
from sardonyx.model_files import UserModel
from sardonyx.native.carve import Library, Plan, plan
from sardonyx.native.given import given
from sardonyx.native.measure import Bounds, Feeds, Tell, Trial, made_up
from sardonyx.native.model import NativeModel
from sardonyx.native.processor import Processor
from sardonyx.native.report import NativeReport, after_measuring, report_of
from sardonyx.native.select import Between, Choice
from sardonyx.native.targets import Target, target_of
from sardonyx.options import Options


@dataclass(frozen=True)
class Generated:
    """The C++ of a model's kernels, not built."""

    source: str
    domain: str
    """The domain that the kernels are operators of; no other library has it."""
    report: NativeReport
    """Which nodes are in which kernel."""


def compile(
    model: UserModel,
    *,
    select: Choice = "auto",
    inputs: Sequence[str] = (),
    outputs: Sequence[str] = (),
    target: str = "cpu",
    measure: bool | Feeds = False,
    processor: str | None = None,
    progress: Tell | None = None,
    **options: Any,
) -> NativeModel:
    """Compile parts of an ONNX model to a library of operators that a stock onnxruntime loads.

    The model is a path, bytes, an `onnx.ModelProto`, an `onnx_ir.Model`, or what `sardonyx.export` and
    `sardonyx.optimize` return. It stays as it is.

    `select` says what becomes kernels: "auto" what is expected to win, "all" everything that can be; names of nodes; a
    function of an `onnx_ir.Node` that says yes or no; `scope(name)` for a module of the exported model. Or `inputs` and
    `outputs` name the values that bound a region. What is asked for by name and cannot be is an error.

    With `measure` each kernel is timed against the nodes it stands for, as onnxruntime optimises them, and put back
    where it is slower: on inputs that are given by name, or made up for True. `processor` names others than this
    machine's: "x86-64-v3". With `target="cuda"` kernels are for onnxruntime's CUDA provider, built by nvcc for this
    machine's GPU, or for one that `processor` names: "sm_90". `progress` is called with a line for each step. Options
    are those of `Options`: `cache_dir` says where libraries are kept.

    >>> import torch, sardonyx
    >>> program = sardonyx.export(torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Sigmoid()).eval(), (torch.ones(2),))
    >>> compiled = compile(program)
    >>> compiled.report.kernels[0].operators
    ['Tanh', 'Sigmoid']
    >>> compiled.session().run(None, {"input": torch.zeros(2).numpy()})[0].tolist()
    [0.5, 0.5]
    """
    tell = progress or _quietly
    chosen, aim = Options.of(options), target_of(target)
    aim.compiler_version()
    built_for = aim.processor(processor)
    if measure is not False and aim.name != "cpu":
        raise OptionError(f"measure times kernels of the CPU, and target is {aim.name!r}", hint="leave measure out")
    tell("reading the model")
    whole = given(model)
    wanted = _wanted(select, inputs, outputs)
    tell("choosing what becomes kernels")
    found = _planned(whole.clone(), wanted, aim)
    report = report_of(found, wanted)
    if measure is not False and found.parts:
        feeds = made_up(whole.graph) if measure is True else measure
        found, report = _measured(whole, found, feeds, built_for, chosen, wanted, tell)
    return _finished(found, report, built_for, chosen, tell)


def generate(
    model: UserModel,
    *,
    select: Choice = "auto",
    inputs: Sequence[str] = (),
    outputs: Sequence[str] = (),
    target: str = "cpu",
) -> Generated:
    """The C++ that `compile` would build of a model, or CUDA C++, and what is in it. Needs no compiler."""
    wanted = _wanted(select, inputs, outputs)
    found = _planned(given(model), wanted, target_of(target))
    return Generated(found.source if found.parts else "", found.library.domain, report_of(found, wanted))


def convert_graph(
    model: UserModel,
    *,
    select: Choice = "auto",
    inputs: Sequence[str] = (),
    outputs: Sequence[str] = (),
    target: str = "cpu",
) -> ir.Model:
    """The model that calls the kernels that `generate` writes, without building them. It needs their library to run."""
    found = _planned(given(model), _wanted(select, inputs, outputs), target_of(target))
    return _spliced(found)


def _quietly(line: str) -> None:
    pass


def _wanted(select: Choice, inputs: Sequence[str], outputs: Sequence[str]) -> Choice:
    if not inputs and not outputs:
        return select
    if select != "auto" or not inputs or not outputs:
        raise OptionError(
            "a region is bounded by both inputs= and outputs=, and is selected by nothing else",
            hint='give compile(..., inputs=["x"], outputs=["y"]) without select',
        )
    return Between(tuple(inputs), tuple(outputs))


def _planned(model: ir.Model, choice: Choice, target: Target) -> Plan:
    found = plan(model, choice=choice, library=Library(target), branches=True)
    if not found.parts and choice != "auto":
        node, why = next(iter(found.refused.items()), (None, ""))
        what = f"{node.op_type} {node.name!r}: {why}" if node is not None else "no node of the graph is selected"
        raise OptionError(f"nothing becomes a kernel; {what}", hint=_hint(choice))
    return found


def _hint(choice: Choice) -> str:
    if choice == "all":
        return 'select="auto" leaves such a model as it is; docs/native-operators.md lists what has a lowering'
    return 'select="all" takes whatever has a lowering, and reports why the rest has none'


def _built(found: Plan, built_for: Processor, options: Options) -> Path:
    return found.library.target.build(found.source, options, built_for)


def _spliced(found: Plan) -> ir.Model:
    if found.parts:
        found.splice()
        RemoveUnusedNodesPass()(found.model)
    return found.model


def _measured(
    whole: ir.Model, found: Plan, feeds: Feeds, built_for: Processor, options: Options, choice: Choice, tell: Tell
) -> tuple[Plan, NativeReport]:
    """The plan without the parts that do not win, and what was measured."""
    _check(feeds, whole.graph)
    planned, bounds = report_of(found, choice), [Bounds(part, found.model.graph) for part in found.parts]
    tell(f"building {len(found.parts)} kernels")
    library = _built(found, built_for, options)
    trial = Trial(whole, _spliced(found), library, feeds)
    tried = trial.parts(bounds, planned.kernels, tell)
    kept = {i for i, taken in enumerate(tried) if not taken.why_not}
    before = after = None
    if kept:
        tell("measuring the whole model")
        smaller = _planned(whole.clone(), choice, found.library.target).only(kept)
        library = _built(smaller, built_for, options)
        before, after, is_worth_it = Trial(whole, _spliced(smaller), library, feeds).whole()
        if not is_worth_it:
            tried = [replace(taken, why_not=taken.why_not or _GAINS_NOTHING) for taken in tried]
            kept, after = set(), before
    result = _planned(whole.clone(), choice, found.library.target).only(kept)
    report = after_measuring(report_of(result, choice), tried, kept)
    return result, replace(report, seconds_before=before, seconds_after=after)


_GAINS_NOTHING = "the whole model gains nothing by the kernels"


def _check(feeds: Feeds, graph: ir.Graph) -> None:
    missing = {str(x.name) for x in graph.inputs if not x.is_initializer()} - set(feeds)
    if missing:
        raise OptionError(f"measure has no input {min(missing)!r}", hint="give all inputs of the model, by name")


def _finished(found: Plan, report: NativeReport, built_for: Processor, options: Options, tell: Tell) -> NativeModel:
    tell(f"building {len(found.parts)} kernels" if found.parts else "nothing to build")
    library = _built(found, built_for, options) if found.parts else None
    source, target = found.source if found.parts else "", found.library.target
    return NativeModel(_spliced(found), library, source, target.compiler_version(), built_for, report, target.name)
