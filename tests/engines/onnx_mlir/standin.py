"""A stand-in for onnx-mlir: its command line, a dozen operators on float32, and real libraries with its interface.

It writes C, which the machine's compiler builds. Flags that begin with `--standin-` inject failures.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

RUNTIME = Path(__file__).with_name("runtime.c")
TYPES = {1: "f32", 2: "ui8", 3: "i8", 4: "ui16", 5: "i16", 6: "i32", 7: "i64", 9: "i1", 10: "f16", 11: "f64"}
TYPES |= {12: "ui32", 13: "ui64", 16: "bf16"}
BINARY = {"Add": "+", "Sub": "-", "Mul": "*", "Div": "/"}
UNARY = {"Relu": "r", "Sigmoid": "s", "Tanh": "t"}


class Refused(Exception):
    pass


def arguments(argv: list[str]) -> tuple[dict[str, str], list[str]]:
    """Flags by name, and everything else."""
    flags, rest, todo = {}, [], list(argv)
    while todo:
        word = todo.pop(0)
        if word == "-o":
            flags["o"] = todo.pop(0)
        elif word.startswith("-"):
            name, _, value = word.lstrip("-").partition("=")
            flags[name] = value
        else:
            rest.append(word)
    return flags, rest


class Emitter:
    """The C of one model: a static tensor for each constant, a statement for each node."""

    def __init__(self, model: onnx.ModelProto, tag: str, flags: dict[str, str]) -> None:
        self.graph, self.tag, self.flags = model.graph, tag, flags
        self.names: dict[str, str] = {}
        self.known: dict[str, np.ndarray] = {}
        self.constants = bytearray()
        self.lines: list[str] = []
        self.made: list[str] = []

    def name(self, value: str) -> str:
        return self.names.setdefault(value, f"v{len(self.names)}")

    def define(self, value: str, expression: str) -> None:
        self.lines.append(f"OMTensor *{self.name(value)} = {expression};")
        self.made.append(value)

    def constant(self, value: str, array: np.ndarray) -> None:
        self.known[value] = array
        self.constants += b"\0" * (-len(self.constants) % 64)
        offset = len(self.constants)
        self.constants += array.tobytes()
        kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
        dims = ", ".join(map(str, array.shape))
        self.define(value, f"constant((char *)weights + {offset}, (int64_t[]){{{dims}}}, {array.ndim}, {kind})")

    def node(self, node: onnx.NodeProto) -> None:
        given = [self.name(x) if x else "NULL" for x in node.input]
        settings = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        if node.op_type in BINARY:
            call = f"binary({given[0]}, {given[1]}, '{BINARY[node.op_type]}')"
        elif node.op_type in UNARY:
            call = f"unary({given[0]}, '{UNARY[node.op_type]}')"
        elif node.op_type == "MatMul":
            call = f"matmul({given[0]}, {given[1]})"
        elif node.op_type == "Gemm":
            numbers = [settings.get(k, d) for k, d in (("alpha", 1.0), ("beta", 1.0), ("transA", 0), ("transB", 0))]
            call = f"gemm({', '.join([*given, 'NULL'][:3])}, {', '.join(map(str, numbers))})"
        elif node.op_type == "Reshape" and node.input[1] in self.known:
            wanted = self.known[node.input[1]]
            call = f"reshape({given[0]}, (int64_t[]){{{', '.join(map(str, wanted))}}}, {wanted.size})"
        elif node.op_type == "Identity":  # of an input or a constant, the same memory
            x, lasting = given[0], {*self.known, *(value.name for value in self.graph.input)}
            owns = int(self.flags.get("standin-fail") == "ownership")
            same = f"omTensorCreateWithOwnership({x}->data, {x}->shape, {x}->rank, {x}->type, {owns})"
            call = same if node.input[0] in lasting else f"copy({x}, {x}->shape, {x}->rank)"
        elif node.op_type == "Constant":
            return self.constant(node.output[0], numpy_helper.to_array(settings["value"]))
        else:
            raise Refused(f"error: failed to legalize operation 'onnx.{node.op_type}'")
        return self.define(node.output[0], call)

    def source(self, folder: Path) -> str:
        for tensor in self.graph.initializer:
            self.constant(tensor.name, numpy_helper.to_array(tensor))
        for node in self.graph.node:
            self.node(node)
        inputs = [f"OMTensor *{self.name(x.name)} = list->tensors[{i}];" for i, x in enumerate(self.graph.input)]
        outputs = [self.name(x.name) for x in self.graph.output]
        drop = [f"omTensorDestroy({self.name(v)});" for v in self.made if self.name(v) not in outputs]
        for value in self.graph.input:  # one handed through is wrapped anew: the caller's stays the caller's
            if self.name(value.name) in outputs:
                x = self.name(value.name)
                outputs[outputs.index(x)] = f"omTensorCreate({x}->data, {x}->shape, {x}->rank, {x}->type)"
        symbol = {"tag": "other", "symbol": None}.get(self.flags.get("standin-fail", ""), self.tag)
        start = ["COUNT(standin_runs, 1);", f"if (!omLoadConstantsFromFile_{self.tag}()) return NULL;"]
        if "standin-wait" in self.flags:
            start.append("if (!wait_for_go()) { errno = ETIMEDOUT; return NULL; }")
        if self.flags.get("standin-fail") == "null":
            start.append("errno = EINVAL; return NULL;")
        listed = f"(OMTensor *[]){{{', '.join(outputs)}}}, {len(outputs)}"
        results = f"OMTensorList *results = omTensorListCreate({listed});"
        body = "\n  ".join([*start, *inputs, *self.lines, results, *drop])
        main = f"OMTensorList *run_main_graph_{symbol}(OMTensorList *list) {{\n  {body}\n  return results;\n}}\n"
        return "\n".join([f'#include "{RUNTIME}"', self.data(folder), main if symbol else "", self.signatures()])

    def data(self, folder: Path) -> str:
        """The constants, in the library or in a file, and the function that loads them."""
        threshold = float(self.flags.get("constants-to-file-total-threshold", 1.5)) * 2**30
        size, load = len(self.constants), f"int omLoadConstantsFromFile_{self.tag}(void)"
        if self.flags.get("store-constants-to-file", "true") != "false" and size and size >= threshold:
            name = f"{Path(self.flags['o']).name}.constants.bin"
            (folder / name).write_bytes(self.constants)
            hidden = "static " if self.flags.get("standin-fail") == "loader" else ""
            return f'static void *weights;\n{hidden}{load} {{ return map_constants(&weights, "{name}", {size}); }}'
        blob = Path(f"{self.flags['o']}.blob")
        blob.write_bytes(self.constants or b"\0")
        place = f'asm(".section .rodata\\n.balign 64\\nblob: .incbin \\"{blob}\\"\\n.previous");'
        return f"{place}\nextern const char blob[];\n#define weights blob\n{load} {{ return 1; }}"

    def signatures(self) -> str:
        wrong = self.flags.get("standin-fail", "")
        texts = []
        for kind, values in (("Input", self.graph.input), ("Output", self.graph.output)):
            listed = [self.described(value) for value in values]
            if wrong == f"signature-{kind.lower()}-rank":
                listed[0]["dims"] = [*listed[0]["dims"], 1]
            if wrong == f"signature-{kind.lower()}-type":
                listed[0]["type"] = "f64"
            if wrong == f"signature-{kind.lower()}-count":
                listed.append(listed[0])
            text = "no JSON" if wrong == "signature-text" else json.dumps(listed)
            ask = f'strcmp(entry, "run_main_graph_{self.tag}") ? NULL : {json.dumps(text)}'
            texts.append(f"const char *om{kind}Signature_{self.tag}(const char *entry) {{ return {ask}; }}")
        return "\n".join(texts)

    def described(self, value: onnx.ValueInfoProto) -> dict[str, object]:
        kind = value.type.tensor_type
        dims = [d.dim_value if d.HasField("dim_value") else -1 for d in kind.shape.dim]
        return {"type": TYPES[kind.elem_type], "dims": dims, "name": value.name}


def fail(how: str | None) -> None:
    """Failures of the compiler itself."""
    if how == "exit":
        print("loc(unknown): error: the stand-in was told to fail", file=sys.stderr)
        sys.exit(3)
    if how == "silent":
        sys.exit(0)
    if how == "crash":
        print("about to crash", flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)


def main(argv: list[str]) -> int:
    flags, rest = arguments(argv)
    if "version" in flags:
        print("onnx-mlir version 0.0.0-standin\nLLVM version 0")
        return 0
    if "standin-argv" in flags:
        Path(flags["standin-argv"]).write_text(json.dumps(argv))
    fail(flags.get("standin-fail"))
    assert "EmitLib" in flags, argv
    stem = Path(flags["o"])
    try:
        source = Emitter(onnx.load(rest[-1]), flags["tag"], flags).source(stem.parent)
    except Refused as refusal:
        print(refusal, file=sys.stderr)
        return 1
    Path(f"{stem}.c").write_text(source)
    level = next((f"-{flag}" for flag in flags if flag in ("O0", "O1", "O2", "O3")), "-O0")
    library = Path(f"{stem}.so")
    command = ["cc", level, "-shared", "-fPIC", "-w", "-o", str(library), f"{stem}.c", "-lm"]
    status = subprocess.run(command).returncode
    if flags.get("standin-fail") == "truncated":
        library.write_bytes(library.read_bytes()[:100])
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
