"""The examples of custom operators are right wherever they run: in torch, differentiated, exported, compiled."""

from __future__ import annotations

from typing import Any

import onnx
import pytest
import torch

import sardonyx

from .example_cases import (
    DTYPES,
    HALF_A_UNIT,
    Call,
    Case,
    assert_same,
    by_each,
    compiled,
    every,
    floating,
    gradients,
    in_each,
    plain,
    trained_in,
    wanting_gradients,
    wide,
)

pytestmark = pytest.mark.usefixtures("sizes_that_kernels_know_are_captured")


# Every example


@every
@in_each
def test_it_is_right_to_the_last_digit(case: Case, dtype: torch.dtype) -> None:
    given = case.given(dtype, 2)
    expected, found = case.reference(*map(wide, given)), case(*given)
    if isinstance(found, tuple):
        assert found[0].dtype == dtype
        assert_same(found, tuple(e.to(f.dtype) for e, f in zip(expected, found, strict=True)))
    else:
        assert found.dtype == floating(dtype)
        # half a unit for the result's own rounding; what is computed in float32 before may add a little
        atol = 1e-6 if dtype == torch.int64 else 2e-7
        torch.testing.assert_close(found.double(), expected, rtol=2 * HALF_A_UNIT[found.dtype], atol=atol)


@every
def test_a_dtype_that_it_has_no_kernel_for_is_refused_by_name(case: Case) -> None:
    good = case.given(torch.float32, 2)
    bad, said = (good[0].to(torch.int32), *good[1:]), f"{case.op.signature.qualified}: .* is int32, and can be "
    with pytest.raises(RuntimeError, match=said):
        case(*bad)
    with pytest.raises(TypeError, match=said):
        torch.export.export(Call(case), bad)
    proto = sardonyx.export(Call(case).eval(), good).proto()
    proto.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.INT32
    with pytest.raises(Exception, match=f"{case.op.signature.name}.*int32|int32.*{case.op.signature.name}"):
        plain(case.op, proto)


@every
@in_each
def test_inputs_need_not_be_contiguous(case: Case, dtype: torch.dtype) -> None:
    given = case.given(dtype, 2)
    program = sardonyx.export(Call(case).eval(), given)
    strided = tuple(x.repeat_interleave(2, -1)[..., ::2] if x.dim() else x for x in given)
    turned = tuple(x.mT.contiguous().mT if x.dim() > 1 else x for x in given)
    assert not any(x.is_contiguous() for x in strided if x.dim())
    for other in (strided, turned):
        assert_same(case(*other), case(*given))
        assert_same(program(*other), case(*given))


@every
@in_each
def test_torch_finds_nothing_wrong_with_it(case: Case, dtype: torch.dtype) -> None:
    with torch.enable_grad():
        given = tuple(wanting_gradients(case.given(dtype, 2)))
        found = torch.library.opcheck(case.op.operator, given, case.attributes)
    assert set(found.values()) == {"SUCCESS"}


@every
def test_its_gradient_is_its_slope(case: Case) -> None:
    with torch.enable_grad():
        assert torch.autograd.gradcheck(case, wanting_gradients(case.given(torch.float64, 1)))


@every
def test_whole_numbers_have_no_gradient_and_what_is_beside_them_has_its_slope(case: Case) -> None:
    with torch.enable_grad():
        given = wanting_gradients(map(wide, case.given(torch.int64, 1)))
        if any(x.requires_grad for x in given):
            assert torch.autograd.gradcheck(case, given)
        else:
            assert not any(x.requires_grad for x in case(*given))


@trained_in(*DTYPES)
def test_its_gradient_is_near_that_of_double_precision(case: Case, dtype: torch.dtype) -> None:
    given = case.given(dtype, 2)
    for found, expected in zip(gradients(case, *given), gradients(case.reference, *map(wide, given)), strict=True):
        tolerance = 16 * HALF_A_UNIT[found.dtype]
        torch.testing.assert_close(
            found.double(), expected, rtol=tolerance, atol=tolerance * expected.abs().max().item()
        )


@every
@in_each
def test_it_is_exported_for_any_size(case: Case, dtype: torch.dtype) -> None:
    dims: dict[str, Any] = {}
    shapes = tuple(
        {at: dims.setdefault(name, torch.export.Dim(name)) for at, name in sizes.items()} if sizes else None
        for sizes in case.dynamic
    )
    exported = torch.export.export(Call(case), case.given(dtype, 2), dynamic_shapes=(shapes,))
    for size in (2, 5):
        given = case.given(dtype, size)
        assert_same(exported.module()(*given), case(*given))


@every
@in_each
def test_onnx_runtime_gives_torchs_result_for_any_size(case: Case, dtype: torch.dtype) -> None:
    program = sardonyx.export(Call(case).eval(), case.given(dtype, 2), dynamic_shapes={"given": case.dynamic})
    assert [node.op_type for node in program.model.graph] == [case.op.signature.name]
    for size in (2, 5):
        given = case.given(dtype, size)
        assert_same(program(*given), case(*given))


@every
@in_each
@by_each
def test_it_is_compiled_once_for_all_sizes(case: Case, dtype: torch.dtype, backend: str) -> None:
    run = compiled(case, backend, dynamic=True)
    for size in (2, 5):
        given = case.given(dtype, size)
        with torch.compiler.set_stance("fail_on_recompile" if size == 5 else "default"):
            assert_same(run(*given), case(*given))


@trained_in(torch.float32, torch.int64)
@by_each
def test_compiled_it_has_the_same_gradient(case: Case, dtype: torch.dtype, backend: str) -> None:
    given = case.given(dtype, 2)
    for found, expected in zip(gradients(compiled(case, backend), *given), gradients(case, *given), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
