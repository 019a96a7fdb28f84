"""Who owns what of the directory: shards and their locks, and each process's share of the capacity."""

from __future__ import annotations

import errno
import functools
import json
import logging
import os
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from lmcache_core.sdk import BackendUnavailable, ConfigError, LMCacheError
from lmcache_core_disk.direct_io import PAGE
from lmcache_core_disk.files import Files
from lmcache_core_disk.nesting import leave_place, take_place
from lmcache_core_disk.small_files import (
    FORMAT,
    FORMAT_FILE,
    check_format,
    read_fields,
    read_small,
    write_small,
)

log = logging.getLogger(__name__)

ROOT_OVERHEAD_NBYTES = 8 * PAGE  # the directory, `format.json` and `lock`
SHARD_OVERHEAD_NBYTES = 16 * PAGE  # two directories, `lock`, `meta.json`, its successor, and the probe
LEAST_NBYTES = 1 << 20
"""The smallest share that is worth a shard."""

_SHARD = "shard-{:03d}"
_META, _LOCK, _SLOTS = "meta.json", "lock", "slots"
_LOCK_POLL_S = 0.01
_KEPT_PARTS = 64  # 64 of 16 digits: the file stays within a page
_USERS_FAULT = frozenset(
    {
        errno.EACCES,
        errno.EEXIST,
        errno.EINVAL,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EPERM,
        errno.EROFS,
    }
)


@dataclass(frozen=True, slots=True)
class Meta:
    """What a shard says about itself. `claim_nbytes` bounds what it may occupy, in use or not."""

    claim_nbytes: int
    parts: tuple[str, ...] = ()  # of the processes that wrote here, the latest first

    def encode(self) -> bytes:
        fields = {"format": FORMAT, "claim_bytes": self.claim_nbytes, "parts": self.parts}
        return json.dumps(fields).encode("ascii")


