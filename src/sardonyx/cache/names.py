"""Names in a user's code, and which of them matter for a fingerprint."""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Names:
    """The names in a function's code, including nested functions."""

    all: frozenset[str]
    loaded: tuple[str, ...]
    """Names looked up as globals."""
    bare: frozenset[str]
    """Those of `loaded` that are used other than to access an attribute."""
    imported: tuple[str, ...]
    """Modules that it imports; '' for a relative import."""


@lru_cache(4096)
def names_of(code: types.CodeType) -> Names:
    """Collect the names in a code object."""
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
"""Builtins whose results may differ from run to run, or reach objects that the code does not name."""
REFLECTION_ATTRIBUTES = frozenset({"__subclasses__", "__globals__", "__builtins__", "f_globals", "f_locals"})
"""Attributes that reach objects which the code does not name."""
PURE_MODULES = _names(
    """
    math cmath functools itertools operator collections typing dataclasses enum abc copy contextlib warnings
    logging numbers types string re statistics fractions decimal bisect heapq textwrap builtins inspect _operator
    _functools _collections _collections_abc _warnings __future__ json struct array weakref _weakref _abc
    """
)
"""Modules of the standard library whose functions depend only on their arguments."""
IGNORED_CLASS_ATTRIBUTES = _names(
    """
    __dict__ __weakref__ __doc__ __hash__ __module__ __qualname__ __annotations__ __abstractmethods__ _abc_impl
    __dataclass_fields__ __dataclass_params__ __firstlineno__ __static_attributes__ __slots__ __parameters__
    __slotnames__ __orig_bases__ __annotate__ __annotate_func__ __annotations_cache__
    """
)
CONSTRUCTORS = _names("__init__ __new__ __post_init__ __init_subclass__ __set_name__")
DYNAMIC_ACCESS = _names("getattr attrgetter methodcaller __getattribute__ __dict__ dir inspect")
"""Names that show that code may access members by computed names."""
NN_MODULE_CALLERS = frozenset({"torch", "numpy"})
"""Packages that call only methods of modules which `nn.Module` defines."""
IGNORED_MODULE_ATTRIBUTES = _names(
    """
    _backward_pre_hooks _backward_hooks _is_full_backward_hook _state_dict_hooks _state_dict_pre_hooks
    _load_state_dict_pre_hooks _load_state_dict_post_hooks _forward_hooks _forward_pre_hooks
    _forward_hooks_with_kwargs _forward_hooks_always_called _forward_pre_hooks_with_kwargs
    """
)
"""Hooks, which are keyed by numbers that differ between processes, and state for gradients and saving."""
PROCESS_SPECIFIC = frozenset({"_original_object_hash"})
"""Attributes that differ in each process: a hash by which transformers detects an edited configuration."""
