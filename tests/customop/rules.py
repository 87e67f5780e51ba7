"""Shape rules of many kinds, and the C++ they become, in one library that is called with sizes."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from random import Random
from typing import Any

from sardonyx.customop import broadcast
from sardonyx.customop.shapes import ShapeRule
from sardonyx.customop.signature import Attribute, Tensor, parse
from sardonyx.options import Options
from sardonyx.toolchain import compiler

Given = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A rule, the parameters it is for, and what makes up arguments for it."""

    name: str
    parameters: str
    rule: Callable[..., Any]
    make: Callable[[Random], Given]
    results: str = "Tensor"

    @cached_property
    def shapes(self) -> ShapeRule:
        return ShapeRule(parse(f"my::Op({self.parameters}) -> {self.results}"), self.rule)


def sizes(r: Random, rank: int | None = None, least: int = 0) -> tuple[int, ...]:
    return tuple(r.randint(least, 7) for _ in range(r.randint(0, 4) if rank is None else rank))


def x(least: int = 0, rank: int | None = None, **more: Callable[[Random], Any]) -> Callable[[Random], Given]:
    """Sizes for x, and what else is asked for."""
    return lambda r: {"x": sizes(r, rank, least)} | {name: make(r) for name, make in more.items()}


def number(low: int, high: int) -> Callable[[Random], int]:
    return lambda r: r.randint(low, high)


def one_of(*values: Any) -> Callable[[Random], Any]:
    return lambda r: r.choice(values)


def numbers(low: int, high: int, most: int = 3) -> Callable[[Random], list[int]]:
    return lambda r: [r.randint(low, high) for _ in range(r.randint(0, most))]


def matrix_product(x: Any, y: Any) -> Any:
    if x[-1] != y[-2]:
        raise ValueError(f"{x} and {y} do not match: {x[-1]} is not {y[-2]}")
    return (*broadcast(x[:-2], y[:-2]), x[-2], y[-1])


def reduced(x: Any, axes: Any, keepdim: Any) -> Any:
    gone = [i in axes or i - len(x) in axes for i in range(len(x))]
    if keepdim:
        return [1 if out else dim for out, dim in zip(gone, x, strict=True)]
    return [dim for out, dim in zip(gone, x, strict=True) if not out]


