"""Views of memory by sizes and strides."""

from __future__ import annotations

import torch

import sardonyx

from .agreement import agrees, agrees_at, gradients, onnx


def chunks(x: torch.Tensor, window: int) -> torch.Tensor:
    """Chunks of twice a window that overlap by a window, as Longformer has them."""
    x = x.view(x.size(0), x.size(1) // (2 * window), 2 * window, x.size(2))
    size, stride = list(x.size()), list(x.stride())
    size[1], stride[1] = 2 * size[1] - 1, stride[1] // 2
    return x.as_strided(size=size, stride=stride)


def windows(x: torch.Tensor) -> torch.Tensor:
    batch, length, heads, width = x.shape
    return chunks((x * 2).transpose(1, 2).reshape(batch * heads, length, width), 4)  # no copy for a batch of one


def test_windows_that_slide_over_any_length() -> None:
    agrees_at(
        lambda one, two: (windows(one), windows(two)),
        *((torch.randn(1, length, 3, 8), torch.randn(2, length, 3, 8)) for length in (32, 64)),
    )


def test_gradients_of_sliding_windows() -> None:
    def squares(x: torch.Tensor) -> torch.Tensor:
        return windows(x).square()

    x = torch.randn(1, 32, 3, 8)
    (expected,), (found,) = gradients(squares, x.double()), gradients(onnx(squares), x)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def views(x: torch.Tensor) -> list[torch.Tensor]:
    x = x + 1
    return [
        x.T.as_strided((3, 2), (1, 3), 2),
        x[1:3].as_strided((2, 3), (6, 2)),
        x[:, 1:3].as_strided((2, 2), (6, 1)),
        x[:, :1].expand(4, 6).as_strided((4, 3), (6, 0)),
        x.as_strided((0, 2), (1, 6), 1),
        torch.as_strided_scatter(x.T, torch.ones(2, 2, dtype=x.dtype), (2, 2), (1, 6), 1),
    ]


def test_memory_that_is_not_contiguous() -> None:
    agrees(views, torch.randn(4, 6))


def beyond(x: torch.Tensor) -> list[torch.Tensor]:
    x = x + 1
    return [x[:, 1:3].as_strided((2, 3), (6, 1)), x[1:].as_strided((2, 3), (6, 1), 0)]


def test_memory_around_the_view_that_is_strided() -> None:
    agrees(beyond, torch.randn(4, 6))


def test_memory_around_a_view_in_an_exported_program() -> None:
    class Beyond(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            return [*beyond(x), (x + 1).T.reshape(2, 12)[:, 2:].as_strided((3, 3), (1, 2))]

    x = torch.randn(4, 6)
    torch.testing.assert_close(sardonyx.export(Beyond().eval(), (x,))(x), Beyond()(x))