class Directory:
    """The directory of one tier: its shards, and the lock under which they are chosen and divided.

    `lock` is held only while a process opens, or asks for a larger part of the capacity; it ends with
    the process, as every lock here does.
    """

    def __init__(self, files: Files, path: Path, *, capacity_nbytes: int, processes: int) -> None:
        self._files = files
        self.path = path
        self.processes = processes
        self.capacity_nbytes = capacity_nbytes - ROOT_OVERHEAD_NBYTES
        self.share_nbytes = self.capacity_nbytes // processes
        self._place: Path | None = None  # its real path, while it is open
        self._fd = -1
        self._lock_fd = -1

    def open(self, timeout_s: float) -> None:
        """Makes the directory where it doesn't exist, and proves that it is ours to use.

        Raises:
            ConfigError: the path can't be used, lies inside another tier's, or holds a format this version
                doesn't know.
            BackendUnavailable: another process is making it, for `timeout_s` now.
        """
        place = Path(os.path.realpath(self.path))
        take_place(self._files, place)
        self._place = place
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = self._files.open_directory(str(self.path))
            self._lock_fd = self._files.open(_LOCK, os.O_RDWR | os.O_CREAT, self._fd)
            if not self._has_format():
                with self.locked(timeout_s):  # another process may be making the same directory
                    if not self._has_format():
                        text = json.dumps({"format": FORMAT}).encode("ascii")
                        write_small(self._files, FORMAT_FILE, text, self._fd)
        except OSError as error:
            raise unusable(self.path, error) from error.with_traceback(None)

    def close(self) -> None:
        place, self._place = self._place, None
        if place is not None:
            leave_place(place)
        for fd in (self._lock_fd, self._fd):
            if fd >= 0:
                self._files.close(fd)
        self._fd = self._lock_fd = -1

    def _has_format(self) -> bool:
        text = read_small(self._files, FORMAT_FILE, self._fd)
        if text:
            check_format(text, self.path / FORMAT_FILE)
        return bool(text)

    @contextmanager
    def locked(self, timeout_s: float) -> Iterator[None]:
        """The directory's lock.

        Raises:
            BackendUnavailable: another process held it for `timeout_s`.
        """
        pause, waited = threading.Event(), 0.0
        while not self._files.lock(self._lock_fd):
            if waited >= timeout_s:
                raise BackendUnavailable(f"{self.path}: another process is busy opening this directory")
            pause.wait(_LOCK_POLL_S)
            waited += _LOCK_POLL_S
        try:
            yield
        finally:
            self._files.unlock(self._lock_fd)

    # -- shards; every method below wants the directory's lock -----------------------------------

    def acquire(self, parts: Sequence[str]) -> Shard:
        """The free shard last written for `parts`, else a new one, else the free one idle for longest.

        Raises:
            BackendUnavailable: every shard is held; the message names the holders.
            ConfigError: a shard has a format this version doesn't know; nothing was changed.
        """
        numbers = self.numbers()
        metas = {number: self._meta(number) for number in numbers}
        opened: list[Shard] = []
        try:
            chosen = self._choose(metas, parts, opened)
            opened.remove(chosen)
        finally:
            for shard in opened:
                shard.close()
        before = metas.get(chosen.number, Meta(0))
        kept = [part for part in before.parts if part not in parts]
        chosen.meta = Meta(before.claim_nbytes, (*parts, *kept)[:_KEPT_PARTS])
        return chosen

    def _choose(self, metas: Mapping[int, Meta], parts: Sequence[str], opened: list[Shard]) -> Shard:
        """Picks a shard and owns it; appends every shard that it opened to `opened`."""
        free: list[tuple[bool, float, Shard]] = []
        holders: list[str] = []
        held_here = False
        for number, meta in metas.items():
            shard = Shard(self._files, self._fd, number)
            opened.append(shard)
            if shard.try_own():
                ours = not parts or not set(parts).isdisjoint(meta.parts)
                free.append((ours, shard.last_written(), shard))
            else:
                holder = shard.holder()
                here = holder == str(os.getpid())
                held_here |= here
                holders.append(f"{shard.name} by {'this process' if here else f'process {holder}'}")
        free.sort(key=lambda row: row[:2])
        if free and free[-1][0]:
            return free[-1][2]
        if len(metas) < self.processes and self._has_room_for_one_more(metas):
            number = next(n for n in range(len(metas) + 1) if n not in metas)
            shard = Shard(self._files, self._fd, number)
            opened.append(shard)
            shard.create()
            return shard
        if free:
            return free[0][2]
        held = ", ".join(holders)
        if len(metas) < self.processes:
            raise BackendUnavailable(
                f"{self.path}: other processes still hold all of its capacity ({held}); it is shared anew "
                f"as they evict or end"
            )
        todo = (
            "another tier or engine of this process uses the same path: give each its own"
            if held_here
            else "end what holds it"
        )
        raise BackendUnavailable(
            f"{self.path}: in use ({held}); {todo}, or raise `processes` (now {self.processes})"
        )

    def surplus(self, own: Shard, used_nbytes: int) -> Shard | None:
        """A free shard to take in: there are more than `processes`, or more claimed than the capacity."""
        numbers = self.numbers()
        if len(numbers) <= self.processes and self.others_nbytes(own) + used_nbytes <= self.capacity_nbytes:
            return None
        for number in numbers:
            if number != own.number:
                shard = Shard(self._files, self._fd, number)
                if shard.try_own():
                    return shard
                shard.close()
        return None

    def others_nbytes(self, *mine: Shard) -> int:
        """What all shards but `mine` may occupy."""
        numbers = set(self.numbers()).difference(shard.number for shard in mine)
        return sum(self._meta(number).claim_nbytes for number in numbers)

    def divide(self, own: Shard, used_nbytes: int) -> int:
        """Records what `own` may occupy from now on and returns its limit, which may lie below its use."""
        limit = max(min(self.share_nbytes, self.capacity_nbytes - self.others_nbytes(own)), 0)
        own.write_meta(replace(own.meta, claim_nbytes=max(limit, used_nbytes)))
        return limit

    def _has_room_for_one_more(self, metas: Mapping[int, Meta]) -> bool:
        claimed = sum(meta.claim_nbytes for meta in metas.values())
        return claimed + min(LEAST_NBYTES, self.share_nbytes) <= self.capacity_nbytes

    def numbers(self) -> list[int]:
        names = (name.removeprefix("shard-") for name in self._files.list(self._fd) if name[:6] == "shard-")
        return sorted(int(name) for name in names if len(name) == 3 and name.isdecimal())

    def _meta(self, number: int) -> Meta:
        shard = _SHARD.format(number)
        where = self.path / shard / _META
        text = read_small(self._files, f"{shard}/{_META}", self._fd)
        if not text:
            return Meta(self.share_nbytes)  # its maker died first; nobody ever claims more at first
        fields = check_format(text, where) if "format" in read_fields(text) else {}
        claim, parts = fields.get("claim_bytes"), fields.get("parts")
        if not isinstance(claim, int) or not isinstance(parts, list) or claim < 0:
            log.warning(
                "%s is damaged: the shard may hold all of the capacity; its next owner mends it", where
            )
            return Meta(self.capacity_nbytes)
        return Meta(claim, tuple(str(part) for part in parts))


