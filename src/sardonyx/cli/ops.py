"""`sardonyx ops`: which of torch's operators become ONNX, and how."""

from __future__ import annotations

from collections import Counter
from fnmatch import fnmatchcase
from typing import Any

import click
import torch

from sardonyx.capture.aot import decompositions
from sardonyx.capture.export import capture
from sardonyx.cli._messages import stdout_to_stderr
from sardonyx.cli._parameters import MODEL, Source, as_json, example, print_result, table
from sardonyx.translate import table as translations
from sardonyx.translate import torchlib

OWN, TORCHLIB, DECOMPOSED, MISSING = "own", "torchlib", "taken apart", "missing"
_MEANING = {
    OWN: "a translation of sardonyx",
    TORCHLIB: "onnxscript's translation",
    DECOMPOSED: "torch writes it with other operators",
    MISSING: "stays in torch, or is an error with fallback='error' and in exports",
}


def coverage(everything: bool = False) -> dict[str, str]:
    """How each operator is translated: those of sardonyx's table, and the core of ATen, or all of it."""
    own, apart = translations.names(), set(decompositions())
    found = dict.fromkeys(own, OWN)
    for name, operator in _aten_operators().items():
        if name not in own and (everything or torch.Tag.core in operator.tags):
            written = operator in apart or operator._can_decompose()
            found[name] = DECOMPOSED if written else TORCHLIB if _in_torchlib(name, operator) else MISSING
    return dict(sorted(found.items()))


def _aten_operators() -> dict[str, Any]:
    """ATen's operators that write to nothing: the others are taken for those before a graph is translated."""
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    found = {name: translations.find_operator(name) for name in names if not name.startswith("aten::sym_")}
    return {name: op for name, op in found.items() if op is not None and not op._schema.is_mutable}


def _in_torchlib(name: str, operator: Any) -> bool:
    """Whether a call of it can go by torchlib: it has one result, and torchlib's translation is not known as wrong."""
    if name in torchlib.WRONG or torch.Tag.nondeterministic_seeded in operator.tags:
        return False
    return len(operator._schema.returns) == 1 and bool(torchlib.registry().is_registered(operator))


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) if set(pattern) & set("*?[") else pattern in name


def _count_calls(model: Source) -> Counter[str]:
    """How often a model calls each operator."""
    module, call = model.module(), model.called_with()
    with stdout_to_stderr():
        graph = capture(module, *call).graph.graph
    called = [node.target for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    return Counter(translations.name_of(x) for x in called if x._schema.returns)  # the others only check something


@click.command(
    epilog=example(
        "sardonyx ops softmax",
        "sardonyx ops 'aten::conv*'",
        "sardonyx ops --missing",
        "sardonyx ops --of examples/models.py:bert",
    )
)
@click.argument("pattern", default="")
@click.option("--missing", is_flag=True, help="Only those that ONNX is not given.")
@click.option("--all", "everything", is_flag=True, help="All of ATen, not only its core.")
@click.option("--of", "model", type=MODEL, metavar="MODEL", help="Only those that a model in torch calls.")
@as_json
def command(pattern: str, missing: bool, everything: bool, model: Source | None, as_json: bool) -> None:
    """List the operators of torch that become ONNX.

    PATTERN is a part of their names, or has *, ? and [] as file names have them.
    """
    calls = None if model is None else _count_calls(model)
    known = coverage(everything or calls is not None)
    listed = known if calls is None else {name: known.get(name, MISSING) for name in sorted(calls)}
    found = {name: how for name, how in listed.items() if _matches(name, pattern) and (how == MISSING or not missing)}
    counts = Counter(found.values())
    rows = [(name, how, *([str(calls[name])] if calls else [])) for name, how in found.items()]
    meant = [f"{counts[how]:>5}  {how}: {meaning}" for how, meaning in _MEANING.items() if counts[how]]
    told = {"operators": found, "counts": {how: counts[how] for how in _MEANING}}
    told |= {} if calls is None else {"calls": {name: calls[name] for name in found}}
    print_result(
        told,
        as_json,
        table(["operator", "translation", *(["calls"] if calls else [])], rows, right=("calls",)),
        "",
        *(meant or ["nothing is missing" if missing else "no operator is so named"]),
    )
