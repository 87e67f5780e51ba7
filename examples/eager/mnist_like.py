"""Train a small CNN to read digits on the device `ort`, with nothing left to the CPU, and beside it on the CPU.

python examples/eager/mnist_like.py --steps 150
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator

import torch
from torch import nn

from sardonyx import eager

_BATCH, _SIZE, _SCALE = 64, 16, 2
_GLYPHS = """
.##. ..#. .##. ###. #..# #### .##. #### .##. .##.
#..# .##. #..# ...# #..# #... #... ...# #..# #..#
#..# ..#. ..#. .##. #### ###. ###. ..#. .##. .###
#..# ..#. .#.. ...# ...# ...# #..# ..#. #..# ...#
.##. .### #### ###. ...# ###. .##. .#.. .##. .##.
"""


def glyphs() -> torch.Tensor:
    """The ten digits as images of ones and zeros, larger than they are written."""
    rows = [[[float(pixel == "#") for pixel in digit] for digit in row.split()] for row in _GLYPHS.strip().splitlines()]
    small = torch.tensor(rows).transpose(0, 1)
    return small.repeat_interleave(_SCALE, 1).repeat_interleave(_SCALE, 2)


def batches(count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Digits anywhere in noisy images; the same ones every time."""
    draw, digits = torch.Generator().manual_seed(1), glyphs()
    height, width = digits.shape[1:]
    for _ in range(count):
        labels = torch.randint(10, (_BATCH,), generator=draw)
        images = 0.3 * torch.randn(_BATCH, 1, _SIZE, _SIZE, generator=draw)
        for image, label in zip(images, labels.tolist(), strict=True):
            down, across = (int(torch.randint(_SIZE - size + 1, (), generator=draw)) for size in (height, width))
            image[0, down : down + height, across : across + width] += digits[label]
        yield images, labels


def network() -> nn.Module:
    """Two blocks of convolution, batch norm and pooling."""
    layers: list[nn.Module] = []
    for channels, wider in ((1, 16), (16, 32)):
        layers += [nn.Conv2d(channels, wider, 3, padding=1), nn.BatchNorm2d(wider), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * (_SIZE // 4) ** 2, 10))


def train(model: nn.Module, steps: int, device: str) -> tuple[list[float], float]:
    """The loss of each step on a device, and the share of digits that are read right afterwards."""
    model = model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    losses = []
    for images, labels in batches(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        optimizer.step()
        losses.append(loss.item())
    *_, (images, labels) = batches(steps + 1)
    with torch.no_grad():
        right = model.eval()(images.to(device)).argmax(1).cpu() == labels
    return losses, right.float().mean().item()


def main() -> None:
    """Train on both, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150, help="steps of training (default: 150)")
    steps = parser.parse_args().steps
    eager.enable(fallback="error")
    torch.manual_seed(0)
    model = network()
    (on_cpu, of_cpu), (on_ort, accuracy) = (train(copy.deepcopy(model), steps, device) for device in ("cpu", "ort"))
    print(f"{'step':>6}{'cpu':>12}{'ort':>12}{'difference':>12}")
    for step in sorted({*range(0, steps, max(steps // 10, 1)), steps - 1}):
        print(f"{step + 1:>6}{on_cpu[step]:>12.6f}{on_ort[step]:>12.6f}{abs(on_cpu[step] - on_ort[step]):>12.1e}")
    print(f"\non ort {accuracy:.0%} of the digits are read right afterwards, on the CPU {of_cpu:.0%}")


if __name__ == "__main__":
    main()
