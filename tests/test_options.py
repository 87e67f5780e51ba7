"""Options: one declaration gives default, environment variable, check and documentation."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sardonyx
from sardonyx import OptionError, Options, compat
from sardonyx.options import defaults


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SARDONYX_CACHE_DIR")


def test_a_mapping_and_an_object_are_the_same() -> None:
    assert Options.of({"cache_size": 5}) == Options.of(Options(cache_size=5))


def test_more_is_laid_over_what_is_given() -> None:
    assert Options.of({"opset": 20}, verify=True) == Options(opset=20, verify=True)


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ({"fallback": "explode"}, "'warn', 'error', 'quiet'"),
        ({"cache_size": 0}, "at least 1"),
        ({"translator": "torch"}, "'sardonyx', 'torchlib'"),
        ({"opset": "23"}, "an integer"),
        ({"opset": 17}, "from 18 on"),
        ({"optimize": "some"}, "'default'"),
        ({"fall_back": "warn"}, "did you mean 'fallback'"),
        ({"zzz": 1}, "known options"),
        ({"dispatcher": 1}, "next: use 'translations'"),
        ({"dynamc": True}, r"did you mean 'dynamic'\? it is an argument of torch.compile"),
        ({"fullgraph": True}, "an argument of torch.compile"),
        ({"ort_session_options": {}}, "next: use 'session_options'"),
        ({"preferred_execution_provider": []}, "did you mean 'preferred_execution_providers'. use 'providers'"),
        ({"use_aot_autograd": True}, "leave it out"),
        ({"target_opset": 20}, "next: use 'opset'"),
        ({"max_drop": 0.05}, "use it with precision="),
        ({"precision": "float32", "max_drop": 0}, "use it with precision="),
        ({"int4_block": 32}, "use it with precision="),
        ({"metric": max}, "use it with precision="),
        ({"translations": [print]}, "use a dict"),
        ({"translations": {"relu": print}}, '"mylib::op"'),
        ({"transforms": print}, "use a list"),
        ({"providers": "CPUExecutionProvider"}, "use a list"),
        ({"engine": None}, r"sardonyx\.engines\(\)"),
        ({"compile_options": 3}, "use text"),
        ({"compile_options": "'-O3"}, "No closing quotation"),
        ({"freeze": "no"}, "True or False"),
        ({"freeze": 1}, "True or False"),
        ({"verify": None}, "True or False"),
        ({"preallocate_outputs": "yes"}, "True, False or None"),
        ({"native": "yes"}, "'auto'"),
        ({"native": 2}, "'auto'"),
        ({"native": np.ones(2)}, "'auto'"),
        ({"fallback": ["warn"]}, "'warn', 'error', 'quiet'"),
        ({"fallback": np.ones(2)}, "'warn', 'error', 'quiet'"),
        ({"cache_size": True}, "an integer"),
        ({"cache_size": 2.0}, "an integer"),
        ({"cache_bytes": "8GB"}, "an integer"),
        ({"cache_bytes": -1}, "a number of bytes"),
        ({"cache_dir": 3}, "use text"),
        ({"dump": True}, "use text"),
        ({"report": ["out.html"]}, "use text"),
        ({"repro": 1}, "use text"),
        ({"compiler_path": 1}, "use text"),
        ({"compiler_image": 1}, "use text"),
        ({"opset": 23.0}, "an integer"),
        ({"opset": True}, "an integer"),
        ({"optimize": 3}, "a list of names"),
        ({"optimize": [1]}, "a list of names"),
        ({"optimize": None}, "a list of names"),
        ({"intercept": "yes"}, "a function that takes the call"),
        ({"transforms": [3]}, "a list of functions"),
        ({"transforms": None}, "a list of functions"),
        ({"providers": [3]}, "a list of names"),
        ({"providers": {"CPUExecutionProvider": {}}}, "a list of names"),
        ({"providers": [("CPUExecutionProvider",)]}, "a list of names"),
        ({"engine_options": [1]}, "use a dict"),
        ({"engine_options": {1: 2}}, "use a dict"),
        ({"session_options": "fast"}, "use a dict"),
        ({"session_options": [1]}, "use a dict"),
        ({1: 2}, "names of options are text"),
        ("fast", "use a dict"),
    ],
)
def test_a_wrong_option_says_what_would_be_right(wrong: Any, hint: str) -> None:
    with pytest.raises(OptionError, match=hint):
        Options.of(wrong)


@pytest.mark.parametrize(
    ("function", "keyword", "hint"),
    [
        (lambda **given: sardonyx.export(torch.nn.ReLU(), (torch.ones(2),), **given), "dynamc", "'dynamic_shapes'"),
        (lambda **given: sardonyx.export(torch.nn.ReLU(), (torch.ones(2),), **given), "dynamic", "'dynamic_shapes'"),
        (lambda **given: sardonyx.compile(torch.nn.ReLU(), **given), "dynamc", "'dynamic'"),
        (compat.make_aot_ort, "dynamc", "'dynamic'"),
        (lambda **given: compat.to_onnx(torch.nn.ReLU(), (torch.ones(2),), **given), "target_opse", "'target_opset'"),
        (compat.make_aot_ort, "falback", "'fallback'"),
    ],
)
def test_a_misspelled_keyword_suggests_those_of_its_function(function: Any, keyword: str, hint: str) -> None:
    with pytest.raises(OptionError, match=rf"did you mean {hint}\?$"):
        function(**{keyword: 1})


@pytest.mark.parametrize("name", [x.name for x in dataclasses.fields(Options) if x.name != "session_options"])
@pytest.mark.parametrize("value", [object(), b"bytes", 1j, {1}], ids=["object", "bytes", "complex", "set"])
def test_no_option_takes_any_object(name: str, value: object) -> None:
    with pytest.raises(OptionError, match=f"{name} is "):
        Options.of({name: value})


def test_a_folder_may_be_a_path() -> None:
    assert Options.of({"cache_dir": Path("a/b"), "dump": Path("c")}) == Options(cache_dir="a/b", dump="c")


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("SARDONYX_FALLBACK", "error", "fallback", "error"),
        ("SARDONYX_VERIFY", "1", "verify", True),
        ("SARDONYX_OPTIMIZE", "false", "optimize", False),
        ("SARDONYX_CACHE_SIZE", "7", "cache_size", 7),
        ("SARDONYX_PROVIDERS", "A, B", "providers", ("A", "B")),
        ("SARDONYX_DUMP", "folder", "dump", "folder"),
        ("ONNXRT_DUMP_PATH", "folder/model_", "dump", "folder/model_{number}"),
        ("SARDONYX_TRANSLATOR", "torchlib", "translator", "torchlib"),
        ("ONNXRT_CHANGE_REWRITER", "0", "translator", "torchlib"),
        ("ONNXRT_CHANGE_REWRITER", "1", "translator", "sardonyx"),
    ],
)
def test_an_environment_variable_sets_a_default(
    variable: str, text: str, name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, text)
    assert getattr(Options.of(), name) == value
    assert getattr(Options.of({name: getattr(Options(), name)}), name) == getattr(Options(), name)


_BROKEN = [("SARDONYX_CACHE_SIZE", "many"), ("SARDONYX_VERIFY", "maybe"), ("ONNXRT_CHANGE_REWRITER", "ours")]


@pytest.mark.parametrize(("variable", "text"), _BROKEN)
def test_a_broken_environment_variable_is_named(variable: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(OptionError, match=variable):
        Options.of()


def test_the_new_name_of_a_variable_comes_before_the_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXRT_CHANGE_REWRITER", "1")
    monkeypatch.setenv("SARDONYX_TRANSLATOR", "torchlib")
    assert Options.of().translator == "torchlib"


def test_defaults_lie_between_what_is_given_and_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SARDONYX_DUMP", "from the environment")
    with defaults(dump="outer", opset=20), defaults(dump="inner"):
        assert (Options.of().dump, Options.of({"dump": "given"}).dump, Options.of().opset) == ("inner", "given", 20)
    assert Options.of().dump == "from the environment"


def test_defaults_of_a_precision_wait_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SARDONYX_INT4_BLOCK", "32")
    with defaults(max_drop=0.2):
        assert (Options.of().max_drop, Options.of({"verify": True}).int4_block) == (0.01, 64)
        lower = Options.of(precision="int4")
        assert (lower.max_drop, lower.int4_block) == (0.2, 32)
    with defaults(max_drop=0.2, precision="int8"):
        assert Options.of(precision="float32") == Options()


def test_options_without_their_precision_have_none_of_its_options() -> None:
    lower = Options(precision="int4", max_drop=0.2, int4_block=32, metric=max)
    assert Options.of(lower, precision="float32") == Options()
    with pytest.raises(OptionError, match=r"^max_drop= without a precision\n  next: use it with precision='auto', "):
        Options.of(lower, precision="float32", max_drop=0.2)


def test_what_changes_the_artifact_is_in_its_key() -> None:
    base = Options()
    assert dataclasses.replace(base, opset=20).artifact_key() != base.artifact_key()
    assert dataclasses.replace(base, translator="torchlib").artifact_key() != base.artifact_key()
    assert dataclasses.replace(base, dump="x").artifact_key() == base.artifact_key()


def test_every_option_is_described() -> None:
    table = Options.describe()
    assert all(f"`{field.name}`" in table for field in dataclasses.fields(Options))
