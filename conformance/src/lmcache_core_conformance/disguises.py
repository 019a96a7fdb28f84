"""Secrets in a text, in whatever form: escaped, quoted for a URL, in hex, or in base64 with others."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable
from html.entities import codepoint2name

SHOWN = "***"
_LETTERS = {"\n": "n", "\r": "r", "\t": "t"}
_WRAPPED = r""" ['"]\n {0,99}b?['"]"""
"""Behind a space, `pprint` goes on in another line."""
_BACKSLASHES = r"\\{0,8}"
_BACKSLASH = r"\\{1,8}"
_LEAST_BASE64 = 4
_RUN = 8
"""So many characters of a secret in a row are hidden, wherever they are cut out of it."""
_IN_BASE64 = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/_-=%")


class Disguises:
    """Finds `secrets` in any form. Takes time linear in the text, which may be a hostile backend's."""

    def __init__(self, secrets: Iterable[str]) -> None:
        longest_first = sorted(secrets, key=len, reverse=True)
        self._plain = _any((form for s in longest_first for form in (_escaped(s), _hex(s))), re.IGNORECASE)
        self._runs = {_small(s)[at : at + _RUN] for s in longest_first for at in range(len(s) - _RUN + 1)}
        self._base64 = _any(_escaped(core) for s in longest_first for core in _base64_cores(s.encode()))

    def hide(self, text: str) -> str:
        """`text` without them; of base64, without all that was encoded together."""
        if self._plain is None or self._base64 is None:
            return text
        text = self._plain.sub(SHOWN, text)
        kept, position = [], 0
        while (found := self._base64.search(text, position)) is not None:
            start, end = found.span()
            while start > position and text[start - 1] in _IN_BASE64:
                start -= 1
            while end < len(text) and text[end] in _IN_BASE64:
                end += 1
            kept += [text[position:start], SHOWN]
            position = end
        return self._hide_runs("".join([*kept, text[position:]]))

    def _hide_runs(self, text: str) -> str:
        """`text` without what is cut out of a secret, as where a driver shortens it."""
        small, kept, start, end = _small(text), [], 0, -1  # the run that was found last
        position = 0
        for at in range(len(small) - _RUN + 1):
            if small[at : at + _RUN] not in self._runs:
                continue
            if at > end:
                kept += [text[position:start], SHOWN] if end >= 0 else []
                position, start = max(end, 0), at
            end = at + _RUN
        return "".join([*kept, *([text[position:start], SHOWN] if end >= 0 else []), text[max(end, 0) :]])


def _small(text: str) -> str:
    """In small letters, each in its place."""
    return "".join(small if len(small := char.lower()) == 1 else char for char in text)


def _any(forms: Iterable[str], flags: int = 0) -> re.Pattern[str] | None:
    return re.compile("|".join(alternatives), flags) if (alternatives := list(forms)) else None


def _hex(secret: str) -> str:
    return "(?i:" + r"[\s:-]?".join(f"{byte:02x}" for byte in secret.encode()) + ")"


def _escaped(text: str) -> str:
    """`text`, each of whose signs may be escaped as Python, JSON, HTML and URLs do, also one in another."""
    return "".join(char if char.isascii() and char.isalnum() else _sign(char) for char in text)


def _sign(char: str) -> str:
    code, utf8, utf16 = ord(char), char.encode(), char.encode("utf-16-be").hex()
    entities = [f"#x0*{code:x}", f"#0*{code}"]
    entities += [codepoint2name[code]] if code in codepoint2name else []
    entities += ["apos"] if char == "'" else []
    forms = [
        "(?i:" + "".join(f"%(?:25){{0,4}}{byte:02x}" for byte in utf8) + ")",
        "(?i:&(?:amp;){0,4}(?:" + "|".join(entities) + ");)",
        "(?i:" + "".join(f"{_BACKSLASH}u{utf16[at : at + 4]}" for at in range(0, len(utf16), 4)) + ")",
        "(?i:" + "".join(f"{_BACKSLASH}x{byte:02x}" for byte in utf8) + ")",
        f"{_BACKSLASH}U(?i:{code:08x})",
    ]
    forms += [f"{_BACKSLASH}x(?i:{code:02x})"] if code < 256 else []
    forms += [f"{_BACKSLASH}{_LETTERS[char]}"] if char in _LETTERS else []
    forms += [r"\+", _WRAPPED] if char == " " else []
    return f"{_BACKSLASHES}(?:{'|'.join([*forms, re.escape(char)])})"


def _base64_cores(secret: bytes) -> list[str]:
    """What of base64 depends on nothing but `secret`, at each of the three places it may begin at."""
    cores = set()
    for shift in range(3):
        first, last = -(-8 * shift // 6), 8 * (shift + len(secret)) // 6
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            core = encode(bytes(shift) + secret).decode()[first:last]
            if len(core) >= _LEAST_BASE64:
                cores.add(core)
    return sorted(cores)
