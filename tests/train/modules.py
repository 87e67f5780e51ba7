"""The modules that the training sweep takes a step of: one or more for each family of torch.nn."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Tensor = torch.Tensor
Inputs = Callable[[int], Any]


@dataclass(frozen=True)
class Case:
    """A module, the arguments it is given for a batch of some size, and how it is judged."""

    name: str
    family: str
    build: Callable[[], nn.Module]
    inputs: Inputs
    """Gives the arguments, a tuple or keywords, for a batch size."""
    learns: int | None = None
    """How many of the arguments, counted from the first, get a gradient; all that are floating point by default."""
    tolerance: float = 1e-5
    batches: tuple[int, int] = (5, 7)
    """Sizes that no other dimension has: torch takes equal sizes for the same symbol."""
    static: str = ""
    """Why it is compiled for one batch size alone."""
    in_torch: str = ""
    """Why dynamo hands nothing of it to a backend, where it does not; the step must be right all the same."""
    random: str = ""
    """How a module that draws random numbers is judged: "factor" or "slope"; see `check`."""


CASES: dict[str, Case] = {}

TORCH_ALONE = {
    "adaptive-softmax": "dynamo does not capture numbers of rows that depend on data",
    "batch-norm2d-cumulative": "dynamo does not capture the number read off num_batches_tracked",
    "ctc": "dynamo takes the size of _ctc_loss for data-dependent",
    "ctc-sum": "dynamo takes the size of _ctc_loss for data-dependent",
    "gaussian-nll": "dynamo does not capture the check for negative variances",
}
FIXED = {
    "affine-grid": "torch does not differentiate affine_grid for a symbolic size",
    "fractional-max-pool3d": "torch has no symbolic sizes for it",
    "interpolate-bilinear-antialiased": "antialiasing over a symbolic size is refused",
    "multi-label-margin": "torch has no symbolic sizes for its gradient",
}


def case(family: str, name: str, build: Callable[[], nn.Module], inputs: Inputs, **how: Any) -> None:
    """Make a module known to the sweep."""
    assert name not in CASES, name
    noted = {"in_torch": TORCH_ALONE.get(name, ""), "static": FIXED.get(name, "")}
    CASES[name] = Case(name, family, build, inputs, **noted, **how)


class Formula(nn.Module):
    """A function of tensors as a module, so that it is compiled and differentiated like one."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *args: Tensor) -> Any:
        return self._function(*args)


def formula(family: str, name: str, function: Callable[..., Any], inputs: Inputs, **how: Any) -> None:
    """Make a function known to the sweep."""
    case(family, name, lambda: Formula(function), inputs, **how)


def batch(*shapes: Sequence[int]) -> Inputs:
    """Normally distributed tensors whose first size is the batch's."""
    return lambda n: tuple(torch.randn(n, *shape) for shape in shapes)


def labels(classes: int, *shape: int) -> Inputs:
    """Logits and a class for each of them."""
    return lambda n: (torch.randn(n, classes, *shape), torch.randint(classes, (n, *shape)))


# Convolution

for spatial, conv in ((1, nn.Conv1d), (2, nn.Conv2d), (3, nn.Conv3d)):
    sides = (9, 8, 6)[:spatial]
    case("convolution", f"conv{spatial}d", lambda conv=conv: conv(4, 6, 3, padding=1), batch((4, *sides)))
    case(
        "convolution",
        f"conv{spatial}d-strided-dilated-grouped",
        lambda conv=conv: conv(4, 6, 3, stride=2, padding=2, dilation=2, groups=2),
        batch((4, *sides)),
    )
for spatial, conv in ((1, nn.ConvTranspose1d), (2, nn.ConvTranspose2d), (3, nn.ConvTranspose3d)):
    sides = (8, 6, 4)[:spatial]
    case("convolution", f"conv-transpose{spatial}d", lambda conv=conv: conv(4, 6, 3), batch((4, *sides)))
    case(
        "convolution",
        f"conv-transpose{spatial}d-strided-grouped",
        lambda conv=conv: conv(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2),
        batch((4, *sides)),
    )
case("convolution", "conv2d-depthwise", lambda: nn.Conv2d(4, 8, 3, groups=4, bias=False), batch((4, 8, 9)))
case("convolution", "conv2d-step-over-the-end", lambda: nn.Conv2d(2, 3, 2, stride=3), batch((2, 10, 9)))
case("convolution", "conv2d-same", lambda: nn.Conv2d(2, 3, 4, padding="same"), batch((2, 8, 9)))
case("convolution", "conv1d-causal", lambda: nn.Conv1d(3, 3, 4, groups=3, padding=3), batch((3, 12)))
case(
    "convolution",
    "conv2d-reflected",
    lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"),
    batch((2, 8, 9)),
)
case(
    "convolution",
    "unfold-and-fold",
    lambda: nn.Sequential(nn.Unfold(3, padding=1), nn.Fold((8, 6), 3, padding=1)),
    batch((2, 8, 6)),
)

# Pooling

