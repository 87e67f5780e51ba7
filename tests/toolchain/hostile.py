"""Texts that try to become code in what is generated."""

from __future__ import annotations

CODE = "} __attribute__((constructor)) static void injected() { __builtin_trap(); } namespace x {"
HOSTILE = {
    "line break": f"a\n{CODE}//",
    "carriage return": f"a\r{CODE}//",
    "end of a comment": f"a*/ {CODE} /*",
    "line continuation": "a\\\n" + CODE,
    "trailing backslash": "a\\",
    "trigraph": "a??/\n" + CODE,
    "quote": f'a"; {CODE} //',
    "line separators": f"a\u2028{CODE}\u2029\x0b\x0c\x85",
    "zero byte": f"a\x00{CODE}",
    "format": "{0}{name}%s",
}
