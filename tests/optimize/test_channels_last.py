"""Networks with channels last, as on CUDA: the same results as eager's, and no Transpose inside a network."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sardonyx
from sardonyx.engines import registry
from sardonyx.engines.engine import Job, Runner
from sardonyx.engines.onnxruntime import OnnxRuntime
from sardonyx.optimize.legalize import Kernels, legalize
from sardonyx.optimize.rules.cuda_channels_last import INTERNAL
from sardonyx.run import sessions
from tests.optimize.channels_last import expand_channels_last

CUDA = torch.device("cuda")


class CudaOnCpu(OnnxRuntime):
    """Builds the models of CUDA, with weights as inputs, and runs them on the CPU."""

    name = "cuda-on-cpu"

    def __init__(self) -> None:
        self.models: list[onnx.ModelProto] = []

    def local_domains(self, device: torch.device, operators: Set[str], *, training: bool = False) -> frozenset[str]:
        return super().local_domains(CUDA, operators, training=training)

    def opset(self, device: torch.device, operators: Set[str]) -> int:
        return super().opset(CUDA, operators)

    def kernels(self, device: torch.device) -> Kernels:
        return super().kernels(CUDA)

    def freezes(self, device: torch.device) -> bool:
        return False

    def load(self, job: Job, artifact: Path | None) -> Runner:
        proto = onnx.load_from_string(job.model)
        self.models.append(proto)
        model = ir.from_proto(proto)
        expand_channels_last(model)
        legalize(model, super().kernels(torch.device("cpu")))
        outputs = tuple(str(x.name) for x in model.graph.outputs)
        return super().load(replace(job, model=ir.to_proto(model).SerializeToString(), outputs=outputs), artifact)

    @property
    def operators(self) -> Counter[str]:
        """The operators of the last model; those with channels last have their domain before their name."""
        return operators(self.models[-1])


def operators(model: onnx.ModelProto) -> Counter[str]:
    return Counter(f"{INTERNAL}.{n.op_type}" if n.domain == INTERNAL else n.op_type for n in model.graph.node)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> CudaOnCpu:
    engine = CudaOnCpu()
    monkeypatch.setattr(registry, "_registered", {engine.name: engine})
    sessions.clear()
    torch._dynamo.reset()
    return engine


class Block(nn.Module):
    """A bottleneck of a residual network."""

    def __init__(self, width: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.narrow = nn.Conv2d(out if stride == 1 else width, width, 1, bias=False)
        self.conv = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.wide = nn.Conv2d(width, out, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for channels in (width, width, out))
        self.skip = nn.Conv2d(width, out, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norms[0](self.narrow(x)))
        y = F.relu(self.norms[1](self.conv(y)))
        return F.relu(self.norms[2](self.wide(y)) + self.skip(x))


class Pooled(nn.Module):
    """A network of blocks, with a stem over an image of three channels."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8)
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = F.max_pool2d(F.relu(self.norm(self.stem(x))), 3, 2, 1)
        return self.head(torch.flatten(F.adaptive_avg_pool2d(self.blocks(y), 1), 1))


def resnet() -> nn.Module:
    return Pooled(Block(8, 16, 2), Block(8, 16))


def prepared(net: nn.Module) -> nn.Module:
    """The network in half precision, for inference, with statistics that are not those of a new one."""
    torch.manual_seed(0)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, 0, 0.5)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
            nn.init.normal_(module.weight, 1, 0.3)
            nn.init.normal_(module.bias, 0, 0.3)
    return net.half().eval()


def compiled(net: Any, **options: Any) -> Any:
    return torch.compile(net, backend="sardonyx", options={"engine": CudaOnCpu.name, "fallback": "error", **options})


