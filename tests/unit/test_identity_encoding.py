"""The canonical encoding: its frozen bytes and what it refuses."""

from __future__ import annotations

from types import MappingProxyType

import pytest

from lmcache_core.identity import Value, encode

GOLDEN: list[tuple[Value, str]] = [
    (None, "4e"),
    (True, "54"),
    (False, "46"),
    (0, "49000000000000000100"),
    (1, "49000000000000000101"),
    (-1, "490000000000000001ff"),
    (128, "4900000000000000020080"),
    (10_000.0, "4440c3880000000000"),
    (float("nan"), "447ff8000000000000"),
    (float("-inf"), "44fff0000000000000"),
    ("é", "530000000000000002c3a9"),
    (b"\x00", "42000000000000000100"),
    ([], "4c0000000000000000"),
    ([None, (True,)], "4c00000000000000024e4c000000000000000154"),
    (
        {"b": 1, "a": None},
        "4d0000000000000002530000000000000001614e53000000000000000162" + "49000000000000000101",
    ),
]


@pytest.mark.parametrize(("value", "expected"), GOLDEN)
def test_the_encoding_never_changes(value: Value, expected: str) -> None:
    assert encode(value).hex() == expected


def test_numbers_that_python_calls_equal_are_different_values() -> None:
    assert len({encode(value) for value in (1, 1.0, True)}) == 3
    assert encode(0.0) != encode(-0.0)


def test_the_order_in_which_a_mapping_was_filled_does_not_matter() -> None:
    assert encode({"a": 1, "b": 2}) == encode(MappingProxyType({"b": 2, "a": 1}))


@pytest.mark.parametrize(
    "value", [{1: 2}, {None: 1}, {"a", "b"}, object(), bytearray(b"x"), 1j, [[{"a": {3}}]]]
)
def test_a_value_without_a_canonical_form_is_refused(value: object) -> None:
    with pytest.raises(TypeError):
        encode(value)  # type: ignore[arg-type]


def test_a_circular_value_is_refused() -> None:
    value: list[Value] = []
    value.append(value)
    with pytest.raises(ValueError, match="nested deeper than 32"):
        encode(value)


def test_text_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(ValueError, match="surrogates"):
        encode("\ud800")
