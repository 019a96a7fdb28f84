"""The canonical encoding: one value, one byte string; two values, never the same one.

Everything that is hashed into an identity goes through here, so that no two neighbouring fields can
trade bytes. Every value starts with a type tag; what can vary in length is prefixed with it.

    N, T, F                 None, True, False
    I <u64 n> <n bytes>     int, two's complement, big-endian, as short as `(bit_length + 8) // 8`
    D <8 bytes>             float, IEEE 754 big-endian; every NaN is the same one
    S <u64 n> <n bytes>     str, UTF-8
    B <u64 n> <n bytes>     bytes
    L <u64 n> <n values>    list or tuple
    M <u64 n> <n pairs>     mapping: pairs of S and value, by the key's UTF-8

The format is frozen: a change of it changes every key ever stored.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import TypeAlias

Value: TypeAlias = "bool | int | float | str | bytes | Sequence[Value] | Mapping[str, Value] | None"

MAX_DEPTH = 32
"""Containers inside containers; deeper (or circular) ones are refused."""

_LENGTH = struct.Struct(">Q")
_FLOAT = struct.Struct(">d")
_NAN = bytes.fromhex("7ff8000000000000")


def encode(value: Value) -> bytes:
    """The canonical bytes of `value`. Prefix-free: no encoding begins with another one.

    1, 1.0 and True are three values; a list and a tuple of the same items are one.

    Raises:
        TypeError: something in `value` is none of the types above, or a mapping's key is no `str`.
        ValueError: it is nested deeper than `MAX_DEPTH`, or a `str` isn't valid Unicode.
    """
    out: list[bytes] = []
    _encode(value, out, 0)
    return b"".join(out)


def _encode(value: Value, out: list[bytes], depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH} containers")
    match value:
        case None:
            out.append(b"N")
        case bool():  # before int, of which it is a subclass
            out.append(b"T" if value else b"F")
        case int():
            _append(out, b"I", value.to_bytes((value.bit_length() + 8) // 8, "big", signed=True))
        case float():
            out.append(b"D" + (_FLOAT.pack(value) if value == value else _NAN))
        case str():
            _append(out, b"S", value.encode())
        case bytes():
            _append(out, b"B", value)
        case list() | tuple():
            out.append(b"L" + _LENGTH.pack(len(value)))
            for item in value:
                _encode(item, out, depth + 1)
        case Mapping():
            for name in value:
                if not isinstance(name, str):
                    raise TypeError(f"a mapping's key must be a str, not {type(name).__name__}")
            out.append(b"M" + _LENGTH.pack(len(value)))
            for key, name in sorted((name.encode(), name) for name in value):
                _append(out, b"S", key)
                _encode(value[name], out, depth + 1)
        case _:
            raise TypeError(f"no canonical encoding for {type(value).__name__}: {value!r}")


def _append(out: list[bytes], tag: bytes, content: bytes) -> None:
    out.append(tag + _LENGTH.pack(len(content)) + content)
