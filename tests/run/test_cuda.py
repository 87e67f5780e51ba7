"""CUDA tensors: bound in device memory, on torch's stream. Needs a GPU and onnxruntime-gpu."""

from __future__ import annotations

import copy
import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from sardonyx.doors.dynamo import sardonyx as backend
from sardonyx.telemetry.report import collecting

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def compiled(model: Any, **options: Any) -> Any:
    torch._dynamo.reset()  # it would reuse the code of an equal model
    return torch.compile(model, backend=backend, options={"fallback": "error", **options})


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, 256)).eval().cuda()


def close(result: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(result, expected, rtol=2e-3, atol=2e-3)


def test_results_are_eagers_and_stay_on_the_device() -> None:
    net, x = model(), torch.randn(8, 256, device="cuda")
    result = compiled(net)(x)
    assert result.device == x.device
    close(result, net(x))


def test_work_queued_before_and_after_on_the_default_stream_is_ordered() -> None:
    net, big = model(), torch.randn(4096, 4096, device="cuda")
    run = compiled(net)
    run(torch.randn(8, 256, device="cuda"))
    for seed in range(20):
        x = torch.full((8, 256), float("nan"), device="cuda")
        torch.cuda.synchronize()
        for _ in range(10):
            big @ big  # keeps the stream busy while the next line waits in it
        x.copy_(torch.full_like(x, seed / 20))
        result = run(x) * 1.0
        close(result, net(torch.full_like(x, seed / 20)))


def test_a_side_stream_is_ordered_too() -> None:
    net, big = model(), torch.randn(4096, 4096, device="cuda")
    run = compiled(net)
    run(torch.randn(8, 256, device="cuda"))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = torch.full((8, 256), float("nan"), device="cuda")
        for _ in range(10):
            big @ big
        x.copy_(torch.full_like(x, 0.5))
        result = run(x) * 1.0
    stream.synchronize()
    close(result, net(torch.full_like(x, 0.5)))


def test_an_edited_weight_is_used() -> None:
    net, x = model(), torch.randn(8, 256, device="cuda")
    run = compiled(net)
    run(x)
    net[0].weight.data.mul_(2.0)
    close(run(x), net(x))
    net[3].weight.data[3].fill_(1.0)
    close(run(x), net(x))


def test_nothing_is_copied_to_the_host() -> None:
    net, x = model(), torch.randn(8, 256, device="cuda")
    run = compiled(net)
    for _ in range(3):
        run(x)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run(x)
        torch.cuda.synchronize()
    copies = [event.key for event in profile.key_averages() if "Memcpy HtoD" in event.key or "Memcpy DtoH" in event.key]
    assert not copies


@pytest.mark.parametrize("batch", [2, 5, 9])
def test_dynamic_shapes(batch: int) -> None:
    net = model()
    run = torch.compile(net, backend=backend, dynamic=True, options={"fallback": "error"})
    for size in (batch, batch + 1):
        x = torch.randn(size, 256, device="cuda")
        close(run(x), net(x))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 8, 3, stride=2),
        nn.Flatten(),
        nn.Linear(8 * 3 * 3, 5),
    ).cuda()


@pytest.mark.parametrize(
    ("build", "shape"), [(lambda: model().train(), (8, 256)), (convolutions, (4, 3, 16, 16))], ids=["mlp", "cnn"]
)
@torch.enable_grad()
def test_training_steps_are_eagers(build: Any, shape: tuple[int, ...]) -> None:
    eager = build()
    ours = copy.deepcopy(eager)
    run = compiled(ours, fallback="quiet")  # the provider has no MaxUnpool
    for net, parameters in ((eager, eager.parameters()), (run, ours.parameters())):
        optimizer = torch.optim.SGD(parameters, 0.1)
        for seed in range(3):
            torch.manual_seed(seed)
            optimizer.zero_grad()
            net(torch.randn(shape, device="cuda")).square().mean().backward()
            optimizer.step()
    for got, expected in zip(ours.state_dict().values(), eager.state_dict().values(), strict=True):
        close(got, expected)


@torch.enable_grad()
def test_attention_in_training_is_torchs_between_graphs_and_right() -> None:
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True).cuda()
    run = torch.compile(layer, backend=backend, options={"fallback": "quiet"})
    x = torch.randn(2, 16, 64, device="cuda")
    expected, got = (torch.autograd.grad(net(x).square().sum(), list(layer.parameters())) for net in (layer, run))
    for ours, eager in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-2, atol=1e-2)


