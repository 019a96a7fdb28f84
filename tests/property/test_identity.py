"""Identity never confuses: encodings are injective, no two neighbouring fields can trade bytes."""

from __future__ import annotations

import json
import math
import struct
from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lmcache_core.identity import Content, Extra, HostScheme, ModelRecord, Part, differences, encode

MODEL = ModelRecord(weights="ab" * 32, config={}, chunk_tokens=8)
PART = Part(layers=(0, 1), heads=(0, 1), content_format="kv float32 1", content_nbytes=8)

scalars = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5)
values = st.recursive(
    scalars | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)
configs = st.dictionaries(
    st.text(max_size=3),
    st.recursive(
        scalars,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=8,
    ),
    max_size=4,
)
tokens = st.integers(0, 2**31 - 1)


def decode(encoded: bytes, at: int = 0) -> tuple[Any, int]:
    """Reads one value back, without a word of the encoder's code: (a tagged value, where it ends)."""
    tag, at = encoded[at : at + 1], at + 1
    if tag in b"NTF":
        return {b"N": None, b"T": True, b"F": False}[tag], at
    if tag == b"D":
        return ("float", encoded[at : at + 8]), at + 8
    (length,) = struct.unpack_from(">Q", encoded, at)
    at += 8
    if tag == b"L":
        items = []
        for _ in range(length):
            item, at = decode(encoded, at)
            items.append(item)
        return ("list", items), at
    if tag == b"M":
        pairs = []
        for _ in range(length):
            key, at = decode(encoded, at)
            item, at = decode(encoded, at)
            pairs.append((key, item))
        return ("mapping", pairs), at
    content = encoded[at : at + length]
    assert len(content) == length
    if tag == b"I":
        return ("int", int.from_bytes(content, "big", signed=True)), at + length
    if tag == b"S":
        return ("str", content.decode()), at + length
    assert tag == b"B"
    return ("bytes", content), at + length


