"""Signatures: what can be written, what it means, and what is refused with which words."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sardonyx.customop.signature import Attribute, Tensor, parse
from sardonyx.errors import DeclarationError


def tensors(text: str, **kwargs: Any) -> list[tuple[str, str, int | None, str]]:
    return [(t.name, t.type, t.rank, t.kind) for t in parse(text, **kwargs).inputs]


def attribute(text: str) -> Attribute:
    [found] = parse(f"my::Op(Tensor x, {text}) -> Tensor").attributes
    return found


# What can be written


def test_a_name_has_a_namespace() -> None:
    made = parse("my::Op(Tensor x) -> Tensor")
    assert (made.namespace, made.name, made.qualified) == ("my", "Op", "my::Op")


def test_the_overload_default_is_none() -> None:
    assert parse("my::Op.default(Tensor x) -> Tensor").name == "Op"


def test_a_tensor_may_have_a_type_and_a_rank() -> None:
    text = "my::Op(Tensor a, Tensor<U> b, Tensor<int64> c, Tensor<T, 4> d, Tensor<, 2> e) -> Tensor"
    expected = [("a", "T", None), ("b", "U", None), ("c", "int64", None), ("d", "T", 4), ("e", "T", 2)]
    assert [t[:3] for t in tensors(text)] == expected


def test_a_tensor_is_required_optional_or_one_of_several() -> None:
    text = "my::Op(Tensor a, Tensor? b, Tensor<T, 3>? c=None, Tensor<int64>[] d) -> Tensor"
    assert [t[3] for t in tensors(text)] == ["required", "optional", "optional", "variadic"]


def test_spaces_mean_nothing() -> None:
    made = parse("  my::Op (  Tensor< T ,  4 > x ,*, int[]  axes = [ 1, 2 ]  )  ->  ( Tensor a , Tensor<int64> b ) ")
    assert made.schema() == "Op(Tensor x, *, int[] axes=[1, 2]) -> (Tensor a, Tensor b)"


@pytest.mark.parametrize(
    ("other", "name"), [("float", "float32"), ("double", "float64"), ("half", "float16"), ("long", "int64")]
)
def test_a_dtype_may_have_its_other_name(other: str, name: str) -> None:
    made = parse(f"my::Op(Tensor<{other}> x, Tensor y) -> Tensor", [other])
    assert (made.inputs[0].type, made.types) == (name, {"T": (name,)})


def test_results_have_names_or_are_numbered() -> None:
    assert [t.name for t in parse("my::Op(Tensor x) -> Tensor").outputs] == ["output"]
    assert [t.name for t in parse("my::Op(Tensor x) -> Tensor y").outputs] == ["y"]
    assert [t.name for t in parse("my::Op(Tensor x) -> (Tensor, Tensor<int64, 1> n)").outputs] == ["output0", "n"]


def test_a_variable_stands_for_floating_point_unless_something_else_is_said() -> None:
    assert parse("my::Op(Tensor x) -> Tensor").types == {"T": ("float32", "float64", "float16", "bfloat16")}


def test_each_variable_has_its_own_dtypes() -> None:
    made = parse("my::Op(Tensor<A> x, Tensor<B> y) -> Tensor<A>", {"A": ["float32"], "B": [torch.int64, "int32"]})
    assert made.types == {"A": ("float32",), "B": ("int64", "int32")}
    assert [dict(chosen) for chosen in made.choices] == [{"A": "float32", "B": b} for b in ("int64", "int32")]


def test_variables_may_have_their_dtypes_together() -> None:
    given = [{"T": t, "X": x} for t in ("float32", torch.float64) for x in (t, "long")]
    made = parse("my::Op(Tensor<X> x, Tensor y) -> Tensor", given)
    assert made.types == {"X": ("float32", "int64", "float64"), "T": ("float32", "float64")}
    pairs = [("float32", "float32"), ("int64", "float32"), ("float64", "float64"), ("int64", "float64")]
    assert [(c["X"], c["T"]) for c in made.choices] == pairs


def test_a_choice_that_is_made_twice_is_one() -> None:
    made = parse("my::Op(Tensor x) -> Tensor", [{"T": "float"}, {"T": "int64"}, {"T": "float32"}])
    assert made.choices == ({"T": "float32"}, {"T": "int64"})


def test_what_it_takes_may_say_which_type_a_result_has() -> None:
    text, pairs = "my::Op(Tensor x) -> Tensor<R>", [{"T": "int8", "R": "int32"}, {"T": "float16", "R": "float32"}]
    assert parse(text, pairs).types["R"] == ("int32", "float32")
    with pytest.raises(DeclarationError, match="no input determines which of int32, float32, int64 its result"):
        parse(text, [*pairs, {"T": "int8", "R": "int64"}])


def test_a_dtype_that_is_named_twice_is_one() -> None:
    assert parse("my::Op(Tensor x) -> Tensor", ["float32", torch.float, "float"]).types == {"T": ("float32",)}


@pytest.mark.parametrize(
    ("text", "default"),
    [
        ("int a=-3", -3),
        ("SymInt a=4", 4),
        ("float a=1e-5", 1e-5),
        ("float a=2", 2.0),
        ("bool a=True", True),
        ("str a='add'", "add"),
        ('str a=""', ""),
        ("int[] a=[]", []),
        ("int[] a=[1, -2]", [1, -2]),
        ("float[] a=[1, 0.5]", [1.0, 0.5]),
        ('str a="a, b=(c) -> [d]"', "a, b=(c) -> [d]"),
        (r"""str a="it's \"quoted\", \\ too" """, r"""it's "quoted", \ too"""),
        ("str a='zwölf\\n'", "zwölf\n"),
    ],
)
def test_attributes_have_defaults_that_torch_has_too(text: str, default: Any) -> None:
    found = attribute(text)
    assert (found.default, type(found.default), found.required) == (default, type(default), False)
    schema = torch._C.parse_schema(parse(f"my::Op(Tensor x, {text}) -> Tensor").schema())
    assert schema.arguments[1].default_value == default


