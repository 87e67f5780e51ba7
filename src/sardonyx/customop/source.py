"""C++ of a library with operators: kernels as they were written, and what torch and ONNX Runtime need around them."""

from __future__ import annotations

import dataclasses
import linecache
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sardonyx import dtypes
from sardonyx.customop.shapes import ShapeRule
from sardonyx.customop.signature import Attribute, Identity, Signature, Tensor
from sardonyx.errors import DeclarationError
from sardonyx.toolchain.headers import read_header
from sardonyx.toolchain.literals import quoted

GLUE = "what sardonyx puts around the kernel"
"""The file that a compiler names for what is not the user's."""

_TYPES: Mapping[str, str] = {
    "float32": "float",
    "float64": "double",
    "float16": "half",
    "bfloat16": "bfloat16",
    "bool": "bool",
    **{f"{sign}int{bits}": f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)},
}
_ATTRIBUTES: Mapping[str, tuple[str, str, str]] = {
    "int": ("kInt", "i", "int64_t"),
    "float": ("kFloat", "f", "double"),
    "bool": ("kBool", "i != 0", "bool"),
    "str": ("kString", "s", "std::string_view"),
    "int[]": ("kInts", "ints", "List<int64_t>"),
    "float[]": ("kFloats", "floats", "List<double>"),
}
_KINDS: Mapping[str, str] = {"required": "kRequired", "optional": "kOptional", "variadic": "kVariadic"}


@dataclass(frozen=True)
class Kernel:
    """The source of a kernel and where it is written."""

    text: str
    file: str
    line: int

    @classmethod
    def of(cls, given: str | Path, what: str, depth: int) -> Kernel:
        """A kernel given as a string or by the name of a file; `depth` is how far up the one who wrote it is."""
        if isinstance(given, Path) or ("\n" not in given and given.endswith((".cpp", ".cc", ".cu", ".h"))):
            try:
                return cls(Path(given).read_text(encoding="utf-8"), str(Path(given).resolve()), 1)
            except (OSError, UnicodeDecodeError) as error:
                raise DeclarationError(f"{what}: the kernel's source cannot be read: {error}") from None
        file = sys._getframe(depth + 1).f_code.co_filename
        before, found, _ = "".join(linecache.getlines(file)).partition(given)
        if not found:
            return cls(given, f"the kernel of {what}", 1)
        return cls(given, file, before.count("\n") + 1)

    def cpp(self) -> str:
        """With its place, so that a compiler's complaints are about what the user wrote."""
        return f"#line {self.line} {quoted(self.file)}\n{self.text}\n"


@dataclass(frozen=True)
class Part:
    """One operator of a library."""

    signature: Signature
    identity: Identity
    shapes: ShapeRule
    kernel: Kernel | None
    """None for an operator whose kernel is a Python function."""
    cuda: Kernel | None = None
    """For the GPU."""


def library(parts: Sequence[Part]) -> str:
    """The source of what is a library's own: kernels, shape rules, and tables that say what there is."""
    return _tables(parts, "", on_gpu=False)


def cuda(parts: Sequence[Part]) -> str:
    """The same in CUDA C++, for the operators that have kernels for the GPU; empty if none has."""
    able = [dataclasses.replace(part, kernel=part.cuda) for part in parts if part.cuda is not None]
    includes = "#include <cuda_bf16.h>\n#include <cuda_fp16.h>\n#include <cuda_runtime.h>\n"
    return _tables(able, includes, on_gpu=True) if able else ""


def _tables(parts: Sequence[Part], includes: str, on_gpu: bool) -> str:
    written = [includes, read_header("sardonyx.toolchain", "narrow.h"), read_header("sardonyx.customop", "kernel.h")]
    written.append("using namespace sardonyx;")
    written += dict.fromkeys(part.kernel.cpp() for part in parts if part.kernel is not None)
    written.append(f"#line 1 {quoted(GLUE)}")
    written += [read_header("sardonyx.customop", name) for name in ("operator.h", "processor.h")]
    if any(part.kernel is None for part in parts):
        written.append(read_header("sardonyx.customop", "python_side.h"))
    written.append("namespace {\nnamespace d = sardonyx::detail;")
    written += [_operator(part, i, on_gpu) for i, part in enumerate(parts)]
    written += ["}  // namespace", _entries(parts)]
    if not on_gpu:
        written.append("extern const uint32_t sardonyx::processor::kNeeded = sardonyx::processor::kCompiledTo;\n")
    return "\n".join(written)


