"""The model record: its frozen form, what it accepts, and how two of them are compared."""

from __future__ import annotations

import copy
import pickle
from enum import IntEnum, StrEnum
from typing import Any

import pytest

from lmcache_core.identity import ABSENT, FieldDifference, ModelRecord, Part, differences

CONFIG: dict[str, Any] = {
    "dtype": "float32",
    "rope": {"theta": 10_000.0, "type": "default", "factor": None},
    "layers": [30, 9, 3],
    "tied": True,
}


def record(**changes: Any) -> ModelRecord:
    return ModelRecord(**{"weights": "ab" * 32, "config": CONFIG, "chunk_tokens": 256, **changes})


def test_the_digest_and_the_stored_form_never_change() -> None:
    assert record().digest.hex() == "5e9d8904bc2a3843ed714184cefaa7c863513359c6f3ea07a1206c6f826ac465"
    assert record().key == "n-5e9d8904bc2a3843ed714184cefaa7c863513359c6f3ea07a1206c6f826ac465"
    assert (
        record(config={"theta": 1e4, "name": "é"}).to_json().decode()
        == """{
  "chunk_tokens": 256,
  "config": {
    "name": "\\u00e9",
    "theta": 10000.0
  },
  "format_version": 1,
  "weights": "abababababababababababababababababababababababababababababababab"
}"""
    )


@pytest.mark.parametrize("number", [float("inf"), float("-inf"), -0.0, 5e-324, 2**200, -(2**200)])
def test_any_number_survives_being_stored(number: float) -> None:
    stored = record(config={"n": number})
    assert ModelRecord.from_json(stored.to_json()).digest == stored.digest


def test_not_a_number_survives_being_stored() -> None:
    stored = record(config={"n": float("nan")})
    assert ModelRecord.from_json(stored.to_json()) == stored


def test_a_record_of_another_format_version_can_be_read_and_compared() -> None:
    old = ModelRecord.from_json(record(format_version=7).to_json())
    assert [d.field for d in differences(record(), old)] == ["format_version"]


@pytest.mark.parametrize(
    "stored",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"\xff",
        b"[" * 100_000,
        b"1" * 5_000,
        b" " * (1 << 20) + b" ",
        record().to_json() + b"\n",
        record().to_json()[:-1],
        record().to_json().replace(b"256", b"256.0"),
        record().to_json().replace(b"256", b"true"),
        record().to_json().replace(b"256", b"0"),
        record().to_json().replace(b"weights", b"Weights"),
        record().to_json().replace(b'"tied": true', b'"tied": false, "tied": true'),
        record().to_json().replace(b"10000.0", b"1e4"),
        record().to_json().replace(b'"float32"', b'"\\ud800"'),
        record().to_json().replace(b"10000.0", b"9" * 5_000),
    ],
)
def test_bytes_that_no_record_wrote_are_a_value_error(stored: bytes) -> None:
    with pytest.raises(ValueError, match="not a model record"):
        ModelRecord.from_json(stored)


def test_a_record_keeps_its_config_when_the_original_changes() -> None:
    config: dict[str, Any] = {"rope": {"theta": 1.0}, "layers": [1]}
    kept = record(config=config)
    config["rope"]["theta"] = 2.0
    config["layers"].append(2)
    assert kept == record(config={"rope": {"theta": 1.0}, "layers": [1]})
    with pytest.raises(TypeError):
        kept.config["rope"]["theta"] = 3.0  # type: ignore[index]


def test_records_are_equal_exactly_when_their_digests_are() -> None:
    assert record(config={"a": 1}) != record(config={"a": True})
    assert record(config={"a": 1}) != record(config={"a": 1.0})
    assert len({record(), record(), record(chunk_tokens=128)}) == 2
    assert record() != "a record"


def test_enums_and_number_subclasses_become_what_they_stand_for() -> None:
    class Dtype(StrEnum):
        HALF = "float16"

    class Bits(IntEnum):
        FOUR = 4

    kept = record(config={"dtype": Dtype.HALF, "bits": Bits.FOUR})
    assert kept == record(config={"dtype": "float16", "bits": 4})
    assert [type(value) for value in kept.config.values()] == [int, str]


