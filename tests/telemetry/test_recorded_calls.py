"""Calls that are recorded, replayed and restored."""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import nn

import sardonyx
from sardonyx import SardonyxError
from sardonyx.diagnose import intercepting, record, replay

from .seen import Batch, Net, X


class TestRecording:
    def recorded(self, folder: Path, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        class Anything(nn.Module):
            def forward(self, *args: Any, **kwargs: Any) -> None:
                pass

        sardonyx.intercept(Anything(), record(folder))(*args, **kwargs)
        return next(iter(replay(folder)))

    @pytest.mark.parametrize(
        "value",
        [
            None,
            True,
            3,
            0.1,
            float("inf"),
            "text",
            [1, [2, {"a": (3,)}]],
            {1: "one", (2, "two"): None},
            OrderedDict(a=1),
            torch.Size([2, 3]),
            torch.bfloat16,
            torch.device("cpu"),
        ],
    )
    def test_plain_values_come_back(self, value: Any, tmp_path: Path) -> None:
        (found,), kwargs = self.recorded(tmp_path, value)
        assert (found, type(found), kwargs) == (value, type(value), {})

    @pytest.mark.parametrize(
        "tensor",
        [
            torch.randn(2, 3),
            torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
            torch.randn(4, 6)[:, ::2],
            torch.tensor([1.5, torch.nan], dtype=torch.bfloat16),
            torch.randn(3).to(torch.float8_e4m3fn),
            torch.randn(2, dtype=torch.complex64).conj(),
            torch.tensor(7),
            torch.empty(0, 3),
            torch.ones(2, requires_grad=True),
        ],
    )
    def test_tensors_come_back_to_the_bit(self, tensor: torch.Tensor, tmp_path: Path) -> None:
        (found,), _ = self.recorded(tmp_path, tensor)
        assert (found.dtype, found.shape, found.requires_grad) == (tensor.dtype, tensor.shape, tensor.requires_grad)
        assert found.stride() == torch.empty_like(tensor).stride()
        ours, theirs = (t.detach().contiguous().resolve_conj().reshape(-1).view(torch.uint8) for t in (found, tensor))
        assert ours.equal(theirs)

    def test_a_tensor_given_twice_is_one_again(self, tmp_path: Path) -> None:
        (first, rest), kwargs = self.recorded(tmp_path, X, [X], y=X)
        assert first is rest[0] is kwargs["y"]

    def test_results_of_transformers_and_registered_dataclasses_come_back(self, tmp_path: Path) -> None:
        @dataclass
        class Known:
            x: torch.Tensor
            name: str

        torch.export.register_dataclass(Known, serialized_type_name="tests.intercept.Known")
        output = hf.modeling_outputs.BaseModelOutput(last_hidden_state=X)
        (found, known), _ = self.recorded(tmp_path, output, Known(X, "here"))
        assert type(found) is type(output)
        assert found.last_hidden_state.equal(X)
        assert (type(known), known.name) == (Known, "here")

    @pytest.mark.parametrize(
        ("value", "what"),
        [
            (Batch(X, "cat"), r"args\[0\] is a .*Batch, which cannot be recorded"),
            ({"f": print}, r"args\[0\]\['f'\] is a builtins.builtin_function_or_method"),
            (torch.eye(2).to_sparse(), r"args\[0\] is a torch.Tensor"),
            (hf.EncoderDecoderCache(hf.DynamicCache(), hf.DynamicCache()), "EncoderDecoderCache"),
        ],
    )
    def test_what_json_cannot_hold_is_refused(self, value: Any, what: str, tmp_path: Path) -> None:
        with pytest.raises(SardonyxError, match=what):
            self.recorded(tmp_path, value)
        assert not list(tmp_path.iterdir())

    def test_a_model_records_itself_up_to_a_limit(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        model = sardonyx.intercept(Net(), lambda call: None)
        model.record(tmp_path / "new", limit=2)
        for factor in range(5):
            model(X * factor, mask=factor)
        model.restore()
        found = list(replay(tmp_path / "new"))
        assert [kwargs["mask"] for _, kwargs in found] == [0, 1]
        assert found[1][0][0].equal(X)
        assert caplog.text.count("further ones are not recorded") == 1

    def test_a_second_recording_goes_on_behind_the_first(self, tmp_path: Path) -> None:
        for value in (1, 2):
            self.recorded(tmp_path, value)
        assert [args for args, _ in replay(tmp_path)] == [(1,), (2,)]

    def test_calls_of_a_module_inside_are_asked_for_by_name(self, tmp_path: Path) -> None:
        model = Net()
        with intercepting(model, record(tmp_path), submodules="last"):
            model(X)
        ((inner,), _) = next(iter(replay(tmp_path, name="last")))
        assert inner.equal(model.first(X).relu())
        assert len(list(replay(tmp_path))) == 1

    def test_files_are_numpys_with_json_inside(self, tmp_path: Path) -> None:
        self.recorded(tmp_path, X)
        arrays = np.load(tmp_path / "000000.npz", allow_pickle=False)
        assert json.loads(str(arrays["structure"]))["args"][0]["tensor"]["shape"] == [3, 4]
        np.testing.assert_array_equal(arrays["0"], X.reshape(-1))

    def test_a_folder_without_calls_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match="no recorded calls"):
            next(replay(tmp_path))

    @pytest.mark.parametrize("damage", ["empty", "truncated", "flipped", "foreign", "text"])
    def test_a_damaged_file_is_an_error_that_names_it(self, damage: str, tmp_path: Path) -> None:
        self.recorded(tmp_path, torch.ones(100))
        path = tmp_path / "000000.npz"
        whole = path.read_bytes()
        middle = whole.index(torch.ones(50).numpy().tobytes())
        if damage == "foreign":
            np.savez(path, x=np.zeros(2))
        else:
            flipped = whole[:middle] + b"\x01" + whole[middle + 1 :]
            path.write_bytes({"empty": b"", "truncated": whole[:middle], "flipped": flipped, "text": b"PK"}[damage])
        with pytest.raises(SardonyxError, match=r"000000\.npz cannot be read as a recorded call"):
            next(replay(tmp_path))


def test_nothing_is_logged_as_a_warning(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with caplog.at_level(logging.WARNING, "sardonyx"), intercepting(Net(), record(tmp_path)) as model:
        model(X)
    assert not caplog.records
