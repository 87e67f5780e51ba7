"""Symbols for sizes and attributes, which record what a shape rule computes as C++."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from sardonyx.toolchain.literals import quoted

T = TypeVar("T")

MAX_RANK = 8
"""Where a rule depends on a rank, ranks up to this are traced."""
_MAX_TENSORS = 32


class Path:
    """The decisions on one path through a rule."""

    def __init__(self, prefix: list[tuple[str, Any, Sequence[Any]]]) -> None:
        self._prefix = prefix
        self.decisions: list[tuple[str, Any, Sequence[Any]]] = []
        self._known: dict[str, Any] = {}
        self._variables: dict[str, str] = {}
        self._lines: list[tuple[int, str]] = []

    def decide(self, question: str, answers: Sequence[T] = (True, False)) -> T:  # type: ignore[assignment]
        """Return one of the answers, the same for the same question."""
        if question not in self._known:
            index = len(self.decisions)
            answer = self._prefix[index][1] if index < len(self._prefix) else answers[0]
            self.decisions.append((question, answer, answers))
            self._known[question] = answer
        decided: T = self._known[question]
        return decided

    def known(self, question: str) -> Any:
        """Return the answer if it was decided."""
        return self._known.get(question)

    def variable(self, kind: str, text: str) -> str:
        """Return the variable that holds a C++ expression, defined once per path."""
        if text not in self._variables:
            self._variables[text] = f"v{len(self._variables)}"
            self._lines.append((len(self.decisions), f"const {kind} {self._variables[text]} = {text};"))
        return self._variables[text]

    def lines(self, depth: int) -> Iterator[str]:
        """Return the definitions made after `depth` decisions."""
        return (line for at, line in self._lines if at == depth)

    def alternatives(self) -> Iterator[Path]:
        """Yield the paths that branch off from this one after its prefix."""
        for index in range(len(self._prefix), len(self.decisions)):
            question, answer, answers = self.decisions[index]
            for other in answers:
                if other != answer:
                    yield Path([*self.decisions[:index], (question, other, answers)])


def conditions_code(paths: Sequence[tuple[Path, str]], depth: int, indent: str) -> str:
    """Return paths as nested conditions."""
    first, ending = paths[0]
    text = "".join(f"{indent}{line}\n" for line in first.lines(depth))  # shared: the paths differ only after this
    if len(first.decisions) <= depth:
        return f"{text}{indent}{ending}\n"
    question, _, answers = first.decisions[depth]
    text += indent
    for answer in answers:
        chosen = [(path, end) for path, end in paths if path.decisions[depth][1] == answer]
        condition = f"({question}) == {str(answer).lower()}"
        text += f"if ({condition}) {{\n{conditions_code(chosen, depth + 1, indent + '  ')}{indent}}} else "
    return (
        f'{text}{{\n{indent}  fail("its shape rule was not traced for this rank or number of tensors");\n{indent}}}\n'
    )


def _path_of(values: Sequence[Any]) -> Path:
    return next(value.path for value in values if isinstance(value, Symbol))


MARK = "\0"
"""Delimits a symbol in a message."""


class Symbol:
    """A parameter of the rule, as a C++ expression."""

    def __init__(self, text: str, path: Path) -> None:
        self.text, self.path = text, path

    def __index__(self) -> int:
        raise TypeError("it uses a size or an attribute as a Python integer, for instance in range()")

    def __eq__(self, other: object) -> bool:
        raise TypeError("it compares a list of floats")

    def __bool__(self) -> bool:
        raise TypeError("it branches on a list of floats")

    def __repr__(self) -> str:
        return f"{MARK}{self.text}{MARK}"

    __hash__ = None  # type: ignore[assignment]


class _Number(Symbol):
    def _call(self, function: str, *operands: Any) -> _Number:
        return _Number(self.path.variable("Number", f"{function}({', '.join(map(_number_code, operands))})"), self.path)

    def __add__(self, other: Any) -> _Number:
        return self._call("add", self, other)

    def __radd__(self, other: Any) -> _Number:
        return self._call("add", other, self)

    def __sub__(self, other: Any) -> _Number:
        return self._call("sub", self, other)

    def __rsub__(self, other: Any) -> _Number:
        return self._call("sub", other, self)

    def __mul__(self, other: Any) -> _Number:
        return self._call("mul", self, other)

    def __rmul__(self, other: Any) -> _Number:
        return self._call("mul", other, self)

    def __floordiv__(self, other: Any) -> _Number:
        return self._call("div", self, other)

    def __rfloordiv__(self, other: Any) -> _Number:
        return self._call("div", other, self)

    def __mod__(self, other: Any) -> _Number:
        return self._call("mod", self, other)

    def __rmod__(self, other: Any) -> _Number:
        return self._call("mod", other, self)

    def __neg__(self) -> _Number:
        return self._call("sub", 0, self)

    def __eq__(self, other: object) -> _Number:  # type: ignore[override]
        return self._call("eq", self, other)

    def __ne__(self, other: object) -> _Number:  # type: ignore[override]
        return self._call("ne", self, other)

    def __lt__(self, other: Any) -> _Number:
        return self._call("lt", self, other)

    def __le__(self, other: Any) -> _Number:
        return self._call("le", self, other)

    def __gt__(self, other: Any) -> _Number:
        return self._call("lt", other, self)

    def __ge__(self, other: Any) -> _Number:
        return self._call("le", other, self)

    def __bool__(self) -> bool:
        return self.path.decide(f"truth({self.text})")

    __hash__ = None


def _number_code(value: Any) -> str:
    if isinstance(value, _Number):
        return value.text
    if isinstance(value, int):
        return f"int64_t{{{int(value)}}}"
    raise TypeError(f"it computes with {value!r}, which is not an integer")


class Sizes(Symbol):
    """The sizes of a tensor, as a tuple, or an integer list attribute, as a list."""

    def __init__(self, text: str, path: Path, rank: int | None = None, kind: type = tuple) -> None:
        super().__init__(text, path)
        self._rank, self.kind = rank, kind

    @property
    def known_rank(self) -> int | None:
        """The rank, if it is declared or decided."""
        return self._rank if self._rank is not None else self.path.known(f"rank_of({self.text})")

    def __len__(self) -> int:
        known = self.known_rank
        return self.path.decide(f"rank_of({self.text})", range(MAX_RANK + 1)) if known is None else known

    def __bool__(self) -> bool:
        return len(self) > 0

    def __iter__(self) -> Iterator[_Number]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            return _Number(self.path.variable("Number", f"at({self.text}, {_number_code(index)})"), self.path)
        if index.step not in (None, 1):
            return self.kind(self)[index]
        begin = _number_code(0 if index.start is None else index.start)
        end = "int64_t{kMaxDims}" if index.stop is None else _number_code(index.stop)
        constant = all(bound is None or isinstance(bound, int) for bound in (index.start, index.stop))
        rank = None if self.known_rank is None or not constant else len(range(self.known_rank)[index])
        return Sizes(self.path.variable("Sizes", f"slice({self.text}, {begin}, {end})"), self.path, rank, self.kind)

    def __add__(self, other: Any) -> Sizes:
        return self._concatenate(self, other)

    def __radd__(self, other: Any) -> Sizes:
        return self._concatenate(other, self)

    def _concatenate(self, first: Any, second: Any) -> Sizes:
        if _kind(first) is not _kind(second):
            raise TypeError(f"it adds a {_kind(second).__name__} to a {_kind(first).__name__}")
        ranks = [_known_rank(shape) for shape in (first, second)]
        rank = None if None in ranks else sum(ranks)  # type: ignore[arg-type]
        return Sizes(f"join({shape_code(first)}, {shape_code(second)})", self.path, rank, self.kind)

    def __contains__(self, number: Any) -> bool:
        return self.path.decide(f"contains({self.text}, {_number_code(number)})")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (tuple, list, Sizes)) or _kind(other) is not self.kind:
            return False
        return len(self) == len(other) and all(bool(a == b) for a, b in zip(self, other, strict=True))

    __hash__ = None


def shape_code(shape: Any) -> str:
    """Return a shape of symbols or numbers in C++; None is a size that only the kernel knows."""
    if isinstance(shape, Sizes):
        return shape.text
    if not isinstance(shape, (tuple, list)):
        raise TypeError(f"it uses {shape!r} as a shape")
    return f"of({{{', '.join('Number::unknown()' if dim is None else _number_code(dim) for dim in shape)}}})"


def _kind(shape: Any) -> type:
    return shape.kind if isinstance(shape, Sizes) else type(shape)


def _known_rank(shape: Any) -> int | None:
    return shape.known_rank if isinstance(shape, Sizes) else len(shape) if isinstance(shape, (tuple, list)) else None


def broadcast_symbols(a: Any, b: Any) -> Sizes:
    """Return the broadcast of two shapes, at least one of which is a symbol."""
    ranks = [_known_rank(shape) for shape in (a, b)]
    rank = None if None in ranks else max(ranks)  # type: ignore[type-var]
    return Sizes(f"broadcast({shape_code(a)}, {shape_code(b)})", _path_of((a, b)), rank)


class TensorListSizes(Symbol):
    """The sizes of each tensor of a list."""

    def __init__(self, first: int, path: Path, rank: int | None = None) -> None:
        super().__init__(f"inputs + {first}, variadic", path)
        self._rank = rank

    def __len__(self) -> int:
        return self.path.decide("variadic", range(_MAX_TENSORS + 1))

    def __bool__(self) -> bool:
        return len(self) > 0

    def __repr__(self) -> str:
        return repr(list(self))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return list(self)[index]
        return Sizes(f"nth({self.text}, {_number_code(index)})", self.path, self._rank)

    def __iter__(self) -> Iterator[Sizes]:
        return (self[i] for i in range(len(self)))


class _String(Symbol):
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (str, _String)):
            return False
        return self.path.decide(f"{self.text} == {other.text if isinstance(other, _String) else quoted(other)}")

    def __bool__(self) -> bool:
        return not self.path.decide(f"{self.text}.empty()")

    __hash__ = None


def message_code(text: str) -> str:
    """Return a message as a C++ expression, with the values of the symbols it mentions."""
    parts = text.split(MARK)
    return " + ".join(f"to_text({part})" if i % 2 else f"std::string({quoted(part)})" for i, part in enumerate(parts))


class _Float(Symbol):
    def _compare(self, sign: str, other: float) -> bool:
        if isinstance(other, Symbol) or not isinstance(other, (int, float)):
            raise TypeError("it compares a float with something that is not a constant")
        return self.path.decide(f"{self.text} {sign} {_real_code(float(other))}")

    def __lt__(self, other: float) -> bool:
        return self._compare("<", other)

    def __le__(self, other: float) -> bool:
        return self._compare("<=", other)

    def __gt__(self, other: float) -> bool:
        return self._compare(">", other)

    def __ge__(self, other: float) -> bool:
        return self._compare(">=", other)

    def __eq__(self, other: object) -> bool:
        return self._compare("==", other)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return not self._compare("==", 0)

    __hash__ = None


def _real_code(value: float) -> str:
    return repr(value) if math.isfinite(value) else "NAN" if math.isnan(value) else f"{'-' * (value < 0)}INFINITY"


SYMBOLS: Mapping[str, Callable[[str, Path], Any]] = {
    "int": lambda text, path: _Number(f"Number({text}.i)", path),
    "bool": lambda text, path: _Number(f"Number({text}.i)", path),
    "float": lambda text, path: _Float(f"{text}.f", path),
    "str": lambda text, path: _String(f"{text}.s", path),
    "int[]": lambda text, path: Sizes(f"sizes_of({text}.ints)", path, kind=list),
    "float[]": lambda text, path: Symbol(f"{text}.floats", path),
}
"""The symbol for an attribute, by its type."""