POOLS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "max-pool1d": (lambda: nn.MaxPool1d(3, 2, 1), (3, 11)),
    "max-pool2d": (lambda: nn.MaxPool2d(2), (3, 8, 6)),
    "max-pool2d-overlapping": (lambda: nn.MaxPool2d(3, 1, 1), (3, 8, 6)),
    "max-pool2d-ceil": (lambda: nn.MaxPool2d(3, 2, 1, ceil_mode=True), (3, 8, 9)),
    "max-pool2d-dilated": (lambda: nn.MaxPool2d(2, 1, dilation=2), (3, 8, 9)),
    "max-pool3d": (lambda: nn.MaxPool3d(2, 2, ceil_mode=True), (2, 6, 3, 8)),
    "avg-pool1d": (lambda: nn.AvgPool1d(3, 2, 1), (3, 11)),
    "avg-pool2d": (lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False), (3, 8, 9)),
    "avg-pool2d-ceil": (lambda: nn.AvgPool2d(3, 2, 1, ceil_mode=True), (3, 8, 9)),
    "avg-pool2d-divisor": (lambda: nn.AvgPool2d(2, divisor_override=3), (3, 8, 6)),
    "avg-pool3d": (lambda: nn.AvgPool3d(2, 2), (2, 6, 4, 8)),
    "adaptive-avg-pool1d": (lambda: nn.AdaptiveAvgPool1d(4), (3, 11)),
    "adaptive-avg-pool2d": (lambda: nn.AdaptiveAvgPool2d((3, 2)), (3, 8, 9)),
    "adaptive-avg-pool2d-global": (lambda: nn.AdaptiveAvgPool2d(1), (3, 8, 9)),
    "adaptive-avg-pool3d": (lambda: nn.AdaptiveAvgPool3d(2), (2, 6, 3, 8)),
    "adaptive-max-pool1d": (lambda: nn.AdaptiveMaxPool1d(4), (3, 11)),
    "adaptive-max-pool2d": (lambda: nn.AdaptiveMaxPool2d((3, 2)), (3, 8, 9)),
    "adaptive-max-pool3d": (lambda: nn.AdaptiveMaxPool3d(2), (2, 6, 3, 8)),
    "lp-pool1d": (lambda: nn.LPPool1d(3, 2), (3, 8)),
    "lp-pool2d": (lambda: nn.LPPool2d(2, 3, stride=2), (3, 8, 9)),
    "lp-pool3d": (lambda: nn.LPPool3d(2, 2), (2, 6, 4, 8)),
}
for name, (build, shape) in POOLS.items():
    case("pooling", name, build, batch(shape))


def unpooled(spatial: int) -> Callable[[Tensor], Tensor]:
    pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[spatial - 1]
    unpool = (F.max_unpool1d, F.max_unpool2d, F.max_unpool3d)[spatial - 1]

    def both(x: Tensor) -> Tensor:
        largest, places = pool(x, 2, return_indices=True)
        return unpool(largest * largest, places, 2)

    return both


for spatial in (1, 2, 3):
    formula("pooling", f"max-unpool{spatial}d", unpooled(spatial), batch((2, *(8, 6, 4)[:spatial])))


def fractional(spatial: int) -> Callable[[Tensor, Tensor], Tensor]:
    pool = (F.fractional_max_pool2d, F.fractional_max_pool3d)[spatial - 2]
    return lambda x, where: pool(x, 2, (4, 3, 2)[:spatial], _random_samples=where)


for spatial in (2, 3):
    formula(
        "pooling",
        f"fractional-max-pool{spatial}d",
        fractional(spatial),
        lambda n, spatial=spatial: (torch.randn(n, 2, *(9, 8, 6)[:spatial]), torch.rand(n, 2, spatial)),
        learns=1,
    )


def tied(n: int) -> tuple[Tensor]:
    return (torch.randint(0, 3, (n, 2, 8, 9)).float(),)


def with_nan(n: int) -> tuple[Tensor]:
    (x,) = batch((2, 8, 6))(n)
    x[:, :, 3, 2:4] = math.nan
    return (x,)


formula("pooling", "max-pool2d-ties", lambda x: F.max_pool2d(x, 3, 2, 1), tied)
formula("pooling", "adaptive-max-pool2d-nan", lambda x: F.adaptive_max_pool2d(x, (4, 3)), with_nan)
formula("pooling", "adaptive-max-pool2d-ties", lambda x: F.adaptive_max_pool2d(x, (3, 2)), tied)

# Normalization


def scaled(norm: nn.Module) -> nn.Module:
    """With weights that are not all one or zero."""
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    return norm


NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "batch-norm1d": (lambda: nn.BatchNorm1d(6), (6,)),
    "batch-norm2d": (lambda: nn.BatchNorm2d(3), (3, 8, 9)),
    "batch-norm3d": (lambda: nn.BatchNorm3d(3, momentum=0.3), (3, 4, 6, 8)),
    "batch-norm2d-cumulative": (lambda: nn.BatchNorm2d(3, momentum=None), (3, 8, 9)),
    "batch-norm2d-without-statistics": (lambda: nn.BatchNorm2d(3, track_running_stats=False), (3, 8, 9)),
    "batch-norm2d-plain": (lambda: nn.BatchNorm2d(3, affine=False), (3, 8, 9)),
    "batch-norm2d-frozen": (lambda: nn.BatchNorm2d(3).eval(), (3, 8, 9)),
    "layer-norm": (lambda: nn.LayerNorm(12), (8, 12)),
    "layer-norm-two-axes": (lambda: nn.LayerNorm((6, 4)), (3, 6, 4)),
    "layer-norm-without-bias": (lambda: nn.LayerNorm(12, bias=False), (8, 12)),
    "group-norm": (lambda: nn.GroupNorm(2, 6), (6, 8, 9)),
    "instance-norm1d": (lambda: nn.InstanceNorm1d(3, affine=True), (3, 12)),
    "instance-norm2d": (lambda: nn.InstanceNorm2d(3), (3, 8, 9)),
    "instance-norm2d-tracked": (lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True), (3, 8, 9)),
    "instance-norm3d": (lambda: nn.InstanceNorm3d(3, affine=True), (3, 4, 6, 8)),
    "rms-norm": (lambda: nn.RMSNorm(12), (8, 12)),
    "local-response-norm": (lambda: nn.LocalResponseNorm(3), (6, 8, 9)),
}
for name, (build, shape) in NORMS.items():
    case("normalization", name, lambda build=build: scaled(build()), batch(shape))
formula("normalization", "normalize", lambda x: F.normalize(x, dim=1), batch((6, 8)))
case("normalization", "weight-norm", lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)), batch((6,)))

# Attention


def attended(**how: Any) -> Callable[..., Tensor]:
    return lambda q, k, v, *mask: F.scaled_dot_product_attention(q, k, v, *mask, **how)


HEADS = ((2, 8, 4), (2, 9, 4), (2, 9, 4))
formula("attention", "sdpa", attended(), batch(*HEADS))
formula("attention", "sdpa-causal", attended(is_causal=True), batch((2, 8, 4), (2, 8, 4), (2, 8, 4)))
formula("attention", "sdpa-scaled", attended(scale=0.3), batch(*HEADS))
formula("attention", "sdpa-added-mask", attended(), batch(*HEADS, (1, 8, 9)))
formula(
    "attention",
    "sdpa-boolean-mask",
    attended(),
    lambda n: (*batch(*HEADS)(n), torch.ones(8, 9, dtype=torch.bool).tril()),
)
formula("attention", "sdpa-grouped", attended(enable_gqa=True), batch((4, 8, 3), (2, 9, 3), (2, 9, 3)))
case(
    "attention",
    "multihead-attention",
    lambda: nn.MultiheadAttention(8, 2, batch_first=True),
    batch((6, 8), (9, 8), (9, 8)),
)
case(
    "attention",
    "multihead-attention-other-widths",
    lambda: nn.MultiheadAttention(8, 2, kdim=4, vdim=6, add_bias_kv=True),
    lambda n: (torch.randn(9, n, 8), torch.randn(11, n, 4), torch.randn(11, n, 6)),
)
case(
    "attention",
    "transformer-encoder-layer",
    lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
    batch((6, 8)),
)
case(
    "attention",
    "transformer-encoder-layer-norm-first",
    lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, activation="gelu", norm_first=True),
    lambda n: (torch.randn(6, n, 8),),
)
case(
    "attention",
    "transformer-decoder-layer",
    lambda: nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
    batch((6, 8), (9, 8)),
)

# Embedding


def words(*shape: int) -> Inputs:
    return lambda n: (torch.randint(0, 10, (n, *shape)),)


case("embedding", "embedding", lambda: nn.Embedding(10, 4), words(6))
case("embedding", "embedding-padding", lambda: nn.Embedding(10, 4, padding_idx=3), words(6))
case("embedding", "embedding-by-frequency", lambda: nn.Embedding(10, 4, scale_grad_by_freq=True), words(6))
case(
    "embedding",
    "embedding-bounded",
    lambda: Formula(lambda i, w: F.embedding(i, w.tanh())),
    lambda n: (*words(6)(n), torch.randn(10, 4)),
)
for mode in ("sum", "mean", "max"):
    case("embedding", f"embedding-bag-{mode}", lambda mode=mode: nn.EmbeddingBag(10, 4, mode=mode), words(6))
    case(
        "embedding",
        f"embedding-bag-{mode}-padding-offsets",
        lambda mode=mode: nn.EmbeddingBag(10, 4, mode=mode, padding_idx=2),
        lambda n: (torch.randint(0, 10, (3 * n,)), 3 * torch.arange(n) - torch.arange(n) % 3),
    )
case(
    "embedding",
    "embedding-bag-weighted",
    lambda: nn.EmbeddingBag(10, 4, mode="sum", include_last_offset=True),
    lambda n: (torch.randint(0, 10, (3 * n,)), 3 * torch.arange(n + 1), torch.randn(3 * n)),
)

# Losses


def some_ignored(n: int) -> tuple[Tensor, Tensor]:
    logits, target = labels(6)(n)
    target[::3] = -100
    return logits, target


def class_weights() -> Tensor:
    return torch.linspace(0.2, 2.0, 6)


