"""PyTorch's own tests are written once for every device, and made for ours as for its own."""

from __future__ import annotations

from typing import Any

import torch
from torch.testing._internal import common_device_type
from torch.testing._internal.common_device_type import (
    dtypes,
    instantiate_device_type_tests,
    onlyCPU,
    onlyOn,
    onlyPRIVATEUSE1,
    ops,
    skipPRIVATEUSE1,
)
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_utils import TestCase

from sardonyx import eager

eager.enable(fallback="error")
# Torch looks for devices when its tests are first imported, which another module may have done before there was one.
if common_device_type.PrivateUse1TestBase not in common_device_type.device_type_test_bases:
    common_device_type.device_type_test_bases.append(common_device_type.PrivateUse1TestBase)

NAMES = {"add", "sum", "where", "cat", "gather", "index_put", "softmax", "nn.functional.conv2d", "nn.functional.gelu"}
CHOSEN = [op for op in op_db if op.name in NAMES and not op.variant_test_name]


class TestAnyDevice(TestCase):
    @ops(CHOSEN, allowed_dtypes=(torch.float32,))
    def test_an_operator_agrees_with_the_cpu(self, device: str, dtype: torch.dtype, op: Any) -> None:
        for sample in list(op.sample_inputs(device, dtype))[:4]:
            same = sample.transform(lambda x: x.cpu() if isinstance(x, torch.Tensor) else x)
            got = op(sample.input, *sample.args, **sample.kwargs)
            assert got.device.type == torch.device(device).type
            torch.testing.assert_close(got.cpu(), op(same.input, *same.args, **same.kwargs))

    @dtypes(torch.float32, torch.float16, torch.bfloat16, torch.int64)
    def test_dtypes_are_kept(self, device: str, dtype: torch.dtype) -> None:
        x = torch.arange(6, device=device).to(dtype)
        torch.testing.assert_close((x + x).cpu(), torch.arange(0, 12, 2, dtype=dtype))

    @onlyPRIVATEUSE1
    def test_of_its_kind_alone(self, device: str) -> None:
        assert device == "ort:0"

    @onlyOn(["ort"])
    def test_by_its_name_alone(self, device: str) -> None:
        assert torch.ones(1, device=device).device == torch.device("ort", 0)

    def test_as_a_device_with_memory(self, device: str) -> None:
        x = torch.zeros(4, device=device)
        x[1:3].add_(1)
        assert x.tolist() == [0, 1, 1, 0]

    @onlyCPU
    def test_of_the_cpu_alone(self, device: str) -> None:
        self.fail("it was run elsewhere")

    @skipPRIVATEUSE1
    def test_of_other_devices(self, device: str) -> None:
        self.fail("it was run here")


instantiate_device_type_tests(TestAnyDevice, globals(), only_for=("ort",))


def test_a_class_is_made_for_the_device() -> None:
    made = {name for name in globals() if name.startswith("TestAnyDevice")}
    assert made == {"TestAnyDevicePRIVATEUSE1"}
