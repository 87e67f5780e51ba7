"""torch.compile(backend="sardonyx"): what a user can rely on."""

from __future__ import annotations

import copy
import threading
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import sardonyx
from sardonyx.telemetry.report import collecting
from tests.sizes import agrees_at_the_edges

from .compiled import close, compiled, mlp


def test_a_model_gives_eagers_result() -> None:
    model, x = mlp(), torch.randn(3, 8)
    close(compiled(model)(x), model(x))


@pytest.mark.parametrize("name", ["sardonyx", "onnxrt"])
def test_both_names_are_registered(name: str) -> None:
    assert name in torch._dynamo.list_backends(exclude_tags=())
    close(torch.compile(torch.sin, backend=name)(torch.ones(3)), torch.ones(3).sin())


def test_modes_are_accepted() -> None:
    close(torch.compile(torch.sin, backend="sardonyx", mode="reduce-overhead")(torch.ones(3)), torch.ones(3).sin())


class TestWeights:
    """A session holds weights as constants; no edit of them may go unnoticed."""

    def test_an_edit_in_place_is_noticed(self) -> None:
        model, x = mlp(), torch.randn(3, 8)
        run = compiled(model)
        run(x)
        model[0].weight.add_(1.0)
        close(run(x), model(x))

    def test_an_edit_behind_the_version_counter_is_noticed(self) -> None:
        model, x = mlp(), torch.randn(3, 8)
        run = compiled(model)
        run(x)
        model[0].weight.data.mul_(2.0)
        close(run(x), model(x))
        model[2].bias.detach().numpy()[:] = 5.0
        close(run(x), model(x))

    def test_a_new_tensor_under_data_is_noticed(self) -> None:
        model, x = mlp(), torch.randn(3, 8)
        run = compiled(model)
        run(x)
        model[0].weight.data = torch.randn(16, 8)
        close(run(x), model(x))

    def test_load_state_dict_is_noticed(self) -> None:
        model, x = mlp(), torch.randn(3, 8)
        run = compiled(model)
        run(x)
        model.load_state_dict(mlp().state_dict())
        close(run(x), model(x))

    def test_a_replaced_parameter_is_noticed(self) -> None:
        model, x = mlp(), torch.randn(3, 8)
        run = compiled(model)
        run(x)
        model[0].weight = nn.Parameter(torch.randn(16, 8))
        close(run(x), model(x))

    def test_weights_that_keep_changing_become_inputs(self) -> None:
        model, x = mlp(), torch.randn(3, 8)
        with collecting() as report:
            run = compiled(model)
            for _ in range(8):
                model[0].weight.add_(0.1)
                close(run(x), model(x))
        assert report.graphs[0].regions[0].sessions <= 5

    @pytest.mark.parametrize("freeze", [True, False])
    def test_edits_of_a_weight_in_another_memory_format(self, freeze: bool) -> None:
        conv, x = nn.Conv2d(8, 16, 3).eval().to(memory_format=torch.channels_last), torch.randn(1, 8, 10, 10)
        run = compiled(conv, freeze=freeze)
        for _ in range(7):
            conv.weight.mul_(1.5)
            close(run(x), conv(x), 1e-3)
            conv.weight.data.mul_(0.7)
            close(run(x), conv(x), 1e-3)

    def test_a_buffer_is_noticed(self) -> None:
        norm, x = nn.BatchNorm1d(8).eval(), torch.randn(4, 8)
        run = compiled(norm)
        run(x)
        norm.running_mean.fill_(3.0)
        close(run(x), norm(x))

    def test_half_after_compiling(self) -> None:
        model, x = mlp(), torch.randn(3, 8)
        run = compiled(model)
        run(x)
        model.half()
        close(run(x.half()), model(x.half()), 5e-3)

    def test_train_and_eval_after_compiling(self) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        x = torch.randn(4, 8)
        model.eval()
        run = torch.compile(model, backend="sardonyx", options={"fallback": "quiet"})
        close(run(x), model(x))
        model.train()
        other = copy.deepcopy(model)
        close(run(x), other(x))
        close(model[1].running_mean, other[1].running_mean)
        model.eval()
        other.eval()
        close(run(x), other(x))

    def test_weights_are_not_copied(self) -> None:
        model = nn.Embedding(1000, 64).eval()
        run = compiled(model)
        run(torch.tensor([1]))
        model.weight.data[1].fill_(7.0)
        assert run(torch.tensor([1])).eq(7.0).all(), "an initializer that is not pre-packed shares torch's memory"

    def test_freeze_can_be_switched_off(self) -> None:
        model, x = mlp(), torch.randn(3, 8)
        with collecting() as report:
            close(compiled(model, freeze=False)(x), model(x))
        assert report.graphs[0].regions[0].weights == 0