CROSS_ENTROPIES: dict[str, tuple[Callable[[], nn.Module], Inputs]] = {
    "cross-entropy": (nn.CrossEntropyLoss, labels(6)),
    "cross-entropy-sum": (lambda: nn.CrossEntropyLoss(reduction="sum"), labels(6)),
    "cross-entropy-each": (lambda: nn.CrossEntropyLoss(reduction="none"), labels(6)),
    "cross-entropy-weights-ignored": (lambda: nn.CrossEntropyLoss(class_weights()), some_ignored),
    "cross-entropy-smoothed": (lambda: nn.CrossEntropyLoss(label_smoothing=0.1), some_ignored),
    "cross-entropy-smoothed-weights": (
        lambda: nn.CrossEntropyLoss(class_weights(), ignore_index=1, label_smoothing=0.2),
        labels(6),
    ),
    "cross-entropy-pixels": (lambda: nn.CrossEntropyLoss(class_weights(), ignore_index=2), labels(6, 4, 3)),
    "cross-entropy-pixels-smoothed": (lambda: nn.CrossEntropyLoss(label_smoothing=0.1), labels(6, 4)),
    "cross-entropy-probabilities": (
        lambda: nn.CrossEntropyLoss(class_weights(), label_smoothing=0.1),
        lambda n: (torch.randn(n, 6), torch.rand(n, 6).softmax(1)),
    ),
    "nll": (nn.NLLLoss, labels(6)),
    "nll-weights-ignored": (lambda: nn.NLLLoss(class_weights()), some_ignored),
    "nll-pixels": (lambda: nn.NLLLoss(class_weights(), ignore_index=2), labels(6, 4, 3)),
    "nll-each": (lambda: nn.NLLLoss(reduction="none"), labels(6, 4)),
}
for name, (build, inputs) in CROSS_ENTROPIES.items():
    case("cross-entropy", name, build, inputs, learns=2 if name.endswith("probabilities") else 1)


def pair(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 6), torch.randn(n, 6)


def probabilities(n: int) -> tuple[Tensor, Tensor]:
    return 0.1 + 0.8 * torch.rand(n, 6), 0.1 + 0.8 * torch.rand(n, 6)


def signs(*shape: int) -> Inputs:
    return lambda n: (torch.randn(n, *shape), torch.randint(0, 2, (n, *shape)) * 2.0 - 1)


def spoken(n: int) -> tuple[Tensor, ...]:
    lengths = torch.full((n,), 12) - torch.arange(n) % 3
    return torch.randn(12, n, 6).log_softmax(-1), torch.randint(1, 6, (n, 4)), lengths, torch.arange(n) % 4 + 1


LOSSES: dict[str, tuple[Callable[[], nn.Module], Inputs, int]] = {
    "l1": (nn.L1Loss, pair, 2),
    "mse": (nn.MSELoss, pair, 2),
    "mse-each": (lambda: nn.MSELoss(reduction="none"), pair, 2),
    "smooth-l1": (lambda: nn.SmoothL1Loss(beta=0.5), pair, 2),
    "smooth-l1-sum": (lambda: nn.SmoothL1Loss(reduction="sum", beta=0.0), pair, 2),
    "huber": (lambda: nn.HuberLoss(delta=0.7), pair, 2),
    "bce": (nn.BCELoss, probabilities, 2),
    "bce-weights": (lambda: nn.BCELoss(class_weights(), reduction="sum"), probabilities, 2),
    "bce-with-logits": (
        lambda: nn.BCEWithLogitsLoss(class_weights(), pos_weight=class_weights() + 1),
        lambda n: (torch.randn(n, 6), torch.rand(n, 6)),
        2,
    ),
    "kl-div": (nn.KLDivLoss, lambda n: (torch.randn(n, 6).log_softmax(1), torch.randn(n, 6).softmax(1)), 2),
    "kl-div-logarithms": (
        lambda: nn.KLDivLoss(reduction="batchmean", log_target=True),
        lambda n: (torch.randn(n, 6).log_softmax(1), torch.randn(n, 6).log_softmax(1)),
        2,
    ),
    "poisson-nll": (lambda: nn.PoissonNLLLoss(full=True), lambda n: (torch.randn(n, 6), 3 * torch.rand(n, 6)), 1),
    "gaussian-nll": (
        lambda: nn.GaussianNLLLoss(full=True),
        lambda n: (torch.randn(n, 6), torch.randn(n, 6), torch.rand(n, 6) + 0.1),
        3,
    ),
    "hinge-embedding": (nn.HingeEmbeddingLoss, signs(6), 1),
    "soft-margin": (nn.SoftMarginLoss, signs(6), 1),
    "margin-ranking": (
        lambda: nn.MarginRankingLoss(0.3),
        lambda n: (torch.randn(n), *signs()(n)),
        2,
    ),
    "multi-margin": (lambda: nn.MultiMarginLoss(weight=class_weights()), labels(6), 1),
    "multi-margin-squared": (lambda: nn.MultiMarginLoss(p=2, margin=0.5), labels(6), 1),
    "multi-label-margin": (
        nn.MultiLabelMarginLoss,
        lambda n: (torch.randn(n, 6), torch.tensor([[3, 0, -1, 1, 2, 4], [5, -1, 1, 1, 1, 1]]).repeat(n, 1)[:n]),
        1,
    ),
    "multi-label-soft-margin": (
        lambda: nn.MultiLabelSoftMarginLoss(class_weights()),
        lambda n: (torch.randn(n, 6), torch.randint(0, 2, (n, 6)).float()),
        1,
    ),
    "cosine-embedding": (
        lambda: nn.CosineEmbeddingLoss(0.2),
        lambda n: (*pair(n), torch.randint(0, 2, (n,)) * 2 - 1),
        2,
    ),
    "triplet-margin": (nn.TripletMarginLoss, lambda n: (*pair(n), torch.randn(n, 6)), 3),
    "triplet-margin-swapped": (
        lambda: nn.TripletMarginLoss(2.0, swap=True),
        lambda n: (*pair(n), torch.randn(n, 6)),
        3,
    ),
    "triplet-margin-with-distance": (
        lambda: nn.TripletMarginWithDistanceLoss(distance_function=nn.CosineSimilarity()),
        lambda n: (*pair(n), torch.randn(n, 6)),
        3,
    ),
    "ctc": (nn.CTCLoss, spoken, 1),
    "ctc-sum": (lambda: nn.CTCLoss(reduction="sum", blank=0, zero_infinity=True), spoken, 1),
    "adaptive-softmax": (
        lambda: nn.AdaptiveLogSoftmaxWithLoss(8, 12, [4, 8]),
        lambda n: (torch.randn(n, 8), torch.randint(12, (n,))),
        1,
    ),
}
for name, (build, inputs, learns) in LOSSES.items():
    case("losses", name, build, inputs, learns=learns)

