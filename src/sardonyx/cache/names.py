"""Names in the user's own code: which it has, and which of them matter to a fingerprint."""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Names:
    """The names in a function's code, that of functions inside it included."""

    all: frozenset[str]
    loaded: tuple[str, ...]
    """Those looked up among globals."""
    bare: frozenset[str]
    """Those of them that are not only used for an attribute of theirs."""
    imported: tuple[str, ...]
    """Modules that it imports; '' for one relative to its own."""


@lru_cache(4096)
def names_of(code: types.CodeType) -> Names:
    """Every name that a function's code has."""
    names, loaded, bare, imported = set[str](), set[str](), set[str](), set[str]()
    for part in _codes(code):
        names.update(part.co_names)
        steps = [step for step in dis.get_instructions(part) if step.opname != "EXTENDED_ARG"]
        for at, step in enumerate(steps):
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
                loaded.add(step.argval)
                if steps[at + 1].opname not in ("LOAD_ATTR", "LOAD_METHOD"):
                    bare.add(step.argval)
            elif step.opname == "IMPORT_NAME":
                dots = steps[at - 2].argval  # loaded before the names to import
                imported.add("" if dots else step.argval)
    return Names(frozenset(names), tuple(sorted(loaded)), frozenset(bare), tuple(sorted(imported)))


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _codes(const)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


IMPURE_BUILTINS = frozenset(
    {"open", "input", "eval", "exec", "compile", "__import__", "globals", "locals", "id", "hash"}
)
"""Builtins whose results may differ from run to run, or lead to what the code does not name."""
REFLECTION_ATTRIBUTES = frozenset({"__subclasses__", "__globals__", "__builtins__", "f_globals", "f_locals"})
"""Attributes that do so."""
PURE_MODULES = _names(
    """
    math cmath functools itertools operator collections typing dataclasses enum abc copy contextlib warnings
    logging numbers types string re statistics fractions decimal bisect heapq textwrap builtins inspect _operator
    _functools _collections _collections_abc _warnings __future__ json struct array weakref _weakref _abc
    """
)
"""Modules of Python that compute from what they are given, and from nothing else."""
IGNORED_CLASS_ATTRIBUTES = _names(
    """
    __dict__ __weakref__ __doc__ __hash__ __module__ __qualname__ __annotations__ __abstractmethods__ _abc_impl
    __dataclass_fields__ __dataclass_params__ __firstlineno__ __static_attributes__ __slots__ __parameters__
    __slotnames__ __orig_bases__ __annotate__ __annotate_func__ __annotations_cache__
    """
)
CONSTRUCTORS = _names("__init__ __new__ __post_init__ __init_subclass__ __set_name__")
DYNAMIC_LOOKUPS = _names("getattr attrgetter methodcaller __getattribute__ __dict__ dir inspect")
"""Names in code that may take a member of a class whose name the code does not have."""
CALL_ONLY_NN_MODULE_METHODS = frozenset({"torch", "numpy"})
"""Packages that call no methods of modules but those that `nn.Module` has."""
IGNORED_MODULE_ATTRIBUTES = _names(
    """
    _backward_pre_hooks _backward_hooks _is_full_backward_hook _state_dict_hooks _state_dict_pre_hooks
    _load_state_dict_pre_hooks _load_state_dict_post_hooks _forward_hooks _forward_pre_hooks
    _forward_hooks_with_kwargs _forward_hooks_always_called _forward_pre_hooks_with_kwargs
    """
)
"""What concerns gradients and saving, and hooks, which are keyed by numbers that differ from process to process."""
PROCESS_SPECIFIC = frozenset({"_original_object_hash"})
"""What transformers notes to tell later whether a configuration was edited: a hash that differs in each process."""
