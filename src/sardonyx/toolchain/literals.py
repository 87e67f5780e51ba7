"""Escape text for generated C++: dimension names, domains, file paths."""

from __future__ import annotations

import hashlib
import re

_MAX_NAME = 64


def quoted(text: str) -> str:
    """Return a string literal, with octal escapes for what could end it or be read as an escape or trigraph.

    >>> print(quoted('a"b??/'))
    "a\\042b\\077\\077/"
    """
    content = text.encode(errors="surrogateescape")
    return '"' + "".join(chr(c) if 32 <= c < 127 and c not in b'"\\?' else f"\\{c:03o}" for c in content) + '"'


def comment(text: str) -> str:
    r"""Return a one-line comment; line breaks and backslashes, which could end or extend it, become spaces.

    >>> comment("a\nb\\")
    '// a b '
    """
    return "// " + re.sub(r"[^\w ×·…=,:;+*()\[\]<>.-]", " ", text)


def identifier(text: str) -> str:
    """Return an identifier for a name; different names get different identifiers.

    >>> identifier("n"), identifier("a b"), len(identifier("n" * 1000))
    ('n_n', 'n_a_20_b', 80)
    """
    plain = "n_" + "".join(c if c.isascii() and c.isalnum() else f"_{ord(c):x}_" for c in text)
    if len(plain) <= _MAX_NAME:
        return plain
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
    return f"{plain[: _MAX_NAME - 2]}_h{digest[:16]}"