# Interpolation and sampling

RESIZES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "nearest-1d": ({"size": 13, "mode": "nearest"}, (2, 8)),
    "nearest-2d": ({"scale_factor": 2, "mode": "nearest"}, (2, 6, 8)),
    "nearest-3d": ({"size": (4, 9, 3), "mode": "nearest"}, (2, 3, 6, 8)),
    "nearest-exact-2d": ({"size": (9, 3), "mode": "nearest-exact"}, (2, 6, 8)),
    "linear": ({"size": 13, "mode": "linear"}, (2, 8)),
    "bilinear": ({"size": (9, 3), "mode": "bilinear"}, (2, 6, 8)),
    "bilinear-aligned": ({"size": (9, 11), "mode": "bilinear", "align_corners": True}, (2, 6, 8)),
    "bilinear-scale": ({"scale_factor": 1.7, "mode": "bilinear"}, (2, 6, 8)),
    "bilinear-antialiased": ({"size": (3, 4), "mode": "bilinear", "antialias": True}, (2, 6, 8)),
    "bicubic": ({"size": (9, 4), "mode": "bicubic"}, (2, 6, 8)),
    "bicubic-aligned": ({"size": (9, 4), "mode": "bicubic", "align_corners": True}, (2, 6, 8)),
    "trilinear": ({"size": (4, 9, 3), "mode": "trilinear"}, (2, 3, 6, 8)),
    "area": ({"size": (4, 3), "mode": "area"}, (2, 6, 8)),
}
for name, (how, shape) in RESIZES.items():
    formula("interpolation", f"interpolate-{name}", lambda x, how=how: F.interpolate(x, **how), batch(shape))
case(
    "interpolation",
    "pixel-shuffle",
    lambda: nn.Sequential(nn.PixelShuffle(2), nn.Tanh(), nn.PixelUnshuffle(3)),
    batch((4, 6, 9)),
)
case("interpolation", "channel-shuffle", lambda: nn.ChannelShuffle(2), batch((4, 6, 3)))


def sampled(**how: Any) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, grid: F.grid_sample(x, grid, **how)


def image_and_grid(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 2, 6, 8), 2.2 * torch.rand(n, 4, 3, 2) - 1.1


for mode in ("bilinear", "nearest", "bicubic"):
    for padding_mode in ("zeros", "border", "reflection"):
        how = {"mode": mode, "padding_mode": padding_mode, "align_corners": mode == "bicubic"}
        formula("sampling", f"grid-sample-{mode}-{padding_mode}", sampled(**how), image_and_grid)
formula(
    "sampling",
    "grid-sample-volume",
    sampled(align_corners=False),
    lambda n: (torch.randn(n, 2, 4, 6, 8), 2.2 * torch.rand(n, 3, 2, 4, 3) - 1.1),
)
formula(
    "sampling",
    "affine-grid",
    lambda theta, x: F.grid_sample(
        x, F.affine_grid(theta, [x.shape[0], 2, 4, 3], align_corners=True), align_corners=True
    ),
    lambda n: (torch.eye(2, 3).mul(0.9) + 0.1 * torch.rand(n, 2, 3), torch.randn(n, 2, 6, 8)),
)

# Padding