class TestDynamicShapes:
    def test_one_graph_serves_many_shapes(self) -> None:
        model = mlp()
        with collecting() as report:
            run = compiled(model, dynamic=True)
            for batch in (2, 3, 7, 31):
                x = torch.randn(batch, 8)
                close(run(x), model(x))
        assert len(report.graphs) == 1

    def test_sizes_of_zero_one_and_many(self) -> None:
        model = mlp()
        agrees_at_the_edges(compiled(model, dynamic=True), model, lambda batch: (torch.randn(batch, 8),), {"batch": 3})

    def test_a_number_taken_for_constant_may_change(self) -> None:
        def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
            return x * factor + factor

        run = compiled(scaled, dynamic=True)
        for factor in (0.5, 0.5, 0.25, 3.0):
            x = torch.randn(4, 5)
            close(run(x, factor), scaled(x, factor))

    def test_an_integer_argument_may_change(self) -> None:
        def repeated(x: torch.Tensor, n: int) -> torch.Tensor:
            return x.new_ones(n) * x.sum() + n

        run = compiled(repeated, dynamic=True)
        for n in (3, 4, 9):
            close(run(torch.ones(3), n), repeated(torch.ones(3), n))


class TestResults:
    def test_views_of_inputs_stay_views(self) -> None:
        run = compiled(lambda x: (x.t(), x + 1))
        x = torch.randn(3, 4)
        view, _ = run(x)
        assert view.data_ptr() == x.data_ptr()
        assert view.stride() == x.t().stride()

    def test_views_of_an_input_that_is_edited_are_where_symbolic_sizes_say(self) -> None:
        def last(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            row, rest = x[x.shape[0] - 1], x[x.shape[0] // 2 :]
            x.add_(1)
            return row, rest

        run = compiled(last, dynamic=True)
        for rows in (3, 9, 4):
            ours, theirs = torch.randn(rows, 2), torch.empty(rows, 2)
            theirs.copy_(ours)
            for got, want in zip(run(ours), last(theirs), strict=True):
                close(got, want)
                assert got.storage_offset() == want.storage_offset()

    def test_an_input_can_be_returned(self) -> None:
        x = torch.randn(3)
        same, more = compiled(lambda x: (x, x + 1))(x)
        assert same is x or same.data_ptr() == x.data_ptr()
        close(more, x + 1)

    def test_strides_are_torchs(self) -> None:
        def turned(x: torch.Tensor) -> torch.Tensor:
            return (x + 1).permute(2, 0, 1)

        x = torch.randn(2, 3, 4)
        result = compiled(turned)(x)
        close(result, turned(x))
        assert result.stride() == turned(x).stride()

    def test_strides_may_depend_on_parts_of_sizes(self) -> None:
        def last(x: torch.Tensor) -> torch.Tensor:
            half = torch.logical_and(x, x).chunk(2, -1)[0]  # (n + 1) // 2 of the last axis
            return half.to(torch.int8).swapaxes(0, -1).to(torch.int16).split(1, 0)[-1]

        call = compiled(last, dynamic=True)
        for size in (3, 9):
            x = torch.ones(size, size, size, dtype=torch.int16)
            assert call(x).stride() == last(x).stride()

    def test_a_power_of_a_number_is_contiguous_for_what_reads_it(self) -> None:
        def logarithm(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            power = 1.5**x
            return power, torch.xlogy(x, power)

        x = torch.rand(4, 3).t()
        for result, expected in zip(compiled(logarithm)(x), logarithm(x), strict=True):
            close(result, expected)
            assert result.stride() == expected.stride()

    def test_an_output_can_come_twice_or_be_none(self) -> None:
        def twice(x: torch.Tensor) -> tuple[torch.Tensor, None, torch.Tensor]:
            y = x * 2
            return y, None, y

        a, nothing, b = compiled(twice)(torch.ones(3))
        assert nothing is None
        assert torch.equal(a, b)

    def test_a_mutated_input_is_mutated(self) -> None:
        def add_one(x: torch.Tensor) -> torch.Tensor:
            x.add_(1)
            return x * 2

        x, expected = torch.zeros(3), torch.zeros(3)
        close(compiled(add_one)(x), add_one(expected))
        close(x, expected)

    def test_non_contiguous_inputs(self) -> None:
        x = torch.randn(4, 6)[:, ::2]
        close(compiled(torch.exp)(x), x.exp())

    @pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (2, 0, 4)])
    def test_shapes_at_the_edge(self, shape: tuple[int, ...]) -> None:
        x = torch.randn(shape)
        close(compiled(lambda x: x.exp() + 1)(x), x.exp() + 1)

    def test_booleans_in_and_out(self) -> None:
        x = torch.tensor([True, False])
        assert torch.equal(compiled(lambda x: ~x)(x), ~x)

    def test_outputs_can_be_preallocated(self) -> None:
        model, x = mlp(), torch.randn(3, 8)
        close(compiled(model, preallocate_outputs=True)(x), model(x))

    def test_results_survive_the_next_call(self) -> None:
        run = compiled(lambda x: x + 1)
        first = run(torch.zeros(64))
        run(torch.ones(64))
        assert first.eq(1).all()


class TestSessions:
    def test_equal_graphs_over_the_same_weights_share_a_session(self) -> None:
        from sardonyx.run import sessions

        model, x = mlp(), torch.randn(3, 8)
        first = torch.compile(model, backend="sardonyx")
        first(x)
        alive = len(sessions._live)
        other = torch.compile(lambda x: model(x), backend="sardonyx")
        close(other(x), model(x))
        assert len(sessions._live) == alive

    def test_models_that_differ_in_a_constant_do_not(self) -> None:
        for factor in (2.0, 3.0):
            torch._dynamo.reset()
            close(compiled(lambda x, f=factor: x * f)(torch.ones(3)), torch.ones(3) * factor)

    def test_reset_clears_them(self) -> None:
        from sardonyx.run import sessions

        compiled(mlp())(torch.randn(3, 8))
        torch._dynamo.reset()
        assert not sessions._live

    def test_other_sessions_of_the_process_go_on_working(self) -> None:
        compiled(torch.sin)(torch.ones(3))
        model = onnx.parser.parse_model(
            '<ir_version: 10, opset_import: ["": 18]> g (float[3] x) => (float[3] y) { y = Relu(x) }'
        )
        session = onnxruntime.InferenceSession(model.SerializeToString(), onnxruntime.SessionOptions())
        assert session.run(None, {"x": torch.ones(3).numpy()})[0].sum() == 3

    def test_many_threads_get_right_results(self) -> None:
        model = mlp()
        run = compiled(model)
        inputs = [torch.randn(3, 8) for _ in range(8)]
        expected = [model(x) for x in inputs]
        run(inputs[0])
        wrong: list[int] = []

        def work(index: int) -> None:
            with torch.no_grad():
                results = [run(inputs[index]) for _ in range(125)]
            wrong.extend(index for result in results if not torch.allclose(result, expected[index], atol=1e-5))

        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


class TestTraining:
    def test_gradients_are_right_with_what_onnx_lacks_in_torch(self) -> None:
        with torch.enable_grad():
            model, x = mlp().train(), torch.randn(5, 8)
            other = copy.deepcopy(model)
            torch.compile(model, backend="sardonyx", options={"fallback": "quiet"})(x).square().sum().backward()
            other(x).square().sum().backward()
        for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            close(ours.grad, theirs.grad)


def test_translations_of_the_users_own_come_before_the_tables_and_decompositions() -> None:
    def by_abs(g: Any, x: Any) -> Any:
        return g.Abs(x)

    x = torch.tensor([-2.0, 0.5])
    model = torch.nn.Module()
    model.forward = lambda x: torch.special.entr(x.sin())
    translations = {torch.ops.aten.special_entr.default: by_abs, "aten::sin": by_abs}
    compiled = torch.compile(model, backend="sardonyx", options={"translations": translations, "fallback": "error"})
    assert compiled(x).tolist() == [2.0, 0.5]
    assert sardonyx.compile(model, translations=translations, fallback="error")(x).tolist() == [2.0, 0.5]
    assert sardonyx.export(model, (x,), translations=translations)(x).tolist() == [2.0, 0.5]