def tagged(value: Any) -> Any:
    """What `decode` must find: the value with its types, so that 1, 1.0 and True are three."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float):
        return ("float", struct.pack(">d", math.nan if math.isnan(value) else value))
    if isinstance(value, dict):
        by_key = sorted(value.items(), key=lambda pair: pair[0].encode())
        return ("mapping", [(("str", key), tagged(inner)) for key, inner in by_key])
    if isinstance(value, list):
        return ("list", [tagged(inner) for inner in value])
    return (type(value).__name__, value)


@given(values)
@settings(max_examples=200, deadline=None)
def test_an_encoding_can_be_read_back_and_ends_where_it_ends(value: Any) -> None:
    encoded = encode(value)
    assert decode(encoded) == (tagged(value), len(encoded))


@given(configs, configs)
@settings(max_examples=150, deadline=None)
def test_records_differ_in_named_fields_exactly_when_their_digests_differ(ours: Any, theirs: Any) -> None:
    a = ModelRecord(weights="w", config=ours, chunk_tokens=16)
    b = ModelRecord(weights="w", config=theirs, chunk_tokens=16)
    found = differences(a, b)
    assert (found == ()) == (a.digest == b.digest) == (tagged(ours) == tagged(theirs))
    assert len({difference.field for difference in found}) == len(found)
    assert [d.field for d in found] == [d.field for d in differences(b, a)]


@given(configs, st.integers(1, 4096), st.text(min_size=1, max_size=5), st.integers(1, 9))
@settings(max_examples=150, deadline=None)
def test_a_record_comes_back_from_its_json(config: Any, chunk: int, weights: str, version: int) -> None:
    record = ModelRecord(weights=weights, config=config, chunk_tokens=chunk, format_version=version)
    again = ModelRecord.from_json(record.to_json())
    assert again.digest == record.digest
    assert again.to_json() == record.to_json()


@given(
    st.binary(max_size=200)
    | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(lambda v: json.dumps(v).encode())
)
@settings(max_examples=150, deadline=None)
def test_any_bytes_are_a_record_or_a_value_error(stored: bytes) -> None:
    with pytest.raises(ValueError, match="not a model record"):
        ModelRecord.from_json(stored)


@given(configs, st.data())
@settings(max_examples=200, deadline=None)
def test_a_changed_record_is_another_valid_record_or_refused(config: Any, data: st.DataObject) -> None:
    record = ModelRecord(weights="w" * 8, config=config, chunk_tokens=16)
    stored = bytearray(record.to_json())
    at = data.draw(st.integers(0, len(stored) - 1))
    stored[at] = data.draw(st.integers(0, 255))
    try:
        again = ModelRecord.from_json(bytes(stored))
    except ValueError:
        return
    assert again.to_json() == stored
    assert (again.digest == record.digest) == (stored == record.to_json())


@given(st.binary(max_size=8), st.binary(max_size=8), st.binary(max_size=8), st.binary(max_size=8))
@settings(max_examples=150, deadline=None)
def test_lora_and_salt_cannot_trade_bytes(lora: bytes, salt: bytes, lora2: bytes, salt2: bytes) -> None:
    same = (lora, salt) == (lora2, salt2)
    assert (Content(MODEL, lora=lora, salt=salt).root == Content(MODEL, lora=lora2, salt=salt2).root) == same


@given(st.binary(min_size=2, max_size=12), st.data())
@settings(max_examples=100, deadline=None)
def test_bytes_moved_from_lora_to_salt_make_another_root(joined: bytes, data: st.DataObject) -> None:
    a, b = data.draw(st.lists(st.integers(0, len(joined)), min_size=2, max_size=2, unique=True))
    first = Content(MODEL, lora=joined[:a], salt=joined[a:])
    second = Content(MODEL, lora=joined[:b], salt=joined[b:])
    assert first.root != second.root


@given(
    st.text(max_size=4), st.none() | st.text(max_size=4), st.text(max_size=4), st.none() | st.text(max_size=4)
)
@settings(max_examples=100, deadline=None)
def test_the_fields_of_a_hosts_scheme_cannot_trade_characters(
    algorithm: str, seed: str | None, algorithm2: str, seed2: str | None
) -> None:
    def root(algorithm: str, seed: str | None) -> bytes:
        return Content.from_host(MODEL, HostScheme(algorithm=algorithm, seed=seed, block_tokens=8), []).root

    same = (algorithm, seed) == (algorithm2, seed2)
    assert (root(algorithm, seed) == root(algorithm2, seed2)) == same


names = st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=4)
ranges = st.tuples(st.integers(0, 20), st.integers(1, 20)).map(lambda pair: (pair[0], pair[0] + pair[1]))
part_fields = st.tuples(ranges, ranges, names, st.integers(1, 999), names)


@given(part_fields, part_fields)
@settings(max_examples=100, deadline=None)
def test_the_fields_of_a_part_cannot_trade_bytes(ours: Any, theirs: Any) -> None:
    def part(fields: Any) -> Part:
        layers, heads, content_format, nbytes, group = fields
        return Part(
            layers=layers, heads=heads, content_format=content_format, content_nbytes=nbytes, group=group
        )

    joined = ours[2] + ours[4]
    for cut in range(1, len(joined)):
        moved = (*ours[:2], joined[:cut], ours[3], joined[cut:])
        assert (part(moved).digest == part(ours).digest) == (moved == ours)
    assert (part(ours).digest == part(theirs).digest) == (ours == theirs)


extras = st.lists(
    st.builds(Extra, st.integers(0, 39), st.text(max_size=3), st.binary(max_size=3)), max_size=4
)


def content(ids: Sequence[int], extra: Sequence[Extra] = ()) -> Content:
    made = Content(MODEL)
    made.extend(ids, extra)
    return made


@given(st.lists(tokens, min_size=8, max_size=40), extras, extras)
@settings(max_examples=150, deadline=None)
def test_extras_cannot_trade_bytes(ids: list[int], ours: list[Extra], theirs: list[Extra]) -> None:
    assume(all(extra.offset < len(ids) // 8 * 8 for extra in (*ours, *theirs)))
    same = sorted(ours) == sorted(theirs)
    assert (content(ids, ours).hashes == content(ids, theirs).hashes) == same


@given(st.lists(tokens, min_size=8, max_size=8), st.text("ab\x00", min_size=1, max_size=6), st.integers(0, 7))
@settings(max_examples=100, deadline=None)
def test_bytes_moved_between_an_extras_fields_or_into_a_second_extra_make_another_hash(
    ids: list[int], joined: str, offset: int
) -> None:
    cuts = range(len(joined) + 1)
    ways = [[Extra(offset, joined[:cut], joined[cut:].encode())] for cut in cuts]
    ways += [[Extra(offset, joined[:cut], b""), Extra(offset, joined[cut:], b"")] for cut in cuts]
    ways += [[Extra(offset, "", joined.encode()), Extra(offset, "", b"")]]
    named: dict[bytes, list[Extra]] = {}
    for way in ways:
        assert sorted(named.setdefault(content(ids, way).hashes[0], way)) == sorted(way)


@given(st.lists(tokens, min_size=16, max_size=16), st.integers(0, 7))
@settings(max_examples=100, deadline=None)
def test_tokens_and_extras_cannot_trade_bytes(ids: list[int], offset: int) -> None:
    """Tokens that spell an extra's bytes are not that extra."""
    value = struct.pack("<4i", *ids[:4])
    spelled = struct.pack("<II", offset, 0) + struct.pack("<I", len(value)) + value
    spelling = array("i", spelled).tolist()
    assume(all(token >= 0 for token in spelling))
    longer = ModelRecord(weights="ab" * 32, config={}, chunk_tokens=8 + len(spelling))
    plain = Content(longer)
    plain.extend(ids[:8] + spelling)
    assert plain.hashes[0] != content(ids[:8], [Extra(offset, "", value)]).hashes[0]
    tail_model = ModelRecord(weights="ab" * 32, config={}, chunk_tokens=64)
    marked, unmarked = Content(tail_model), Content(tail_model)
    marked.extend(ids, [Extra(offset, "", value)])
    unmarked.extend(ids + spelling + [0] * 16)
    assert not {tail.key for tail in marked.tails(PART)} & {tail.key for tail in unmarked.tails(PART)}


