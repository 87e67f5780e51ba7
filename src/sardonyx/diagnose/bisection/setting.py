"""The items that `bisect` enables and disables, and the model with a selection of them."""

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
from sardonyx.native.partition import KernelGroup, KernelPlan, plan_kernels
from sardonyx.optimize.selection import select_rules
from sardonyx.options import Options
from sardonyx.toolchain import compiler

ItemKind: TypeAlias = Literal["option", "optimizer", "level", "kernel", "rule"]
KINDS: tuple[ItemKind, ...] = ("option", "optimizer", "level", "kernel", "rule")
"""In the order in which they are disabled: the last that is applied to a model comes first."""

_APPLIED = re.compile(r"GraphTransformer (\S+) modified: 1")
_DISABLE = "optimization.disable_specified_optimizers"
_NOT_FLAGS = ("graph_optimization_level", "custom_ops", "config")


@dataclass(frozen=True)
class Item:
    """Something that may change a result: a rule, a kernel, an optimizer of ONNX Runtime, an entry of an option."""

    kind: ItemKind
    name: str


@dataclass
class Settings:
    """A model, and the items that its options enable."""

    subject: Subject
    options: Options
    _kernels: dict[frozenset[Item], tuple[KernelPlan, Path]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._cpu = torch.device("cpu")
        self._flags = _option_entries(self.options)
        session = self.options.session_options
        self._level = session.get("graph_optimization_level") if isinstance(session, Mapping) else None
        self._optimizers: list[str] = []

    def items(self, kind: ItemKind, context: Sequence[Item]) -> list[Item]:
        """Return the items of a kind, with the context enabled."""
        return [Item(kind, name) for name in _LIST_NAMES[kind](self, context)]

    def _rule_names(self, context: Sequence[Item]) -> list[str]:
        return sorted(select_rules(self.options.optimize))

    def _kernel_names(self, context: Sequence[Item]) -> list[str]:
        if self.options.native is not True or not find_engine(self.options.engine).takes_kernels(self._cpu):
            return []
        return [_kernel_name(part) for part in plan_kernels(self._rewritten(context)).parts]

    def _level_names(self, context: Sequence[Item]) -> list[str]:
        off = not find_engine(self.options.engine).takes_session_options or self._level == level("none")
        return [] if off else ["graph_optimization_level"]

    def _optimizer_names(self, context: Sequence[Item]) -> list[str]:
        """Return the optimizers of ONNX Runtime that change the model, from its verbose log."""
        if not self._level_names(context):
            return []
        model, options = self.prepare([*context, *self.items("option", context)])
        with _capture_stderr() as output:
            run(model, with_session(options, log_severity_level=1), self.subject.calls[0])
        self._optimizers = list(dict.fromkeys(_APPLIED.findall("".join(output))))
        return self._optimizers

    def _flag_names(self, context: Sequence[Item]) -> list[str]:
        return list(self._flags)

    def prepare(self, items: Sequence[Item]) -> tuple[ir.Model, Options]:
        """Return the model and the options with only these items enabled."""
        names = {kind: [item.name for item in items if item.kind == kind] for kind in KINDS}
        options = self._chosen(names)
        model = self._rewritten(items)
        if names["kernel"]:
            library = self._splice(model, items, names["kernel"])
            options = with_session(options, custom_ops=[str(library)])
        return model, options

    def call(self, items: Sequence[Item]) -> Callable[[Feeds], list[torch.Tensor]]:
        """Return a function that runs the model with only these items enabled."""
        return runner(*self.prepare(items))

    def _rewritten(self, items: Sequence[Item]) -> ir.Model:
        names = [item.name for item in items if item.kind == "rule"]
        return apply_rules(Options.of(self.options, optimize=names or "none"), self.subject)

    def _splice(self, model: ir.Model, items: Sequence[Item], names: Sequence[str]) -> Path:
        """Insert kernels into a model; return their library, which is built once for all possible kernels."""
        kernels = plan_kernels(model)
        key = frozenset(item for item in items if item.kind == "rule")
        if key not in self._kernels:
            self._kernels[key] = (kernels, compiler.build_library(kernels.source, self.options))
        library = self._kernels[key][1]
        parts = [part for part in kernels.parts if _kernel_name(part) in names]
        KernelPlan(model, parts, kernels.library, kernels.rejected).splice()
        return library

    def _chosen(self, names: Mapping[ItemKind, Sequence[str]]) -> Options:
        original = self.options.session_options
        has_libraries = isinstance(original, Mapping) and "custom_ops" in original
        session: dict[str, Any] = {"custom_ops": original["custom_ops"]} if has_libraries else {}
        session["config"] = {}
        chosen: dict[str, Any] = {"engine_options": {}}
        flags = []
        for name in names["option"]:
            where, key, value = self._flags[name]
            if where == "compile_options":
                flags.append(value)
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
            compile_options=shlex.join(flags),
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


def _kernel_name(part: KernelGroup) -> str:
    """Return a name for a kernel: its first output and its operators."""
    operators = " ".join(node.op_type for node in part.group)
    return f"{part.outputs[0].name} ({operators})"


def _option_entries(options: Options) -> dict[str, tuple[str, str, Any]]:
    """Return the entries of options by display name: the option, the key and the value."""
    entries: dict[str, tuple[str, str, Any]] = {}
    session = options.session_options if isinstance(options.session_options, Mapping) else {}
    for key, value in session.get("config", {}).items():
        entries[f"session_options.config.{key}={value}"] = ("config", key, value)
    for key, value in session.items():
        if key not in _NOT_FLAGS:
            entries[f"session_options.{key}={value}"] = ("session_options", key, value)
    for key, value in (options.engine_options or {}).items():
        entries[f"engine_options.{key}={value}"] = ("engine_options", key, value)
    for flag in shlex.split(options.compile_options):
        entries[f"compile_options {flag}"] = ("compile_options", flag, flag)
    return entries


@contextmanager
def _capture_stderr() -> Iterator[list[str]]:
    """While active, redirect file descriptor 2; the list it yields is filled at the end."""
    output: list[str] = []
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        stderr = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield output
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            file.seek(0)
            output.append(file.read())