PADS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "pad-reflect1d": (lambda: nn.ReflectionPad1d((2, 3)), (2, 8)),
    "pad-reflect2d": (lambda: nn.ReflectionPad2d((2, 3, 1, 4)), (2, 6, 8)),
    "pad-reflect3d": (lambda: nn.ReflectionPad3d((2, 1, 0, 1, 1, 2)), (2, 3, 4, 6)),
    "pad-replicate1d": (lambda: nn.ReplicationPad1d((2, 3)), (2, 8)),
    "pad-replicate2d": (lambda: nn.ReplicationPad2d((2, 3, 1, 4)), (2, 6, 8)),
    "pad-replicate3d": (lambda: nn.ReplicationPad3d((2, 1, 0, 1, 1, 2)), (2, 3, 4, 6)),
    "pad-replicate-crop": (lambda: nn.ReplicationPad2d((-2, 3, 1, -1)), (2, 6, 8)),
    "pad-replicate-one": (lambda: nn.ReplicationPad2d((2, 3, 1, 4)), (2, 1, 2)),
    "pad-circular1d": (lambda: nn.CircularPad1d((2, 3)), (2, 8)),
    "pad-circular2d": (lambda: nn.CircularPad2d((2, 3, 1, 4)), (2, 6, 8)),
    "pad-circular3d": (lambda: nn.CircularPad3d((2, 1, 0, 1, 1, 2)), (2, 3, 4, 6)),
    "pad-constant": (lambda: nn.ConstantPad2d((2, 3, 1, 4), 0.5), (2, 6, 8)),
    "pad-crop": (lambda: nn.ConstantPad2d((-2, 3, 1, -1), 0.5), (2, 6, 8)),
}
for name, (build, shape) in PADS.items():
    case("padding", name, build, batch(shape))

# Indexing


def places(shape: Sequence[int], below: int) -> Callable[[int], Tensor]:
    return lambda n: torch.randint(below, (n, *shape))


def with_places(shape: Sequence[int], index: Sequence[int], below: int, *others: Sequence[int]) -> Inputs:
    """A tensor, indices below a bound, further tensors."""
    return lambda n: (torch.randn(n, *shape), torch.randint(below, (n, *index)), *batch(*others)(n))


def with_rows(count: int, *others: Sequence[int]) -> Inputs:
    """A tensor of 8 columns, places among them, all different, and further tensors."""
    return lambda n: (torch.randn(n, 8), torch.randperm(8)[:count], *batch(*others)(n))


INDEXING: dict[str, tuple[Callable[..., Any], Inputs]] = {
    "gather": (lambda x, i: torch.gather(x, 1, i), with_places((8, 3), (6, 3), 8)),
    "take-along-dim": (lambda x, i: torch.take_along_dim(x, i, 1), with_places((8, 3), (6, 1), 8)),
    "take": (torch.take, with_places((8,), (4,), 40)),
    "index-select": (lambda x, i: x.index_select(1, i), with_rows(3)),
    "index-advanced": (lambda x, i: x[:, i, i % 3], lambda n: (torch.randn(n, 8, 3), torch.tensor([1, 0, 1, 6]))),
    "index-rows-twice": (lambda x, i: x[i], with_places((3,), (2,), 5)),
    "index-by-mask": (
        lambda x, m: torch.where(m, x, 0.0) + x[:, 0, None],
        lambda n: (torch.randn(n, 8), torch.rand(n, 8) > 0.5),
    ),
    "scatter": (
        lambda x, i, y: x.scatter(1, i, y),
        lambda n: (torch.randn(n, 8), torch.randperm(8)[:3].expand(n, 3), torch.randn(n, 3)),
    ),
    "scatter-add": (lambda x, i, y: x.scatter_add(1, i, y), with_places((8,), (6,), 8, (6,))),
    "scatter-value": (lambda x, i: x.scatter(1, i, 2.0), with_places((8,), (6,), 8)),
    "scatter-reduce-sum": (lambda x, i, y: x.scatter_reduce(1, i, y, "sum"), with_places((8,), (6,), 8, (6,))),
    "scatter-reduce-mean": (lambda x, i, y: x.scatter_reduce(1, i, y, "mean"), with_places((8,), (6,), 8, (6,))),
    "scatter-reduce-amax": (
        lambda x, i, y: x.scatter_reduce(1, i, y, "amax", include_self=False),
        with_places((8,), (6,), 8, (6,)),
    ),
    "index-add": (
        lambda x, i, y: x.index_add(1, i, y, alpha=2),
        lambda n: (torch.randn(n, 8), torch.tensor([1, 6, 1]), torch.randn(n, 3)),
    ),
    "index-copy": (lambda x, i, y: x.index_copy(1, i, y), with_rows(3, (3,))),
    "index-fill": (lambda x, i: x.index_fill(1, i, 0.5), with_rows(3)),
    "index-put": (
        lambda x, i, y: x.index_put((i,), y, accumulate=True),
        lambda n: (torch.randn(9, 3), torch.randint(9, (n,)), torch.randn(n, 3)),
    ),
    "index-put-in-place": (
        lambda x, i, y: (2 * x).index_put_((i,), y),
        lambda n: (torch.randn(9, 3), torch.randperm(9)[:n], torch.randn(n, 3)),
    ),
    "masked-fill": (lambda x, m: x.masked_fill(m, -1.0), lambda n: (torch.randn(n, 8), torch.rand(n, 8) > 0.5)),
    "masked-scatter": (
        lambda x, m, y: x.masked_scatter(m, y),
        lambda n: (torch.randn(n, 8), torch.rand(n, 8) > 0.5, torch.randn(n, 8)),
    ),
    "where": (
        lambda x, m, y: torch.where(m, x * y, y),
        lambda n: (torch.randn(n, 8), torch.rand(n, 8) > 0.5, torch.randn(n, 1)),
    ),
    "slices-written": (
        lambda x, y: torch.slice_scatter(x, y, 1, 2, 8, 2).select_scatter(y[:, 0], 1, 3),
        batch((9,), (3,)),
    ),
    "diagonal-written": (lambda x, y: torch.diagonal_scatter(x, y, 0, 1, 2), batch((6, 8), (6,))),
    "cat-split-stack": (lambda x, y: torch.stack(torch.cat([x, y.tanh(), x * y], 1).split(8, 1), 1), batch((8,), (8,))),
    "roll-flip": (lambda x: (x.roll(2, 1) * x.flip(1)).repeat_interleave(2, 1), batch((8,))),
    "unfold-windows": (lambda x: x.unfold(1, 4, 2).square(), batch((10,))),
    "triangles": (lambda x: x.tril(1) * x.triu(-1) + torch.diag_embed(x.diagonal(0, 1, 2)), batch((6, 6))),
}
for name, (function, inputs) in INDEXING.items():
    formula("indexing", name, function, inputs)