_COMMON = ("kernel.h", "operator.h", "checks.h", "ort_side.h", "torch_side.h", "processor.h", "exports.h")


def common() -> str:
    """The source of what all libraries have in common: the sides of torch and ONNX Runtime."""
    written = ["#include <dlfcn.h>\n#include <deque>\n#include <memory>\n#include <mutex>\n#include <vector>"]
    written += [read_header("sardonyx.toolchain", "narrow.h"), read_header("sardonyx.toolchain", "ort.h")]
    written += [read_header("sardonyx.customop", name) for name in _COMMON]
    return "\n".join(written)


def joint(libraries: Sequence[Path]) -> str:
    """The source of a library that offers the operators of others: beside it there is only what all have in common."""
    paths = ", ".join(quoted(str(path)) for path in libraries)
    return f"""\
#include <cstdint>
#include <dlfcn.h>
#include <initializer_list>
namespace sardonyx::processor {{ extern const uint32_t kNeeded = 0; }}
namespace sardonyx::detail {{
struct Entry;
struct Enlisted {{ Enlisted(const Entry* entries, int count); }};
static const struct Joined {{
  Joined() {{
    for (const char* path : {{{paths}}}) {{
      void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
      void* found = library ? dlsym(library, "sardonyx_entries") : nullptr;
      if (!found) continue;
      int count = 0;
      const Entry* const* entries = reinterpret_cast<const Entry* const* (*)(int*)>(found)(&count);
      for (int i = 0; i < count; ++i) Enlisted(entries[i], 1);
    }}
  }}
}} joined;
}}  // namespace sardonyx::detail
"""


def calling(signature: Signature, *, on_gpu: bool = False) -> str:
    """How a kernel is declared."""
    variables = [f"class {name}" for name in signature.types]
    template = f"template <{', '.join(variables)}> " if variables else ""
    return f"{template}void {signature.name}({', '.join(_declared(signature, on_gpu))})"


def _declared(signature: Signature, on_gpu: bool) -> list[str]:
    views = {"variadic": "Ins"}
    inputs = [f"{views.get(t.kind, 'In')}<{_TYPES.get(t.type, t.type)}> {t.name}" for t in signature.inputs]
    outputs = [f"Out<{_TYPES.get(t.type, t.type)}> {t.name}" for t in signature.outputs]
    return [
        *inputs,
        *outputs,
        *(f"{_ATTRIBUTES[a.type][2]} {a.name}" for a in signature.attributes),
        "cudaStream_t stream" if on_gpu else "Parallel parallel",
    ]


_LONG_RULE = 8000
"""Characters of C++ from which on a shape rule is not optimised: one over lists and ranks takes seconds less."""


def _operator(part: Part, index: int, on_gpu: bool) -> str:
    signature = part.signature
    order = [
        signature.inputs.index(p) if isinstance(p, Tensor) else -1 - signature.attributes.index(p)
        for p in signature.parameters
    ]
    instances = [_instance(part, index, number, chosen, on_gpu) for number, chosen in enumerate(signature.choices)]
    names = [f"{{inputs{index}_{k}, outputs{index}_{k}, run{index}_{k}}}" for k in range(len(instances))]
    rule = part.shapes.cpp()
    kind = "SARDONYX_UNOPTIMISED void" if len(rule) > _LONG_RULE else "void"
    return f"""
{kind} shapes{index}(const d::Sizes* inputs, int64_t variadic, const d::Attribute* attributes, d::Sizes* outputs) {{
  using namespace d;
{rule}}}
{_table("d::Parameter", f"inputs{index}", [_parameter(t) for t in signature.inputs])}
{_table("d::Parameter", f"outputs{index}", [_parameter(t) for t in signature.outputs])}
{"".join(_values(a, index) for a in signature.attributes)}\
{_table("d::Field", f"fields{index}", [_field(a, index) for a in signature.attributes])}
{_table("int", f"order{index}", list(map(str, order)))}
{"".join(instances)}\
{_table("d::Instance", f"instances{index}", names)}
const d::Operator operator{index} = {{{quoted(signature.qualified)}, {quoted(part.identity.domain)},
    {quoted(part.identity.name)}, {part.identity.version}, {quoted(signature.name)},
    inputs{index}, {len(signature.inputs)}, outputs{index}, {len(signature.outputs)},
    fields{index}, {len(signature.attributes)}, order{index}, instances{index}, {len(instances)}, shapes{index},
    {str(on_gpu).lower()}}};
void boxed{index}(uint64_t* stack, uint64_t, uint64_t) {{ d::boxed(operator{index}, stack); }}
"""


