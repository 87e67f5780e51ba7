"""Symbols that stand for sizes and attributes: what a shape rule does with them, they write down as C++."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from sardonyx.toolchain.literals import quoted

T = TypeVar("T")

MOST_RANKS = 8
"""Where a rule asks for a rank, ranks up to this are followed."""
_MOST_TENSORS = 32


class Path:
    """What was decided on one way through a rule."""

    def __init__(self, prefix: list[tuple[str, Any, Sequence[Any]]]) -> None:
        self._prefix = prefix
        self.taken: list[tuple[str, Any, Sequence[Any]]] = []
        self._known: dict[str, Any] = {}
        self._named: dict[str, str] = {}
        self._lines: list[tuple[int, str]] = []

    def decide(self, question: str, answers: Sequence[T] = (True, False)) -> T:  # type: ignore[assignment]
        """One of the answers; the same whenever the question is the same."""
        if question not in self._known:
            at = len(self.taken)
            answer = self._prefix[at][1] if at < len(self._prefix) else answers[0]
            self.taken.append((question, answer, answers))
            self._known[question] = answer
        found: T = self._known[question]
        return found

    def known(self, question: str) -> Any:
        """The answer, if it was decided."""
        return self._known.get(question)

    def named(self, kind: str, text: str) -> str:
        """The variable that holds what C++ computes here: what is used often is written once."""
        if text not in self._named:
            self._named[text] = f"v{len(self._named)}"
            self._lines.append((len(self.taken), f"const {kind} {self._named[text]} = {text};"))
        return self._named[text]

    def lines(self, depth: int) -> Iterator[str]:
        """What is computed after so many decisions."""
        return (line for at, line in self._lines if at == depth)

    def others(self) -> Iterator[Path]:
        """The ways that part from this one, after what led here."""
        for at in range(len(self._prefix), len(self.taken)):
            question, answer, answers = self.taken[at]
            for other in answers:
                if other != answer:
                    yield Path([*self.taken[:at], (question, other, answers)])


def conditions(paths: Sequence[tuple[Path, str]], depth: int, indent: str) -> str:
    """Ways as nested conditions."""
    first, ending = paths[0]
    text = "".join(f"{indent}{line}\n" for line in first.lines(depth))  # the same for all: they part only here
    if len(first.taken) <= depth:
        return f"{text}{indent}{ending}\n"
    question, _, answers = first.taken[depth]
    text += indent
    for answer in answers:
        chosen = [(path, end) for path, end in paths if path.taken[depth][1] == answer]
        condition = f"({question}) == {str(answer).lower()}"
        text += f"if ({condition}) {{\n{conditions(chosen, depth + 1, indent + '  ')}{indent}}} else "
    return f'{text}{{\n{indent}  fail("its shape rule does not know so many of them");\n{indent}}}\n'


def _path_of(values: Sequence[Any]) -> Path:
    return next(value.path for value in values if isinstance(value, Symbol))


MARK = "\0"
"""Around a symbol where a message mentions it."""


class Symbol:
    """Something that the rule is given: C++ that says what it is."""

    def __init__(self, text: str, path: Path) -> None:
        self.text, self.path = text, path

    def __index__(self) -> int:
        raise TypeError("it uses a size or an attribute as a Python integer, as range() does")

    def __eq__(self, other: object) -> bool:
        raise TypeError("it compares a list of real numbers")

    def __bool__(self) -> bool:
        raise TypeError("it decides by a list of real numbers")

    def __repr__(self) -> str:
        return f"{MARK}{self.text}{MARK}"

    __hash__ = None  # type: ignore[assignment]


class _Number(Symbol):
    """An integer."""

    def _with(self, function: str, *operands: Any) -> _Number:
        return _Number(self.path.named("Number", f"{function}({', '.join(map(_number, operands))})"), self.path)

    def __add__(self, other: Any) -> _Number:
        return self._with("add", self, other)

    def __radd__(self, other: Any) -> _Number:
        return self._with("add", other, self)

    def __sub__(self, other: Any) -> _Number:
        return self._with("sub", self, other)

    def __rsub__(self, other: Any) -> _Number:
        return self._with("sub", other, self)

    def __mul__(self, other: Any) -> _Number:
        return self._with("mul", self, other)

    def __rmul__(self, other: Any) -> _Number:
        return self._with("mul", other, self)

    def __floordiv__(self, other: Any) -> _Number:
        return self._with("div", self, other)

    def __rfloordiv__(self, other: Any) -> _Number:
        return self._with("div", other, self)

    def __mod__(self, other: Any) -> _Number:
        return self._with("mod", self, other)

    def __rmod__(self, other: Any) -> _Number:
        return self._with("mod", other, self)

    def __neg__(self) -> _Number:
        return self._with("sub", 0, self)

    def __eq__(self, other: object) -> _Number:  # type: ignore[override]
        return self._with("eq", self, other)

    def __ne__(self, other: object) -> _Number:  # type: ignore[override]
        return self._with("ne", self, other)

    def __lt__(self, other: Any) -> _Number:
        return self._with("lt", self, other)

    def __le__(self, other: Any) -> _Number:
        return self._with("le", self, other)

    def __gt__(self, other: Any) -> _Number:
        return self._with("lt", other, self)

    def __ge__(self, other: Any) -> _Number:
        return self._with("le", other, self)

    def __bool__(self) -> bool:
        return self.path.decide(f"truth({self.text})")

    __hash__ = None


def _number(value: Any) -> str:
    if isinstance(value, _Number):
        return value.text
    if isinstance(value, int):
        return f"int64_t{{{int(value)}}}"
    raise TypeError(f"it computes with {value!r}, which is no integer")


class Sizes(Symbol):
    """The sizes of a tensor, which are a tuple, or integers that are a list."""

    def __init__(self, text: str, path: Path, rank: int | None = None, kind: type = tuple) -> None:
        super().__init__(text, path)
        self._rank, self.kind = rank, kind

    @property
    def known_rank(self) -> int | None:
        """How many there are, if that follows from what was said or decided already."""
        return self._rank if self._rank is not None else self.path.known(f"rank_of({self.text})")

    def __len__(self) -> int:
        known = self.known_rank
        return self.path.decide(f"rank_of({self.text})", range(MOST_RANKS + 1)) if known is None else known

    def __bool__(self) -> bool:
        return len(self) > 0

    def __iter__(self) -> Iterator[_Number]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            return _Number(self.path.named("Number", f"at({self.text}, {_number(index)})"), self.path)
        if index.step not in (None, 1):
            return self.kind(self)[index]
        begin = _number(0 if index.start is None else index.start)
        end = "int64_t{kMostDims}" if index.stop is None else _number(index.stop)
        constant = all(bound is None or isinstance(bound, int) for bound in (index.start, index.stop))
        rank = None if self.known_rank is None or not constant else len(range(self.known_rank)[index])
        return Sizes(self.path.named("Sizes", f"slice({self.text}, {begin}, {end})"), self.path, rank, self.kind)

    def __add__(self, other: Any) -> Sizes:
        return self._joined(self, other)

    def __radd__(self, other: Any) -> Sizes:
        return self._joined(other, self)

    def _joined(self, first: Any, then: Any) -> Sizes:
        if _kind(first) is not _kind(then):
            raise TypeError(f"it adds a {_kind(then).__name__} to a {_kind(first).__name__}")
        ranks = [_known_rank(shape) for shape in (first, then)]
        rank = None if None in ranks else sum(ranks)  # type: ignore[arg-type]
        return Sizes(f"join({written(first)}, {written(then)})", self.path, rank, self.kind)

    def __contains__(self, number: Any) -> bool:
        return self.path.decide(f"contains({self.text}, {_number(number)})")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (tuple, list, Sizes)) or _kind(other) is not self.kind:
            return False
        return len(self) == len(other) and all(bool(a == b) for a, b in zip(self, other, strict=True))

    __hash__ = None


def written(shape: Any) -> str:
    """A shape, of symbols or of numbers, in C++; None is a size that only the kernel will know."""
    if isinstance(shape, Sizes):
        return shape.text
    if not isinstance(shape, (tuple, list)):
        raise TypeError(f"it takes {shape!r} for a shape")
    return f"of({{{', '.join('Number::unknown()' if dim is None else _number(dim) for dim in shape)}}})"


def _kind(shape: Any) -> type:
    return shape.kind if isinstance(shape, Sizes) else type(shape)


def _known_rank(shape: Any) -> int | None:
    return shape.known_rank if isinstance(shape, Sizes) else len(shape) if isinstance(shape, (tuple, list)) else None


def broadcast_symbols(a: Any, b: Any) -> Sizes:
    """The shape that two have together, of which one at least is a symbol."""
    ranks = [_known_rank(shape) for shape in (a, b)]
    rank = None if None in ranks else max(ranks)  # type: ignore[type-var]
    return Sizes(f"broadcast({written(a)}, {written(b)})", _path_of((a, b)), rank)


class Several(Symbol):
    """The sizes of each tensor of a list."""

    def __init__(self, first: int, path: Path, rank: int | None = None) -> None:
        super().__init__(f"inputs + {first}, variadic", path)
        self._rank = rank

    def __len__(self) -> int:
        return self.path.decide("variadic", range(_MOST_TENSORS + 1))

    def __bool__(self) -> bool:
        return len(self) > 0

    def __repr__(self) -> str:
        return repr(list(self))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return list(self)[index]
        return Sizes(f"nth({self.text}, {_number(index)})", self.path, self._rank)

    def __iter__(self) -> Iterator[Sizes]:
        return (self[i] for i in range(len(self)))


class _Text(Symbol):
    """A text, which can be compared."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (str, _Text)):
            return False
        return self.path.decide(f"{self.text} == {other.text if isinstance(other, _Text) else quoted(other)}")

    def __bool__(self) -> bool:
        return not self.path.decide(f"{self.text}.empty()")

    __hash__ = None