# Sums along an axis, and order

SCANS: dict[str, tuple[Callable[..., Any], Inputs]] = {
    "cumsum": (lambda x: x.cumsum(1), batch((8, 3))),
    "cumprod": (lambda x: x.cumprod(1), batch((6, 3))),
    "logcumsumexp": (lambda x: x.logcumsumexp(1), batch((8,))),
    "cummax": (lambda x: x.cummax(1).values, batch((8,))),
    "sort": (lambda x: x.sort(1, descending=True).values, batch((8,))),
    "topk": (lambda x: x.topk(3, 1).values, batch((8,))),
    "kthvalue": (lambda x: x.kthvalue(3, 1).values, batch((8,))),
    "median": (lambda x: x.median(1).values, batch((9,))),
    "max-and-min": (lambda x: x.max(1).values - x.min(1).values, batch((8,))),
    "amax-ties": (lambda x: x.amax(1) - x.amin((2, 3)).sum(1)[:, None, None], tied),
    "max-of-all-ties": (lambda x: x.max() * x.amin(), tied),
    "maximum-ties": (
        lambda x, y: torch.maximum(x, y) - torch.minimum(x, y * 2) + torch.clamp(x, 0, 1),
        lambda n: (*tied(n), *tied(n)),
    ),
    "relu-of-nan": (
        lambda x: F.relu(x) + x.abs() + x.amax(1, keepdim=True),
        lambda n: (torch.tensor([math.nan, 0.0, 1.0, -1.0, 2.0]).repeat(n, 1),),
    ),
    "prod": (lambda x: x.prod(1), batch((6, 3))),
    "mean-var-std": (lambda x: x.mean(1) + x.var(1) * x.std(1, correction=0), batch((8, 3))),
    "norms": (lambda x: x.norm(dim=1) + x.norm(1, 1) + x.norm(3.0, 1) + x.norm(math.inf, 1), batch((8, 3))),
    "logsumexp": (lambda x: x.logsumexp((1, 2)), batch((8, 3))),
    "searched-weights": (lambda x: x * x.argsort(1).float(), batch((8,))),
}
for name, (function, inputs) in SCANS.items():
    formula("reductions and order", name, function, inputs)

# Distances and products

PRODUCTS: dict[str, tuple[Callable[..., Any], Inputs]] = {
    "cdist": (torch.cdist, batch((6, 3), (8, 3))),
    "cdist-taxicab": (lambda x, y: torch.cdist(x, y, p=1.0), batch((6, 3), (8, 3))),
    "cdist-cubic": (lambda x, y: torch.cdist(x, y, p=3.0), batch((6, 3), (8, 3))),
    "cdist-largest": (lambda x, y: torch.cdist(x, y, p=math.inf), batch((6, 3), (8, 3))),
    "cdist-by-products": (lambda x, y: torch.cdist(x, y, compute_mode="use_mm_for_euclid_dist"), batch((6, 3), (8, 3))),
    "pdist": (torch.pdist, lambda n: (torch.randn(n, 3),)),
    "pairwise-distance": (F.pairwise_distance, batch((6,), (6,))),
    "cosine-similarity": (F.cosine_similarity, batch((6, 3), (6, 3))),
    "matmul-broadcast": (torch.matmul, batch((1, 6, 3), (2, 3, 4))),
    "einsum": (lambda x, y: torch.einsum("bij,bkj->bik", x, y), batch((6, 3), (8, 3))),
    "addmm-and-baddbmm": (lambda x, y, z: torch.baddbmm(x, y, z, beta=0.5, alpha=2), batch((6, 4), (6, 3), (3, 4))),
    "outer-dot-mv": (
        lambda x, v: torch.outer(x @ v, v) * torch.dot(v, v),
        lambda n: (torch.randn(n, 6), torch.randn(6)),
    ),
}
for name, (function, inputs) in PRODUCTS.items():
    formula("distances and products", name, function, inputs)
