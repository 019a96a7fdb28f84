"""Values: round trips, ranges, replacement, deletion, scanning, and reading while others write."""

from __future__ import annotations

import os
import shutil
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from lmcache_core.sdk import (
    BackendClosed,
    BackendError,
    BackendUnavailable,
    DeadlineExceeded,
    Item,
    Outcome,
    Status,
    StorageKey,
)

from .support import PAGE, Call, Disk, Memory, ProbedFiles, content, occupied_nbytes

OpenDisk = Callable[..., Disk]


@pytest.mark.parametrize("pieces", [1, 3])
def test_a_value_is_read_back_as_it_was_put_whatever_the_views(disk: Disk, pieces: int) -> None:
    put = disk.put("a", 1, 5, pieces=pieces)
    assert (put.status, put.nbytes) == (Status.OK, 5 * PAGE)
    outcome, value = disk.get("a", 8, pieces=4)
    assert outcome.status is Status.OK
    assert value == content(1, 5 * PAGE)


def test_a_value_of_more_pieces_than_one_system_call_takes_is_whole(disk: Disk) -> None:
    pages = 1500
    assert disk.put("a", 1, pages, pieces=pages).status is Status.OK
    outcome, value = disk.get("a", pages, pieces=pages)
    assert outcome.nbytes == pages * PAGE
    assert value == content(1, pages * PAGE)


def test_memory_beyond_the_value_is_not_touched(disk: Disk) -> None:
    disk.put("a", 1, 2)
    memory = Memory(4 * PAGE, pieces=2)
    memory.memory[:] = b"x" * (4 * PAGE)
    disk.backend.get_many([Item(StorageKey("a"), memory.views)], Call())
    assert memory.memory[2 * PAGE :] == b"x" * (2 * PAGE)


def test_a_range_is_read_and_one_beyond_the_end_is_a_miss(disk: Disk) -> None:
    disk.put("a", 1, 5)
    outcome, value = disk.get("a", 2, offset=2 * PAGE, whole=False)
    assert outcome.status is Status.OK
    assert value == content(1, 5 * PAGE)[2 * PAGE : 4 * PAGE]
    assert disk.get("a", 2, offset=4 * PAGE, whole=False)[0].status is Status.MISS
    assert disk.host.lost_copies == [], "the value is as good as before"


def test_views_too_small_are_told_the_length(disk: Disk) -> None:
    disk.put("a", 1, 5)
    outcome, _ = disk.get("a", 4)
    assert (outcome.status, outcome.nbytes) == (Status.TOO_SMALL, 5 * PAGE)


def test_odd_lengths_and_offsets_are_refused(disk: Disk) -> None:
    memory = Memory(PAGE)
    call = Call()
    odd = memory.views[0].slice(0, 100)
    disk.backend.put_many([Item(StorageKey("a"), [odd]), Item(StorageKey("b"), [])], call)
    assert [call.outcomes[i].status for i in (0, 1)] == [Status.FAILED, Status.FAILED]
    disk.put("a", 1, 2)
    outcome, _ = disk.get("a", 1, offset=512, whole=False)
    assert outcome.status is Status.FAILED
    assert isinstance(outcome.error, BackendError)
    assert disk.backend.stats().counters["failed"] == 3


def test_replacing_a_value_raises_its_token_and_takes_no_more_room_twice(disk: Disk) -> None:
    first = disk.put("a", 1, 4)
    second = disk.put("a", 2, 4)
    files = disk.slot_files()
    third = disk.put("a", 3, 4)
    assert first.token is not None
    assert second.token is not None
    assert third.token is not None
    assert first.token < second.token < third.token
    assert disk.holds("a", 3, 4)
    assert disk.slot_files() == files, "the third copy was recycled into the first one's slot"
    assert disk.backend.stats().counters["recycled_slots"] == 1


def test_a_deleted_value_is_absent_to_all(disk: Disk) -> None:
    disk.put("a", 1)
    assert disk.delete("a").status is Status.OK
    assert disk.delete("a").status is Status.MISS
    assert disk.stat("a").status is Status.MISS
    assert disk.get("a")[0].status is Status.MISS
    assert disk.keys() == []


