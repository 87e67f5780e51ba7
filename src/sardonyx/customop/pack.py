"""Pack operators for machines with only onnxruntime and numpy: an importable folder, and a wheel."""

from __future__ import annotations

import base64
import hashlib
import json
import platform
import re
import shutil
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sardonyx.customop import source
from sardonyx.customop.declaration import CustomOp
from sardonyx.customop.project import Project, render_template
from sardonyx.customop.signature import Attribute, Signature, Tensor
from sardonyx.errors import CompilerError, DeclarationError
from sardonyx.toolchain import compiler
from sardonyx.toolchain.literals import quoted
from sardonyx.versions import versions

OLDEST_ONNXRUNTIME = "1.18"
_LIBRARY, _MANIFEST = "operators.so", "manifest.json"


def pack(project: Project, output: Path, *, march: str | None = None) -> Path:
    """Write a folder with one library for all operators of a project; return its path, `<output>/<project>_ort`."""
    operators = [op for op in project.operators if op.has_kernels]
    if not operators:
        raise DeclarationError(
            f"{project.name} has no kernels to pack: its operators are compositions, which models contain"
        )
    for op in operators:
        if op.operator_source.kernel is None:
            raise DeclarationError(
                f"{op.signature.qualified} is computed by a Python function, which cannot be packed",
                hint="write its kernel in C++, or declare it in another module",
            )
    march = march or ("x86-64-v3" if platform.machine() in ("x86_64", "AMD64") else None)
    folder = output / f"{project.name}_ort"
    if folder.exists() and not (folder / _MANIFEST).is_file():
        raise DeclarationError(f"{folder} exists already and is not a pack", hint="choose another folder with --output")
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output) as temporary:
        target = Path(temporary, folder.name)
        target.mkdir()
        _write_pack(target, folder.name, project.version, operators, march)
        shutil.rmtree(folder, ignore_errors=True)
        target.rename(folder)
    return folder


def _write_pack(folder: Path, package: str, version: str, operators: Sequence[CustomOp], march: str | None) -> None:
    _build(operators, folder / _LIBRARY, march)
    about = {"name": package, "version": version, "operators": [_operator_manifest(op) for op in operators]}
    manifest = {**about, **_library_manifest(folder / _LIBRARY, march)}
    names = [f"{op.domain}::{op.name}" for op in operators]
    variables = {
        "package": package,
        "operators": quoted(", ".join(names))[1:-1],
        "platform": manifest["library"]["platform"],
        "processor": march or platform.machine(),
        "table": "\n".join(map(_table_row, manifest["operators"])),
        **manifest["built_with"],
    }
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    (folder / "__init__.py").write_text(render_template("packed.py.in", variables), encoding="utf-8")
    (folder / "README.md").write_text(render_template("packed.md.in", variables), encoding="utf-8")


def _build(operators: Sequence[CustomOp], library: Path, march: str | None) -> None:
    """Build the kernels for `march`, and the check that the processor supports it for any processor."""
    flags = tuple(dict.fromkeys(flag for op in operators for flag in op.flags))
    march_flags = () if march is None else (f"-march={march}",)
    cxx = compiler.find()
    with tempfile.TemporaryDirectory() as folder:
        kernels, common = Path(folder, "kernels.o"), Path(folder, "common.o")
        try:
            cxx.compile(source.library([op.operator_source for op in operators]), kernels, flags=(*flags, *march_flags))
        except CompilerError as error:  # each compiled by itself when it was declared
            hint = "they share one library: rename functions that two of them define"
            raise CompilerError(
                "the kernels do not compile together", error.log, hint=hint if "redefinition" in error.log else None
            ) from None
        cxx.compile(source.common(), common, flags=("-O1",))
        cxx.link([kernels, common], library)


# The manifest


def _library_manifest(library: Path, march: str | None) -> dict[str, Any]:
    content = library.read_bytes()
    return {
        "library": {
            "file": library.name,
            "sha256": hashlib.sha256(content).hexdigest(),
            "bytes": len(content),
            "platform": sysconfig.get_platform(),
            "march": march,
            "glibc": _glibc(content),
        },
        "needs": {"onnxruntime": f">={OLDEST_ONNXRUNTIME}"},
        "built_with": {"sardonyx": versions()["sardonyx"], "compiler": compiler.find().version},
    }


