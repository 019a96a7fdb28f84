"""A system call that fails is an outcome, and harms nothing that was stored."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Sequence

import pytest

from lmcache_core.sdk import BackendError, BackendUnavailable, PermissionDenied, Status
from lmcache_core_disk.files import Files

from .support import MIB, PAGE, Disk, Host, ProbedFiles, content, occupied_nbytes

OpenDisk = Callable[..., Disk]


class Faults:
    """Fails calls named `name` while armed, optionally only those on one argument."""

    def __init__(self) -> None:
        self.name = ""
        self.code = 0
        self.times = 0

    def arm(self, name: str, code: int, times: int = 1 << 30) -> None:
        self.name, self.code, self.times = name, code, times

    def before(self, name: str, argument: object) -> None:
        if name == self.name and self.times:
            self.times -= 1
            raise OSError(self.code, errno.errorcode[self.code])


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
def disk(open_disk: OpenDisk, faults: Faults) -> Disk:
    disk = open_disk(files=ProbedFiles(faults.before))
    disk.put("old", 1, 4)
    return disk


@pytest.mark.parametrize(
    ("code", "status", "error"),
    [
        (errno.ENOSPC, Status.FULL, None),
        (errno.EDQUOT, Status.FULL, None),
        (errno.EIO, Status.FAILED, BackendError),
        (errno.EROFS, Status.FAILED, PermissionDenied),
        (errno.EACCES, Status.FAILED, PermissionDenied),
    ],
)
@pytest.mark.parametrize("call", ["open", "pwritev", "fstat"])
def test_a_failing_write_is_an_outcome_and_the_old_value_stays(
    disk: Disk, faults: Faults, code: int, status: Status, error: type[BackendError] | None, call: str
) -> None:
    used = disk.backend.stats().used_bytes
    faults.arm(call, code)
    for key in ("old", "new"):
        outcome = disk.put(key, 2, 4)
        assert outcome.status is status
        assert error is None or isinstance(outcome.error, error)
    faults.arm("", 0)
    assert disk.backend.stats().used_bytes <= used + 2 * 4096  # a directory's page, at most
    assert disk.holds("old", 1, 4)
    assert disk.stat("new").status is Status.MISS
    assert disk.put("new", 3, 4).status is Status.OK


def test_a_failing_read_is_an_outcome_and_the_value_stays(disk: Disk, faults: Faults) -> None:
    faults.arm("preadv", errno.EIO, times=1)
    outcome, _ = disk.get("old")
    assert outcome.status is Status.FAILED
    assert isinstance(outcome.error, BackendError)
    assert outcome.error.__traceback__ is None
    assert disk.holds("old", 1, 4)


def test_a_slot_that_failed_to_be_written_is_not_used_again(disk: Disk, faults: Faults) -> None:
    disk.put("old", 2, 4)  # frees the first slot
    faults.arm("pwritev", errno.EIO, times=1)
    assert disk.put("new", 3, 4).status is Status.FAILED
    assert disk.backend.stats().counters["free_slot_bytes"] == 0
    assert disk.put("new", 3, 4).status is Status.OK
    assert disk.holds("new", 3, 4)
    assert disk.holds("old", 2, 4)


def test_a_record_that_arrived_though_its_write_failed_never_names_anothers_bytes(
    open_disk: OpenDisk,
) -> None:
    class Unsure(Files):
        """Journal writes fail: before anything is written, or when all has been."""

        fails = ""

        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            of_journal = len(buffers[0]) % PAGE != 0
            if of_journal and self.fails == "before":
                raise OSError(errno.EIO, "EIO")
            written = super().pwritev(fd, buffers, offset)
            if of_journal and self.fails == "after":
                raise OSError(errno.EIO, "EIO")
            return written

    files = Unsure()
    disk = open_disk(files=files)
    disk.put("first", 1, 4)
    files.fails = "after"
    assert disk.put("a", 2, 4).status is Status.FAILED
    files.fails = "before"
    assert disk.put("b", 3, 4).status is Status.FAILED
    files.fails = ""
    disk.close()
    disk = open_disk()
    assert disk.holds("first", 1, 4)
    outcome, value = disk.get("a")
    assert outcome.status is Status.MISS or value == content(2, 4 * PAGE)


def test_a_full_file_system_gets_our_free_slots_back(disk: Disk, faults: Faults) -> None:
    disk.put("old", 2, 4)
    assert disk.backend.stats().counters["free_slot_bytes"] > 0
    faults.arm("pwritev", errno.ENOSPC, times=1)
    assert disk.put("other-length", 3, 3).status is Status.OK
    assert disk.backend.stats().counters["free_slot_bytes"] == 0


def test_a_slot_that_cannot_be_unlinked_stays_counted(disk: Disk, faults: Faults) -> None:
    disk.put("old", 2, 4)  # frees a slot of four pages
    used = disk.backend.stats().used_bytes
    faults.arm("unlink", errno.EIO)
    assert disk.backend._store is not None
    disk.backend._store.slots.limit = 0  # too much is used: free slots must go
    disk.backend._store.slots.shrink()
    assert disk.backend.stats().used_bytes == used
    assert disk.backend.stats().counters["free_slot_bytes"] == 0


def test_a_slot_that_could_not_be_unlinked_gives_its_room_back_once_it_can_be(
    open_disk: OpenDisk, faults: Faults
) -> None:
    disk = open_disk(files=ProbedFiles(faults.before), host=Host(capacity_bytes=MIB))
    assert disk.put("large", 1, 150).status is Status.OK
    disk.delete("large")
    faults.arm("unlink", errno.EIO)
    for _ in range(2):
        assert disk.put("other-length", 2, 100).status is Status.FULL
        assert occupied_nbytes(disk.path) <= MIB
    faults.arm("", 0)
    assert disk.put("other-length", 2, 100).status is Status.OK
    assert disk.holds("other-length", 2, 100)
    assert len(disk.slot_files()) == 1


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM])
def test_refused_direct_io_degrades_once_with_one_warning(
    open_disk: OpenDisk, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    class Refusing(ProbedFiles):
        def open(self, name: str, flags: int, dir_fd: int | None = None) -> int:
            if flags & os.O_DIRECT:
                raise OSError(code, errno.errorcode[code])
            return super().open(name, flags, dir_fd)

    with caplog.at_level(logging.WARNING, "lmcache_core_disk"):
        disk = open_disk(files=Refusing())
        for number in range(3):
            assert disk.put(f"k-{number}", number, 4).status is Status.OK
            assert disk.holds(f"k-{number}", number, 4)
    assert disk.backend.stats().counters["direct_io"] == 0
    (record,) = caplog.records
    assert "refuses direct I/O" in record.message
    assert errno.errorcode[code] in record.message


def test_direct_io_refused_later_degrades_without_losing_the_transfer(
    disk: Disk, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    faults.arm("preadv", errno.EINVAL, times=1)
    with caplog.at_level(logging.WARNING, "lmcache_core_disk"):
        assert disk.holds("old", 1, 4)
        assert disk.put("old", 2, 4).status is Status.OK
    assert len(caplog.records) == 1
    assert disk.backend.stats().counters["direct_io"] == 0


def test_direct_io_can_be_switched_off_without_a_warning(
    open_disk: OpenDisk, caplog: pytest.LogCaptureFixture
) -> None:
    disk = open_disk(direct_io=False)
    assert disk.put("a", 1, 4).status is Status.OK
    assert disk.holds("a", 1, 4)
    assert caplog.records == []


def test_short_transfers_are_continued(open_disk: OpenDisk) -> None:
    class Short(ProbedFiles):
        def preadv(self, fd: int, buffers: list[memoryview], offset: int) -> int:
            return super().preadv(fd, [buffers[0][:4096]], offset)

        def pwritev(self, fd: int, buffers: list[memoryview], offset: int) -> int:
            return super().pwritev(fd, [buffers[0][:4096]], offset)

    disk = open_disk(files=Short())
    assert disk.put("a", 1, 7, pieces=2).status is Status.OK
    assert disk.holds("a", 1, 7)


def test_a_write_that_stops_short_of_its_end_is_no_value(open_disk: OpenDisk) -> None:
    class Stopping(Files):
        """Of a file system that takes no more than `most` bytes of a file, and says nothing."""

        most = 1 << 30

        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            room = max(self.most - offset, 0)
            return super().pwritev(fd, [buffers[0][:room]], offset) if room else 0

    files = Stopping()
    disk = open_disk(files=files, direct_io=False)
    files.most = 7000
    assert disk.put("short", 1, 7).status is Status.FAILED
    assert disk.get("short")[0].status is Status.MISS
    assert disk.put("fits", 1, 1).status is Status.OK
    assert disk.holds("fits", 1, 1)
    disk.close()
    (disk.path / "shard-000" / "journal").unlink()
    with pytest.raises(BackendUnavailable, match="short write"):
        open_disk(files=files)


def test_a_file_that_vanishes_at_the_wrong_moment_is_no_reason_to_forget_the_rest(
    disk: Disk, faults: Faults
) -> None:
    faults.arm("open", errno.ENOENT, times=2)
    assert disk.put("new", 2, 4).status is Status.FAILED
    assert disk.host.forgotten == []
    assert disk.holds("old", 1, 4)
    assert disk.put("new", 2, 4).status is Status.OK


def test_a_fifo_in_place_of_a_value_is_never_waited_for(disk: Disk) -> None:
    (file,) = disk.slot_files()
    file.unlink()
    os.mkfifo(file)
    assert disk.get("old")[0].status in (Status.FAILED, Status.MISS)
    assert disk.put("old", 2, 4).status is Status.OK
    assert disk.holds("old", 2, 4)