def _table(kind: str, name: str, entries: Sequence[str]) -> str:
    return f"const {kind} {name}[] = {{{', '.join(entries) or '{}'}}};"


def _parameter(tensor: Tensor) -> str:
    rank = -1 if tensor.rank is None else tensor.rank
    return f"{{{quoted(tensor.name)}, d::Kind::{_KINDS[tensor.kind]}, {rank}}}"


def _values(attribute: Attribute, index: int) -> str:
    """The numbers of a list that is a default."""
    if not isinstance(attribute.default, list):
        return ""
    kind = "int64_t" if attribute.type == "int[]" else "double"
    return f"const {kind} list{index}_{attribute.name}[] = {{{', '.join(map(repr, attribute.default)) or '0'}}};\n"


def _field(attribute: Attribute, index: int) -> str:
    required = str(attribute.required).lower()
    standard = _standard(attribute, index)
    return f"{{{quoted(attribute.name)}, d::Type::{_ATTRIBUTES[attribute.type][0]}, {required}, {standard}}}"


def _standard(attribute: Attribute, index: int) -> str:
    """The default, in the member that its type says."""
    value = attribute.default
    if attribute.required:
        return "{}"
    if attribute.type in ("int", "bool"):
        return f"{{{int(value)}}}"
    if attribute.type == "float":
        return f"{{0, {value!r}}}"
    if attribute.type == "str":
        return f"{{0, 0, {{{quoted(value)}, {len(value.encode())}}}}}"  # with its length it is a constant
    lists = {"int[]": "{0, 0, {}, {%s}}", "float[]": "{0, 0, {}, {nullptr, 0}, {%s}}"}
    return lists[attribute.type] % f"list{index}_{attribute.name}, {len(value)}"


def _instance(part: Part, index: int, number: int, chosen: Mapping[str, str], on_gpu: bool) -> str:
    signature = part.signature

    def numbers(tensors: Sequence[Tensor]) -> list[str]:
        return [str(int(dtypes.to_onnx(signature.dtype_of(t, chosen)))) for t in tensors]

    return f"""\
{_table("int", f"inputs{index}_{number}", numbers(signature.inputs))}
{_table("int", f"outputs{index}_{number}", numbers(signature.outputs))}
void run{index}_{number}(const d::Call& c) {{{_call(part, index, number, chosen, on_gpu)}}}
"""


def _call(part: Part, index: int, number: int, chosen: Mapping[str, str], on_gpu: bool) -> str:
    if part.kernel is None:
        return f" d::call_python(c, inputs{index}_{number}, outputs{index}_{number}); "
    signature, given = part.signature, []
    for i, t in enumerate(signature.inputs):
        kind = _TYPES[chosen.get(t.type, t.type)]
        given.append(
            f"Ins<{kind}>(c.inputs + {i}, c.variadic)" if t.kind == "variadic" else f"In<{kind}>(c.inputs + {i})"
        )
    for i, t in enumerate(signature.outputs):
        given.append(f"Out<{_TYPES[chosen.get(t.type, t.type)]}>(c.outputs + {i}, c.allocator, {i})")
    given += [f"c.attributes[{i}].{_ATTRIBUTES[a.type][1]}" for i, a in enumerate(signature.attributes)]
    given.append("static_cast<cudaStream_t>(c.runs_on)" if on_gpu else "Parallel(c.run, c.runs_on)")
    return f"\n  d::finish([&] {{ return ::{signature.name}({', '.join(given)}); }});\n"


def _entries(parts: Sequence[Part]) -> str:
    spaces = [quoted(part.signature.namespace) for part in parts]
    entries = ", ".join(f"{{&operator{i}, {space}, boxed{i}}}" for i, space in enumerate(spaces))
    return f"""
static const d::Entry g_entries[] = {{{entries}}};
static const d::Enlisted g_enlisted(g_entries, {len(parts)});
"""
