"""Fingerprints: two modules have the same one only if they compute the same from the same inputs and weights.

A fingerprint hashes everything that could make a difference: the values of attributes, the code of the user's functions
and classes with all they refer to, package versions, and torch's global settings. Of weights only shape, dtype and
device count. If anything cannot be hashed by value, there is no fingerprint.
"""

from __future__ import annotations

import copyreg
import enum
import functools
import hashlib
import logging
import operator
import re
import sys
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from itertools import compress
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules import module as torch_module

from sardonyx.cache import provenance
from sardonyx.cache.machine import own_code
from sardonyx.cache.names import (
    CONSTRUCTORS,
    DYNAMIC_ACCESS,
    IGNORED_CLASS_ATTRIBUTES,
    IGNORED_MODULE_ATTRIBUTES,
    IMPURE_BUILTINS,
    NN_MODULE_CALLERS,
    PROCESS_SPECIFIC,
    PURE_MODULES,
    REFLECTION_ATTRIBUTES,
    Names,
    names_of,
)
from sardonyx.cache.provenance import is_importable_by_name, origin_of_function, origin_of_module
from sardonyx.versions import versions

log = logging.getLogger(__name__)

_MAX_VALUES = 500_000
"""Values hashed before giving up: more would take longer than the fingerprint can save."""


class _NoFingerprint(Exception):
    """Something cannot be hashed by value."""


def fingerprint(module: nn.Module) -> str | None:
    """Return a digest of a module that is the same in every process; None if it cannot be computed reliably.

    >>> fingerprint(nn.ReLU()) == fingerprint(nn.ReLU()) != fingerprint(nn.ReLU(inplace=True))
    True
    """
    hasher = _Hasher(module)
    try:
        hasher.value(_global_state())
        hasher.value(module)
        hasher.hash_used_members()
        hasher.check_packages()
    except Exception as reason:  # objects may raise anything when inspected
        log.info("%s has no fingerprint: %r", type(module).__name__, reason)
        return None
    return hasher.digest()


_SETTINGS: tuple[Callable[[], Any], ...] = (
    torch.get_default_dtype,
    torch.is_grad_enabled,
    torch.is_inference_mode_enabled,
    torch.are_deterministic_algorithms_enabled,
    torch.get_float32_matmul_precision,
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
    torch.backends.cuda.math_sdp_enabled,
    torch.backends.cuda.cudnn_sdp_enabled,
    torch.backends.mha.get_fastpath_enabled,
    torch.cuda.is_available,
)


def _global_state() -> list[Any]:
    """Return the global settings that change what torch traces."""
    if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
        raise _NoFingerprint("a mode of torch is active")
    return [
        versions(),
        sys.flags.optimize,
        [setting() for setting in _SETTINGS],
        [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")],
        [torch.backends.mkldnn.enabled, torch.backends.cudnn.enabled, torch.backends.cuda.matmul.allow_tf32],
        list(torch_module._global_forward_pre_hooks.values()),
        list(torch_module._global_forward_hooks.values()),
    ]


# Types that are hashed by value

_PLAIN = frozenset(
    {type(None), bool, int, float, complex, str, bytes, bytearray, type(...), type(NotImplemented), range}
)
_PLAIN_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, torch.finfo, torch.iinfo)
_CONTAINERS = frozenset({dict, list, set, deque, OrderedDict, defaultdict, types.MappingProxyType})
_DATA = _PLAIN | _CONTAINERS | {tuple, frozenset}
_UNIQUE = (*_PLAIN_OF_TORCH, tuple, frozenset, enum.Enum, type, types.FunctionType, types.BuiltinFunctionType)
"""Types that may be in a set: they have no identity besides their value."""
_BASES = frozenset({*_CONTAINERS, tuple, frozenset, str, int, float, bytes})
"""Types whose contents are hashed besides the attributes that a user's subclass adds."""

_METHODS = (types.FunctionType, staticmethod, classmethod, property, functools.cached_property)
_CODE = (types.FunctionType, types.BuiltinFunctionType, type)
_TORCH_NAMESPACES = ("aten", "prim", "prims")
"""Namespaces of operators that are part of torch."""