def test_an_attribute_without_a_default_is_required() -> None:
    assert attribute("*, int[] axes") == Attribute("axes", "int[]", required=True)


def test_parameters_stand_in_any_order() -> None:
    made = parse("my::Op(int n, Tensor x, float f, *, Tensor? y=None, str mode='a') -> Tensor")
    assert [p.name for p in made.parameters] == ["n", "x", "f", "y", "mode"]
    assert made.schema() == 'Op(int n, Tensor x, float f, *, Tensor? y=None, str mode="a") -> Tensor'


def test_what_comes_before_a_required_one_cannot_be_left_out() -> None:
    made = parse("my::Op(Tensor? a, Tensor b, Tensor? c, int n=2, *, int axis) -> Tensor")
    assert made.schema() == "Op(Tensor? a, Tensor b, Tensor? c=None, int n=2, *, int axis) -> Tensor"


def test_an_operator_may_take_no_tensor() -> None:
    assert parse("my::Op(int n) -> Tensor<float32>").inputs == ()


@pytest.mark.parametrize("name", ["self", "dtype", "domain", "input", "g", "args", "fields", "inputs", "int", "double"])
def test_any_name_is_good_for_a_parameter(name: str) -> None:
    made = parse(f"my::Op(Tensor {name}, *, int[] a{name}=[1]) -> Tensor")
    schema = torch._C.parse_schema(f"my::{made.schema()}")
    assert [a.name for a in schema.arguments] == [name, f"a{name}"]


@pytest.mark.parametrize(
    "text",
    [
        "my::Op(Tensor x, Tensor? y=None, Tensor[] z, *, int a, float b=0.5, bool c=False) -> (Tensor, Tensor n)",
        'my::Op(int n, str mode="sum", int[] axes=[0, 1], float[] scales=[0.5, 2.0]) -> Tensor',
    ],
)
def test_torch_reads_the_schema_and_its_own_words_are_a_signature_again(text: str) -> None:
    first = parse(text, {"T": ["float32"]})
    again = parse(f"my::{torch._C.parse_schema(first.schema())}".replace("my::my::", "my::"), {"T": ["float32"]})
    assert again == first


# What is refused