def _operator_manifest(op: CustomOp) -> dict[str, Any]:
    signature = op.signature
    return {
        "domain": op.domain,
        "name": op.name,
        "version": op.version,
        "signature": f"{signature.namespace}::{signature.schema()}",
        "doc": str(op.schema.doc or ""),
        "inputs": [_tensor_manifest(signature, t) for t in signature.inputs],
        "outputs": [_tensor_manifest(signature, t) for t in signature.outputs],
        "attributes": [_attribute_manifest(a) for a in signature.attributes],
        "types": [dict(chosen) for chosen in signature.choices],
    }


def _tensor_manifest(signature: Signature, tensor: Tensor) -> dict[str, Any]:
    types = signature.types.get(tensor.type, (tensor.type,))
    return {"name": tensor.name, "kind": tensor.kind, "type": tensor.type, "types": [*types], "rank": tensor.rank}


def _attribute_manifest(attribute: Attribute) -> dict[str, Any]:
    entry = {"name": attribute.name, "type": attribute.type, "required": attribute.required}
    return entry if attribute.required else {**entry, "default": attribute.default}


def _table_row(entry: dict[str, Any]) -> str:
    tensors = [
        ", ".join(f"{t['name']}{_ARITY_SUFFIXES[t['kind']]}: {'/'.join(t['types'])}" for t in entry[side])
        for side in ("inputs", "outputs")
    ]
    attributes = ", ".join(
        f"{a['name']}" + ("" if a["required"] else f"={a['default']!r}") for a in entry["attributes"]
    )
    return f"| {entry['domain']}::{entry['name']} | {tensors[0]} | {tensors[1]} | {attributes} |"


_ARITY_SUFFIXES = {"required": "", "optional": "?", "variadic": "[]"}


def _glibc(library: bytes) -> str | None:
    versions = [(int(major), int(minor)) for major, minor in re.findall(rb"GLIBC_(\d+)\.(\d+)", library)]
    return ".".join(map(str, max(versions))) if versions else None


# As a wheel


def wheel(folder: Path) -> Path:
    """Write a wheel of a packed folder next to it; return its path."""
    manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
    stem = f"{manifest['name']}-{manifest['version']}"
    tag = f"py3-none-{_platform_tag(manifest['library'])}"
    files = {f"{folder.name}/{path.name}": path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
    about = f"{stem}.dist-info"
    files[f"{about}/METADATA"] = _metadata(manifest, (folder / "README.md").read_text(encoding="utf-8")).encode()
    files[f"{about}/WHEEL"] = (
        f"Wheel-Version: 1.0\nGenerator: sardonyx {manifest['built_with']['sardonyx']}\n"
        f"Root-Is-Purelib: false\nTag: {tag}\n"
    ).encode()
    record = f"{about}/RECORD"
    files[record] = "".join(f"{line}\n" for line in (*_record(files), f"{record},,")).encode()
    path = folder.parent / f"{stem}-{tag}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name)  # no timestamp: builds are reproducible
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(entry, content)
    return path


def _platform_tag(library: dict[str, Any]) -> str:
    """Return the platform tag for pip; on Linux with the glibc version, so that older systems reject the wheel."""
    system, _, machine = library["platform"].partition("-")
    if system == "linux" and library["glibc"]:
        return f"manylinux_{library['glibc'].replace('.', '_')}_{machine}"
    return re.sub(r"[-.]", "_", library["platform"])


def _metadata(manifest: dict[str, Any], readme: str) -> str:
    names = ", ".join(f"{op['domain']}::{op['name']}" for op in manifest["operators"])
    return (
        f"Metadata-Version: 2.1\nName: {manifest['name']}\nVersion: {manifest['version']}\n"
        f"Summary: {names} in ONNX Runtime\nRequires-Dist: onnxruntime{manifest['needs']['onnxruntime']}\n"
        f"Requires-Dist: numpy\nDescription-Content-Type: text/markdown\n\n{readme}"
    )


def _record(files: dict[str, bytes]) -> Iterator[str]:
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        yield f"{name},sha256={digest},{len(content)}"