def convolution(x: Any, weight: Any, stride: Any, padding: Any) -> Any:
    assert x[1] == weight[1], "channels differ"
    spatial = [(n + 2 * padding - k) // stride + 1 for n, k in zip(x[2:], weight[2:], strict=True)]
    return (x[0], weight[0], *spatial)


def concatenated(x: Any, axis: Any) -> Any:
    first = list(x[0])
    return [sum(t[i] for t in x) if i == axis else dim for i, dim in enumerate(first)]


def by_mode(x: Any, mode: Any) -> Any:
    if mode == "none":
        return x
    if mode in ("sum", "mean"):
        return ()
    raise ValueError(f"no mode {mode}")


def several_results(x: Any, y: Any) -> Any:
    return (x if y is None else broadcast(x, y)), () if y is None else y, (len(x),)


CASES = [
    Case("the same", "Tensor x", lambda x: x, x()),
    Case("none", "Tensor x", lambda: (), x()),
    Case("open", "Tensor x", lambda x: (None, x[-1]), x(rank=2)),
    Case("a constant", "Tensor x", lambda x: (3, x[0]), x(rank=1)),
    Case("reversed", "Tensor x", lambda x: tuple(reversed(x)), x()),
    Case("a step", "Tensor x", lambda x: x[::-2], x()),
    Case("without the last", "Tensor x", lambda x: (*x[:-1], 2), x()),
    Case("before and after", "Tensor x, int axis", lambda x, axis: x[:axis] + x[axis:], x(axis=number(-6, 6))),
    Case("one out", "Tensor x, int axis", lambda x, axis: x[:axis] + x[axis + 1 :], x(axis=number(-6, 6))),
    Case("one looked up", "Tensor x, int axis", lambda x, axis: (x[axis],), x(axis=number(-5, 5))),
    Case("flat", "Tensor x", lambda x: (math.prod(x),), x()),
    Case("flat from", "Tensor x, int at", lambda x, at: [*x[:at], math.prod(x[at:])], x(rank=3, at=number(-4, 4))),
    Case(
        "floor division",
        "Tensor x, int by",
        lambda x, by: ((x[0] - 5) // by + 20, 20 - x[0] // -by, (x[0] - 5) % by + 9),
        x(rank=1, by=number(-4, 4)),
    ),
    Case("rounded up", "Tensor x, int by", lambda x, by: (-(-x[0] // by),), x(rank=1, by=number(1, 4))),
    Case(
        "the larger", "Tensor<T, 2> x, int n", lambda x, n: (max(*x, n), min(x[0], x[1], 5)), x(rank=2, n=number(0, 9))
    ),
    Case("negative", "Tensor x, int n", lambda x, n: (x[0] - n,), x(rank=1, n=number(0, 9))),
    Case("a chain of comparisons", "Tensor x", lambda x: (1,) if 2 <= x[0] < 5 else (2, 2), x(rank=1)),
    Case("an unlike pair", "Tensor x", lambda x: () if x[0] != x[1] or not x[0] else x, x(rank=2)),
    Case(
        "reduced",
        "Tensor<T, 3> x, *, int[] axes, bool keepdim=False",
        reduced,
        x(rank=3, axes=numbers(-4, 4), keepdim=one_of(0, 1)),
    ),
    Case("permuted", "Tensor x, int[] by", lambda x, by: [x[i] for i in by], x(rank=3, by=numbers(-3, 3))),
    Case("as asked", "Tensor x, int[] to", lambda to: to, x(to=numbers(0, 9, 8))),
    Case("compared", "Tensor x, int[] to", lambda x, to: x if list(x) == to else (), x(to=numbers(0, 3))),
    Case("never the same", "Tensor x, int[] to", lambda x, to: x if x == to else (), x(to=numbers(0, 3))),
    Case("lists", "Tensor x, int[] to", lambda x, to: list(x) + to[1:] + [1], x(to=numbers(0, 3))),
    Case("by mode", "Tensor x, str mode='none'", by_mode, x(mode=one_of("none", "sum", "mean", "", 'a "b" \\ ö'))),
    Case("by text or not", "Tensor x, str mode", lambda x, mode: x if mode else (), x(mode=one_of("", "a"))),
    Case(
        "by real number", "Tensor x, float p", lambda x, p: x if 0.25 < p <= 1 else (), x(p=one_of(0.25, 0.5, 1.0, 2.0))
    ),
    Case("at infinity", "Tensor x, float p", lambda x, p: x if p == math.inf else (9,), x(p=one_of(0.0, math.inf))),
    Case("any but zero", "Tensor x, float p", lambda x, p: x if p else (9,), x(p=one_of(0.0, 0.5))),
    Case(
        "broadcast",
        "Tensor x, Tensor y",
        lambda x, y: broadcast(x, y, (1, 1)),
        x(y=lambda r: tuple(r.choice((1, 2, 3)) for _ in range(r.randint(0, 3)))),
    ),
    Case("a matrix product", "Tensor x, Tensor y", matrix_product, x(y=lambda r: sizes(r, 3), rank=2, least=6)),
    Case(
        "a convolution",
        "Tensor<T, 4> x, Tensor<T, 4> weight, *, int stride=1, int padding=0",
        convolution,
        x(rank=4, least=6, weight=lambda r: sizes(r, 4, 6), stride=number(1, 3), padding=number(0, 3)),
    ),
    Case(
        "concatenated",
        "Tensor<T, 2>[] x, *, int axis",
        concatenated,
        lambda r: {"x": [sizes(r, 2) for _ in range(r.randint(1, 5))], "axis": r.randint(0, 2)},
    ),
    Case(
        "parts of a list",
        "Tensor<T, 1>[] x",
        lambda x: (len(x), x[-1][0], *(t[0] for t in x[1:])),
        lambda r: {"x": [sizes(r, 1) for _ in range(r.randint(1, 5))]},
    ),
    Case(
        "the third of a list", "Tensor[] x", lambda x: x[2], lambda r: {"x": [sizes(r) for _ in range(r.randint(1, 5))]}
    ),
    Case(
        "several results",
        "Tensor x, Tensor? y=None",
        several_results,
        x(least=1, y=lambda r: r.choice((None, (), (1,), (1, 1)))),
        "(Tensor, Tensor, Tensor<int64>)",
    ),
]


# What the rules become

_ROOM, _MOST = 16, 64

_CALLED = """
extern "C" __attribute__((visibility("default"))) int call(int rule, int count, const int64_t* ranks,
    const int64_t* dims, const char* const* names, int variadic, int fields, const int64_t* ints, const double* reals,
    const char* const* texts, const int64_t* const* lists, int results, int64_t* out, char* error) {
  using namespace sardonyx::detail;
  Sizes inputs[64], outputs[64];
  Attribute attributes[16];
  for (int i = 0; i < count; ++i) {
    inputs[i].rank = ranks[i];
    for (int d = 0; d < 16; ++d) {
      const int64_t dim = dims[i * 16 + d];
      inputs[i].dims[d] = dim < 0 ? Number::unknown(names[i * 16 + d]) : Number(dim);
    }
  }
  for (int i = 0; i < fields; ++i) {
    attributes[i] = {ints[i], reals[i], texts[i], {lists[i] + 1, lists[i][0]}, {}};
  }
  try {
    rules[rule](inputs, variadic, attributes, outputs);
  } catch (const Unknown&) {
    return 1;
  } catch (const std::exception& failed) {
    std::snprintf(error, 256, "%s", failed.what());
    return 2;
  }
  for (int i = 0; i < results; ++i) {
    *out++ = outputs[i].rank;
    for (int64_t d = 0; d < outputs[i].rank; ++d) *out++ = outputs[i].dims[d].known ? outputs[i].dims[d].value : -1;
  }
  return 0;
}
"""


class Refused(Exception):
    """What a rule in C++ says against sizes."""


def in_cpp(index: int, given: Mapping[str, Any]) -> list[tuple[int | None, ...]] | None:
    """What the rule in C++ gives; None where it cannot tell."""
    signature = CASES[index].shapes.signature
    inputs = [given[t.name] for t in signature.inputs]
    variadic = len(inputs.pop()) if signature.inputs[-1].kind == "variadic" else 0
    tensors = inputs + (given[signature.inputs[-1].name] if variadic else [])
    padded = [[*(t or ()), *[0] * (_ROOM - len(t or ()))] for t in tensors]
    flat = [dim for t in padded for dim in t]
    fields = [_field(a, given) for a in signature.attributes] or [(0, 0.0, "", [])]
    lists = [(ctypes.c_int64 * (len(f[3]) + 1))(len(f[3]), *f[3]) for f in fields]
    out, error = (ctypes.c_int64 * 256)(), ctypes.create_string_buffer(256)
    state = _library().call(
        *(index, len(tensors), _array(ctypes.c_int64, [-1 if t is None else len(t) for t in tensors])),
        _array(ctypes.c_int64, [dim if isinstance(dim, int) else -1 for dim in flat]),
        _array(ctypes.c_char_p, [None if isinstance(dim, int) or not dim.name else dim.name.encode() for dim in flat]),
        *(variadic, len(signature.attributes), _array(ctypes.c_int64, [f[0] for f in fields])),
        *(_array(ctypes.c_double, [f[1] for f in fields]), _array(ctypes.c_char_p, [f[2].encode() for f in fields])),
        _array(ctypes.c_void_p, [ctypes.addressof(values) for values in lists]),
        *(len(signature.outputs), out, error),
    )
    if state == 2:
        raise Refused(error.value.decode())
    return None if state else _read(list(out), len(signature.outputs))


def _field(attribute: Attribute, given: Mapping[str, Any]) -> tuple[int, float, str, Sequence[int]]:
    value = given[attribute.name]
    kind = attribute.type
    return (
        *(int(value) if kind in ("int", "bool") else 0, value if kind == "float" else 0.0),
        *(value if kind == "str" else "", value if kind == "int[]" else []),
    )


def _array(kind: Any, values: Sequence[Any]) -> Any:
    return (kind * len(values))(*values)


def _read(numbers: list[int], results: int) -> list[tuple[int | None, ...]]:
    found = []
    for _ in range(results):
        rank, numbers = numbers[0], numbers[1:]
        found.append(tuple(None if dim < 0 else dim for dim in numbers[:rank]))
        numbers = numbers[rank:]
    return found


@cache
def _library() -> Any:
    return ctypes.CDLL(str(_built()))


def _built() -> Path:
    headers = [("toolchain", "narrow.h"), ("customop", "kernel.h"), ("customop", "operator.h")]
    written = ["#include <cstdio>\n#include <vector>"]
    written += [resources.files(f"sardonyx.{folder}").joinpath(name).read_text() for folder, name in headers]
    for i, case in enumerate(CASES):
        parameters = "const Sizes* inputs, int64_t variadic, const Attribute* attributes, Sizes* outputs"
        written.append(f"namespace sardonyx::detail {{ void rule{i}({parameters}) {{\n{case.shapes.cpp()}}} }}")
    names = ", ".join(f"sardonyx::detail::rule{i}" for i in range(len(CASES)))
    written.append(f"static decltype(&sardonyx::detail::rule0) const rules[] = {{{names}}};")
    return compiler.build_library("\n".join([*written, _CALLED]), Options.of({}), flags=("-O0",))


def open_tensors(given: Given, tensors: Sequence[Tensor]) -> list[tuple[str, int | None]]:
    """Where sizes stand: the names of tensors that are given, and which of a list."""
    places: list[tuple[str, int | None]] = []
    for tensor in tensors:
        value = given[tensor.name]
        places += [(tensor.name, i) for i in range(len(value))] if tensor.kind == "variadic" else [(tensor.name, None)]
    return [(name, i) for name, i in places if given[name] is not None]
