"""What can be at fault, item by item, and a model made ready with some of the items alone."""

from __future__ import annotations

import os
import re
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import onnx_ir as ir
import torch

from sardonyx.diagnose.comparison.run_config import level
from sardonyx.diagnose.comparison.subject import Feeds, Subject
from sardonyx.diagnose.comparison.trace import apply_rules, run, runner, with_session
from sardonyx.engines.registry import find as find_engine
from sardonyx.native.carve import Part, Plan, plan
from sardonyx.optimize.selection import selected
from sardonyx.options import Options
from sardonyx.toolchain import compiler

ItemKind: TypeAlias = Literal["option", "optimizer", "level", "kernel", "rule"]
KINDS: tuple[ItemKind, ...] = ("option", "optimizer", "level", "kernel", "rule")
"""In the order in which they are taken away: what comes last to a model goes first."""

_APPLIED = re.compile(r"GraphTransformer (\S+) modified: 1")
_DISABLE = "optimization.disable_specified_optimizers"
_NOT_FLAGS = ("graph_optimization_level", "custom_ops", "config")


@dataclass(frozen=True)
class Item:
    """A thing that may change a result: a rule, a kernel, an optimizer of ONNX Runtime, an entry of an option."""

    kind: ItemKind
    name: str


@dataclass
class Settings:
    """A model, and what its options put on it."""

    subject: Subject
    options: Options
    _kernels: dict[frozenset[Item], tuple[Plan, Path]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._cpu = torch.device("cpu")
        self._flags = _option_entries(self.options)
        given = self.options.session_options
        self._level = given.get("graph_optimization_level") if isinstance(given, Mapping) else None
        self._optimizers: list[str] = []

    def items(self, kind: ItemKind, context: Sequence[Item]) -> list[Item]:
        """What there is of a kind, with the context in use."""
        return [Item(kind, name) for name in _LIST_NAMES[kind](self, context)]

    def _rule_names(self, context: Sequence[Item]) -> list[str]:
        return sorted(selected(self.options.optimize))

    def _kernel_names(self, context: Sequence[Item]) -> list[str]:
        if self.options.native is not True or not find_engine(self.options.engine).takes_kernels(self._cpu):
            return []
        return [_kernel_name(part) for part in plan(self._rewritten(context)).parts]

    def _level_names(self, context: Sequence[Item]) -> list[str]:
        off = not find_engine(self.options.engine).takes_session_options or self._level == level("none")
        return [] if off else ["graph_optimization_level"]

    def _optimizer_names(self, context: Sequence[Item]) -> list[str]:
        """Those of ONNX Runtime that do something to the model, as it says itself when it is asked to tell more."""
        if not self._level_names(context):
            return []
        model, options = self.ready([*context, *self.items("option", context)])
        with _capture_stderr() as heard:
            run(model, with_session(options, log_severity_level=1), self.subject.calls[0])
        self._optimizers = list(dict.fromkeys(_APPLIED.findall("".join(heard))))
        return self._optimizers

    def _flag_names(self, context: Sequence[Item]) -> list[str]:
        return list(self._flags)

    def ready(self, items: Sequence[Item]) -> tuple[ir.Model, Options]:
        """The model and the options with these items and no others."""
        names = {kind: [item.name for item in items if item.kind == kind] for kind in KINDS}
        options = self._chosen(names)
        model = self._rewritten(items)
        if names["kernel"]:
            library = self._splice(model, items, names["kernel"])
            options = with_session(options, custom_ops=[str(library)])
        return model, options

    def call(self, items: Sequence[Item]) -> Callable[[Feeds], list[torch.Tensor]]:
        """A function of inputs, with these items and no others."""
        return runner(*self.ready(items))

    def _rewritten(self, items: Sequence[Item]) -> ir.Model:
        names = [item.name for item in items if item.kind == "rule"]
        return apply_rules(Options.of(self.options, optimize=names or "none"), self.subject)

    def _splice(self, model: ir.Model, items: Sequence[Item], names: Sequence[str]) -> Path:
        """Put kernels into a model; the library that has them, which is built once for all that could be there."""
        found = plan(model)
        key = frozenset(item for item in items if item.kind == "rule")
        if key not in self._kernels:
            self._kernels[key] = (found, compiler.built(found.source, self.options))
        library = self._kernels[key][1]
        parts = [part for part in found.parts if _kernel_name(part) in names]
        Plan(model, parts, found.library, found.refused).splice()
        return library

    def _chosen(self, names: Mapping[ItemKind, Sequence[str]]) -> Options:
        given = self.options.session_options
        kept = {"custom_ops": given["custom_ops"]} if isinstance(given, Mapping) and "custom_ops" in given else {}
        session: dict[str, Any] = {**kept, "config": {}}
        chosen: dict[str, Any] = {"engine_options": {}}
        words = []
        for name in names["option"]:
            where, key, value = self._flags[name]
            if where == "compile_options":
                words.append(value)
            elif where == "engine_options":
                chosen["engine_options"][key] = value
            else:
                (session["config"] if where == "config" else session)[key] = value
        if find_engine(self.options.engine).takes_session_options:
            self._set_level(session, names)
        chosen["engine_options"] = chosen["engine_options"] or None
        session = {key: value for key, value in session.items() if value not in ({}, None)}
        return Options.of(
            self.options,
            session_options=session or None,
            compile_options=shlex.join(words),
            optimize="none",
            native=False,
            **chosen,
        )

    def _set_level(self, session: dict[str, Any], names: Mapping[ItemKind, Sequence[str]]) -> None:
        session["graph_optimization_level"] = self._level if names["level"] or names["optimizer"] else level("none")
        disabled = [name for name in self._optimizers if name not in names["optimizer"]]
        if disabled and (names["level"] or names["optimizer"]):
            session["config"][_DISABLE] = ";".join(disabled)


_LIST_NAMES: Mapping[ItemKind, Callable[[Settings, Sequence[Item]], list[str]]] = {
    "option": Settings._flag_names,
    "optimizer": Settings._optimizer_names,
    "level": Settings._level_names,
    "kernel": Settings._kernel_names,
    "rule": Settings._rule_names,
}


def _kernel_name(part: Part) -> str:
    """A kernel by what it computes and the operators that are in it."""
    operators = " ".join(node.op_type for node in part.group)
    return f"{part.gives[0].name} ({operators})"


def _option_entries(options: Options) -> dict[str, tuple[str, str, Any]]:
    """Entries of options, each by the name a user knows it by: where it belongs, its key and its value."""
    found: dict[str, tuple[str, str, Any]] = {}
    session = options.session_options if isinstance(options.session_options, Mapping) else {}
    for key, value in session.get("config", {}).items():
        found[f"session_options.config.{key}={value}"] = ("config", key, value)
    for key, value in session.items():
        if key not in _NOT_FLAGS:
            found[f"session_options.{key}={value}"] = ("session_options", key, value)
    for key, value in (options.engine_options or {}).items():
        found[f"engine_options.{key}={value}"] = ("engine_options", key, value)
    for word in shlex.split(options.compile_options):
        found[f"compile_options {word}"] = ("compile_options", word, word)
    return found


@contextmanager
def _capture_stderr() -> Iterator[list[str]]:
    """While active, what native code writes to standard error is kept instead; the list is filled at the end."""
    heard: list[str] = []
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield heard
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            heard.append(file.read())