def check(net: nn.Module, *inputs: Tensor, run: Any = None) -> None:
    """Compare with eager in single precision."""
    if run is None:
        net = prepared(net)
        run = compiled(net)
    with torch.no_grad():
        result = run(*inputs)
        half = net(*inputs)
        expected = copy.deepcopy(net).float()(*(x.float() for x in inputs))
    assert result.stride() == half.stride()
    torch.testing.assert_close(result.float(), expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))


def image(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float16)


@pytest.mark.parametrize("batch", [1, 3])
def test_only_the_image_is_transposed(engine: CudaOnCpu, batch: int) -> None:
    check(resnet(), image(batch, 3, 37, 33))
    assert engine.operators["Transpose"] == 1
    assert engine.operators[f"{INTERNAL}.Conv"] == 4
    assert engine.operators["Gemm"] == 4 + 1
    assert not engine.operators["Conv"]


def test_an_image_with_channels_last_is_not_transposed(engine: CudaOnCpu) -> None:
    net = prepared(resnet()).to(memory_format=torch.channels_last)
    x = image(2, 3, 37, 33).contiguous(memory_format=torch.channels_last)
    check(net, x, run=compiled(net))
    assert engine.operators["Transpose"] == 3  # the weights of convolutions over several pixels


def test_edits_and_replacements_of_weights_with_channels_last_are_seen(engine: CudaOnCpu) -> None:
    net = prepared(resnet()).to(memory_format=torch.channels_last)
    run, x = compiled(net), image(2, 3, 37, 33)
    check(net, x, run=run)
    with torch.no_grad():
        net.stem.weight.mul_(0.5)
        check(net, x, run=run)
        net.stem.weight.data = torch.randn_like(net.stem.weight)
        check(net, x, run=run)
        net.stem.weight.data = torch.randn(net.stem.weight.shape, dtype=torch.float16)  # channels first
        check(net, x, run=run)


def test_inputs_of_other_strides_are_right(engine: CudaOnCpu) -> None:
    net = prepared(resnet())
    run = compiled(net)
    check(net, image(2, 3, 37, 33), run=run)
    check(net, image(2, 3, 37, 33).contiguous(memory_format=torch.channels_last), run=run)
    check(net, image(2, 3, 33, 37).transpose(2, 3), run=run)
    check(net, image(4, 3, 74, 33)[::2, :, ::2], run=run)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=["first", "last"])
def test_a_batch_of_any_size(engine: CudaOnCpu, memory_format: torch.memory_format) -> None:
    net = prepared(resnet())
    run = torch.compile(net, backend="sardonyx", dynamic=True, options={"engine": CudaOnCpu.name, "fallback": "error"})
    for size in ((2, 3, 37, 33), (5, 3, 37, 33), (3, 3, 41, 50)):
        check(net, image(*size).contiguous(memory_format=memory_format), run=run)
    assert len(engine.models) <= 2


