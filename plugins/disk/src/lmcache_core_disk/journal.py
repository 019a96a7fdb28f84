"""The shard's journal: an append-only list of what was stored and deleted, each record checked alone."""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lmcache_core.sdk import StorageKey
from lmcache_core_disk.direct_io import PAGE, move
from lmcache_core_disk.files import Files

# checksum of the rest (CRC-32) | length | kind | key length | token | slot | pages | pages charged,
# then the key, then the parent key (empty: none)
_HEAD = struct.Struct("<IHBBQIII")
_PUT, _DELETE = 1, 2
_START = b"lmcache-core-disk journal 1\n".ljust(32, b" ")

_FIRST_NBYTES = 4 * PAGE
_STEP_NBYTES = 1 << 20  # doubled up to this size, then grown by it

_NAME = "journal"
_NEW = "journal.new"


class JournalFull(Exception):
    """No room for one more record within the capacity."""


class Value:
    """One stored value. `record` is its line in the journal; what follows it is the catalog's."""

    __slots__ = ("charged", "gone", "key", "nbytes", "readers", "record", "slot", "token", "unlinked")

    def __init__(
        self, key: StorageKey, token: int, slot: int, nbytes: int, charged: int, record: bytes
    ) -> None:
        self.key = key
        self.token = token
        self.slot = slot
        self.nbytes = nbytes
        self.charged = charged
        self.record = record
        self.readers = 0
        self.gone = False
        self.unlinked = False

    @property
    def parent(self) -> StorageKey | None:
        parent = self.record[_HEAD.size + len(self.key) :]
        return StorageKey(parent.decode("latin-1")) if parent else None


