"""A model with kernels of its own: run, written to a folder that onnxruntime alone can run, and read again."""

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
from sardonyx.native.session import available, open_session, write
from sardonyx.native.targets import Target, target_of
from sardonyx.versions import versions

MODEL, LIBRARY, MANIFEST = "model.onnx", "kernels.so", "manifest.json"
_FORMAT = 1
_OLDEST_ONNXRUNTIME = "1.18"


class FolderError(SardonyxError, RuntimeError):
    """A compiled model on disk is incomplete, damaged, or made for another machine."""


@dataclass(frozen=True)
class NativeModel:
    """What `sardonyx.native.compile` returns."""

    model: ir.Model
    """The model, with kernels in the place of what they compute."""
    library: Path | None
    """The library they are in; None where the model has none."""
    source: str
    """The library's C++."""
    compiler: str
    processor: Processor
    report: NativeReport
    """What was taken, what was not and why; and times, where they were measured."""
    target: str = "cpu"
    """What the kernels run on: "cpu" or "cuda"."""

    def proto(self) -> onnx.ModelProto:
        """The model as protobuf."""
        return ir.to_proto(self.model)

    def session(self, sess_options: Any = None, **kwargs: Any) -> Any:
        """An `onnxruntime.InferenceSession`, which takes these arguments, with the library registered.

        Without `providers` it has those that the kernels are for.
        """
        if self.library is not None and not self.library.is_file():
            raise FolderError(
                f"the library {self.library} is gone", hint="compile the model again; save() keeps it in a folder"
            )
        target = target_of(self.target)
        if "providers" not in kwargs:
            kwargs["providers"] = available(target.providers)
        return open_session(self.model, self.library, sess_options, **kwargs)

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write the model, the library, its source and manifest.json into a folder, which onnxruntime alone can run.

        Weights that were in a file of their own are copied into one beside the model. A folder that has a compiled
        model already is replaced.
        """
        folder = Path(folder)
        if folder.exists() and not (folder / MANIFEST).is_file() and (folder.is_file() or any(folder.iterdir())):
            raise FolderError(f"{folder} exists already and is no compiled model", hint="name another folder")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as beside:
            made = Path(beside, folder.name)
            made.mkdir()
            self._write(made)
            shutil.rmtree(folder, ignore_errors=True)
            made.rename(folder)
        return folder

    def _write(self, folder: Path) -> None:
        write(self.model, folder / MODEL)
        if self.library is not None:
            shutil.copyfile(self.library, folder / LIBRARY)
            (folder / target_of(self.target).source).write_text(self.source, encoding="utf-8")
        told = {
            "format": _FORMAT,
            "readme": _readme(target_of(self.target), has_kernels=self.library is not None),
            "needs": {"onnxruntime": f">={_OLDEST_ONNXRUNTIME}", "platform": sysconfig.get_platform()},
            "built_with": {**versions(), "compiler": self.compiler},
            "target": self.target,
            "processor": asdict(self.processor),
            "files": {path.name: _described(path) for path in sorted(folder.iterdir())},
            "report": self.report.as_dict(),
        }
        (folder / MANIFEST).write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    def __repr__(self) -> str:
        return f"NativeModel({len(self.report.kernels)} kernels; {self.report.nodes_after} nodes)"


def _readme(target: Target, *, has_kernels: bool) -> list[str]:
    return [
        "import onnxruntime",
        "options = onnxruntime.SessionOptions()",
        *[f'options.register_custom_ops_library("./{LIBRARY}")'] * has_kernels,
        f'session = onnxruntime.InferenceSession("{MODEL}", options, providers={json.dumps(target.providers)})',
    ]


def _described(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": _digest(path)}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load(folder: str | os.PathLike[str]) -> NativeModel:
    """Read what `NativeModel.save` wrote; a folder that was damaged, or that this processor cannot run, is an error.

    The digests in its manifest tell of accidents, not of attacks: who can write the folder can write them too. A
    session of the model runs the library's code, so load only what comes from people you trust.
    """
    folder = Path(folder)
    told = _manifest(folder)
    try:
        return _read(folder, told)
    except SardonyxError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        what = f"lacks {error}" if isinstance(error, KeyError) else f"is damaged: {error}"
        raise FolderError(f"{folder / MANIFEST} {what}", hint=_AGAIN) from error


def _read(folder: Path, told: dict[str, Any]) -> NativeModel:
    _check_files(folder, told["files"])
    processor, target = Processor(**told["processor"]), told.get("target", "cpu")
    has_kernels = LIBRARY in told["files"]
    lacking = processor.lacking() if has_kernels else None
    if lacking:
        raise FolderError(
            f"{folder / LIBRARY} was built for {lacking}",
            hint="compile the model again on this machine, or with processor= for what both have",
        )
    return NativeModel(
        _model(folder / MODEL),
        folder / LIBRARY if has_kernels else None,
        (folder / target_of(target).source).read_text(encoding="utf-8") if has_kernels else "",
        told["built_with"]["compiler"],
        processor,
        NativeReport.of_dict(told["report"]),
        target,
    )


def _model(path: Path) -> ir.Model:
    try:
        return ir.load(path)
    except Exception as error:
        raise FolderError(f"{path} is no ONNX model that can be read: {error}", hint=_AGAIN) from error


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        told = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FolderError(
            f"{folder} has no {MANIFEST}", hint="name a folder that NativeModel.save or `sardonyx native compile` wrote"
        ) from None
    except ValueError as error:
        raise FolderError(f"{folder / MANIFEST} is damaged: {error}", hint=_AGAIN) from error
    except OSError as error:
        raise FolderError(f"{folder / MANIFEST} cannot be read: {error.strerror}", hint=_AGAIN) from error
    if not isinstance(told, dict):
        raise FolderError(f"{folder / MANIFEST} is damaged: it is no object", hint=_AGAIN)
    if told.get("format") != _FORMAT:
        raise FolderError(
            f"{folder} has the format {told.get('format')}, and this sardonyx reads {_FORMAT}", hint=_AGAIN
        )
    return told


_AGAIN = "compile the model again, or copy the folder anew"


def _check_files(folder: Path, files: dict[str, Any]) -> None:
    for name in (MODEL, *files):
        path, wanted = folder / name, files.get(name)
        if Path(name).name != name:
            raise FolderError(f"{folder / MANIFEST} describes {name!r}, which is no file of the folder", hint=_AGAIN)
        if not path.is_file():
            raise FolderError(f"{path} is missing", hint=_AGAIN)
        if _described(path) != wanted:
            raise FolderError(f"{path} is not what {MANIFEST} describes: it was changed or cut short", hint=_AGAIN)