class Shard:
    """One subdirectory, owned by the process that holds its lock. Journal and slots lie in it."""

    def __init__(self, files: Files, root_fd: int, number: int) -> None:
        self._files = files
        self._root_fd = root_fd
        self._lock_fd = -1
        self.number = number
        self.name = _SHARD.format(number)
        self.fd = -1
        self.slots_fd = -1
        self.meta = Meta(0)

    def create(self) -> None:
        """Makes the directory and owns it; the directory's lock keeps others away meanwhile."""
        self._files.mkdir(self.name, self._root_fd)
        if not self.try_own():
            raise BackendUnavailable(f"{self.name} was taken by process {self.holder()} while it was made")

    def try_own(self) -> bool:
        """Takes the shard's lock, which lasts as long as this process; False when another holds it."""
        try:
            self.fd = self._files.open_directory(self.name, self._root_fd)
            self._lock_fd = self._files.open(_LOCK, os.O_RDWR | os.O_CREAT, self.fd)
            if not (self._files.lock(self._lock_fd) and self._lock_directory()):
                return False
        except OSError:
            self.close()
            raise
        _watch_forks()
        _owned.add(self)
        return True

    def _lock_directory(self) -> bool:
        """Locks the directory itself, too: who tidies up may remove the lock's file, as it grows old."""
        try:
            return self._files.lock(self.fd)
        except OSError:  # a file system that locks only files, written to
            return True

    def prepare(self) -> None:
        """Opens the slots, and writes this process's number where others look for the holder."""
        self._files.truncate(self._lock_fd, 0)
        self._files.pwritev(self._lock_fd, [memoryview(b"%d\n" % os.getpid())], 0)
        with suppress(FileExistsError):
            self._files.mkdir(_SLOTS, self.fd)
        self.slots_fd = self._files.open_directory(_SLOTS, self.fd)

    def holder(self) -> str:
        """The number of the process that last wrote it here."""
        pid = read_small(self._files, _LOCK, self.fd).strip()
        return pid.decode("ascii") if pid.isdigit() else "unknown"

    def last_written(self) -> float:
        try:
            return self._files.stat("journal", self.fd).st_mtime
        except FileNotFoundError:
            return 0.0

    def write_meta(self, meta: Meta) -> None:
        write_small(self._files, _META, meta.encode(), self.fd)
        self.meta = meta

    def remove(self) -> None:
        """Deletes the shard's directory with all that is ours in it; what isn't, stays."""
        self._clear(self.slots_fd)
        for name in self._files.list(self.fd):
            if name not in (_SLOTS, _LOCK):
                self._files.unlink(name, self.fd)
        self._files.rmdir(_SLOTS, self.fd)
        self._files.unlink(_LOCK, self.fd)
        self._files.rmdir(self.name, self._root_fd)

    def _clear(self, dir_fd: int) -> None:
        for name in self._files.list(dir_fd):
            fd = self._files.open_directory(name, dir_fd)
            try:
                for slot in self._files.list(fd):
                    self._files.unlink(slot, fd)
            finally:
                self._files.close(fd)
            self._files.rmdir(name, dir_fd)

    def close(self) -> None:
        """Lets go of the shard: another process may own it from here on."""
        _owned.discard(self)
        for fd in (self.slots_fd, self.fd, self._lock_fd):
            if fd >= 0:
                self._files.close(fd)
        self.slots_fd = self.fd = self._lock_fd = -1

    def is_gone(self) -> bool:
        """Whether somebody removed the directory of the slots, so that nothing can be put there any more."""
        try:
            return self._files.stat(_SLOTS, self.fd).st_ino != self._files.fstat(self.slots_fd).st_ino
        except FileNotFoundError:
            return True
        except OSError:
            return False

    def let_go_in_child(self) -> None:
        """In a forked child: the lock stays the parent's alone, and ends with it."""
        fds = (self._lock_fd, self.fd)
        self._lock_fd = self.fd = -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)


_owned: weakref.WeakSet[Shard] = weakref.WeakSet()


@functools.cache
def _watch_forks() -> None:
    def let_go() -> None:
        for shard in list(_owned):
            shard.let_go_in_child()

    os.register_at_fork(after_in_child=let_go)


def unusable(path: Path, error: OSError) -> LMCacheError:
    """The error for a directory that can't be opened: the user's to mend, or passing by itself."""
    reason = error.strerror or str(error)
    if error.errno in _USERS_FAULT:
        return ConfigError(
            f"path {path}: no files can be kept there ({reason}); choose a directory on a disk that this "
            f"user (uid {os.getuid()}) can write to"
        )
    return BackendUnavailable(f"path {path}: {reason}")