def put_record(
    key: StorageKey, parent: StorageKey | None, token: int, slot: int, nbytes: int, charged: int
) -> bytes:
    names = (key + (parent or "")).encode("ascii")
    return _seal(_PUT, len(key), token, slot, nbytes // PAGE, -(-charged // PAGE), names)


def delete_record(key: StorageKey, token: int) -> bytes:
    return _seal(_DELETE, len(key), token, 0, 0, 0, key.encode("ascii"))


def _seal(kind: int, key_length: int, token: int, slot: int, pages: int, charged: int, names: bytes) -> bytes:
    length = _HEAD.size + len(names)
    record = bytearray(_HEAD.pack(0, length, kind, key_length, token, slot, pages, charged) + names)
    struct.pack_into("<I", record, 0, zlib.crc32(memoryview(record)[4:]))
    return bytes(record)


@dataclass(slots=True)
class Replay:
    """What a journal says: the values alive at its end, oldest first, and where its last record ends."""

    values: dict[StorageKey, Value] = field(default_factory=dict)
    token: int = 0
    end: int = len(_START)
    torn: bool = False
    """Something that is no record follows the end, or there is no start: it was cut short by a crash."""


def replay(memory: bytes) -> Replay:
    """Reads records up to the first that isn't whole. Survives any bytes.

    A later record of a key or of a slot replaces the earlier one.
    """
    result = Replay()
    values, owners = result.values, dict[int, Value]()
    if not memory.startswith(_START):
        result.torn = len(memory) > 0  # all zeros too, as a power loss leaves it: no start to append to
        return result
    view = memoryview(memory)
    unpack, crc32, head_nbytes, limit = _HEAD.unpack_from, zlib.crc32, _HEAD.size, len(memory)
    position, last = len(_START), 0
    while position + head_nbytes <= limit:
        checksum, length, kind, key_length, token, slot, pages, charged = unpack(memory, position)
        end = position + length
        names = position + head_nbytes
        if length < head_nbytes + key_length or end > limit or token <= last:
            break
        if crc32(view[position + 4 : end]) != checksum:
            break
        key = StorageKey(str(view[names : names + key_length], "latin-1"))
        old = values.pop(key, None)
        if old is not None:
            del owners[old.slot]
        if kind == _PUT:
            squatter = owners.get(slot)
            if squatter is not None:
                del values[squatter.key]
            value = Value(key, token, slot, pages * PAGE, charged * PAGE, memory[position:end])
            values[key] = owners[slot] = value
        position, last = end, token
    result.token, result.end = last, position
    result.torn = bool(memory[position:].strip(b"\0"))
    return result


class Journal:
    """Appends records to a file of zeros written ahead, so that a full disk can't stop a delete.

    Not thread-safe: the catalog's commit lock covers every call. `charged_nbytes`, twice the file's
    length, is what counts against the capacity: a compaction always has room for its new file.
    `reserve(nbytes)` asks for more. Records reach the page cache, which kill -9 leaves alone, and are
    never synced: after a power loss the journal may end early, or name slots whose bytes did not
    arrive, which the checksums of the frames in them show.
    """

    def __init__(self, files: Files, dir_fd: int, reserve: Callable[[int], bool]) -> None:
        self._files = files
        self._dir_fd = dir_fd
        self._reserve = reserve
        self._fd = -1
        self._nbytes = 0
        self._end = 0
        self.charged_nbytes = 0
        self.live_nbytes = 0  # of the records that a compaction would keep; the catalog counts
        self.compactions = 0

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def load(self) -> Replay:
        """Reads the journal there is, an empty one where there is none; sweeps a compaction cut short."""
        with contextlib.suppress(FileNotFoundError):
            self._files.unlink(_NEW, self._dir_fd)
        try:
            fd = self._files.open(_NAME, os.O_RDONLY, self._dir_fd)
        except FileNotFoundError:
            return Replay()
        try:
            self._nbytes = self._files.fstat(fd).st_size
            memory = bytearray(self._nbytes)
            move(self._files.preadv, fd, [memoryview(memory)], 0)
        finally:
            self._files.close(fd)
        return replay(bytes(memory))

    def start(self, found: Replay, records: Sequence[bytes], *, rewrite: bool) -> None:
        """Opens for appending after what `load` found, or after a rewrite that keeps just `records`."""
        self.live_nbytes = sum(map(len, records))
        if rewrite or self._nbytes % PAGE or self._nbytes < _FIRST_NBYTES:
            nbytes = _FIRST_NBYTES
            while nbytes < len(_START) + 2 * self.live_nbytes:
                nbytes += min(nbytes, _STEP_NBYTES)
            # Never longer than before: the old journal's charge covers both until the rename.
            before = -(-self._nbytes // PAGE) * PAGE
            self._rewrite(records, min(nbytes, max(before, _FIRST_NBYTES)))
        else:
            self._fd = self._files.open(_NAME, os.O_WRONLY, self._dir_fd)
            self._end = found.end
        self.charged_nbytes = 2 * self._nbytes

    def append(self, record: bytes, records: Callable[[], Sequence[bytes]]) -> None:
        """Writes one record; `records` gives the live ones when the journal must be written anew first.

        Raises:
            JournalFull: the capacity allows no longer journal. OSError: it couldn't be written.
                Either way the record does not count.
        """
        if self._was_removed():
            self._rewrite(records(), self._nbytes)
        if self._end + len(record) > self._nbytes:
            self._make_room(len(record), records)
        if self._files.pwritev(self._fd, [memoryview(record)], self._end) != len(record):
            raise OSError(errno.ENOSPC, "short write to the journal")
        self._end += len(record)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._files.close(fd)

    def _was_removed(self) -> bool:
        """Whether somebody unlinked or cut the file: what is appended now would not be there next time."""
        status = self._files.fstat(self._fd)
        return status.st_nlink == 0 or status.st_size < self._nbytes

    def _make_room(self, nbytes: int, records: Callable[[], Sequence[bytes]]) -> None:
        needed = len(_START) + self.live_nbytes + nbytes
        if 2 * needed > self._nbytes and self._grow():
            return
        if needed > self._nbytes:
            raise JournalFull
        self._rewrite(records(), self._nbytes)
        self.compactions += 1

    def _grow(self) -> bool:
        nbytes = self._nbytes + min(self._nbytes, _STEP_NBYTES)
        missing = 2 * nbytes - self.charged_nbytes
        if missing > 0:
            if not self._reserve(missing):
                return False
            self.charged_nbytes += missing
        self._write_zeros(self._fd, self._nbytes, nbytes)
        self._nbytes = nbytes
        return True

    def _rewrite(self, records: Sequence[bytes], nbytes: int) -> None:
        """Puts a journal of `nbytes` holding just `records` in the place of this one."""
        content = memoryview(b"".join([_START, *records]))
        fd = self._files.open(_NEW, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, self._dir_fd)
        try:
            if move(self._files.pwritev, fd, [content], 0) != len(content):
                raise OSError(errno.ENOSPC, "short write to the new journal")
            self._write_zeros(fd, len(content), nbytes)
            self._files.rename(_NEW, _NAME, self._dir_fd, self._dir_fd)
        except OSError:
            self._files.close(fd)
            self._files.unlink(_NEW, self._dir_fd)
            raise
        self.close()
        self._fd, self._nbytes, self._end = fd, nbytes, len(content)

    def _write_zeros(self, fd: int, start: int, end: int) -> None:
        zeros = memoryview(bytes(min(end - start, _STEP_NBYTES)))
        while start < end:
            written = self._files.pwritev(fd, [zeros[: end - start]], start)
            if not written:
                raise OSError(errno.ENOSPC, "short write to the journal")
            start += written
