"""Several processes on one directory: who gets which shard, and how much of the capacity."""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from lmcache_core.sdk import BackendUnavailable, ConfigError, Status
from lmcache_core_disk.files import Files

from .support import MIB, PAGE, Disk, Host, ProbedFiles, occupied_nbytes

OpenDisk = Callable[..., Disk]

# Two backends in one process hold their shards by locks of their own, as two processes do.


def fill(disk: Disk, prefix: str, pages: int = 16) -> int:
    """Puts values until there is no room; how many went in."""
    for number in range(10_000):
        if disk.put(f"{prefix}-{number}", number, pages).status is not Status.OK:
            return number
    raise AssertionError("never full")


def test_each_process_has_a_shard_and_its_share(open_disk: OpenDisk) -> None:
    host = Host(capacity_bytes=4 * MIB)
    first, second = open_disk(host=host, processes=2), open_disk(host=host, processes=2)
    fill(first, "a")
    fill(second, "b")
    assert set(first.keys()).isdisjoint(second.keys())
    for disk in (first, second):
        stats = disk.backend.stats()
        assert stats.capacity_bytes is not None
        assert 0.9 * 2 * MIB < stats.used_bytes <= stats.capacity_bytes <= 2 * MIB
    assert occupied_nbytes(first.path) <= 4 * MIB


def test_no_free_shard_is_one_error_that_names_the_holder(open_disk: OpenDisk) -> None:
    open_disk()
    with pytest.raises(BackendUnavailable) as caught:
        open_disk()
    message = str(caught.value)
    assert (
        "in use (shard-000 by this process); another tier or engine of this process uses the same path"
        in message
    )
    assert "`processes` (now 1)" in message


def test_a_shard_that_another_process_holds_names_it(open_disk: OpenDisk) -> None:
    lock = open_disk().path / "shard-000" / "lock"
    lock.write_text("1\n")
    with pytest.raises(
        BackendUnavailable, match=r"in use \(shard-000 by process 1\); end what holds it, or raise"
    ):
        open_disk()


def test_a_shard_whose_lock_was_tidied_away_still_has_one_owner(open_disk: OpenDisk) -> None:
    disk = open_disk()
    disk.put("k", 1)
    for lock in (disk.path / "shard-000" / "lock", disk.path / "lock"):
        lock.unlink()
    with pytest.raises(BackendUnavailable, match="in use"):
        open_disk()
    disk.close()
    assert open_disk().holds("k", 1)


def test_a_file_system_that_locks_no_directories_is_good_enough(open_disk: OpenDisk) -> None:
    class FilesOnly(Files):
        def lock(self, fd: int) -> bool:
            if stat.S_ISDIR(self.fstat(fd).st_mode):
                raise OSError(errno.EBADF, "EBADF")
            return super().lock(fd)

    disk = open_disk(files=FilesOnly())
    disk.put("k", 1)
    with pytest.raises(BackendUnavailable, match="in use"):
        open_disk(files=FilesOnly())
    disk.close()
    assert open_disk().holds("k", 1)


def test_a_process_adopts_the_shard_last_written_for_its_parts(open_disk: OpenDisk) -> None:
    parts = [("a" * 16,), ("b" * 16,)]
    disks = [open_disk(host=Host(parts=part), processes=2) for part in parts]
    for number, disk in enumerate(disks):
        disk.put(f"k-{number}", number)
        disk.close()
    assert open_disk(host=Host(parts=parts[1]), processes=2).keys() == ["k-1"]
    assert open_disk(host=Host(parts=parts[0]), processes=2).keys() == ["k-0"]


def test_parts_used_long_ago_are_still_known(open_disk: OpenDisk) -> None:
    for number, part in enumerate(["a" * 16, "b" * 16, "c" * 16]):
        disk = open_disk(host=Host(parts=(part,)), processes=1)
        disk.put(f"k-{number}", number)
        disk.close()
    open_disk(host=Host(parts=("c" * 16,)), processes=2).close()  # leaves room for another shard
    assert open_disk(host=Host(parts=("a" * 16,)), processes=2).keys() == ["k-0", "k-1", "k-2"]


def test_without_a_match_a_new_shard_comes_before_another_models(open_disk: OpenDisk) -> None:
    disk = open_disk(host=Host(parts=("a" * 16,)), processes=2)
    disk.put("k", 1)
    disk.close()
    assert open_disk(host=Host(parts=("b" * 16,)), processes=2).keys() == []
    assert open_disk(host=Host(parts=("c" * 16,)), processes=2).keys() == ["k"]


