"""The capacity is a bound on every byte in the directory at every moment."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_core.sdk import Status
from lmcache_core_disk.files import Files

from .support import MIB, PAGE, Disk, Host, ProbedFiles, occupied_nbytes

OpenDisk = Callable[..., Disk]

steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 9), st.sampled_from([1, 2, 7, 8, 40, 90])),
        st.tuples(st.just("delete"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("reopen"), st.sampled_from([1, 2]), st.sampled_from([MIB, 2 * MIB, 3 * MIB])),
    ),
    min_size=1,
    max_size=30,
)


@settings(max_examples=60, deadline=None)
@given(steps=steps)
def test_after_every_system_call_the_directory_holds_no_more_than_the_capacity(
    steps: list[tuple[str, int, int]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cache"
        capacity, highest = 3 * MIB, 0

        def after(name: str) -> None:
            nonlocal highest
            if name in ("pwritev", "mkdir", "rename", "open") and path.exists():
                highest = max(highest, occupied_nbytes(path))

        files = ProbedFiles(after=after)
        disk = Disk(path, files=files, host=Host(capacity_bytes=capacity))
        model: dict[str, tuple[int, int]] = {}
        for seed, (step, number, amount) in enumerate(steps):
            key = f"k-{number}"
            if step == "put":
                outcome = disk.put(key, seed, amount)
                assert outcome.status in (Status.OK, Status.FULL)
                if outcome.status is Status.OK:
                    model[key] = (seed, amount)
            elif step == "delete":
                expected = Status.OK if key in model else Status.MISS
                assert disk.delete(key).status is expected
                model.pop(key, None)
            else:
                disk.close()
                assert highest <= capacity
                processes, capacity = number, amount
                if capacity // processes < MIB:
                    processes = 1
                disk = Disk(path, files=files, host=Host(capacity_bytes=capacity), processes=processes)
                highest = occupied_nbytes(path)
                # A smaller capacity drops the oldest values; the rest is as it was.
                left = disk.keys()
                assert set(left) <= set(model)
                model = {key: model[key] for key in left}
            stats = disk.backend.stats()
            assert highest <= capacity
            assert occupied_nbytes(path) <= stats.used_bytes + 8 * PAGE
            assert sorted(disk.keys()) == sorted(model)
        for key, (seed, pages) in model.items():
            assert disk.holds(key, seed, pages)
        disk.close()


def test_a_full_store_keeps_what_it_has(open_disk: OpenDisk) -> None:
    disk = open_disk(host=Host(capacity_bytes=MIB))
    stored = 0
    while disk.put(f"k-{stored}", stored, 16).status is Status.OK:
        stored += 1
    assert stored > 8
    assert disk.put("k-0", 99, 16).status is Status.FULL
    assert all(disk.holds(f"k-{number}", number, 16) for number in range(stored))
    assert disk.put("large", 1, 400).status is Status.FULL
    disk.delete("k-1")
    assert disk.put("again", 5, 16).status is Status.OK


def test_files_that_occupy_a_block_more_than_their_bytes_stay_within_the_capacity(
    open_disk: OpenDisk,
) -> None:
    class Extents(Files):
        """Of a file system that needs a block of its own to list the extents of each slot."""

        def fstat(self, fd: int) -> os.stat_result:
            status = super().fstat(fd)
            return SimpleNamespace(  # type: ignore[return-value]
                st_blocks=status.st_blocks + PAGE // 512, st_size=status.st_size, st_nlink=status.st_nlink
            )

    disk = open_disk(files=Extents(), host=Host(capacity_bytes=MIB))
    assert disk.put("odd", 1, 2).status is Status.OK  # so that the rest doesn't come out even
    number = 0
    while disk.put(f"k-{number}", number).status is Status.OK:
        number += 1
        stats = disk.backend.stats()
        assert stats.capacity_bytes is not None
        assert 2 * PAGE * number < stats.used_bytes <= stats.capacity_bytes
    assert stats.used_bytes > stats.capacity_bytes - 3 * PAGE


def test_free_slots_of_one_length_make_room_for_another(open_disk: OpenDisk) -> None:
    disk = open_disk(host=Host(capacity_bytes=MIB))
    for number in range(8):
        assert disk.put(f"k-{number}", number, 16).status is Status.OK
    for number in range(8):
        disk.delete(f"k-{number}")
    assert disk.backend.stats().counters["free_slot_bytes"] == 8 * 16 * PAGE
    assert disk.put("large", 1, 100).status is Status.OK
    assert disk.holds("large", 1, 100)
    stats = disk.backend.stats()
    assert stats.capacity_bytes is not None
    assert stats.used_bytes <= stats.capacity_bytes


def test_thousands_of_deletes_and_puts_keep_the_journal_small(open_disk: OpenDisk) -> None:
    disk = open_disk(host=Host(capacity_bytes=MIB))
    for number in range(3000):
        assert disk.put(f"k-{number % 5}", number, 1).status is Status.OK
        if number % 3 == 0:
            disk.delete(f"k-{number % 5}")
    stats = disk.backend.stats()
    assert stats.counters["compactions"] > 5
    assert (disk.path / "shard-000" / "journal").stat().st_size <= 4 * 4 * PAGE
    entries = disk.keys()
    disk.close()
    assert open_disk(host=Host(capacity_bytes=MIB)).keys() == entries


def test_deletes_succeed_when_the_journal_can_grow_no_more(open_disk: OpenDisk) -> None:
    failing: list[bool] = []

    def before(name: str, argument: object) -> None:
        if failing and name == "pwritev":
            raise OSError(errno.ENOSPC, "no space")

    disk = open_disk(files=ProbedFiles(before))
    for number in range(4):
        disk.put(f"k-{number}", number, 2)
    failing.append(True)
    assert disk.put("k-9", 9, 2).status is Status.FULL
    assert disk.delete("k-1").status is Status.OK
    assert disk.get("k-1")[0].status is Status.MISS
    failing.clear()
    assert disk.put("k-5", 5, 2).status is Status.OK
    disk.close()
    disk = open_disk()
    assert disk.keys() == ["k-0", "k-2", "k-3", "k-5"]
    assert all(disk.holds(f"k-{number}", number, 2) for number in (0, 2, 3, 5))


@pytest.mark.parametrize("capacity", [None, 1000, 2 * MIB - 1])
def test_no_capacity_or_too_little_is_a_config_error(open_disk: OpenDisk, capacity: int | None) -> None:
    with pytest.raises(Exception, match="capacity"):
        open_disk(host=Host(capacity_bytes=capacity), processes=2)


def test_a_full_store_with_a_long_journal_stays_within_the_capacity(
    open_disk: OpenDisk, tmp_path: Path
) -> None:
    highest = 0

    def after(name: str) -> None:
        nonlocal highest
        if name in ("pwritev", "rename") and (tmp_path / "cache").exists():
            highest = max(highest, occupied_nbytes(tmp_path / "cache"))

    disk = open_disk(files=ProbedFiles(after=after), host=Host(capacity_bytes=MIB))
    name = "c-" + "0" * 110
    for number in range(800):
        key = f"{name}-{number % 260}"
        if disk.put(key, number, 1, parent=key).status is Status.FULL:
            for victim in disk.keys()[:20]:
                assert disk.delete(victim).status is Status.OK
    assert disk.backend.stats().counters["compactions"] > 0
    assert disk.backend.stats().counters["full"] > 0
    assert 0.9 * MIB < highest <= MIB