REFUSED = [
    ("Op(Tensor x) -> Tensor", "does not start with domain::Name("),
    ("my::Op", "does not start with domain::Name("),
    ("my.Op(Tensor x) -> Tensor", "does not start with domain::Name("),
    ("my::Op.out(Tensor x) -> Tensor", "it has the overload 'out'"),
    ("my::Op(Tensor x)", "it has no results"),
    ("my::Op(Tensor x) -> ", "it has no results"),
    ("my::Op(Tensor x) -> ()", "it has no results"),
    ("my::Op(Tensor x) -> (Tensor, Tensor", "the parenthesis around its results is not closed"),
    ("my::Op(Tensor x) -> Tensor?", "is optional or a list, which is not supported"),
    ("my::Op(Tensor x) -> Tensor[]", "is optional or a list, which is not supported"),
    ("my::Op(Tensor x) -> int", "output has the type 'int'"),
    ("my::Op(Tensor) -> Tensor", "'Tensor' is not a type and a name"),
    ("my::Op(Tensor 2x) -> Tensor", "'Tensor 2x' is not a type and a name"),
    ("my::Größe(Tensor x) -> Tensor", "does not start with domain::Name("),
    ("my::Op(Tensor größe) -> Tensor", "'Tensor größe' is not a type and a name"),
    ("my::Op(Tensor x) -> Tensor 2y", "its result 'Tensor 2y' is not a type and a name"),
    ("my::Op(Tensor x=None) -> Tensor", "x is a tensor and has the default None"),
    ("my::Op(Tensor? x=1) -> Tensor", "x is a tensor and has the default 1"),
    ("my::Op(Tensor<T, U> x) -> Tensor", "x has the type 'Tensor<T, U>'"),
    ("my::Op(Tensor(a!) x) -> Tensor", "x has the type 'Tensor(a!)'"),
    ("my::Op(Tensor<complex64> x) -> Tensor", "is not a dtype that kernels support"),
    ("my::Op(Tensor<float8_e4m3fn> x) -> Tensor", "is not a dtype that kernels support"),
    ("my::Op(Tensor x, Device d) -> Tensor", "d has the type 'Device'"),
    ("my::Op(Tensor x, int? n=None) -> Tensor", "n has the type 'int?'"),
    ("my::Op(Tensor x, int n=1.5) -> Tensor", "the default of n, 1.5, is not of type int"),
    ("my::Op(Tensor x, int n=True) -> Tensor", "the default of n, True, is not of type int"),
    ("my::Op(Tensor x, bool n=1) -> Tensor", "the default of n, 1, is not of type bool"),
    ("my::Op(Tensor x, str n=1) -> Tensor", "the default of n, 1, is not of type str"),
    ("my::Op(Tensor x, int[] n=[1, 2.5]) -> Tensor", "the default of n, [1, 2.5], is not of type int[]"),
    ("my::Op(Tensor x, int n=None) -> Tensor", "the default of n, None, is not of type int"),
    ("my::Op(Tensor x, int n=m) -> Tensor", "the default of n, m, is not a constant"),
    ("my::Op(Tensor x, int n=9223372036854775808) -> Tensor", "does not fit into 64 bits"),
    ("my::Op(Tensor x, float f=inf) -> Tensor", "the default of f is inf, which torch schemas do not support"),
    ("my::Op(Tensor x, float f=1e999) -> Tensor", "the default of f is 1e999, which torch schemas do not support"),
    ("my::Op(Tensor x, float f=nan) -> Tensor", "the default of f is nan, which torch schemas do not support"),
    ("my::Op(Tensor[] x, Tensor y) -> Tensor", "only the last of its tensors can be a list"),
    ("my::Op(Tensor x, *, *, int n) -> Tensor", "it has two stars"),
    ("my::Op(Tensor x, *) -> Tensor", "nothing follows its star"),
    ("my::Op(Tensor x, Tensor x) -> Tensor", "two of its parameters or results are called x"),
    ("my::Op(Tensor x, int x) -> Tensor", "two of its parameters or results are called x"),
    ("my::Op(Tensor output) -> Tensor", "two of its parameters or results are called output"),
    ("my::Op(int n) -> Tensor", "no input determines which of float32, float64, float16, bfloat16"),
    (f"my::Op({', '.join(f'Tensor x{i}' for i in range(65))}) -> Tensor", "it has 65 tensors on one side"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_a_bad_signature_is_refused_with_the_reason_and_what_to_do(text: str, message: str) -> None:
    with pytest.raises(DeclarationError) as caught:
        parse(text)
    assert str(caught.value).startswith(f"invalid signature {text!r}: ")
    assert message in caught.value.what
    assert caught.value.hint


@pytest.mark.parametrize(
    ("types", "message"),
    [
        ("float32", "the dtypes of T are 'float32'"),
        ([], "the dtypes of T are []"),
        (["floaty"], "'floaty' is not a dtype that kernels support"),
        ([torch.complex64], "torch.complex64 is not a dtype that kernels support"),
        ({"U": ["float32"]}, "dtypes has 'U', and no tensor has this type"),
        ([{"U": "float32"}], "its types are T, and dtypes has the choice {'U': 'float32'}"),
        ([{"T": "float32"}, "int64"], "its types are T, and dtypes has the choice 'int64'"),
        ([{"T": "floaty"}], "'floaty' is not a dtype that kernels support"),
    ],
)
def test_bad_dtypes_are_refused(types: Any, message: str) -> None:
    with pytest.raises(DeclarationError) as caught:
        parse("my::Op(Tensor x) -> Tensor", types)
    assert message in caught.value.what


def test_a_tensor_is_described_by_its_name_type_rank_and_kind() -> None:
    assert parse("my::Op(Tensor<U, 3>? x) -> Tensor<U>").inputs == (Tensor("x", "U", 3, "optional"),)
