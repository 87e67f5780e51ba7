"""What every engine promises, tried on every engine that is installed here: torch's results, or a clear refusal."""

from __future__ import annotations

import gc
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn

import sardonyx
from sardonyx.engines import Job, Runner, artifacts, engines, find
from sardonyx.errors import EngineError, SardonyxError

NAMES = ("onnxruntime", "reference", "openvino", "iree")
ENGINES = [
    pytest.param(e.name, marks=pytest.mark.skipif(not e.installed, reason=e.reason or "not installed"))
    for e in engines()
    if e.name in NAMES
]


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SARDONYX_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@dataclass(frozen=True)
class Case:
    name: str
    function: Callable[..., Any]
    args: tuple[torch.Tensor, ...]
    refused: frozenset[str] = frozenset()
    """Engines that must say that they cannot."""
    tolerance: float = 1e-5


def case(name: str, function: Callable[..., Any], *args: torch.Tensor, refused: str = "", tol: float = 1e-5) -> Case:
    return Case(name, function, args, frozenset(refused.split()), tol)


def ints(*values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


X = torch.linspace(-2, 2, 24).reshape(4, 6)
HALF = X.half()
CASES = [
    case("float", lambda x: torch.softmax(x @ x.T + 1, -1), X),
    case("double", lambda x: torch.exp(x) / 3, X.double(), refused="openvino"),
    case("half", lambda x: (x @ x.T).relu(), HALF, tol=2e-3),
    case("bfloat16", lambda x: x * 2 + x.sum(0), X.bfloat16(), tol=2e-2),
    case("long", lambda x, y: x * y + (x > 2), ints(1, 2, 3), ints(2, -5, 7), refused="openvino"),
    case("long index", lambda x, i: x[i + 1], X, ints(0, 2, 1)),
    case("a long over 32 bits", lambda x: x * 3, ints(2**40, -(2**33), 7), refused="openvino"),
    case("int", lambda x: x // 2 - 5, ints(-7, 7, 9, dtype=torch.int32)),
    case("short", lambda x: x.clone().view(3, 1), ints(-7, 7, 300, dtype=torch.int16)),
    case("bytes are unsigned", lambda x: x.float() * 2, ints(0, 200, 255, dtype=torch.uint8)),
    case("bytes wrap", lambda x: x + x, ints(0, 100, 200, dtype=torch.uint8), refused="openvino"),
    case("bool", lambda x, y: (x & ~y) | (x ^ y), ints(1, 0, 1).bool(), ints(1, 1, 0).bool()),
    case("bool to float", lambda x: torch.where(x > 0, x, -x), X),
    case("several results", lambda x: (x + 1, x.sum(), x.argmax(-1), x > 0), X),
    case("a result that is an input", lambda x: (x, x * 2), X),
    case("an input that nothing reads", lambda x, unused, y: x - y, X, torch.zeros(2), X + 1),
    case("without dimensions", lambda x, y: x * y, torch.tensor(2.5), torch.tensor(-1.0)),
    case("empty", lambda x: x * 2 + 1, torch.zeros(0, 3)),
    case("an empty result", lambda x: x[4:] + 1, X),
    case("a sum over nothing", lambda x: x.sum(0), torch.zeros(0, 3)),
    case("transposed", lambda x: x * 2, X.T),
    case("with gaps", lambda x: x + 1, X[::2, 1::3]),
    case("not aligned", lambda x: x + 1, X.flatten()[1:14]),
    case("expanded", lambda x: x.sum(0), X[:1].expand(5, 6)),
    case("infinities", lambda x: torch.tanh(x) + x, torch.tensor([math.inf, -math.inf, 1e30, 0.0])),
    case("convolution", nn.Conv2d(3, 4, 3, padding=1).eval(), torch.randn(1, 3, 8, 8)),
    case("pooling", lambda x: nn.functional.max_pool2d(x, 2), torch.randn(1, 3, 8, 8)),
    case("normalisation", nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU()).eval(), X),
    case("embedding", nn.Embedding(9, 4), ints(3, 0, 8).reshape(1, 3)),
]


def program(function: Callable[..., Any], args: Sequence[torch.Tensor], engine: str, **more: Any) -> sardonyx.Program:
    return sardonyx.export(function, tuple(args), engine=engine, domains=(), opset=21, **more)


def runner(function: Callable[..., Any], args: Sequence[torch.Tensor], engine: str, **more: Any) -> Runner:
    return program(function, args, engine, **more)._load()


def close(result: Any, expected: Any, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_results_are_torchs(engine: str, case: Case) -> None:
    if engine in case.refused:
        with pytest.raises(SardonyxError, match=engine):
            program(case.function, case.args, engine)(*case.args)
        return
    close(program(case.function, case.args, engine)(*case.args), case.function(*case.args), case.tolerance)


def test_a_size_may_change(engine: str) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    run = program(model, (X,), engine, dynamic_shapes=({0: "batch"},))
    kept = [(x, run(x)) for x in (torch.randn(n, 6) for n in (4, 1, 7, 0, 2, 7))]
    for x, result in kept:  # none shares memory with a later one
        close(result, model(x))


def test_a_result_whose_size_depends_on_values(engine: str) -> None:
    if engine == "iree":
        pytest.skip("its compiler has no NonZero")
    run = program(lambda mask: mask.nonzero(), (X > 0,), engine)
    for mask in (X > 0, X > 1, X > 5):
        assert torch.equal(run(mask), torch.nonzero(mask))


def test_results_go_into_given_tensors(engine: str) -> None:
    run = runner(lambda x: (x * 2, x.sum(0)), (X,), engine)
    whole, strided = torch.full((4, 6), 7.0), torch.full((12,), 7.0)[::2]
    run.into([X], [whole, strided])
    close((whole, strided), (X * 2, X.sum(0)))
    straight = torch.empty(6)
    run.into([X + 1], [whole, straight])
    close((whole, straight), ((X + 1) * 2, (X + 1).sum(0)))


def test_results_are_the_callers_own(engine: str) -> None:
    run = runner(lambda x: x * 2, (X,), engine)
    first = run([X])[0]
    second = run([X])[0]
    first.add_(1.0)
    close(second, X * 2)
    close(run([X])[0], X * 2)


def test_inputs_are_left_alone_and_let_go(engine: str) -> None:
    run = runner(lambda x: x * 2, (X,), engine)
    x = X.clone()
    run([x])
    close(x, X)
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None


def test_threads_may_call_at_once(engine: str) -> None:
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3)).eval()
    run = runner(model, (X,), engine)
    inputs = [torch.randn(4, 6) for _ in range(4)]
    wrong: list[int] = []

    def work(index: int) -> None:
        expected = model(inputs[index])
        results = [run([inputs[index]])[0] for _ in range(20)]
        wrong.extend(index for result in results if not torch.allclose(result, expected, atol=1e-5))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_an_operator_that_it_lacks_is_named(engine: str) -> None:
    if engine == "reference":
        pytest.skip("it raises onnx's own errors")
    given = job_of(engine)
    model = onnx.load_from_string(given.model)
    model.graph.node[0].op_type = "NoSuchOperator"
    with pytest.raises(EngineError, match="NoSuchOperator"):
        artifacts.load(find(engine), replace(given, model=model.SerializeToString()))