class _Hasher:
    """Traverses values and code, and hashes each once."""

    def __init__(self, module: nn.Module) -> None:
        self._hashed = hashlib.sha256()
        self._seen: dict[int, tuple[int, Any]] = {}
        """By address: its number, and the object itself, so that its address is not reused."""
        self._count = 0
        self._packages = {"torch"}
        self._bases: set[type] = set()
        self._names = {"forward"}
        """Every name in the user code that was hashed."""
        self._called: list[type] = []
        """Classes that code may instantiate."""
        self._deferred: list[tuple[type, str, Any]] = []
        """Members of classes that no hashed code uses so far."""
        self._weights: dict[int, str] = {}
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            self._weights.setdefault(id(tensor), name)

    def digest(self) -> str:
        return self._hashed.hexdigest()

    def check_packages(self) -> None:
        """Hash monkeypatches of the packages in use; raise if user code replaced something."""
        for where, what in provenance.monkeypatches(sorted(self._packages)):
            if what is None:
                raise _NoFingerprint(f"{where} was replaced")
            self._put(where, what)
        for namespace in (vars(torch), vars(nn.functional), vars(torch.Tensor), vars(nn.Module)):
            self._put("names", repr(provenance.functions_by_name(namespace)))

    def _put(self, *texts: str) -> None:
        self._count += 1
        if self._count > _MAX_VALUES:
            raise _NoFingerprint(f"there are more than {_MAX_VALUES} values")
        for text in texts:
            self._put_bytes(text.encode(errors="surrogatepass"))

    def _put_bytes(self, data: Any) -> None:
        self._hashed.update(b"%d:" % len(data))
        self._hashed.update(data)

    def _first_time(self, thing: Any) -> bool:
        """Whether an object was not hashed before; if it was, hash its number."""
        known = self._seen.get(id(thing))
        if known is not None:
            self._put("again", str(known[0]))
            return False
        self._seen[id(thing)] = (len(self._seen), thing)
        return True

    # Values

    def value(self, value: Any) -> None:
        kind = type(value)
        if kind in _PLAIN or isinstance(value, _PLAIN_OF_TORCH):
            self._put(kind.__name__, repr(value))
        elif kind in (tuple, frozenset):  # immutable: identity does not matter
            self._items(value)
        else:
            if isinstance(value, type):
                self._called.append(value)
            if self._first_time(value):
                self._dispatch(value)

    def _dispatch(self, value: Any) -> None:
        if type(value) in _CONTAINERS:
            self._items(value)
        else:
            hash_function = next((f for kinds, f in _HASH_FUNCTIONS if isinstance(value, kinds)), _Hasher._object)
            hash_function(self, value)

    def _kind(self, kind: type) -> None:
        """Hash the class of an existing instance: its constructor does not matter."""
        if self._first_time(kind):
            self._class(kind)

    def _items(self, value: Any) -> None:
        """Hash the items of a container, in order if it has one."""
        if isinstance(value, (set, frozenset)):
            self._put("set", *sorted(self._item_digest(item) for item in value))
        elif isinstance(value, Mapping):
            self._put(type(value).__name__, str(len(value)))
            self.value(getattr(value, "default_factory", None))
            for key, item in list(value.items()):
                self.value(key)
                self.value(item)
        else:
            self._put(type(value).__name__, str(len(value)))
            for item in list(value):
                self.value(item)

    def _item_digest(self, item: Any) -> str:
        """Return the digest of one item of a set."""
        if not (type(item) in _PLAIN or isinstance(item, _UNIQUE) or id(item) in self._weights):
            raise _NoFingerprint(f"a set holds a {type(item).__name__}")
        hasher = _Hasher(nn.Module())
        hasher._weights, hasher._packages = self._weights, self._packages
        hasher._names, hasher._called, hasher._deferred = self._names, self._called, self._deferred
        hasher.value(item)
        return hasher.digest()

    def _object(self, value: Any) -> None:
        """Hash an instance: its class and all of its attributes."""
        kind = type(value)
        if kind.__module__ == "typing" or isinstance(value, (types.GenericAlias, types.UnionType)):
            self._put("type", repr(value))
            return
        base = next((base for base in kind.__mro__ if base in _BASES), object)
        slots = copyreg._slotnames(kind)  # type: ignore[attr-defined]  # as pickle asks
        pointers = (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0) + len(slots)
        if kind.__basicsize__ > base.__basicsize__ + 8 * pointers or kind.__itemsize__ != base.__itemsize__:
            raise _NoFingerprint(f"the content of a {kind.__module__}.{kind.__qualname__} is not visible")
        self._put("object")
        self._kind(kind)
        self._attributes({name: object.__getattribute__(value, name) for name in slots if _has_slot(value, name)})
        self._attributes(_instance_dict(value), without=PROCESS_SPECIFIC)
        if base in (str, int, float, bytes):
            self._put(base.__repr__(value))
        elif base is not object:
            self._items(value)

    def _attributes(self, values: Mapping[str, Any], without: Collection[str] = ()) -> None:
        self._put("attributes")
        for name in sorted(name for name in values if name not in without):
            self._put(name)
            self.value(values[name])

    def _enum(self, value: enum.Enum) -> None:
        self._put("enum", repr(value.name))
        self._kind(type(value))
        self.value(value.value)

    def _array(self, value: Any) -> None:
        if value.dtype.hasobject or (not isinstance(value, np.generic) and type(value) is not np.ndarray):
            raise _NoFingerprint(f"a {type(value).__name__} holds {value.dtype}")
        self._put("array", str(value.dtype), repr(value.shape))
        self._put_bytes(np.ascontiguousarray(value).tobytes())

    def _tensor(self, value: torch.Tensor) -> None:
        if type(value) not in (torch.Tensor, nn.Parameter) or value.layout != torch.strided or value.is_quantized:
            raise _NoFingerprint(f"a tensor is a {type(value).__name__}, {value.layout}, {value.dtype}")
        self._put("tensor", type(value).__name__, str(value.dtype), str(value.device), repr(tuple(value.shape)))
        self._put(repr((value.stride(), value.requires_grad, value.is_conj(), value.is_neg(), value.is_inference())))
        self._attributes(_instance_dict(value))
        name = self._weights.get(id(value))
        if name is not None:
            self._put("weight", name)
        elif value.numel() and value.device.type != "meta":
            plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
            self._put_bytes(plain.view(-1).view(torch.uint8).numpy().data)

    def _module(self, value: nn.Module) -> None:
        if isinstance(value, (torch.jit.ScriptModule, torch.fx.GraphModule)):
            raise _NoFingerprint(f"there is a {type(value).__name__}, whose code is not Python")
        self._put("module")
        self._kind(type(value))
        self._attributes(vars(value), without=IGNORED_MODULE_ATTRIBUTES)
        before, after = value._forward_pre_hooks, value._forward_hooks
        self.value([(hook, key in value._forward_pre_hooks_with_kwargs) for key, hook in before.items()])
        keywords, always = value._forward_hooks_with_kwargs, value._forward_hooks_always_called
        self.value([(hook, key in keywords, key in always) for key, hook in after.items()])

    # Code

    def _function(self, value: types.FunctionType) -> None:
        origin = origin_of_function(value)
        if origin is not None and is_importable_by_name(value):
            self._released(origin, value)
            return
        self._put("function", origin or "")
        if origin is None:
            self._code(value)
        else:  # created by released code, as decorators do: its closure identifies it
            module = str(value.__globals__.get("__name__", ""))
            self._uses(origin, module)
            self._put(module, value.__code__.co_qualname, str(value.__code__.co_firstlineno))
        self.value(value.__defaults__)
        self.value(value.__kwdefaults__)
        self._attributes(vars(value))
        for cell in value.__closure__ or ():
            self._cell(cell)

    def _cell(self, cell: types.CellType) -> None:
        try:
            content = cell.cell_contents
        except ValueError:
            self._put("empty")
        else:
            self.value(content)

    def _code(self, function: types.FunctionType) -> None:
        """Hash a function of user code: its bytecode, and everything that it names."""
        self._code_object(function.__code__)
        used = names_of(function.__code__)
        self._names |= used.all
        if used.all & REFLECTION_ATTRIBUTES:
            raise _NoFingerprint(f"the code uses {min(used.all & REFLECTION_ATTRIBUTES)}")
        for name in used.loaded:
            self._put(name)
            if name in function.__globals__:
                self._global(name, function.__globals__[name], used)
            else:
                self._builtin_name(name)
        for name in used.imported:
            if not name or origin_of_module(name) is None or name not in sys.modules:
                raise _NoFingerprint(f"{function.__qualname__} imports {name or 'from its own package'} while it runs")
            self._namespace(sys.modules[name], used.all, set())

    def _global(self, name: str, value: Any, used: Names) -> None:
        if not isinstance(value, types.ModuleType):
            self.value(value)
        elif name in used.bare:  # it is passed to code that may use other names
            self._module_value(value)
        else:
            self._namespace(value, used.all, set())

    def _builtin_name(self, name: str) -> None:
        if name in IMPURE_BUILTINS:
            raise _NoFingerprint(f"the code uses {name}()")
        builtins = vars(sys.modules["builtins"])
        self._put("builtin" if name in builtins else "absent")
        self.value(builtins.get(name))

    def _namespace(self, module: types.ModuleType, names: frozenset[str], seen: set[str]) -> None:
        """Hash a module that code names: those of its attributes that the code names too."""
        if module.__name__ in seen:
            return
        seen.add(module.__name__)
        origin = origin_of_module(module.__name__)
        if origin is not None:
            self._uses(origin, module.__name__)
        self._put("namespace", module.__name__, origin or "")
        if origin is None and ("getattr" in names or "__getattr__" in vars(module)):
            raise _NoFingerprint(f"the code may use any attribute of {module.__name__}")
        if module is torch.ops and names & _custom_namespaces():
            raise _NoFingerprint("the code calls custom operators")
        for name in sorted(names & vars(module).keys()):
            attribute = vars(module)[name]
            self._put(name)
            if isinstance(attribute, types.ModuleType):
                self._namespace(attribute, names, seen)
            elif origin is None or type(attribute) in _DATA or isinstance(attribute, _CODE):
                self.value(attribute)

    def _module_value(self, value: types.ModuleType) -> None:
        """Hash a module that is used as a value, so that any of its attributes may be used."""
        origin = origin_of_module(value.__name__)
        if origin is None:
            raise _NoFingerprint(f"the code may use any attribute of {value.__name__}")
        self._uses(origin, value.__name__)
        self._put("module", origin, value.__name__)

    def _pure(self, module: str) -> None:
        top = module.partition(".")[0]
        if module == "numpy.random" or (top in sys.stdlib_module_names and top not in PURE_MODULES):
            raise _NoFingerprint(f"the code uses {module}, which depends on more than its arguments")

    def _code_object(self, code: types.CodeType) -> None:
        self._put_bytes(code.co_code)
        self._put_bytes(code.co_exceptiontable)
        counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        self._put(repr((counts, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)))
        for const in code.co_consts:
            if isinstance(const, types.CodeType):
                self._code_object(const)
            else:
                self.value(const)

    def _class(self, value: type) -> None:
        origin = origin_of_module(value.__module__)
        if origin is not None and (is_importable_by_name(value) or not _is_python_class(value)):
            self._released(origin, value)
            if issubclass(value, nn.Module):
                self._released_class(value)
            return
        self._put("class", value.__name__)
        for kind in (type(value), *value.__bases__):
            self._kind(kind)
        deferred = {name for name, member in vars(value).items() if _is_deferrable(value, name, member)}
        deferred -= IGNORED_CLASS_ATTRIBUTES
        self._attributes(vars(value), without=deferred | IGNORED_CLASS_ATTRIBUTES)
        self._deferred += [(value, name, vars(value)[name]) for name in sorted(deferred)]

    def hash_used_members(self) -> None:
        """Hash the deferred members of classes that the hashed code may use."""
        while True:
            ready = [self._is_used(owner, name) for owner, name, _ in self._deferred]
            used = list(compress(self._deferred, ready))
            if not used:
                return
            self._deferred[:] = compress(self._deferred, map(operator.not_, ready))
            for owner, name, member in sorted(used, key=lambda it: (it[0].__module__, it[0].__qualname__, it[1])):
                self._put("member", name)
                self._kind(owner)
                self.value(member)

    def _is_used(self, owner: type, name: str) -> bool:
        if name in CONSTRUCTORS:
            return not self._names.isdisjoint(("type", "__class__")) or any(
                issubclass(called, owner) for called in self._called
            )
        return (
            name in self._names or not self._names.isdisjoint(DYNAMIC_ACCESS) or not self._packages <= NN_MODULE_CALLERS
        )

    def _released_class(self, value: type) -> None:
        """Hash the functions of a class and its module, and the state of its file."""
        for base in value.__mro__:
            if base not in self._bases and issubclass(base, nn.Module):
                self._bases.add(base)
                module = sys.modules[base.__module__]
                self._put(
                    repr(provenance.functions_by_name(vars(base))),
                    repr(provenance.functions_by_name(vars(module))),
                    repr(provenance.file_state(module.__name__)),
                )

    def _released(self, origin: str, value: Any) -> None:
        """Hash code of a released package by name and version."""
        module = value.__module__ or ""
        self._uses(origin, module)
        self._put("released", origin, module, value.__qualname__)

    def _uses(self, origin: str, module: str) -> None:
        if origin == provenance.OURS:
            self._put(own_code())
        elif origin == provenance.PYTHON or module == "numpy.random":
            self._pure(module)
        else:
            self._packages.add(module.partition(".")[0])

    def _builtin(self, value: Any) -> None:
        """Hash a function written in C by name; a bound one with the object it is bound to."""
        bound = getattr(value, "__self__", None)
        owner = getattr(value, "__objclass__", None) or (bound if isinstance(bound, type) else None)
        module = getattr(value, "__module__", None) or (bound.__name__ if isinstance(bound, types.ModuleType) else "")
        if module:
            self._pure(module)
        self._put("builtin", module, value.__qualname__, owner.__qualname__ if owner else "")
        if bound is not None and not isinstance(bound, (type, types.ModuleType)):
            self.value(bound)

    def _operator(self, value: Any) -> None:
        name = str(value)
        if not name.startswith(tuple(f"{own}." for own in _TORCH_NAMESPACES)):
            raise _NoFingerprint(f"torch.ops.{name} is a custom operator")
        self._put("operator", name)