def test_unknown_parts_take_the_shard_written_last(open_disk: OpenDisk) -> None:
    disks = [open_disk(processes=2), open_disk(processes=2)]
    for number, disk in enumerate(disks):
        disk.put(f"k-{number}", number)
        disk.close()
    os.utime(disks[0].path / "shard-001" / "journal", (1, 1))
    assert open_disk(host=Host(parts=()), processes=2).keys() == ["k-0"]


def test_fewer_processes_than_before_keep_everything(open_disk: OpenDisk) -> None:
    disks = [open_disk(processes=3) for _ in range(3)]
    for number, disk in enumerate(disks):
        disk.put(f"k-{number}", number, 3, parent="root")
        disk.put("in-all", number, 3)
        disk.close()
    disk = open_disk(processes=1)
    assert sorted(disk.keys()) == ["in-all", "k-0", "k-1", "k-2"]
    assert all(disk.holds(f"k-{number}", number, 3) for number in range(3))
    assert any(disk.holds("in-all", number, 3) for number in range(3))
    assert len(list(disk.path.glob("shard-*"))) == 1
    used = disk.backend.stats().used_bytes
    disk.close()
    disk = open_disk(processes=1)
    assert sorted(disk.keys()) == ["in-all", "k-0", "k-1", "k-2"]
    assert disk.backend.stats().used_bytes <= used


def test_a_surplus_shard_in_use_is_left_alone(open_disk: OpenDisk) -> None:
    other = open_disk(processes=2)
    other.put("theirs", 1)
    disk = open_disk(processes=2)
    disk.put("k", 2)
    disk.close()
    assert open_disk(processes=1).keys() == ["k"]
    assert other.holds("theirs", 1)


