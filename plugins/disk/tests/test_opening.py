"""Opening: paths that can't be used are found at once, and large indexes load quickly."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lmcache_core.sdk import BackendUnavailable, ConfigError
from lmcache_core_disk.backend import DiskBackend
from lmcache_core_disk.config import DiskConfig
from lmcache_core_disk.files import Files
from lmcache_core_disk.journal import Journal, put_record

from .support import PAGE, Disk, Host, ProbedFiles

OpenDisk = Callable[..., Disk]


def test_building_a_backend_touches_nothing(tmp_path: Path) -> None:
    backend = DiskBackend(DiskConfig(path=tmp_path / "cache"))
    backend.close()
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_is_a_file_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="choose a directory"):
            Disk(path)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM, errno.EROFS])
@pytest.mark.parametrize("call", ["open", "mkdir", "pwritev"])
def test_a_path_that_cannot_be_written_is_a_config_error(open_disk: OpenDisk, code: int, call: str) -> None:
    def before(name: str, argument: object) -> None:
        if name == call:
            raise OSError(code, errno.errorcode[code])

    with pytest.raises(ConfigError, match="choose a directory"):
        open_disk(files=ProbedFiles(before))


@pytest.mark.parametrize("inner", ["kv/sub", "kv/shard-000", "kv/shard-000/slots", "link/sub"])
def test_a_path_inside_another_tiers_is_a_config_error_whether_that_is_open_or_not(
    tmp_path: Path, inner: str
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "kv")
    disk = Disk(tmp_path / "kv")
    before = sorted(disk.path.rglob("*"))
    for _ in range(2):
        with pytest.raises(ConfigError, match=f"lies inside {disk.path}, .* a directory of its own"):
            Disk(tmp_path / inner)
        disk.close()
    assert sorted(disk.path.rglob("*")) == before


def test_a_path_around_another_tiers_is_a_config_error_while_that_is_open(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "kv" / "sub")
    with pytest.raises(ConfigError, match=f"{disk.path} lies inside {tmp_path}/kv, "):
        Disk(tmp_path / "kv")
    disk.close()
    Disk(tmp_path / "kv").close()


def test_another_programs_directory_above_is_no_tiers(tmp_path: Path) -> None:
    for text in ("", "[]", '{"format": "xl"}', '{"version": 1}'):
        (tmp_path / "format.json").write_text(text)
        Disk(tmp_path / "kv").close()


def test_a_directory_that_fails_for_now_is_unavailable(open_disk: OpenDisk) -> None:
    def before(name: str, argument: object) -> None:
        if name == "preadv":
            raise OSError(errno.EIO, "EIO")

    with pytest.raises(BackendUnavailable):
        open_disk(files=ProbedFiles(before))


def test_a_failed_open_leaves_no_descriptor_and_no_lock(open_disk: OpenDisk) -> None:
    open_fds = lambda: len(list(Path("/proc/self/fd").iterdir()))  # noqa: E731
    open_disk().close()
    before = open_fds()
    for failing in range(60):
        left = [failing]

        def fail(name: str, argument: object, left: list[int] = left) -> None:
            left[0] -= name not in ("close", "unlock")
            if left[0] < 0 and name not in ("close", "unlock"):
                raise OSError(errno.EIO, "EIO")

        try:
            open_disk(files=ProbedFiles(fail)).close()
        except BackendUnavailable:
            assert open_fds() == before
        else:
            break
    else:
        raise AssertionError("opening never got through")
    open_disk().close()
    assert open_fds() == before


def test_two_openings_at_once_wait_for_each_other_but_not_for_ever(open_disk: OpenDisk) -> None:
    disk = open_disk(processes=2)
    assert disk.backend._store is not None
    directory = disk.backend._store.directory
    with directory.locked(0.0), pytest.raises(BackendUnavailable, match="busy opening"):
        open_disk(processes=2)
    assert open_disk(processes=2).keys() == []


def test_an_index_of_100_000_entries_opens_in_under_a_second(open_disk: OpenDisk) -> None:
    disk = open_disk()
    disk.close()
    shard = disk.path / "shard-000"
    count = 100_000
    records = []
    for slot in range(count):
        if slot % 256 == 0:
            directory = shard / "slots" / f"{slot // 256:06x}"
            directory.mkdir()
            (first := directory / "00").touch()
        else:
            os.link(first, directory / f"{slot % 256:02x}")
        key = f"c-0123456789abcdef-{slot:064x}"
        records.append(put_record(key, key, slot + 1, slot, PAGE, PAGE))  # type: ignore[arg-type]
    shard_fd = Files().open_directory(str(shard))
    journal = Journal(Files(), shard_fd, lambda nbytes: True)
    journal.start(journal.load(), [], rewrite=True)
    for record in records:
        journal.append(record, list)
        journal.live_nbytes += len(record)
    journal.close()
    Files().close(shard_fd)

    wall_s, cpu_s = [], []
    for _ in range(3):
        gc.collect()
        started, spent = time.perf_counter(), time.process_time()
        disk = open_disk(host=Host(capacity_bytes=4 << 30))
        wall_s.append(time.perf_counter() - started)
        cpu_s.append(time.process_time() - spent)
        assert disk.backend.stats().entries == count
        disk.close()
    shutil.rmtree(shard)
    print(f"opened {count} entries in {min(wall_s):.3f} s, {min(cpu_s):.3f} s of it computing")
    assert min(cpu_s) < 1.0  # the waiting depends on what else this machine does
