"""Train a small CNN with batch norm to tell shapes in noisy images, eagerly and through sardonyx.

python examples/finetune_cnn.py --steps 120 --output cnn.svg
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from curves import Batch, arguments, compare, report

_SIZE, _BATCH = 24, 64
_SHAPES = ("disc", "ring", "cross", "stripes")


def images(steps: int) -> Iterator[Batch]:
    """Batches of a shape each image, somewhere in the noise; the same ones every time."""
    draw = torch.Generator().manual_seed(1)
    axis = torch.arange(_SIZE, dtype=torch.float32)
    for _ in range(steps):
        labels = torch.randint(len(_SHAPES), (_BATCH,), generator=draw)
        center = 8 + 8 * torch.rand(2, _BATCH, 1, generator=draw)
        down, across = ((axis - c).abs() for c in center)
        shapes = _shapes(down[:, :, None], across[:, None, :])
        clean = torch.stack(shapes, 1)[torch.arange(_BATCH), labels].float()
        yield (clean + 0.7 * torch.randn(clean.shape, generator=draw)).unsqueeze(1), labels


def _shapes(down: torch.Tensor, across: torch.Tensor) -> list[torch.Tensor]:
    """The four shapes, from each pixel's distances to the centre."""
    radius = (down.square() + across.square()).sqrt()
    inside = torch.maximum(down, across) < 6
    return [radius < 5, (radius - 5).abs() < 1.2, inside & (torch.minimum(down, across) < 1.2), inside & (down % 4 < 2)]


def network() -> nn.Module:
    """Three blocks of convolution, batch norm and pooling."""
    layers: list[nn.Module] = []
    for channels, wider in ((1, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(channels, wider, 3, padding=1), nn.BatchNorm2d(wider), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * (_SIZE // 8) ** 2, len(_SHAPES)))


def main() -> None:
    """Train, print, draw."""
    given = arguments(__doc__, "finetune_cnn.svg", steps=120)
    torch.manual_seed(0)
    curves = compare(
        network(),
        images,
        lambda parameters: torch.optim.SGD(parameters, lr=0.003, momentum=0.9),
        given.steps,
        given.device,
    )
    report(f"CNN with batch norm, {_BATCH} images of {_SIZE}×{_SIZE} a step, SGD", curves, given.output)


if __name__ == "__main__":
    main()
