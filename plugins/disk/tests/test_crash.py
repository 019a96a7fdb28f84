"""Killed at any system call, the store reopens with each value as it was before or after, never between."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from lmcache_core.sdk import BackendClosed, Status

from .scenarios import CAPACITY, SCENARIOS, UNHARMED
from .support import MIB, PAGE, Call, Disk, Host, content, occupied_nbytes

OpenDisk = Callable[..., Disk]

RUNNER = Path(__file__).with_name("crash_runner.py")


def killed_runs(root: Path, scenario: str, mode: str) -> list[tuple[Path, int]]:
    """Runs the scenario with a kill at every call; the directories and how many operations returned."""
    subprocess.run([sys.executable, str(RUNNER), str(root), scenario, mode], check=True, timeout=150)
    runs = sorted(int(path.stem) for path in root.glob("*.done"))
    return [(root / f"{number}", (root / f"{number}.done").stat().st_size) for number in runs]


def state_after(scenario: str, count: int) -> dict[str, tuple[int, int]]:
    state: dict[str, tuple[int, int]] = {}
    for kind, key, seed, pages in SCENARIOS[scenario][:count]:
        if kind == "put":
            state[key] = (seed, pages)
        else:
            state.pop(key, None)
    return state


def check_accounts(disk: Disk) -> None:
    """No temporary is left, every slot file is a value or free, and the count covers what is there."""
    stats = disk.backend.stats()
    assert stats.capacity_bytes is not None
    assert occupied_nbytes(disk.path) <= stats.used_bytes + 8 * 4096
    assert stats.used_bytes <= stats.capacity_bytes
    names = {path.name for path in disk.path.rglob("*") if path.is_file()}
    assert not [name for name in names if name.endswith(".new") or name == "probe"]
    slots = sum(path.stat().st_blocks * 512 for path in disk.slot_files())
    assert slots == stats.used_bytes - stats.counters["overhead_bytes"]
    stored = sum(entry.stored or 0 for entry in disk.backend.scan(Call(), "", None, 1000).entries)
    assert slots == stored + stats.counters["free_slot_bytes"]


@pytest.mark.parametrize("mode", ["before", "torn"])
@pytest.mark.parametrize("scenario", sorted(SCENARIOS))
def test_killed_at_any_call_every_value_is_old_or_new(tmp_path: Path, scenario: str, mode: str) -> None:
    runs = killed_runs(tmp_path, scenario, mode)
    assert len(runs) > 2 * (len(SCENARIOS[scenario]) - UNHARMED[scenario])
    for path, count in runs:
        disk = Disk(path, host=Host(capacity_bytes=CAPACITY))
        before, after = state_after(scenario, count), state_after(scenario, count + 1)
        found = set(disk.keys())
        for key in before.keys() | after.keys():
            wanted = {state.get(key) for state in (before, after)}
            if key in found:
                assert any(value and disk.holds(key, *value) for value in wanted), (path, key)
            else:
                assert None in wanted, (path, key)
        assert found <= before.keys() | after.keys()
        check_accounts(disk)
        assert disk.put("afterwards", 77, 4).status is Status.OK
        assert disk.holds("afterwards", 77, 4)
        disk.close()


@pytest.mark.parametrize("mode", ["before", "torn"])
def test_killed_while_shards_are_merged_at_most_the_value_on_its_way_is_lost(
    tmp_path: Path, mode: str
) -> None:
    everything = {f"{number}-{value}": (10 * number + value, 2) for number in range(2) for value in range(3)}
    for path, _ in killed_runs(tmp_path, "merge", mode):
        disk = Disk(path, host=Host(capacity_bytes=3 * MIB), processes=1)
        found = disk.keys()
        assert set(found) <= {*everything, "both"}
        assert len(found) >= len(everything)
        assert all(disk.holds(key, *everything[key]) for key in found if key != "both")
        assert [entry.name for entry in path.glob("shard-*")] in (["shard-000"], ["shard-001"])
        check_accounts(disk)
        disk.close()


def test_killed_from_outside_in_the_middle_of_concurrent_puts(tmp_path: Path) -> None:
    program = f"""
import sys, threading
sys.path.insert(0, {str(RUNNER.parent)!r})
from pathlib import Path
from support import Disk, Host, MIB
disk = Disk(Path({str(tmp_path / "cache")!r}), host=Host(capacity_bytes=64 * MIB))
def put(thread):
    for number in range(1000):
        key = f"{{thread}}-{{number % 5}}"
        assert disk.put(key, 1000 * thread + number, 64).status.value == "ok"
        sys.stdout.write(f"{{key}} {{1000 * thread + number}}\\n")
        sys.stdout.flush()
for thread in range(4):
    threading.Thread(target=put, args=(thread,)).start()
"""
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    with child.stdout:
        lines = [child.stdout.readline() for _ in range(200)]
        child.send_signal(signal.SIGKILL)
        lines.extend(child.stdout)
    assert child.wait(30) == -signal.SIGKILL
    acknowledged = {}
    for line in lines:
        if line.endswith("\n"):
            key, seed = line.split()
            acknowledged[key] = max(int(seed), acknowledged.get(key, 0))
    disk = Disk(tmp_path / "cache", host=Host(capacity_bytes=64 * MIB))
    for key, seed in acknowledged.items():
        assert disk.holds(key, seed, 64) or disk.holds(key, seed + 5, 64), key
    check_accounts(disk)
    disk.close()


def test_a_killed_process_frees_its_shard_even_when_a_child_of_it_lives_on(tmp_path: Path) -> None:
    program = f"""
