"""Values with units, as they are written in a config file: byte sizes and durations."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Self

from lmcache_core.config.secrecy import holds_credentials

_BYTE_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SECONDS_PER_UNIT = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER_AND_UNIT = re.compile(r"\s*([0-9]{1,19}(?:\.[0-9]{1,9})?)\s*([A-Za-z]*)\s*", re.ASCII)
_MAX_BYTES = 2**60
_MAX_SECONDS = 100 * 365 * 86400.0  # what any wait of the operating system still takes


class ByteSize(int):
    """A number of bytes; reads `4GiB`, `512 MB` or a plain number.

    >>> ByteSize("4GiB")
    ByteSize('4GiB')
    >>> ByteSize("1.5 KiB") + 1
    1537

    Raises:
        ValueError: not a number with a known unit, negative, not whole, or above 1 EiB.
    """

    def __new__(cls, value: int | str = 0) -> Self:
        return super().__new__(cls, _whole_bytes(value))

    def __str__(self) -> str:
        for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
            if self and self % factor == 0:
                return f"{int(self) // factor}{unit}"
        return f"{int(self)}"

    def __repr__(self) -> str:
        return f"ByteSize({str(self)!r})"

    def __reduce__(self) -> tuple[type[ByteSize], tuple[int]]:
        return (ByteSize, (int(self),))

    @classmethod
    def from_config(cls, value: object) -> Self:
        """`value` as found in a config file: a whole number of bytes, or text with a unit."""
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError(f"expected a size such as 4GiB, got {describe(value)}")
        return cls(value)


class Duration(float):
    """A number of seconds; reads `100ms`, `5s`, `2m` or a plain number of seconds.

    >>> Duration("100ms")
    Duration('100ms')
    >>> Duration(2) * 2
    4.0

    Raises:
        ValueError: not a number with a known unit, negative, not finite, or above 100 years.
    """

    def __new__(cls, value: float | str = 0.0) -> Self:
        return super().__new__(cls, _seconds(value))

    def __str__(self) -> str:
        for unit, factor in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
            if self and float(self) % factor == 0:
                return f"{int(self) // factor}{unit}"
        for unit, per_second in (("ms", 1e3), ("us", 1e6)):
            number = float(self) * per_second
            if self and abs(number - round(number)) < 1e-9:
                return f"{round(number)}{unit}"
        return f"{float(self):g}s"

    def __repr__(self) -> str:
        return f"Duration({str(self)!r})"

    def __reduce__(self) -> tuple[type[Duration], tuple[float]]:
        return (Duration, (float(self),))

    @classmethod
    def from_config(cls, value: object) -> Self:
        """`value` as found in a config file: seconds, or text with a unit."""
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError(f"expected a duration such as 100ms or 5s, got {describe(value)}")
        return cls(value)


def path_from_config(value: object) -> Path:
    """`value` as a path, `~` expanded.

    Raises:
        ValueError: not text, empty, or holding a NUL character, a `$`, which nothing here expands, or what
            the file system's encoding lacks.
    """
    if isinstance(value, Path):
        return value
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError(f"expected a path, got {describe(value)}")
    if "$" in value:
        raise ValueError(
            f"{describe(value)}: environment variables aren't expanded; write the whole path, or begin with ~"
        )
    try:
        path = Path(value).expanduser()
        os.fsencode(path)
        return path
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{value!a} can't be a path where text is {error.encoding}: set LC_ALL=C.UTF-8, or choose another"
        ) from error
    except RuntimeError as error:
        raise ValueError(f"{describe(value)} names a home directory that can't be found: {error}") from error


def describe(value: object) -> str:
    """`value` as an error message shows it: short, without credentials, by its YAML kind if not a scalar."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return f"{str(value).lower()} (a boolean)"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, str) and holds_credentials(value):
        return "text with credentials (not shown)"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _whole_bytes(value: int | str) -> int:
    nbytes = _parse_bytes(value) if isinstance(value, str) else value
    if nbytes < 0:
        raise ValueError(f"a size can't be negative: {nbytes}")
    if nbytes > _MAX_BYTES:
        raise ValueError("a size above 1 EiB can't be meant")
    return nbytes


def _parse_bytes(text: str) -> int:
    match = _NUMBER_AND_UNIT.fullmatch(text)
    factor = _BYTE_UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        units = "B, KB, MB, GB, TB, KiB, MiB, GiB or TiB"
        raise ValueError(f"{describe(text)} is not a size; write a number with {units}")
    whole, _, fraction = match[1].partition(".")
    scale: int = 10 ** len(fraction)
    nbytes, rest = divmod(int(whole + fraction) * factor, scale)
    if rest:
        raise ValueError(f"{describe(text.strip())} is not a whole number of bytes")
    return nbytes


def _seconds(value: float | str) -> float:
    if isinstance(value, str):
        match = _NUMBER_AND_UNIT.fullmatch(value)
        factor = _SECONDS_PER_UNIT.get(match[2].lower() or "s") if match else None
        if match is None or factor is None:
            raise ValueError(f"{describe(value)} is not a duration; write a number with us, ms, s, m, h or d")
        value = float(match[1]) * factor
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"a duration must be finite and not negative: {value}")
    if value > _MAX_SECONDS:
        raise ValueError("a duration above 100 years can't be meant")
    return value
