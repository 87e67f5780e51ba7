"""`sardonyx ops`: list how torch's operators are translated to ONNX."""

from __future__ import annotations

from collections import Counter
from fnmatch import fnmatchcase
from typing import Any

import click
import torch

from sardonyx.capture.aot import decompositions
from sardonyx.capture.export import capture
from sardonyx.cli._messages import example, print_result, stdout_to_stderr, table
from sardonyx.cli._parameters import MODEL, as_json
from sardonyx.cli._source import Source
from sardonyx.translate import table as translations
from sardonyx.translate import torchlib

OWN, TORCHLIB, DECOMPOSED, MISSING = "own", "torchlib", "taken apart", "missing"
_MEANING = {
    OWN: "translated by sardonyx",
    TORCHLIB: "translated by onnxscript's torchlib",
    DECOMPOSED: "decomposed by torch into other operators",
    MISSING: "runs in torch, or is an error with fallback='error' and in exports",
}


def coverage(everything: bool = False) -> dict[str, str]:
    """Return how each operator is translated: those in sardonyx's table, and core ATen or all of ATen."""
    own, decomposed = translations.names(), set(decompositions())
    methods = dict.fromkeys(own, OWN)
    for name, operator in _aten_operators().items():
        if name not in own and (everything or torch.Tag.core in operator.tags):
            decomposes = operator in decomposed or operator._can_decompose()
            methods[name] = DECOMPOSED if decomposes else TORCHLIB if _in_torchlib(name, operator) else MISSING
    return dict(sorted(methods.items()))


def _aten_operators() -> dict[str, Any]:
    """Return ATen's functional operators: in-place ones are replaced by them before translation."""
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    operators = {name: translations.find_operator(name) for name in names if not name.startswith("aten::sym_")}
    return {name: op for name, op in operators.items() if op is not None and not op._schema.is_mutable}


def _in_torchlib(name: str, operator: Any) -> bool:
    """Whether torchlib can translate it: it has one result, and torchlib's translation is not known to be wrong."""
    if name in torchlib.WRONG or torch.Tag.nondeterministic_seeded in operator.tags:
        return False
    return len(operator._schema.returns) == 1 and bool(torchlib.registry().is_registered(operator))


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) if set(pattern) & set("*?[") else pattern in name


def _count_calls(model: Source) -> Counter[str]:
    """Count the calls of each operator in a model."""
    module, call = model.module(), model.require_example()
    with stdout_to_stderr():
        graph = capture(module, *call).graph.graph
    called = [node.target for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    return Counter(translations.name_of(x) for x in called if x._schema.returns)  # operators without results are checks


@click.command(
    epilog=example(
        "sardonyx ops softmax",
        "sardonyx ops 'aten::conv*'",
        "sardonyx ops --missing",
        "sardonyx ops --of examples/models.py:bert",
    )
)
@click.argument("pattern", default="")
@click.option("--missing", is_flag=True, help="Only operators without a translation.")
@click.option("--all", "everything", is_flag=True, help="All of ATen, not only its core.")
@click.option("--of", "model", type=MODEL, metavar="MODEL", help="Only operators that a torch model calls.")
@as_json
def command(pattern: str, missing: bool, everything: bool, model: Source | None, as_json: bool) -> None:
    """List torch's operators and how they are translated to ONNX.

    PATTERN is a part of their names, or a glob with *, ? and [].
    """
    calls = None if model is None else _count_calls(model)
    known = coverage(everything or calls is not None)
    listed = known if calls is None else {name: known.get(name, MISSING) for name in sorted(calls)}
    shown = {name: how for name, how in listed.items() if _matches(name, pattern) and (how == MISSING or not missing)}
    counts = Counter(shown.values())
    rows = [(name, how, *([str(calls[name])] if calls else [])) for name, how in shown.items()]
    legend = [f"{counts[how]:>5}  {how}: {meaning}" for how, meaning in _MEANING.items() if counts[how]]
    result = {"operators": shown, "counts": {how: counts[how] for how in _MEANING}}
    result |= {} if calls is None else {"calls": {name: calls[name] for name in shown}}
    print_result(
        result,
        as_json,
        table(["operator", "translation", *(["calls"] if calls else [])], rows, right=("calls",)),
        "",
        *(legend or ["nothing is missing" if missing else "no operator matches"]),
    )