def _hash_attributes(*names: str) -> Callable[[_Hasher, Any], None]:
    """Return a function that hashes an object by some of its attributes."""

    def hash_value(hasher: _Hasher, value: Any) -> None:
        if origin_of_module(type(value).__module__) is None:
            raise _NoFingerprint(f"a {type(value).__qualname__} may be more than a {type(value).__base__}")
        hasher.value((type(value).__name__, *(getattr(value, name) for name in names)))

    return hash_value


_HASH_FUNCTIONS: tuple[tuple[Any, Callable[[_Hasher, Any], None]], ...] = (
    (torch.Tensor, _Hasher._tensor),
    (nn.Module, _Hasher._module),
    (types.FunctionType, _Hasher._function),
    (enum.Enum, _Hasher._enum),
    (type, _Hasher._class),
    (types.ModuleType, _Hasher._module_value),
    ((torch._ops.OpOverload, torch._ops.OpOverloadPacket), _Hasher._operator),
    ((types.BuiltinFunctionType, types.MethodWrapperType, types.MethodDescriptorType), _Hasher._builtin),
    ((types.WrapperDescriptorType, types.ClassMethodDescriptorType), _Hasher._builtin),
    ((types.GetSetDescriptorType, types.MemberDescriptorType), _Hasher._builtin),
    (types.MethodType, _hash_attributes("__func__", "__self__")),
    ((staticmethod, classmethod), _hash_attributes("__func__")),
    (property, _hash_attributes("fget", "fset", "fdel")),
    (functools.cached_property, _hash_attributes("func", "attrname")),
    (functools.partial, _hash_attributes("func", "args", "keywords", "__dict__")),
    (functools._lru_cache_wrapper, _hash_attributes("__wrapped__")),
    (slice, _hash_attributes("start", "stop", "step")),
    ((np.ndarray, np.generic), _Hasher._array),
    (np.dtype, _hash_attributes("str", "names")),
    (np.ufunc, _hash_attributes("__name__")),
    (re.Pattern, _hash_attributes("pattern", "flags")),
    (logging.Logger, _hash_attributes("name")),
    (PurePath, lambda hasher, value: hasher.value(("path", str(value)))),
    (weakref.ref, lambda hasher, value: hasher.value(("reference", value()))),
)
"""How to hash types other than plain values and containers; anything else is an object with attributes."""


def _instance_dict(value: Any) -> Mapping[str, Any]:
    try:
        attributes: Mapping[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return attributes


def _has_slot(value: Any, slot: str) -> bool:
    try:
        object.__getattribute__(value, slot)
    except AttributeError:
        return False
    return True


def _is_python_class(kind: type) -> bool:
    """Whether a class was defined in Python, so that it could hold user code under a package's name."""
    return any(isinstance(value, types.FunctionType) for value in vars(kind).values()) or "__dict__" in vars(kind)


def _is_deferrable(owner: type, name: str, member: Any) -> bool:
    """Whether a member of a class matters only if code names it.

    That holds for constructors, and for methods of modules that their released bases do not define.
    """
    if name in CONSTRUCTORS:
        return True
    if not isinstance(member, _METHODS) or name.startswith("__") or not issubclass(owner, nn.Module):
        return False
    return not any(name in vars(base) for base in owner.__mro__ if origin_of_module(base.__module__) is not None)


def _custom_namespaces() -> set[str]:
    return {name.partition("::")[0] for name in torch._C._dispatch_get_all_op_names()}.difference(_TORCH_NAMESPACES)