def test_scan_pages_through_a_prefix_oldest_first_with_parents(disk: Disk) -> None:
    for number in range(7):
        disk.put(f"c-{number}", number, parent=f"c-{number - 1}" if number else None)
    disk.put("n-1", 9)
    disk.put("c-2", 10, parent="c-1")  # newest now
    assert disk.keys("c-", limit=2) == ["c-0", "c-1", "c-3", "c-4", "c-5", "c-6", "c-2"]
    entries = disk.backend.scan(Call(), "", None, 100).entries
    assert {entry.key: entry.parent for entry in entries}["c-3"] == "c-2"
    assert {entry.key: entry.parent for entry in entries}["c-0"] is None
    tokens = [entry.token or 0 for entry in entries]
    assert tokens == sorted(tokens)
    assert all(entry.stored is not None and entry.stored >= entry.nbytes == PAGE for entry in entries)


def test_everything_survives_a_restart(open_disk: OpenDisk) -> None:
    disk = open_disk()
    for number in range(20):
        disk.put(f"k-{number}", number, 1 + number % 3, parent="root")
    disk.delete("k-3")
    disk.put("k-4", 99, 2)
    before = disk.backend.scan(Call(), "", None, 100).entries
    used = disk.backend.stats().used_bytes
    disk.close()
    disk = open_disk()
    assert disk.backend.scan(Call(), "", None, 100).entries == before
    assert disk.backend.stats().used_bytes == used
    assert disk.holds("k-4", 99, 2)
    newest = disk.put("k-5", 5)
    assert newest.token is not None
    assert newest.token > max(entry.token or 0 for entry in before)


def test_files_are_private_and_their_names_say_nothing_of_keys(disk: Disk) -> None:
    key = "c-" + "f" * 118
    assert disk.put(key, 1, parent=key).status is Status.OK
    for root, directories, files in os.walk(disk.path):
        assert stat.S_IMODE(os.stat(root).st_mode) == 0o700
        for name in files:
            assert stat.S_IMODE(os.stat(Path(root, name)).st_mode) == 0o600
        assert all(len(name) < 16 and "fff" not in name for name in directories + files)


def test_a_slot_being_read_is_not_recycled_until_the_reader_leaves(open_disk: OpenDisk) -> None:
    reading, go_on = threading.Event(), threading.Event()

    def before(name: str, argument: object) -> None:
        if name == "preadv" and threading.current_thread() is reader:
            reading.set()
            assert go_on.wait(30)

    outcomes: list[bool] = []
    reader = threading.Thread(target=lambda: outcomes.append(disk.holds("a", 1, 4)))
    disk = open_disk(files=ProbedFiles(before))
    disk.put("a", 1, 4)
    reader.start()
    assert reading.wait(30)
    disk.put("a", 2, 4)
    disk.delete("a")
    for number in range(4):
        disk.put(f"b-{number}", 10 + number, 4)
    go_on.set()
    reader.join()
    assert outcomes == [True], "the reader saw the value as it was when it began"
    free = disk.backend.stats().counters["free_slot_bytes"]
    assert free >= 4 * PAGE, "and its slot was freed when it left"


def test_a_slot_with_two_readers_is_not_recycled_until_both_have_left(disk: Disk) -> None:
    disk.put("a", 1, 4)
    assert disk.backend._store is not None
    catalog = disk.backend._store.catalog
    value = catalog.acquire(StorageKey("a"))
    assert value is not None
    assert catalog.acquire(StorageKey("a")) is value
    disk.delete("a")
    catalog.release(value)
    disk.put("b", 2, 4)
    assert disk.backend.stats().counters["recycled_slots"] == 0
    catalog.release(value)
    disk.put("c", 3, 4)
    assert disk.backend.stats().counters["recycled_slots"] == 1