import os, sys
sys.path.insert(0, {str(RUNNER.parent)!r})
from pathlib import Path
from support import Disk
disk = Disk(Path({str(tmp_path / "cache")!r}))
disk.put("a", 1, 2)
if os.fork() == 0:
    try:
        disk.put("b", 1, 2)
    except Exception as error:
        print(type(error).__name__, os.getpid(), flush=True)
    sys.stdin.read()
    os._exit(0)
os.wait()
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    assert parent.stdin is not None
    with parent.stdout, parent.stdin:
        error, child = parent.stdout.readline().split()
        assert error == "BackendClosed", "a forked child must not write to its parent's shard"
        parent.send_signal(signal.SIGKILL)
        parent.wait(30)
        os.kill(int(child), 0)  # it lives
        disk = Disk(tmp_path / "cache")
        assert disk.holds("a", 1, 2)
        disk.close()
        os.kill(int(child), signal.SIGKILL)


def test_a_torn_journal_is_read_up_to_the_tear_whatever_follows(open_disk: OpenDisk) -> None:
    disk = open_disk()
    for number in range(6):
        disk.put(f"k-{number}", number, 2)
    disk.close()
    journal = disk.path / "shard-000" / "journal"
    content = bytearray(journal.read_bytes())
    third = content.index(b"k-3")
    content[third + 1] ^= 1
    journal.write_bytes(content)
    disk = open_disk()
    assert disk.keys() == ["k-0", "k-1", "k-2"]
    disk.put("new", 9, 2)
    check_accounts(disk)
    disk.close()
    disk = open_disk()
    assert disk.keys() == ["k-0", "k-1", "k-2", "new"], "records beyond the tear never come back"
    assert all(disk.holds(f"k-{number}", number, 2) for number in range(3))


@pytest.mark.parametrize("start", [b"", b"lmcache-core-disk journal 9\n"])
def test_a_journal_without_its_start_is_begun_anew_and_keeps_what_comes(
    open_disk: OpenDisk, start: bytes
) -> None:
    disk = open_disk()
    disk.put("before", 1, 2)
    disk.close()
    journal = disk.path / "shard-000" / "journal"
    journal.write_bytes(start.ljust(journal.stat().st_size, b"\0"))  # zeros, as a power loss leaves it
    disk = open_disk()
    assert disk.keys() == []
    disk.put("after", 2, 2)
    disk.close()
    disk = open_disk()
    assert disk.keys() == ["after"]
    assert disk.holds("after", 2, 2)


def test_a_stray_file_with_a_high_number_costs_neither_memory_nor_room(open_disk: OpenDisk) -> None:
    disk = open_disk()
    disk.put("k", 1, 2)
    disk.close()
    (disk.path / "shard-000" / "slots" / "ffffff").mkdir()
    (disk.path / "shard-000" / "slots" / "ffffff" / "ff").write_bytes(b"x" * 4 * PAGE)
    disk = open_disk()
    assert disk.backend._store is not None
    assert len(disk.backend._store.slots._spare_ids) <= 2 * 256
    assert disk.put("recycled", 2, 4).status is Status.OK
    for number in range(300):
        assert disk.put(f"k-{number}", number).status is Status.OK
    check_accounts(disk)
    disk.close()
    disk = open_disk()
    assert len(disk.keys()) == 302
    assert disk.holds("recycled", 2, 4)
    assert disk.holds("k-299", 299)


def test_slots_without_a_record_and_records_without_a_slot_are_swept(open_disk: OpenDisk) -> None:
    disk = open_disk()
    for number in range(4):
        disk.put(f"k-{number}", number, 2)
    first, *_ = disk.slot_files()
    disk.close()
    first.unlink()
    (first.parent / "77").write_bytes(b"x" * 5000)
    (first.parent / "78").write_bytes(b"y" * 8192)
    (disk.path / "shard-000" / "journal.new").write_bytes(b"half")
    disk = open_disk()
    assert disk.keys() == ["k-1", "k-2", "k-3"]
    assert disk.backend.stats().counters["free_slot_bytes"] == 8192
    check_accounts(disk)


def test_a_record_without_a_slot_does_not_come_back_with_what_is_written_there_next(
    open_disk: OpenDisk,
) -> None:
    disk = open_disk()
    disk.put("lost", 1, 2)
    disk.put("kept", 2, 2)
    slot = disk.slot_files()[0]
    disk.close()
    slot.unlink()
    open_disk().close()
    slot.write_bytes(content(9, 2 * PAGE))  # as a kill between a value's bytes and its record leaves it
    disk = open_disk()
    assert disk.keys() == ["kept"]
    assert disk.holds("kept", 2, 2)


def test_nothing_hangs_when_threads_put_while_one_closes(open_disk: OpenDisk) -> None:
    disk = open_disk()
    started = threading.Barrier(5)
    closed: list[int] = []

    def put(seed: int) -> None:
        started.wait()
        try:
            for number in range(10_000):
                disk.put(f"{seed}-{number % 3}", seed, 2)
        except BackendClosed:
            closed.append(seed)

    threads = [threading.Thread(target=put, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    started.wait()
    disk.close()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert sorted(closed) == [0, 1, 2, 3]
    open_disk().close()