EXACT = {
    "sum": lambda x: x.sum(),
    "prod": lambda x: (x - BIG + 1).prod(1),
    "amax": lambda x: x.amax(1),
    "amin": lambda x: x.amin((0, 1)),
    "max": lambda x: x.max(1),
    "aminmax": lambda x: torch.aminmax(x),
    "clamp": lambda x: x.clamp(BIG + 3, BIG + 9),
    "maximum": lambda x: torch.maximum(x, x.flip(0)),
    "sort": lambda x: x.sort(1)[0],
    "cumsum": lambda x: x.cumsum(1),
    "fmod": lambda x: torch.fmod(x, 1000),
    "floor_divide": lambda x: x // 7,
    "sign": lambda x: (x - BIG - 5).sign(),
}
BIG = 1_700_000_000_123_456_789


@pytest.mark.parametrize("name", EXACT)
def test_integers_of_64_bits_are_exact(name: str) -> None:
    x = torch.arange(64, device="cuda").view(4, 16) * 3 % 67 + BIG  # no two are equal
    torch.testing.assert_close(compiled(EXACT[name], fallback="quiet")(x), EXACT[name](x), rtol=0, atol=0)


def recordings(report: Any) -> Any:
    return report.graphs[0].regions[0].recordings


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_extrema_of_infinities_are_infinite(dtype: torch.dtype) -> None:
    def extrema(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pooled = torch.nn.functional.max_pool1d(x[None], 3)[0]
        return x.amax(1), x.amin(1), x.amax(), x.max(1).values, torch.softmax(x, 1), pooled

    inf = float("inf")
    rows = [[-inf] * 3, [inf] * 3, [-inf, float("nan"), -inf], [-inf, torch.finfo(dtype).min, -inf], [1, -inf, inf]]
    x = torch.tensor(rows, dtype=dtype, device="cuda")
    run = compiled(extrema, fallback="quiet")
    for expected, result in zip(extrema(x), run(x), strict=True):
        torch.testing.assert_close(result, expected, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_negative_numbers_become_uint8_as_in_eager(dtype: torch.dtype) -> None:
    x = torch.tensor([-1, -1.5, -100, 0, 200, 255, 300], dtype=dtype, device="cuda")
    torch.testing.assert_close(compiled(lambda x: x.byte())(x), x.byte())


def test_sessions_that_copy_from_the_host_end_at_any_time() -> None:
    """Concat of many operands has a list of them copied from the host."""
    for size in range(1, 20):
        parts = [torch.randn(size, device="cuda") for _ in range(40)]
        run = compiled(lambda *xs: torch.cat(xs).relu())
        for _ in range(size % 5 + 1):
            close(run(*parts), torch.cat(parts).relu())
        del run
        gc.collect()


def test_a_shape_that_repeats_is_recorded_and_replayed() -> None:
    net = model()
    with collecting() as report:
        run = compiled(net)
        for _ in range(6):
            x = torch.randn(8, 256, device="cuda")
            close(run(x), net(x))
    assert (recordings(report).recorded, recordings(report).replays) == (1, 4)


def test_results_of_replays_are_not_overwritten() -> None:
    net = model()
    run = compiled(net)
    inputs = [torch.randn(8, 256, device="cuda") for _ in range(8)]
    results = [run(x) for x in inputs]
    for x, result in zip(inputs, results, strict=True):
        close(result, net(x))


def test_edited_and_replaced_weights_are_seen_by_replays() -> None:
    net, x = model(), torch.randn(8, 256, device="cuda")
    run = compiled(net)
    for _ in range(4):
        run(x)
    net[0].weight.data.mul_(2.0)
    close(run(x), net(x))
    net[0].weight = nn.Parameter(torch.randn_like(net[0].weight) / 16)
    for _ in range(4):
        close(run(x), net(x))


def test_replays_on_several_streams_are_ordered() -> None:
    net, big = model(), torch.randn(4096, 4096, device="cuda")
    run = compiled(net)
    streams = [torch.cuda.Stream() for _ in range(2)]
    for count in range(12):
        stream = streams[count % 2]
        with torch.cuda.stream(stream):
            x = torch.full((8, 256), float("nan"), device="cuda")
            for _ in range(4):
                big @ big
            x.copy_(torch.full_like(x, count / 12))
            result = run(x) * 1.0
        stream.synchronize()
        close(result, net(torch.full_like(x, count / 12)))


def test_threads_share_recordings() -> None:
    net = model()
    run = compiled(net)
    with torch.no_grad():
        run(torch.randn(8, 256, device="cuda"))  # dynamo does not compile in several threads at once

    def work(seed: int) -> bool:
        generator = torch.Generator("cuda").manual_seed(seed)
        for _ in range(20):
            x = torch.randn(8, 256, device="cuda", generator=generator)
            with torch.no_grad():
                if not torch.allclose(run(x), net(x), rtol=2e-3, atol=2e-3):
                    return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


def test_the_callers_own_cuda_graph() -> None:
    net, x = model(), torch.randn(8, 256, device="cuda")
    run = compiled(net)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), torch.no_grad():
        for _ in range(4):
            run(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph, stream=side):
        result = run(x)
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    close(result, net(x))


def test_what_cannot_be_recorded_runs_without_a_graph() -> None:
    def chosen(x: torch.Tensor) -> torch.Tensor:
        return x[x > 0].sum() + torch.nonzero(x).sum()

    with collecting() as report:
        run = torch.compile(chosen, backend=backend, options={"fallback": "quiet"})
        for _ in range(5):
            x = torch.randn(64, device="cuda")
            torch.testing.assert_close(run(x), chosen(x), rtol=1e-4, atol=1e-4)
    notes = [r.recordings for graph in report.graphs for r in graph.regions if r.recordings is not None]
    assert all(not note.replays or not note.refused for note in notes)


@torch.no_grad()
@pytest.mark.parametrize(("mode", "recorded"), [("reduce-overhead", 1), ("max-autotune-no-cudagraphs", 0)])
def test_modes_of_torch(mode: str, recorded: int) -> None:
    net, x = model(), torch.randn(8, 256, device="cuda")
    with collecting() as report:
        torch._dynamo.reset()
        run = torch.compile(net, backend=backend, mode=mode)
        for _ in range(4):
            close(run(x), net(x))
    notes = [region.recordings for graph in report.graphs for region in graph.regions]
    assert sum(note.recorded for note in notes if note is not None) == recorded


def test_results_on_the_cpu_are_on_the_cpu() -> None:
    def mixed(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x * 2, x.sum().cpu(), torch.arange(3) + 1

    x = torch.randn(4, device="cuda")
    for got, expected in zip(compiled(mixed, fallback="quiet")(x), mixed(x), strict=True):
        assert got.device == expected.device
        torch.testing.assert_close(got, expected)


def test_a_model_that_is_freed_while_it_runs() -> None:
    big = torch.randn(4096, 4096, device="cuda")
    for _ in range(5):
        net = model()
        run = compiled(net)
        for _ in range(20):
            big @ big
        result = run(torch.randn(8, 256, device="cuda"))
        del run, net
        torch._dynamo.reset()
        gc.collect()
        assert result.isfinite().all()


class Projections(nn.Module):
    """Several linear layers of one input."""

    def __init__(self, depth: int, widths: tuple[int, ...], bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(depth, width, bias=bias) for width in widths)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(layer(x) for layer in self.layers)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "widths", "bias"),
    [
        ((8, 128, 768), (768, 768, 768), True),
        ((1, 512, 2048), (2048, 512, 512), False),
        ((1, 2048), (32000,), False),
        ((2, 5, 7, 64), (32, 8, 16, 24, 40), True),
        ((3, 64), (64,), True),
    ],
)
def test_matrix_products_are_as_exact_as_eagers(
    dtype: torch.dtype, shape: tuple[int, ...], widths: tuple[int, ...], bias: bool
) -> None:
    net = Projections(shape[-1], widths, bias).eval().to("cuda", dtype)
    x = torch.randn(shape, device="cuda", dtype=dtype)
    exact = [y.double() for y in copy.deepcopy(net).double()(x.double())]
    with collecting() as report:
        run = compiled(net)
        for _ in range(4):  # algorithms are measured in the second call, a graph is replayed from the third on
            results = run(x)
    assert any(name.startswith("Products") for name in report.operators)
    for result, eager, truth in zip(results, net(x), exact, strict=True):
        assert (result.double() - truth).abs().max() <= 1.5 * (eager.double() - truth).abs().max()


def test_operands_of_a_product_may_begin_at_any_address() -> None:
    weight = torch.randn(64 * 64 + 1, device="cuda", dtype=torch.float16)[1:].view(64, 64)
    x = torch.randn(3 * 64 + 1, device="cuda", dtype=torch.float16)[1:].view(3, 64)
    run = compiled(lambda x, w: x @ w)
    for _ in range(4):
        close(run(x, weight).float(), x.float() @ weight.float())


def test_memory_is_constant_over_ten_thousand_calls_with_twenty_shapes() -> None:
    net = model().half()
    run = torch.compile(net, backend=backend, dynamic=True, options={"fallback": "error"})
    inputs = [torch.randn(rows, 256, device="cuda", dtype=torch.float16) for rows in range(8, 168, 8)]
    expected = [net(x) for x in inputs]
    generator = torch.Generator().manual_seed(0)
    for index in range(100):
        close(run(inputs[index % 20]), expected[index % 20])
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    for count in range(9_900):
        index = int(torch.randint(0, 20, (), generator=generator))
        result = run(inputs[index])
        if count % 50 == 0:
            close(result, expected[index])
    torch.cuda.synchronize()
    assert torch.cuda.mem_get_info()[0] >= free
