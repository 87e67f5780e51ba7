"""What a device has to be: tensors made on it and moved, shown, saved, copied; storages; generators; errors."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from sardonyx import eager
from sardonyx.eager.dispatch import State
from sardonyx.errors import SardonyxError

native = pytest.mark.skipif("State.core is None", reason="memory without the core does not grow, nor is it pinned")


@pytest.mark.parametrize(
    "make",
    [
        lambda d: torch.ones(3, device=d),
        lambda d: torch.zeros(2, 3, dtype=torch.int64, device=d),
        lambda d: torch.full((2,), 3.5, device=d),
        lambda d: torch.arange(5, device=d),
        lambda d: torch.arange(0.0, 1.0, 0.25, device=d),
        lambda d: torch.linspace(0, 1, 7, device=d),
        lambda d: torch.eye(3, device=d),
        lambda d: torch.tensor([[1, 2.0], [3, 4]], device=d),
        lambda d: torch.tensor(True, device=d),
        lambda d: torch.zeros(0, 3, device=d),
        lambda d: torch.ones(2, dtype=torch.complex64, device=d) * 1j,
        lambda d: torch.ones_like(torch.zeros(2, 2, device=d)),
        lambda d: torch.ones(2, device=d).new_full((3,), 2.0),
    ],
)
def test_tensors_are_made_on_it(make: Callable[[str], torch.Tensor]) -> None:
    made = make("ort")
    assert made.device == torch.device("ort", 0)
    torch.testing.assert_close(made.cpu(), make("cpu"))


@pytest.mark.parametrize(
    "draw",
    [
        lambda d: torch.randn(5, device=d),
        lambda d: torch.rand(5, device=d),
        lambda d: torch.randint(0, 9, (5,), device=d),
        lambda d: torch.randperm(9, device=d),
        lambda d: torch.empty(5, device=d).normal_(),
        lambda d: torch.nn.functional.dropout(torch.ones(9, device=d), 0.5),
        lambda d: torch.bernoulli(torch.full((9,), 0.5, device=d)),
    ],
)
def test_torchs_seed_governs_random_numbers(draw: Callable[[str], torch.Tensor]) -> None:
    torch.manual_seed(3)
    expected = draw("cpu")
    torch.manual_seed(3)
    torch.testing.assert_close(draw("ort").cpu(), expected)


def test_the_generators_state_is_put_back() -> None:
    with torch.random.fork_rng(device_type="ort"):
        torch.manual_seed(5)
        first = torch.rand(3, device="ort").tolist()
    torch.manual_seed(5)
    assert torch.rand(3, device="ort").tolist() == first


def test_tensors_come_and_go() -> None:
    x = torch.randn(3, 4)
    for moved in (x.to("ort"), x.ort(), x.t().to("ort").t(), x.to("ort", torch.float64).float()):  # type: ignore[attr-defined]
        assert moved.is_ort  # type: ignore[attr-defined]
        torch.testing.assert_close(moved.cpu(), x)
        assert moved.tolist() == x.tolist()


def test_it_is_shown_with_its_device() -> None:
    assert repr(torch.ones(2, device="ort")) == "tensor([1., 1.], device='ort:0')"
    assert str(torch.device("ort")) == "ort"


def test_it_is_the_default_device_where_asked_for() -> None:
    with torch.device("ort"):
        assert torch.ones(2).device.type == "ort"
    assert torch.ones(2).device.type == "cpu"


def test_the_module_of_the_device() -> None:
    module: Any = torch.ort  # type: ignore[attr-defined]
    assert module.is_available()
    assert module.device_count() == 1
    assert module.current_device() == 0
    module.synchronize()


def test_copies_share_what_the_originals_share() -> None:
    x = torch.arange(6.0, device="ort")
    pair = copy.deepcopy({"whole": x, "part": x[2:4]})
    pair["part"].fill_(9)
    assert pair["whole"].tolist() == [0, 1, 9, 9, 4, 5]
    assert x.tolist() == [0, 1, 2, 3, 4, 5]


def test_it_can_be_pickled() -> None:
    x = torch.randn(3, device="ort")
    again = pickle.loads(pickle.dumps(x))
    assert again.device.type == "ort"
    assert torch.equal(again, x)


@pytest.mark.parametrize("place", [None, "cpu", "ort"])
def test_it_is_saved_and_loaded(place: str | None) -> None:
    file = io.BytesIO()
    torch.save({"x": torch.arange(3.0, device="ort")}, file)
    file.seek(0)
    loaded = torch.load(file, map_location=place)["x"]
    assert loaded.device.type == (place or "ort")
    assert loaded.tolist() == [0, 1, 2]


def test_a_module_moves_and_loads_a_state() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    moved = copy.deepcopy(model).to("ort")
    assert {p.device.type for p in (*moved.parameters(), *moved.buffers())} == {"ort"}
    moved.load_state_dict(model.state_dict())
    x = torch.randn(5, 3)
    torch.testing.assert_close(moved(x.to("ort")).cpu(), model(x))


def test_storages_of_the_device() -> None:
    assert torch.UntypedStorage(4, device="ort").nbytes() == 4
    storage = torch.UntypedStorage([1, 2, 3], device="ort")
    x = torch.empty(0, dtype=torch.uint8, device="ort").set_(storage)
    x[1] = 7
    assert torch.empty(0, dtype=torch.uint8, device="ort").set_(storage).tolist() == [1, 7, 3]
    assert x.clone().resize_(2).tolist() == [1, 7]


def test_storages_that_cannot_be() -> None:
    with pytest.raises(RuntimeError, match=r"negative dimension -1|cannot allocate 18446744073709551615 bytes"):
        torch.UntypedStorage(-1, device="ort")


@native
def test_memory_that_was_given_back_is_not_read() -> None:
    x = torch.ones(4, device="ort")
    x.untyped_storage().resize_(0)
    for _ in range(3):
        with pytest.raises(RuntimeError, match=r"aten::add.Tensor: a tensor has no memory"):
            x + 1
    x.untyped_storage().resize_(16)
    assert x.fill_(2).tolist() == [2] * 4


@native
def test_what_is_pinned_for_it_is_a_copy_on_the_host() -> None:
    x = torch.arange(3.0)
    pinned = x.pin_memory()
    assert pinned.device.type == "cpu"
    assert pinned.tolist() == x.tolist()
    assert pinned.data_ptr() != x.data_ptr()


def test_tensors_of_two_devices_do_not_mix() -> None:
    with pytest.raises(RuntimeError, match="expected all tensors on ort, found one on cpu"):
        torch.ones(3, device="ort") + torch.ones(3)
    assert (torch.ones(3, device="ort") + torch.tensor(1.0)).tolist() == [2, 2, 2]


def test_autocast_chooses_dtypes() -> None:
    x = torch.randn(3, 3, device="ort")
    with torch.autocast("ort", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
        assert torch.nn.functional.linear(x, x).dtype == torch.bfloat16
        assert (x @ x).exp().dtype == torch.float32
    assert (x @ x).dtype == torch.float32


def test_gradients_are_scaled_as_on_the_cpu() -> None:
    def trained(device: str) -> list[list[float]]:
        layer = nn.Linear(4, 2)
        with torch.no_grad():
            layer.weight.fill_(0.5)
        layer.to(device)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(device, init_scale=8.0, growth_interval=2)
        states = []
        for factor in (1.0, 1.0, 1.0, torch.inf, 1.0):
            optimizer.zero_grad()
            with torch.enable_grad():
                loss = (layer(torch.ones(2, 4, device=device)) * factor).square().mean()
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            states.append([scaler.get_scale(), layer.weight.sum().item()])
        return states

    torch.manual_seed(0)
    found = trained("ort")
    torch.manual_seed(0)
    torch.testing.assert_close(found, trained("cpu"))


def test_functional_transforms_work() -> None:
    x = torch.randn(3, 4)
    torch.testing.assert_close(torch.vmap(lambda row: row * 2)(x.to("ort")).cpu(), x * 2)
    twice = torch.func.hessian(lambda t: (t.sin() * t).sum())
    torch.testing.assert_close(twice(x.to("ort")).cpu(), twice(x))


# What has no ONNX model


def test_without_a_fallback_it_is_an_error_that_names_the_operator() -> None:
    with pytest.raises(eager.NotMapped, match=r"aten::_linalg_eigh\S* cannot run on ort"):
        torch.linalg.eigh(torch.eye(3, device="ort"))


def test_with_one_it_runs_on_the_cpu_is_said_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    eager.enable(fallback="warn")
    before = sum(eager.stats().fallbacks.values())
    x = torch.diag(torch.tensor([2.0, 1.0]))
    for _ in range(2):
        values = torch.linalg.eigh(x.to("ort")).eigenvalues
        torch.testing.assert_close(values.cpu(), torch.tensor([1.0, 2.0]))
        assert values.device.type == "ort"
    assert sum(eager.stats().fallbacks.values()) == before + 2
    assert caplog.text.count("on the CPU: aten::_linalg_eigh") == 1


def test_dtypes_that_onnx_lacks_are_cast_by_the_cpu() -> None:
    x = torch.tensor([1.0, 2.5], device="ort")
    with pytest.raises(eager.NotMapped, match="aten::_to_copy cannot run on ort"):
        x.to(torch.float8_e5m2)
    eager.enable(fallback="quiet")
    assert x.to(torch.float8_e5m2).float().tolist() == [1, 2.5]


def test_what_the_engine_refuses_names_the_operator() -> None:
    x, index = torch.ones(3, device="ort"), torch.tensor([7], device="ort")
    for place in (0, 0, 7, 7):
        index.fill_(place)
        if place:
            with pytest.raises(RuntimeError, match=r"^aten::gather: onnxruntime"):
                x.gather(0, index)
        else:
            assert x.gather(0, index).tolist() == [1]


def test_an_unknown_fallback_is_refused() -> None:
    with pytest.raises(ValueError, match="fallback is 'maybe'"):
        eager.enable(fallback="maybe")  # type: ignore[arg-type]


def test_weights_that_are_shared_stay_so() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.to("ort")
    assert model[1].weight is model[0].weight
    assert optimizer.param_groups[0]["params"][0] is model[0].weight
    assert model[0].weight.device.type == "ort"


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_graphs_run_on_its_tensors(dynamic: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    moved = copy.deepcopy(model).to("ort")
    compiled = torch.compile(moved, backend="sardonyx", dynamic=dynamic, options={"fallback": "error"})
    with torch.enable_grad():
        for size in (3, 5):
            x = torch.randn(size, 4)
            result, expected = compiled(x.to("ort")), model(x)
            assert result.device.type == "ort"
            torch.testing.assert_close(result.cpu(), expected)
            result.square().sum().backward()
            expected.square().sum().backward()
    for mine, other in zip(moved.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), other.grad)  # type: ignore[union-attr]


def test_a_forked_process_computes_and_has_no_gradients_where_its_parent_had() -> None:
    script = """