def test_concurrent_puts_of_a_key_leave_one_whole_value(disk: Disk) -> None:
    start = threading.Barrier(4)

    def writer(seed: int) -> None:
        start.wait()
        for _ in range(20):
            assert disk.put("a", seed, 4).status is Status.OK

    threads = [threading.Thread(target=writer, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert any(disk.holds("a", seed, 4) for seed in range(4))
    assert disk.keys() == ["a"]
    assert len(disk.slot_files()) <= 5


def test_a_cancelled_call_stops_at_the_next_item(disk: Disk) -> None:
    memory = Memory(PAGE)
    call = Call()

    def cancel(index: int) -> None:
        call.cancelled = True

    call.on_done = cancel
    with pytest.raises(DeadlineExceeded):
        disk.backend.put_many([Item(StorageKey(key), memory.views) for key in "abc"], call)
    assert list(call.outcomes) == [0]
    assert disk.keys() == ["a"]


def test_close_neither_waits_for_a_running_read_nor_disturbs_it(open_disk: OpenDisk) -> None:
    reading, go_on = threading.Event(), threading.Event()

    def before(name: str, argument: object) -> None:
        if name == "preadv" and threading.current_thread() is reader:
            reading.set()
            assert go_on.wait(30)

    outcomes: list[bool] = []
    reader = threading.Thread(target=lambda: outcomes.append(disk.holds("a", 1, 4)))
    disk = open_disk(files=ProbedFiles(before))
    disk.put("a", 1, 4)
    reader.start()
    assert reading.wait(30)
    disk.close()
    disk.close()
    with pytest.raises(BackendClosed):
        disk.stat("a")
    with pytest.raises(Exception, match="in use"):
        open_disk()  # the shard is ours until the reader is out
    go_on.set()
    reader.join()
    assert outcomes == [True]
    assert open_disk().holds("a", 1, 4)


def test_a_write_running_at_close_does_not_become_visible(open_disk: OpenDisk) -> None:
    writing, go_on = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def before(name: str, argument: object) -> None:
        if name == "pwritev" and threading.current_thread() is writer:
            writing.set()
            assert go_on.wait(30)

    def put() -> None:
        try:
            disk.put("a", 2, 4)
        except BackendClosed as error:
            errors.append(error)

    writer = threading.Thread(target=put)
    disk = open_disk(files=ProbedFiles(before))
    disk.put("a", 1, 4)
    writer.start()
    assert writing.wait(30)
    disk.close()
    go_on.set()
    writer.join()
    assert len(errors) == 1
    assert open_disk().holds("a", 1, 4)


@pytest.mark.parametrize("damage", ["deleted", "cut", "cut oddly"])
def test_a_value_damaged_behind_our_back_is_a_miss_and_reported(disk: Disk, damage: str) -> None:
    token = disk.put("a", 1, 4).token
    (file,) = disk.slot_files()
    if damage == "deleted":
        file.unlink()
    else:
        os.truncate(file, 2 * PAGE if damage == "cut" else 1000)
    assert disk.get("a")[0].status is Status.MISS
    assert [(key, told) for key, told, _ in disk.host.lost_copies] == [("a", token)]
    assert disk.stat("a").status is Status.MISS
    assert disk.put("a", 2, 4).status is Status.OK
    assert disk.put("b", 3, 4).status is Status.OK
    assert disk.holds("a", 2, 4)
    assert disk.holds("b", 3, 4)


def test_a_value_found_damaged_while_it_is_put_anew_does_not_take_the_new_one_with_it(
    open_disk: OpenDisk,
) -> None:
    def before(name: str, argument: object) -> None:
        if name == "preadv" and armed:
            armed.pop()
            disk.put("a", 2, 4)

    armed: list[bool] = []
    disk = open_disk(files=ProbedFiles(before))
    token = disk.put("a", 1, 4).token
    os.truncate(disk.slot_files()[0], PAGE)
    armed.append(True)
    assert disk.get("a")[0].status is Status.MISS
    assert [told for _, told, _ in disk.host.lost_copies] == [token]
    assert disk.holds("a", 2, 4)


@pytest.mark.parametrize("removed", [".", "shard-000", "shard-000/slots"])
def test_a_directory_removed_while_in_use_costs_one_put_and_is_made_anew(disk: Disk, removed: str) -> None:
    disk.put("a", 1, 4)
    shutil.rmtree(disk.path / removed)
    assert disk.get("a")[0].status is Status.MISS
    assert disk.put("b", 1, 4).status is Status.FAILED
    assert len(disk.host.forgotten) == 1
    for number in range(300):
        assert disk.put(f"k-{number}", number).status is Status.OK
    assert len(disk.host.forgotten) == 1
    assert disk.get("a")[0].status is disk.get("b")[0].status is Status.MISS
    assert disk.holds("k-0", 0)
    assert disk.delete("k-299").status is Status.OK
    assert disk.backend.stats().used_bytes >= occupied_nbytes(disk.path)
    disk.close()
    again = Disk(disk.path)
    assert sorted(again.keys()) == sorted(f"k-{number}" for number in range(299))
    again.close()


@pytest.mark.parametrize("cut", [None, 0, 1000])
def test_a_journal_removed_or_cut_while_in_use_is_written_anew(disk: Disk, cut: int | None) -> None:
    for number in range(100):
        disk.put(f"k-{number}", number)
    journal = disk.path / "shard-000" / "journal"
    if cut is None:
        journal.unlink()
    else:
        os.truncate(journal, cut)
    disk.put("after", 7)
    assert disk.backend.stats().used_bytes >= occupied_nbytes(disk.path)
    disk.close()
    again = Disk(disk.path)
    assert again.keys() == [*(f"k-{number}" for number in range(100)), "after"]
    again.close()


def test_what_others_put_in_the_place_of_a_removed_directory_is_not_kept_unknown(tmp_path: Path) -> None:
    disk, other = Disk(tmp_path / "cache"), Disk(tmp_path / "other")
    other.put("theirs", 1, 4)
    other.close()
    shutil.rmtree(disk.path)
    other.path.rename(disk.path)
    assert disk.put("a", 1).status is Status.FAILED
    assert disk.put("a", 1).status is Status.OK
    assert disk.keys() == ["a"]
    disk.close()


def test_a_removed_directory_is_made_anew_only_once_nobody_uses_the_old_one(open_disk: OpenDisk) -> None:
    reading, go_on = threading.Event(), threading.Event()

    def before(name: str, argument: object) -> None:
        if name == "preadv" and threading.current_thread() is reader:
            reading.set()
            go_on.wait(60)

    files = ProbedFiles(before)
    outcomes: list[tuple[Outcome, bytes]] = []
    reader = threading.Thread(target=lambda: outcomes.append(disk.get("a")))
    disk = open_disk(files=files)
    disk.put("a", 1, 4)
    reader.start()
    assert reading.wait(60)
    shutil.rmtree(disk.path)
    assert disk.put("b", 2).status is Status.FAILED
    with pytest.raises(BackendUnavailable, match="removed"):
        disk.put("b", 2)
    go_on.set()
    reader.join(60)
    assert outcomes[0][1] == content(1, 4 * PAGE)
    assert disk.put("b", 2).status is Status.OK
    assert disk.holds("b", 2)


def test_the_next_file_of_a_batch_is_open_before_an_item_is_settled(open_disk: OpenDisk) -> None:
    story: list[str] = []

    def before(name: str, argument: object) -> None:
        if name in ("open", "preadv"):
            story.append(name)

    disk = open_disk(files=ProbedFiles(before))
    for number in range(3):
        disk.put(f"k-{number}", number)
    story.clear()
    call = Call(on_done=lambda index: story.append(f"settled {index}"))
    items = [Item(StorageKey(f"k-{number}"), Memory(PAGE).views) for number in range(3)]
    disk.backend.get_many(items, call)
    assert story == [
        *("open", "preadv", "open", "settled 0"),
        *("preadv", "open", "settled 1"),
        *("preadv", "settled 2"),
    ]


def test_a_batch_of_reads_cut_short_leaves_no_file_open_and_no_slot_in_use(disk: Disk) -> None:
    for number in range(3):
        disk.put(f"k-{number}", number, 4)
    files = len(os.listdir("/proc/self/fd"))
    call = Call()

    def cancel(index: int) -> None:
        call.cancelled = True

    call.on_done = cancel
    with pytest.raises(DeadlineExceeded):
        disk.backend.get_many([Item(StorageKey(f"k-{n}"), Memory(4 * PAGE).views) for n in range(3)], call)
    assert list(call.outcomes) == [0]
    assert len(os.listdir("/proc/self/fd")) == files
    disk.delete("k-1")
    assert disk.backend.stats().counters["free_slot_bytes"] == 4 * PAGE
