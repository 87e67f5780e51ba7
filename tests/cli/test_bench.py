"""`sardonyx bench`: who takes part, what is told, and that another result is noticed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sardonyx.cli import bench

from .calling import BERT, assert_snapshot, run, told

QUICK = ("--rounds", "2", "--seconds", "0.001")


def test_bert_against_eager_and_onnxruntime() -> None:
    found = told("bench", BERT, "--against", "eager,onnxruntime", *QUICK)
    assert_snapshot("bench", {**found, "overhead": sorted(found["overhead"])})
    for contender in found["contenders"]:
        assert contender["difference"] < 1e-4
    assert found["dominates"] in ("overhead", *(row["name"] for row in found["operators"]))


def test_resnet_against_onnxruntime(resnet: Path) -> None:
    done = run("bench", resnet, "--against", "onnxruntime", *QUICK)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["onnxruntime", "sardonyx"]
    assert "dominate" in lines[4]
    assert lines[5].startswith("  in kernels ")
    assert lines[6].startswith("  outside kernels ")


def test_another_result_is_told_and_the_exit_code(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench._Bench, "_session", lambda self: lambda: [torch.zeros(1, 16, 64), torch.zeros(1, 64)])
    done = run("bench", bert, "--against", "onnxruntime", *QUICK)
    assert done.exit_code == 1
    assert "sardonyx failed: its result differs from onnxruntime" in done.stdout


def test_one_that_fails_is_told_beside_the_others(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: bench._Bench) -> bench.TimedCall:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(bench._Bench, "_session", fail)
    done = run("bench", bert, "--against", "onnxruntime", *QUICK)
    assert done.exit_code == 0, done.output
    assert "onnxruntime failed: out of luck" in done.stdout


def test_a_turn_counts_by_the_median_of_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 1.0, 101.0, 101.0, 102.0, 102.0, 103.0])  # a call in which others had the processor
    monkeypatch.setattr(bench.time, "perf_counter", lambda: next(clock))
    contender = bench.Contender("eager", list)
    bench._round([contender], 0, 103.0)
    assert contender.rounds == [1.0]


def test_times_that_vary_are_told_to_be_uncertain() -> None:
    steady, wide = bench.Contender("steady", rounds=[1.0, 1.01, 1.0]), bench.Contender("wide", rounds=[1.0, 3.0, 1.1])
    assert steady.spread == pytest.approx(0.005)
    (doubt,) = bench._uncertainty([steady, wide, bench.Contender("once", rounds=[1.0])])
    assert "times of wide vary" in doubt


@pytest.mark.parametrize("name", ["eager", "nobody"])
def test_who_cannot_take_part_is_an_error(bert: Path, name: str) -> None:
    done = run("bench", bert, "--against", name)
    assert (done.exit_code, f"'{name}' cannot run" in done.stderr, "next: use some of" in done.stderr) == (
        3,
        True,
        True,
    )


def test_an_engine_that_is_not_there_is_a_missing_package(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    done = run("bench", bert, "--against", "onnx-mlir")
    assert (done.exit_code, "error: the engine 'onnx-mlir' is not available: " in done.stderr) == (4, True)


def test_others_have_none_of_our_kernels(bert: Path) -> None:
    found = told("bench", bert, "--against", "onnxruntime", "--option", "native=true", *QUICK)
    assert [(x["name"], x["failed"]) for x in found["contenders"]] == [("onnxruntime", ""), ("sardonyx", "")]


def test_turns_begin_with_another_one_each_time() -> None:
    order: list[str] = []
    contenders = [bench.Contender(name, lambda name=name: order.append(name) or []) for name in "abc"]  # type: ignore[misc,func-returns-value]
    for number in range(3):
        bench._round(contenders, number, 0.0)
    assert "".join(order) == "aabbcc" + "bca" + "cab", "the first turn has a call that does not count"
