"""Text that others choose, as it may stand in generated C++: names of sizes, domains, paths of files."""

from __future__ import annotations

import hashlib
import re

_LONGEST_NAME = 64


def quoted(text: str) -> str:
    """A string literal. Whatever could end it, or be read as an escape or a trigraph, is an octal escape.

    >>> print(quoted('a"b??/'))
    "a\\042b\\077\\077/"
    """
    content = text.encode(errors="surrogateescape")
    return '"' + "".join(chr(c) if 32 <= c < 127 and c not in b'"\\?' else f"\\{c:03o}" for c in content) + '"'


def comment(text: str) -> str:
    r"""A comment of one line. Line breaks and backslashes, which could end or extend it, become spaces.

    >>> comment("a\nb\\")
    '// a b '
    """
    return "// " + re.sub(r"[^\w ×·…=,:;+*()\[\]<>.-]", " ", text)


def identifier(text: str) -> str:
    """An identifier for a name; different names have different ones.

    >>> identifier("n"), identifier("a b"), len(identifier("n" * 1000))
    ('n_n', 'n_a_20_b', 80)
    """
    plain = "n_" + "".join(c if c.isascii() and c.isalnum() else f"_{ord(c):x}_" for c in text)
    if len(plain) <= _LONGEST_NAME:
        return plain
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
    return f"{plain[: _LONGEST_NAME - 2]}_h{digest[:16]}"