class Dense(nn.Module):
    """Layers over all earlier ones, joined along channels."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm2d(4 + 3 * i) for i in range(3))
        self.convs = nn.ModuleList(nn.Conv2d(4 + 3 * i, 3, 3, padding=1, bias=i > 0) for i in range(3))
        self.first = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        layers = [self.first(x)]
        for norm, conv in zip(self.norms, self.convs, strict=True):
            layers.append(conv(F.silu(norm(torch.cat(layers, 1)))))
        return F.avg_pool2d(torch.cat(layers, 1), 2)


def test_layers_joined_along_channels(engine: CudaOnCpu) -> None:
    check(Dense(), image(2, 4, 10, 7))
    assert engine.operators["Transpose"] == 1 + 1  # the image, the result


class Gated(nn.Module):
    """Channels scaled by a function of their means, a bias per channel, and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.down, self.up = nn.Conv2d(8, 12, 3), nn.Conv2d(12, 4, 1), nn.Conv2d(4, 12, 1)
        self.shift = nn.Parameter(torch.randn(12, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = F.hardswish(self.conv(x) + self.shift)
        gate = torch.sigmoid(self.up(F.relu(self.down(y.mean((2, 3), keepdim=True)))))
        return (y * gate * 0.5 - 1).clamp(-1, 2)


def test_channels_scaled_by_their_means(engine: CudaOnCpu) -> None:
    check(Gated(), image(3, 8, 9, 6))
    assert engine.operators["Transpose"] == 1 + 1


CONVOLUTIONS = {
    "dilated": nn.Conv2d(5, 7, 3, dilation=2, padding=3),
    "of a line": nn.Conv2d(9, 4, (1, 5), stride=(2, 3), padding=(0, 2)),
    "one pixel, padded": nn.Conv2d(9, 4, 1, padding=1),
    "one channel": nn.Conv2d(1, 1, 3),
    "one pixel of one channel": nn.Conv2d(1, 1, 1),
    "even, without bias": nn.Conv2d(16, 8, 4, 2, 1, bias=False),
    "as large as the image": nn.Conv2d(8, 3, (9, 10)),
    "replicated": nn.Conv2d(8, 8, 3, padding=1, padding_mode="replicate"),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("batch", [1, 2])
def test_convolutions(engine: CudaOnCpu, name: str, batch: int) -> None:
    conv = CONVOLUTIONS[name]
    check(nn.Sequential(conv, nn.ReLU()), image(batch, conv.in_channels, 9, 10))
    assert not engine.operators["Conv"]


@pytest.mark.parametrize("groups", [2, 8])
def test_networks_with_groups_stay_as_they_are(engine: CudaOnCpu, groups: int) -> None:
    check(nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3, groups=groups)), image(2, 8, 9, 10))
    assert engine.operators["Conv"] == 2


@pytest.mark.parametrize("layer", [nn.GroupNorm(2, 8), nn.ConvTranspose2d(8, 8, 2), nn.Upsample(scale_factor=2)])
def test_networks_of_layers_with_channels_first_stay_as_they_are(engine: CudaOnCpu, layer: nn.Module) -> None:
    check(nn.Sequential(nn.Conv2d(8, 8, 3), layer, nn.Conv2d(8, 8, 1)), image(2, 8, 9, 10))
    assert engine.operators["Conv"] == 2


def test_a_few_layers_may_have_channels_first(engine: CudaOnCpu) -> None:
    convs = [nn.Conv2d(8, 8, size) for size in (3, 1, 3, 1, 1, 3)]
    grouped, upsample = nn.Conv2d(8, 8, 3, groups=2), nn.Upsample(scale_factor=2)
    check(nn.Sequential(*convs[:3], upsample, *convs[3:]), image(2, 8, 9, 10))
    assert not engine.operators["Conv"]
    check(nn.Sequential(*convs[:5], grouped, *convs[5:]), image(2, 8, 13, 10))
    assert engine.operators["Conv"] == 1


def test_training_stays_as_it_is(engine: CudaOnCpu) -> None:
    net = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).half().train()
    x = image(2, 8, 9, 10)
    with torch.enable_grad():
        compiled(net)(x).float().sum().backward()
    assert not any(operators(model)[f"{INTERNAL}.Conv"] for model in engine.models)


def test_a_rule_can_be_left_out(engine: CudaOnCpu) -> None:
    net = prepared(resnet())
    check(net, image(2, 3, 37, 33), run=compiled(net, optimize="default-ChannelsLastConvolution"))
    assert engine.operators["Conv"] == 8


def test_a_model_stored_on_disk_is_called_in_the_same_order(engine: CudaOnCpu, tmp_path: Path) -> None:
    net = prepared(resnet()).to(memory_format=torch.channels_last)
    x = image(2, 3, 37, 33).contiguous(memory_format=torch.channels_last)
    for from_disk in (False, True):
        module = sardonyx.compile(net, engine=engine.name, fallback="error", cache_dir=str(tmp_path))
        for _ in range(3):
            check(net, x, run=module)
        assert [build.from_disk for build in module.builds] == [from_disk]
