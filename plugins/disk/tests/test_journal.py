"""The journal: what it was told comes back, whatever else is in the file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_core.sdk import StorageKey
from lmcache_core_disk.files import Files
from lmcache_core_disk.journal import Journal, JournalFull, delete_record, put_record, replay

from .support import PAGE

START = b"lmcache-core-disk journal 1\n".ljust(32, b" ")
KEYS = [StorageKey(f"k-{number}") for number in range(6)]

operations = st.lists(
    st.tuples(st.booleans(), st.sampled_from(KEYS), st.integers(0, 9)), min_size=0, max_size=40
)


def journal_of(steps: list[tuple[bool, StorageKey, int]]) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """A journal, and which (token, slot) each key has at its end."""
    memory, model = START, dict[str, tuple[int, int]]()
    for token, (put, key, slot) in enumerate(steps, start=1):
        if put:
            memory += put_record(key, KEYS[0], token, slot, PAGE, 2 * PAGE)
            model = {name: held for name, held in model.items() if held[1] != slot}
            model.pop(key, None)
            model[key] = (token, slot)
        else:
            memory += delete_record(key, token)
            model.pop(key, None)
    return memory, model


@settings(max_examples=150, deadline=None)
@given(steps=operations, padding=st.integers(0, 100))
def test_replay_gives_the_last_word_on_each_key_and_slot(
    steps: list[tuple[bool, StorageKey, int]], padding: int
) -> None:
    memory, model = journal_of(steps)
    found = replay(memory + bytes(padding))
    assert {key: (value.token, value.slot) for key, value in found.values.items()} == model
    assert list(found.values) == list(model), "oldest first"
    assert (found.end, found.token, found.torn) == (len(memory), len(steps), False)
    assert all(value.parent == KEYS[0] and value.charged == 2 * PAGE for value in found.values.values())


@settings(max_examples=200, deadline=None)
@given(steps=operations, position=st.integers(32, 3000), flip=st.integers(1, 255))
def test_a_flipped_byte_ends_the_replay_there(
    steps: list[tuple[bool, StorageKey, int]], position: int, flip: int
) -> None:
    memory, _ = journal_of(steps)
    position = min(position, len(memory) - 1)
    if position < 32:
        return
    damaged = bytearray(memory)
    damaged[position] ^= flip
    found = replay(bytes(damaged))
    assert found.end <= position
    assert found.torn
    assert found.values.keys() == replay(memory[: found.end]).values.keys()


@settings(max_examples=50, deadline=None)
@given(steps=operations)
def test_records_that_come_a_second_time_are_none(steps: list[tuple[bool, StorageKey, int]]) -> None:
    memory, model = journal_of(steps)
    found = replay(memory + memory[len(START) :])
    assert (found.end, found.torn) == (len(memory), bool(steps))
    assert {key: (value.token, value.slot) for key, value in found.values.items()} == model


@settings(max_examples=200, deadline=None)
@given(memory=st.binary(max_size=400))
def test_replay_survives_any_bytes(memory: bytes) -> None:
    assert replay(memory).values == {}
    found = replay(START + memory)
    assert found.end == len(START)
    assert found.torn == bool(memory.strip(b"\0"))


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[int]:
    fd = Files().open_directory(str(tmp_path))
    yield fd
    Files().close(fd)


def test_a_refused_growth_compacts_and_a_journal_of_live_records_is_full(directory: int) -> None:
    journal = Journal(Files(), directory, lambda nbytes: False)
    journal.start(journal.load(), [], rewrite=True)
    records: list[bytes] = []

    def fill() -> None:
        for token in range(1, 10_000):
            record = put_record(StorageKey(f"k-{token}"), None, token, token, PAGE, PAGE)
            journal.append(record, lambda: records)
            journal.live_nbytes += len(record)
            records.append(record)

    with pytest.raises(JournalFull):
        fill()
    assert journal.nbytes == 4 * PAGE
    journal.live_nbytes -= sum(map(len, records[:100]))
    journal.append(delete_record(StorageKey("k-1"), 10_000), lambda: records[100:])
    assert journal.compactions == 1
    journal.close()
    found = Journal(Files(), directory, lambda nbytes: False).load()
    assert [value.record for value in found.values.values()] == records[100:]
    assert found.token == 10_000


def test_a_growing_journal_reserves_the_room_for_its_compaction(directory: int) -> None:
    reserved: list[int] = []

    def reserve(nbytes: int) -> bool:
        reserved.append(nbytes)
        return True

    journal = Journal(Files(), directory, reserve)
    journal.start(journal.load(), [], rewrite=True)
    for token in range(1, 3000):
        record = put_record(StorageKey(f"k-{token}"), None, token, token, PAGE, PAGE)
        journal.append(record, list)
        journal.live_nbytes += len(record)
    assert journal.charged_nbytes == 2 * 4 * PAGE + sum(reserved) == 2 * journal.nbytes
    assert journal.compactions == 0
    journal.close()