case("distances and products", "linear", lambda: nn.Linear(6, 4), batch((3, 6)))
case("distances and products", "bilinear", lambda: nn.Bilinear(6, 3, 4), batch((6,), (3,)))

# The softmax family and activations

for name, build in {
    "softmax": lambda: nn.Softmax(1),
    "log-softmax": lambda: nn.LogSoftmax(1),
    "softmin": lambda: nn.Softmin(1),
    "softmax2d": nn.Softmax2d,
}.items():
    case("softmax", name, build, batch((6, 3, 4)))

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "celu": lambda: nn.CELU(0.7),
    "elu": lambda: nn.ELU(0.7),
    "gelu": nn.GELU,
    "gelu-tanh": lambda: nn.GELU("tanh"),
    "glu": nn.GLU,
    "hardshrink": nn.Hardshrink,
    "hardsigmoid": nn.Hardsigmoid,
    "hardswish": nn.Hardswish,
    "hardtanh": nn.Hardtanh,
    "leaky-relu": lambda: nn.LeakyReLU(0.1),
    "log-sigmoid": nn.LogSigmoid,
    "mish": nn.Mish,
    "prelu": lambda: nn.PReLU(6),
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "selu": nn.SELU,
    "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU,
    "softplus": lambda: nn.Softplus(2.0, 1.5),
    "softshrink": nn.Softshrink,
    "softsign": nn.Softsign,
    "tanh": nn.Tanh,
    "tanhshrink": nn.Tanhshrink,
    "threshold": lambda: nn.Threshold(0.1, 20.0),
}
for name, build in ACTIVATIONS.items():
    formula_of = build
    case("activations", name, build, lambda n: (3 * torch.randn(n, 6, 8),))
case("activations", "relu-in-place", lambda: nn.Sequential(nn.Linear(6, 4), nn.ReLU(inplace=True)), batch((6,)))

# Dropout and other noise

for name, build, shape in (
    ("dropout", lambda: nn.Dropout(0.4), (300,)),
    ("dropout-in-place", lambda: nn.Sequential(nn.Identity(), nn.Dropout(0.4)), (300,)),
    ("dropout1d", lambda: nn.Dropout1d(0.4), (100, 3)),
    ("dropout2d", lambda: nn.Dropout2d(0.4), (100, 3, 2)),
    ("dropout3d", lambda: nn.Dropout3d(0.4), (100, 3, 2, 2)),
    ("rrelu", nn.RReLU, (300,)),
):
    case("dropout", name, build, batch(shape), random="factor")
for name, build, shape in (
    ("alpha-dropout", lambda: nn.AlphaDropout(0.4), (300,)),
    ("feature-alpha-dropout", lambda: nn.FeatureAlphaDropout(0.4), (100, 3)),
    ("gumbel-softmax", lambda: Formula(F.gumbel_softmax), (6,)),
    ("transformer-encoder-layer-dropout", lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.3, batch_first=True), (6, 8)),
):
    case("dropout", name, build, batch(shape), random="slope")

# Recurrent networks

RNNS: dict[str, tuple[Callable[[], nn.Module], Inputs]] = {
    "rnn": (lambda: nn.RNN(3, 4), lambda n: (torch.randn(6, n, 3),)),
    "rnn-relu-two-layers": (lambda: nn.RNN(3, 4, 2, nonlinearity="relu", batch_first=True), batch((6, 3))),
    "lstm": (lambda: nn.LSTM(3, 4), lambda n: (torch.randn(6, n, 3),)),
    "lstm-two-layers-both-ways": (lambda: nn.LSTM(3, 4, 2, batch_first=True, bidirectional=True), batch((6, 3))),
    "lstm-projected": (lambda: nn.LSTM(3, 4, proj_size=2, batch_first=True), batch((6, 3))),
    "gru": (lambda: nn.GRU(3, 4), lambda n: (torch.randn(6, n, 3),)),
    "gru-two-layers-both-ways": (lambda: nn.GRU(3, 4, 2, batch_first=True, bidirectional=True), batch((6, 3))),
    "gru-given-state": (lambda: nn.GRU(3, 4), lambda n: (torch.randn(6, n, 3), torch.randn(1, n, 4))),
    "rnn-cell": (lambda: nn.RNNCell(3, 4), batch((3,), (4,))),
    "lstm-cell": (lambda: nn.LSTMCell(3, 4), lambda n: (torch.randn(n, 3), (torch.randn(n, 4), torch.randn(n, 4)))),
    "gru-cell": (lambda: nn.GRUCell(3, 4), batch((3,), (4,))),
}
for name, (build, inputs) in RNNS.items():
    case("recurrent", name, build, inputs)