@given(st.lists(tokens, max_size=40), st.lists(tokens, max_size=40))
@settings(max_examples=150, deadline=None)
def test_prefixes_are_named_alike_exactly_as_far_as_their_tokens_agree(a: list[int], b: list[int]) -> None:
    ours, theirs = content(a), content(b)
    for i in range(5):
        end = 8 * (i + 1)
        both = len(a) >= end and len(b) >= end
        assert (both and ours.hashes[i] == theirs.hashes[i]) == (both and a[:end] == b[:end])


@given(st.lists(tokens, max_size=120), extras, st.lists(st.integers(0, 120), max_size=6), st.integers(1, 40))
@settings(max_examples=200, deadline=None)
def test_every_split_of_a_request_gives_the_same_names(
    ids: list[int], extra: list[Extra], cuts: list[int], chunk_tokens: int
) -> None:
    extra = [e for e in extra if e.offset < len(ids)]
    model = ModelRecord(weights="w", config={}, chunk_tokens=chunk_tokens)
    whole, grown = Content(model), Content(model)
    whole.extend(array("i", ids), extra)
    bounds = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    for first, end in pairwise(bounds):
        grown.extend(ids[first:end], [e for e in extra if first <= e.offset < end])
        grown.keys(PART)
    assert grown.hashes == whole.hashes
    assert grown.keys(PART) == whole.keys(PART)
    assert grown.tails(PART) == whole.tails(PART)
    assert grown.tokens.tolist() == ids
    names = [*whole.keys(PART), *(tail.key for tail in whole.tails(PART))]
    assert len({*names}) == len(names) == len(ids) // chunk_tokens + len(ids) % chunk_tokens // 16
