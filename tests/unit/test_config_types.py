from __future__ import annotations

import copy
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_core.config import ByteSize, Duration


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("4GiB", 4 << 30),
        ("1.5 KiB", 1536),
        ("10 MB", 10_000_000),
        (" 2 tib ", 2 << 40),
    ],
)
def test_a_size_is_read_with_its_unit(text: str, nbytes: int) -> None:
    assert ByteSize(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "4 Gb/s", "1e9", "0x10", "1.5", "NaN", "2048 PiB", "٤GiB"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"size|bytes"):
        ByteSize(text)


def test_a_size_beyond_an_exbibyte_is_refused() -> None:
    with pytest.raises(ValueError, match="1 EiB"):
        ByteSize(2**60 + 1)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("100ms", 0.1), ("5s", 5.0), ("2m", 120.0), ("1.5h", 5400.0), ("3", 3.0), ("20us", 2e-5)],
)
def test_a_duration_is_read_with_its_unit(text: str, seconds: float) -> None:
    assert Duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("value", ["", "s", "-1s", "1 week", "inf", float("nan"), float("inf"), -0.5])
def test_a_duration_that_is_none_is_refused(value: float | str) -> None:
    with pytest.raises(ValueError, match="duration"):
        Duration(value)


def test_a_duration_that_no_wait_takes_is_refused() -> None:
    assert Duration("36500d") == 36500 * 86400
    with pytest.raises(ValueError, match="100 years"):
        Duration("36501d")


@pytest.mark.parametrize("text", ["100ms", "10us", "90s", "2h", "1500ms"])
def test_a_duration_is_read_back_from_its_own_text(text: str) -> None:
    assert Duration(str(Duration(text))) == Duration(text)


@pytest.mark.parametrize("value", [True, None, [], {}])
def test_values_of_other_kinds_are_not_taken_for_units(value: object) -> None:
    with pytest.raises(ValueError, match="expected a size"):
        ByteSize.from_config(value)
    with pytest.raises(ValueError, match="expected a duration"):
        Duration.from_config(value)


@settings(max_examples=200)
@given(st.integers(min_value=0, max_value=2**60))
def test_a_size_is_read_back_from_its_own_text(nbytes: int) -> None:
    assert ByteSize(str(ByteSize(nbytes))) == nbytes


@pytest.mark.parametrize("value", [ByteSize("3GiB"), Duration("250ms")])
def test_values_with_units_survive_pickling_and_copying(value: ByteSize | Duration) -> None:
    for twin in (pickle.loads(pickle.dumps(value)), copy.deepcopy(value)):
        assert twin == value
        assert type(twin) is type(value)
        assert str(twin) == str(value)