def test_more_processes_than_before_share_without_loss_as_the_first_one_shrinks(open_disk: OpenDisk) -> None:
    host = Host(capacity_bytes=4 * MIB)
    disk = open_disk(host=host)
    count = fill(disk, "a")
    for number in range(count * 3 // 10):
        disk.delete(f"a-{number}")
    disk.close()
    kept = count - count * 3 // 10

    first = open_disk(host=host, processes=2)
    assert len(first.keys()) == kept, "nothing is lost"
    second = open_disk(host=host, processes=2)
    assert occupied_nbytes(first.path) <= 4 * MIB
    assert first.put("more", 1, 16).status is Status.FULL, "it is above its share"
    few = fill(second, "b")
    assert occupied_nbytes(first.path) <= 4 * MIB
    for key in first.keys()[: count // 4]:
        assert first.delete(key).status is Status.OK
    assert second.backend._store is not None
    second.backend._store._next_extend = 0.0
    assert fill(second, "c") > few // 2, "what the first gave up is the second's"
    assert occupied_nbytes(first.path) <= 4 * MIB
    stats = second.backend.stats()
    assert stats.capacity_bytes is not None
    assert stats.capacity_bytes > 1.9 * MIB


def test_a_lower_capacity_drops_the_oldest_values(open_disk: OpenDisk) -> None:
    disk = open_disk(host=Host(capacity_bytes=4 * MIB))
    count = fill(disk, "a")
    disk.close()
    disk = open_disk(host=Host(capacity_bytes=2 * MIB))
    left = disk.keys()
    assert 0.4 * count < len(left) < 0.5 * count
    assert left == [f"a-{number}" for number in range(count - len(left), count)]
    assert all(disk.holds(f"a-{number}", number, 16) for number in range(count - len(left), count))
    assert occupied_nbytes(disk.path) <= 2 * MIB


def test_a_lower_capacity_drops_children_before_their_parents(open_disk: OpenDisk) -> None:
    disk = open_disk(host=Host(capacity_bytes=4 * MIB))
    count = 0
    while disk.put(f"a-{count}", count, 16, parent=f"a-{count - 1}" if count else None).status is Status.OK:
        count += 1
    disk.close()
    disk = open_disk(host=Host(capacity_bytes=2 * MIB))
    left = disk.keys()
    assert 0.4 * count < len(left) < 0.5 * count
    assert left == [f"a-{number}" for number in range(len(left))]


def test_a_lower_capacity_drops_the_oldest_family_whole_before_the_next(open_disk: OpenDisk) -> None:
    disk = open_disk(host=Host(capacity_bytes=4 * MIB))
    disk.put("root", 1)
    for number in range(10):  # written in turns
        for family in ("old", "new"):
            parent = f"{family}-{number - 1}" if number else "root"
            assert disk.put(f"{family}-{number}", number, 16, parent=parent).status is Status.OK
    disk.close()
    capacity = 16 * 16 * PAGE  # less than both, more than one
    disk = open_disk(host=Host(capacity_bytes=capacity))
    left = disk.keys()
    kept = {family: sum(key.startswith(family) for key in left) for family in ("root", "old", "new")}
    assert kept["root"] == 1
    assert kept["new"] == 10
    assert 0 < kept["old"] < 10
    assert all(f"old-{number}" in left for number in range(kept["old"]))


@pytest.mark.parametrize("parents", [("a-0", "a-1"), ("a-1", "a-0")], ids=["themselves", "a ring"])
def test_a_lower_capacity_is_kept_to_even_where_parents_form_a_ring(
    open_disk: OpenDisk, parents: tuple[str, str]
) -> None:
    disk = open_disk(host=Host(capacity_bytes=4 * MIB))
    for number, parent in enumerate(parents):
        assert disk.put(f"a-{number}", number, 150, parent=parent).status is Status.OK
    disk.close()
    disk = open_disk(host=Host(capacity_bytes=MIB))
    assert disk.keys() == ["a-1"]
    assert occupied_nbytes(disk.path) <= MIB


def test_when_others_hold_all_the_capacity_the_tier_is_down(open_disk: OpenDisk) -> None:
    first = open_disk(host=Host(capacity_bytes=4 * MIB))
    fill(first, "a")
    with pytest.raises(BackendUnavailable, match="capacity"):
        open_disk(host=Host(capacity_bytes=4 * MIB), processes=2)
    assert occupied_nbytes(first.path) <= 4 * MIB


def test_an_unknown_format_is_refused_and_left_as_it_is(open_disk: OpenDisk) -> None:
    disk = open_disk()
    disk.put("k", 1)
    disk.close()
    for file in (disk.path / "format.json", disk.path / "shard-000" / "meta.json"):
        before = file.read_bytes()
        file.write_text(json.dumps({"format": 7}))
        with pytest.raises(ConfigError, match="format 7") as caught:
            open_disk()
        assert str(file) in str(caught.value)
        assert json.loads(file.read_text()) == {"format": 7}
        file.write_bytes(before)
    assert open_disk().holds("k", 1)


@pytest.mark.parametrize(
    "damaged",
    [
        b"{",
        bytes(60),
        b"[" * PAGE,
        b'{"format": 1, "claim_bytes": -9, "parts": []}',
        b'{"format": 1, "claim_bytes": "9", "parts": []}',
    ],
    ids=["cut short", "zeros", "nested", "negative", "no number"],
)
def test_a_damaged_meta_is_mended_by_the_next_owner_and_gives_nobody_more_room(
    open_disk: OpenDisk, caplog: pytest.LogCaptureFixture, damaged: bytes
) -> None:
    host = Host(capacity_bytes=4 * MIB)
    disk = open_disk(host=host, processes=2)
    disk.put("k", 1)
    meta = disk.path / "shard-000" / "meta.json"
    meta.write_bytes(damaged)
    with pytest.raises(BackendUnavailable, match="hold all of its capacity"):
        open_disk(host=host, processes=2)
    disk.close()
    disk = open_disk(host=host, processes=2)
    assert disk.holds("k", 1)
    assert json.loads(meta.read_text())["claim_bytes"] == disk.backend.stats().capacity_bytes
    assert open_disk(host=host, processes=2).put("other", 2).status is Status.OK
    assert "meta.json is damaged" in caplog.text


def test_a_process_that_died_while_making_its_shard_is_cleaned_up_after(open_disk: OpenDisk) -> None:
    disk = open_disk()
    disk.put("k", 1)
    disk.close()
    (disk.path / "shard-000" / "meta.json").unlink()
    assert open_disk().holds("k", 1)
    assert (disk.path / "shard-000" / "meta.json").stat().st_size < PAGE


def test_two_processes_may_make_the_directory_at_once(tmp_path: Path) -> None:
    waits = threading.Event()
    second: list[Disk] = []

    def open_second() -> None:
        files = ProbedFiles(lambda name, argument: waits.set() if name == "lock" else None)
        second.append(Disk(tmp_path / "new", files=files, host=Host(deadline_s=20.0), processes=2))

    thread = threading.Thread(target=open_second)

    def before(name: str, argument: object) -> None:
        if name == "rename" and not thread.ident:  # the first is about to say which format this is
            thread.start()
            assert waits.wait(10.0)

    first = Disk(tmp_path / "new", files=ProbedFiles(before), processes=2)
    thread.join(10.0)
    assert second
    for disk in (first, *second):
        assert disk.put("k", 1).status is Status.OK
        disk.close()