def message(text: str) -> str:
    """A message as C++ makes it, with the values of the symbols that it mentions."""
    parts = text.split(MARK)
    return " + ".join(f"shown({part})" if i % 2 else f"std::string({quoted(part)})" for i, part in enumerate(parts))


class _Real(Symbol):
    """A real number, which can be compared."""

    def _than(self, sign: str, other: float) -> bool:
        if isinstance(other, Symbol) or not isinstance(other, (int, float)):
            raise TypeError("it compares a real number with something that is no constant")
        return self.path.decide(f"{self.text} {sign} {_real(float(other))}")

    def __lt__(self, other: float) -> bool:
        return self._than("<", other)

    def __le__(self, other: float) -> bool:
        return self._than("<=", other)

    def __gt__(self, other: float) -> bool:
        return self._than(">", other)

    def __ge__(self, other: float) -> bool:
        return self._than(">=", other)

    def __eq__(self, other: object) -> bool:
        return self._than("==", other)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return not self._than("==", 0)

    __hash__ = None


def _real(value: float) -> str:
    return repr(value) if math.isfinite(value) else "NAN" if math.isnan(value) else f"{'-' * (value < 0)}INFINITY"


SYMBOLS: Mapping[str, Callable[[str, Path], Any]] = {
    "int": lambda text, path: _Number(f"Number({text}.i)", path),
    "bool": lambda text, path: _Number(f"Number({text}.i)", path),
    "float": lambda text, path: _Real(f"{text}.f", path),
    "str": lambda text, path: _Text(f"{text}.s", path),
    "int[]": lambda text, path: Sizes(f"sizes_of({text}.ints)", path, kind=list),
    "float[]": lambda text, path: Symbol(f"{text}.floats", path),
}
"""What stands for an attribute, by its type."""
