"""A model with kernels: run it, save it to a folder that onnxruntime alone can run, and load it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sysconfig
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from sardonyx.errors import SardonyxError
from sardonyx.native.processor import Processor
from sardonyx.native.report import NativeReport
from sardonyx.native.session import check_providers, open_session, write_model
from sardonyx.native.targets import Target, target_of
from sardonyx.versions import versions

MODEL, LIBRARY, MANIFEST = "model.onnx", "kernels.so", "manifest.json"
_FORMAT = 1
_OLDEST_ONNXRUNTIME = "1.18"


class FolderError(SardonyxError, RuntimeError):
    """A compiled model on disk is incomplete, damaged, or built for another machine."""


@dataclass(frozen=True)
class NativeModel:
    """The result of `sardonyx.native.compile`."""

    model: ir.Model
    """The model, with kernels in place of the nodes they compute."""
    library: Path | None
    """The library of kernels; None if there are none."""
    source: str
    """The C++ source of the library."""
    compiler: str
    processor: Processor
    report: NativeReport
    """Which nodes are in kernels, why others are not, and measured times."""
    target: str = "cpu"
    """The target of the kernels: "cpu" or "cuda"."""

    def proto(self) -> onnx.ModelProto:
        """Return the model as protobuf."""
        return ir.to_proto(self.model)

    def session(self, sess_options: Any = None, **kwargs: Any) -> Any:
        """Return an `onnxruntime.InferenceSession` with the library registered; takes the same arguments.

        The default `providers` are those of the target.
        """
        if self.library is not None and not self.library.is_file():
            raise FolderError(
                f"the library {self.library} does not exist", hint="compile the model again; save() keeps a copy"
            )
        target = target_of(self.target)
        if "providers" not in kwargs:
            kwargs["providers"] = check_providers(target.providers)
        return open_session(self.model, self.library, sess_options, **kwargs)

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write the model, library, source and manifest.json into a folder that onnxruntime alone can run.

        External weights are copied into one file next to the model. A folder with a compiled model is replaced.
        """
        folder = Path(folder)
        if folder.exists() and not (folder / MANIFEST).is_file() and (folder.is_file() or any(folder.iterdir())):
            raise FolderError(f"{folder} exists already and is not a compiled model", hint="choose another folder")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as temporary:
            target = Path(temporary, folder.name)
            target.mkdir()
            self._write(target)
            shutil.rmtree(folder, ignore_errors=True)
            target.rename(folder)
        return folder

    def _write(self, folder: Path) -> None:
        write_model(self.model, folder / MODEL)
        if self.library is not None:
            shutil.copyfile(self.library, folder / LIBRARY)
            (folder / target_of(self.target).source).write_text(self.source, encoding="utf-8")
        manifest = {
            "format": _FORMAT,
            "readme": _readme(target_of(self.target), has_kernels=self.library is not None),
            "needs": {"onnxruntime": f">={_OLDEST_ONNXRUNTIME}", "platform": sysconfig.get_platform()},
            "built_with": {**versions(), "compiler": self.compiler},
            "target": self.target,
            "processor": asdict(self.processor),
            "files": {path.name: _file_entry(path) for path in sorted(folder.iterdir())},
            "report": self.report.as_dict(),
        }
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    def __repr__(self) -> str:
        return f"NativeModel({len(self.report.kernels)} kernels; {self.report.nodes_after} nodes)"


def _readme(target: Target, *, has_kernels: bool) -> list[str]:
    return [
        "import onnxruntime",
        "options = onnxruntime.SessionOptions()",
        *[f'options.register_custom_ops_library("./{LIBRARY}")'] * has_kernels,
        f'session = onnxruntime.InferenceSession("{MODEL}", options, providers={json.dumps(target.providers)})',
    ]


def _file_entry(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": _digest(path)}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load(folder: str | os.PathLike[str]) -> NativeModel:
    """Load a model saved by `NativeModel.save`; a damaged folder, or one for another processor, is an error.

    The digests in the manifest detect accidents, not attacks: whoever can write the folder can change them. A session
    runs the library's code, so load only folders that you trust.
    """
    folder = Path(folder)
    manifest = _manifest(folder)
    try:
        return _read(folder, manifest)
    except SardonyxError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        problem = f"lacks {error}" if isinstance(error, KeyError) else f"is damaged: {error}"
        raise FolderError(f"{folder / MANIFEST} {problem}", hint=_RECOMPILE) from error


def _read(folder: Path, manifest: dict[str, Any]) -> NativeModel:
    _check_files(folder, manifest["files"])
    processor, target = Processor(**manifest["processor"]), manifest.get("target", "cpu")
    has_kernels = LIBRARY in manifest["files"]
    missing = processor.missing() if has_kernels else None
    if missing:
        raise FolderError(
            f"{folder / LIBRARY} was built for {missing}",
            hint="compile the model again on this machine, or with a processor= that both support",
        )
    return NativeModel(
        _model(folder / MODEL),
        folder / LIBRARY if has_kernels else None,
        (folder / target_of(target).source).read_text(encoding="utf-8") if has_kernels else "",
        manifest["built_with"]["compiler"],
        processor,
        NativeReport.of_dict(manifest["report"]),
        target,
    )


def _model(path: Path) -> ir.Model:
    try:
        return ir.load(path)
    except Exception as error:
        raise FolderError(f"{path} is not a readable ONNX model: {error}", hint=_RECOMPILE) from error


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FolderError(
            f"{folder} has no {MANIFEST}", hint="use a folder written by NativeModel.save or `sardonyx native compile`"
        ) from None
    except ValueError as error:
        raise FolderError(f"{folder / MANIFEST} is damaged: {error}", hint=_RECOMPILE) from error
    except OSError as error:
        raise FolderError(f"{folder / MANIFEST} cannot be read: {error.strerror}", hint=_RECOMPILE) from error
    if not isinstance(manifest, dict):
        raise FolderError(f"{folder / MANIFEST} is damaged: it is not an object", hint=_RECOMPILE)
    if manifest.get("format") != _FORMAT:
        raise FolderError(
            f"{folder} has format {manifest.get('format')}, and this sardonyx reads format {_FORMAT}", hint=_RECOMPILE
        )
    return manifest


_RECOMPILE = "compile the model again, or copy the folder again"


def _check_files(folder: Path, files: dict[str, Any]) -> None:
    for name in (MODEL, *files):
        path, entry = folder / name, files.get(name)
        if Path(name).name != name:
            raise FolderError(
                f"{folder / MANIFEST} describes {name!r}, which is not a file of the folder", hint=_RECOMPILE
            )
        if not path.is_file():
            raise FolderError(f"{path} is missing", hint=_RECOMPILE)
        if _file_entry(path) != entry:
            raise FolderError(f"{path} is not what {MANIFEST} describes: it was modified or truncated", hint=_RECOMPILE)