def test_a_record_pickles_and_copies() -> None:
    assert pickle.loads(pickle.dumps(record())) == record()
    assert copy.deepcopy(record()) == record()


def test_a_record_that_is_not_one_does_not_unpickle() -> None:
    with pytest.raises(ValueError, match="not a model record"):
        pickle.loads(pickle.dumps(record()).replace(b"float32", b"FLOAT\\2"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chunk_tokens": 0}, "chunk_tokens must be an int from 1"),
        ({"chunk_tokens": True}, "chunk_tokens"),
        ({"chunk_tokens": 256.0}, "chunk_tokens"),
        ({"format_version": 0}, "format_version"),
        ({"weights": ""}, "weights"),
        ({"weights": "w" * 257}, "weights"),
        ({"config": {"n": 2**256}}, "config.n has more than 256 bits"),
        ({"config": {"text": "x" * (1 << 20)}}, "at most 1048576 can be stored"),
    ],
)
def test_a_field_out_of_range_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        record(**changes)


@pytest.mark.parametrize("config", [{"a": b"bytes"}, {"a": {1}}, {1: 2}, [1], None])
def test_a_config_that_json_cannot_hold_is_refused(config: Any) -> None:
    with pytest.raises(TypeError):
        record(config=config)


def test_differences_name_each_field_and_both_values() -> None:
    theirs = record(
        weights="cd" * 32,
        chunk_tokens=128,
        config={
            "dtype": "bfloat16",
            "rope": {"theta": 10_000, "type": "default", "a.b": 1},
            "layers": [30, 9],
            "tied": True,
        },
    )
    assert differences(record(), theirs) == (
        FieldDifference(field="weights", ours="ab" * 32, theirs="cd" * 32),
        FieldDifference(field="chunk_tokens", ours=256, theirs=128),
        FieldDifference(field="config.dtype", ours="float32", theirs="bfloat16"),
        FieldDifference(field="config.layers[2]", ours=3, theirs=ABSENT),
        FieldDifference(field='config.rope["a.b"]', ours=ABSENT, theirs=1),
        FieldDifference(field="config.rope.factor", ours=None, theirs=ABSENT),
        FieldDifference(field="config.rope.theta", ours=10_000.0, theirs=10_000),
    )


def test_a_difference_reads_as_a_sentence() -> None:
    (difference,) = differences(record(config={"a": 1}), record(config={}))
    assert str(difference) == "config.a: 1 here, absent there"


def part(**changes: Any) -> Part:
    fields: dict[str, Any] = {"layers": (0, 30), "heads": (0, 3), "content_format": "kv float32 64"}
    return Part(**{**fields, "content_nbytes": 512, **changes})


def test_a_parts_digest_never_changes() -> None:
    assert part().digest == "8a14a1b370f181c5"


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": (0, 15)},
        {"layers": (15, 30)},
        {"heads": (0, 30), "layers": (0, 3)},
        {"content_format": "kv bfloat16 64"},
        {"content_nbytes": 256},
        {"group": "window"},
        {"content_format": "kv float32 6", "group": "4full"},
    ],
)
def test_every_field_of_a_part_is_in_its_digest(changes: dict[str, Any]) -> None:
    assert part(**changes).digest != part().digest


def test_a_part_knows_the_size_of_a_segment() -> None:
    assert part(layers=(10, 30), heads=(1, 3)).num_layers == 20
    assert part(heads=(1, 3)).segment_nbytes(256) == 2 * 256 * 512


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": (3, 3)},
        {"heads": (-1, 3)},
        {"content_nbytes": 0},
        {"content_format": ""},
        {"content_format": "x" * 121},
        {"group": "fen\u00eatre"},
        {"group": "a\nb"},
    ],
)
def test_a_part_that_holds_nothing_or_has_no_name_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        part(**changes)