def test_what_is_closed_lets_its_weights_go(engine: str) -> None:
    given = job_of(engine)
    weights = {name: weight.clone() for name, weight in given.weights.items()}
    run = artifacts.load(find(engine), replace(given, weights=weights))
    close(run([X])[0], LINEAR(X))
    held = [weakref.ref(weight) for weight in weights.values()]
    run.close()
    del run, weights
    gc.collect()
    assert [ref() for ref in held] == [None] * len(held)


def test_an_artifact_is_loaded_after_its_folder_is_gone(engine: str, tmp_path: Path) -> None:
    chosen, given = find(engine), job_of(engine)
    if chosen.identity(given.options) is None:
        pytest.skip("it writes nothing")
    folder = tmp_path / "artifact"
    folder.mkdir()
    chosen.compile(given, folder)
    made = [chosen.load(given, folder), chosen.load(given, folder)]
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    for run in made:
        close(run([X])[0], LINEAR(X))


def test_a_model_is_loaded_without_an_artifact(engine: str) -> None:
    run = find(engine).load(job_of(engine), None)
    close(run([X])[0], LINEAR(X))


def test_a_damaged_artifact_is_refused(engine: str, tmp_path: Path) -> None:
    chosen, given = find(engine), job_of(engine)
    if chosen.identity(given.options) is None:
        pytest.skip("it writes nothing")
    chosen.compile(given, tmp_path)
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(EngineError, match=engine):
        chosen.load(given, tmp_path)


def test_what_decides_an_artifact_is_in_its_identity(engine: str) -> None:
    chosen = find(engine)
    plain = chosen.identity(sardonyx.Options())
    settings = {"openvino": {"INFERENCE_PRECISION_HINT": "bf16"}, "iree": {"flags": "--iree-opt-level=O1"}}
    if plain is not None:
        assert chosen.identity(sardonyx.Options(engine_options=settings[engine])) != plain


LINEAR = nn.Linear(6, 3).eval()


def job_of(engine: str) -> Job:
    """The job that an exported model is loaded from."""
    seen: list[Job] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(artifacts, "load", lambda _, job: seen.append(job))
        program(LINEAR, (X,), engine)._load()
    return seen[0]


class TestCompiled:
    """The same engines behind torch.compile."""

    @pytest.fixture
    def compiled(self, engine: str) -> Callable[..., Any]:
        def compile(model: Any, dynamic: bool | None = None, **options: Any) -> Any:
            chosen = {"engine": engine, "fallback": "error", **options}
            return torch.compile(model, backend="sardonyx", dynamic=dynamic, options=chosen)

        return compile

    def test_inference(self, compiled: Callable[..., Any]) -> None:
        model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8)).eval()
        close(compiled(model)(X), model(X))

    def test_an_edited_weight_is_noticed(self, compiled: Callable[..., Any]) -> None:
        model = nn.Linear(6, 4).eval()
        run = compiled(model)
        for _ in range(4):
            close(run(X), model(X))
            model.weight.add_(1.0)

    def test_training(self, engine: str, compiled: Callable[..., Any]) -> None:
        if engine == "reference":
            pytest.skip("a training step in it takes seconds")
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        twin = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        twin.load_state_dict(model.state_dict())
        losses = []
        with torch.enable_grad():
            for trained, run in ((model, compiled(model)), (twin, twin)):
                optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
                for _ in range(3):
                    optimizer.zero_grad()
                    loss = run(X).square().mean()
                    loss.backward()
                    optimizer.step()
                losses.append(loss.detach())
        close(losses[0], losses[1])
        close([p.detach() for p in model.parameters()], [p.detach() for p in twin.parameters()])

    def test_a_symbolic_size(self, compiled: Callable[..., Any]) -> None:
        run = compiled(lambda x, y: torch.softmax(x @ y, -1).reshape(-1), dynamic=True)
        for n, k in ((3, 5), (4, 7), (2, 2)):
            x, y = torch.randn(n, k), torch.randn(k, 6)
            close(run(x, y), torch.softmax(x @ y, -1).reshape(-1))