import os, sys, torch
from sardonyx import eager
torch.set_num_threads(2)
eager.enable(executor=sys.argv[1])
x, w = torch.ones(500, 500, device="ort"), torch.ones(2, device="ort", requires_grad=True)
def compute():
    y = torch.empty(500, 500, device="ort")
    torch.add(x @ x, x, out=y).sub_(1)
    return [y[0, :2].tolist(), x.t().neg()[:, 1:].sum().item(), (x * 0.5)[0, 0].item()]
first = [compute() for _ in range(2)][0]
(w * w).sum().backward()
print(first, flush=True)
if os.fork() == 0:
    print([compute() for _ in range(2)][1], flush=True)
    try:
        (w * w).sum().backward()
    except RuntimeError as error:
        print("fork" in str(error), flush=True)
    os._exit(0)
os.wait()
print(compute(), flush=True)
"""
    executor = "python" if State.core is None else "native"
    done = subprocess.run([sys.executable, "-c", script, executor], capture_output=True, text=True, check=True)
    first, second, refused, last = done.stdout.splitlines()
    assert first == "[[500.0, 500.0], -249500.0, 0.5]"
    assert (second, refused, last) == (first, "True", first)


def test_a_device_that_comes_after_the_first_backward_has_gradients_or_is_refused() -> None:
    script = """
import sys, torch
from sardonyx import eager
from sardonyx.errors import SardonyxError
torch.ones(2, requires_grad=True).sum().backward()
for _ in range(2):
    try:
        eager.enable(executor=sys.argv[1])
    except SardonyxError as error:
        print(error.what)
        continue
    x = torch.full((3,), 2.0, device="ort", requires_grad=True)
    (x * x).sum().backward()
    print(x.grad.tolist())
"""
    executor = "python" if State.core is None else "native"
    done = subprocess.run([sys.executable, "-c", script, executor], capture_output=True, text=True, check=False)
    refused = "autograd does not know the device: a backward ran before it was enabled"
    assert done.stdout.splitlines() == [refused if executor == "python" else "[4.0, 4.0, 4.0]"] * 2, done.stderr


def test_an_executor_that_there_is_not() -> None:
    with pytest.raises(ValueError, match="executor is 'fast'"):
        eager.enable(executor="fast")  # type: ignore[arg-type]
    with pytest.raises(SardonyxError, match="is already enabled"):
        eager.enable(executor="native" if State.core is None else "python")
