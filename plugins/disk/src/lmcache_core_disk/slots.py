"""Slot files: one value each, recycled in place, and the byte count that is the hard cap."""

from __future__ import annotations

import contextlib
import errno
import heapq
import itertools
import logging
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from lmcache_core_disk.direct_io import PAGE, DirectIO

log = logging.getLogger(__name__)

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
_DIRECTORY_SLOTS = 256
_DIRECTORY_NBYTES = 2 * PAGE  # 256 two-letter names fit one page; the parent's entry has the rest
_EXTENTS_NBYTES = PAGE  # a file in more than a few extents may need a block of its own to list them

_DIRECTORY = re.compile(r"[0-9a-f]{6}")  # so the journal has room for every number
_NAMES = tuple(f"{low:02x}" for low in range(_DIRECTORY_SLOTS))
_LOW = {name: low for low, name in enumerate(_NAMES)}


class Slot(NamedTuple):
    """A file that holds, or may hold, one value of exactly `nbytes`; it counts as `charged` bytes."""

    id: int
    nbytes: int
    charged: int
    recycled: bool = True


class Slots:
    """Slot files under one directory, and everything that counts against this process's bytes.

    A slot that `write` filled is the caller's until it comes back by `give_back` or `discard`, which it
    must not while anybody reads it. Free slots keep their bytes, and their
    place on the disk (overwriting in place is nearly twice as fast as a new file), until a value of
    another length needs the room.

    `limit` is the cap; used never rises above it. Freed slots are unlinked while used is above it,
    as it can be after a restart with less capacity.
    """

    def __init__(
        self, io: DirectIO, dir_fd: int, *, overhead_nbytes: int, extend: Callable[[int], int]
    ) -> None:
        self._io = io
        self._dir_fd = dir_fd
        self._extend = extend  # asks for more of the directory's capacity, gives the new limit
        # Guards everything below; no system call is made under it. Unlinking takes a slot off the free
        # list first, and its bytes off the count after.
        self._lock = threading.Lock()
        self.limit = 0
        self._used = overhead_nbytes
        self._slot_nbytes = 0  # the part of used that lies in slots
        self._free: dict[int, list[Slot]] = {}
        self._free_nbytes = 0
        self._stuck: deque[tuple[Slot, bool]] = deque()  # could not be unlinked; whether the id serves again
        self._spare_ids: list[int] = []  # heap: low numbers are used first, so directories stay few
        self._directories: set[int] = set()
        self.written = [0, 0]  # values written to new slots, to recycled ones

    # -- the count -------------------------------------------------------------------------------

    @property
    def used_nbytes(self) -> int:
        return self._used

    def counters(self) -> dict[str, int]:
        with self._lock:
            return {
                "free_slot_bytes": self._free_nbytes,
                "overhead_bytes": self._used - self._slot_nbytes,
                "new_slots": self.written[False],
                "recycled_slots": self.written[True],
            }

    def charge(self, nbytes: int) -> None:
        """Counts bytes that are there already, whatever the limit says."""
        with self._lock:
            self._used += nbytes

    def reserve(self, nbytes: int) -> bool:
        """Counts `nbytes` more, unlinking free slots to make room; False when there is none.

        What could not be unlinked before is tried again here, where its bytes are wanted.
        """
        extended = False
        while True:
            with self._lock:
                if self._used + nbytes <= self.limit:
                    self._used += nbytes
                    return True
                reachable = self._used - self._free_nbytes + nbytes <= self.limit
                victim = self._pop_any() if reachable else None
            if victim is not None:
                self.discard(victim)
            elif self._unlink_stuck():
                continue
            elif extended:
                return False
            else:
                self.limit = self._extend(self._used)
                extended = True

    # -- slots -----------------------------------------------------------------------------------

    def write(self, nbytes: int, buffers: Sequence[memoryview]) -> Slot | None:
        """Writes a value into a slot that nothing names; None when the capacity is used up.

        Raises:
            OSError: the slot it was to go to is gone again.
        """
        while True:
            slot = self._take(nbytes)
            if slot is None:
                return None
            try:
                return self._fill(slot, buffers)
            except OSError as error:
                self.discard(slot)
                vanished = slot.recycled and error.errno == errno.ENOENT
                if not vanished and not (error.errno in _NO_ROOM and self._drop_free(nbytes)):
                    raise

    def _take(self, nbytes: int) -> Slot | None:
        with self._lock:
            same = self._free.get(nbytes)
            if same and self._used <= self.limit:
                return self._pop(nbytes)
        slot_id, fresh_directory = self._number()
        charged = nbytes + _EXTENTS_NBYTES
        if not self.reserve(charged + (_DIRECTORY_NBYTES if fresh_directory else 0)):
            self._unnumber(slot_id, fresh_directory)
            return None
        with self._lock:
            self._slot_nbytes += charged
        return Slot(slot_id, nbytes, charged, recycled=False)

    def _fill(self, slot: Slot, buffers: Sequence[memoryview]) -> Slot:
        """Writes the slot; returns it with the bytes it now occupies."""
        name = _name(slot.id)
        try:
            occupied = self._io.write(name, self._dir_fd, buffers, create=not slot.recycled)
        except FileNotFoundError:
            if slot.recycled:
                raise
            self._make_directory(name)
            occupied = self._io.write(name, self._dir_fd, buffers, create=True)
        charged = max(occupied, slot.nbytes)
        with self._lock:
            self._used += charged - slot.charged
            self._slot_nbytes += charged - slot.charged
            self.written[slot.recycled] += 1
        return Slot(slot.id, slot.nbytes, charged)

    def _drop_free(self, nbytes: int) -> bool:
        """Unlinks free slots of `nbytes` in all, for a file system fuller than our count; whether any."""
        dropped = 0
        while dropped < nbytes:
            with self._lock:
                victim = self._pop_any()
            if victim is None:
                break
            self.discard(victim)
            dropped += victim.charged
        return dropped > 0

    def open(self, slot_id: int) -> int:
        """A descriptor to read the slot by, for the caller to close."""
        return self._io.open(_name(slot_id), self._dir_fd)

    def give_back(self, slot: Slot) -> None:
        """Takes back a slot that nothing names or reads; keeps its file unless too much is used."""
        with self._lock:
            keep = self._used <= self.limit
            if keep:
                self._push(slot)
        if not keep:
            self.discard(slot)

    def discard(self, slot: Slot, *, reuse_id: bool = True) -> None:
        """Unlinks a slot; one that can't be unlinked stays counted, and out of use, until it can be.

        `reuse_id=False` when the journal may still name it.
        """
        try:
            self.unlink(slot.id)
        except OSError as error:
            log.warning("slot file %s could not be unlinked: %s", _name(slot.id), error)
            with self._lock:
                self._stuck.append((slot, reuse_id))
        else:
            self.forget(slot, reuse_id=reuse_id)

    def _unlink_stuck(self) -> bool:
        """Tries one slot that could not be unlinked once more; whether it went."""
        with self._lock:
            stuck = self._stuck.popleft() if self._stuck else None
        if stuck is None:
            return False
        slot, reuse_id = stuck
        try:
            self.unlink(slot.id)
        except OSError:
            with self._lock:
                self._stuck.append(stuck)
            return False
        self.forget(slot, reuse_id=reuse_id)
        return True

    def unlink(self, slot_id: int) -> None:
        """Removes the file alone; its bytes count until `forget`, when nobody has it open any more.

        Raises:
            OSError: it is still there.
        """
        with contextlib.suppress(FileNotFoundError):
            self._io.files.unlink(_name(slot_id), self._dir_fd)

    def forget(self, slot: Slot, *, reuse_id: bool) -> None:
        with self._lock:
            self._used -= slot.charged
            self._slot_nbytes -= slot.charged
            if reuse_id:
                heapq.heappush(self._spare_ids, slot.id)

    def shrink(self) -> None:
        """Unlinks free slots while more is used than the limit."""
        while True:
            with self._lock:
                victim = self._pop_any() if self._used > self.limit else None
            if victim is None:
                return
            self.discard(victim)

    # -- opening ---------------------------------------------------------------------------------

    def survey(self) -> set[int]:
        """The slot files there are."""
        files, found = self._io.files, set[int]()
        for directory in files.list(self._dir_fd):
            if not _DIRECTORY.fullmatch(directory):
                continue  # not ours: neither counted nor touched
            fd = files.open_directory(directory, self._dir_fd)
            try:
                names = files.list(fd)
            finally:
                files.close(fd)
            high = int(directory, 16) * _DIRECTORY_SLOTS
            found.update(high + _LOW[name] for name in names if name in _LOW)
            self._directories.add(high // _DIRECTORY_SLOTS)
        return found

    def adopt(self, live: Iterable[tuple[int, int]], orphans: Iterable[int]) -> None:
        """Counts what `survey` found: live (slot, charged) pairs; orphans become free slots if whole."""
        taken = set[int]()
        for slot_id, charged in live:
            taken.add(slot_id)
            self._slot_nbytes += charged
        for slot_id in sorted(orphans):
            status = self._io.files.stat(_name(slot_id), self._dir_fd)
            occupied = status.st_blocks * 512
            if status.st_size and status.st_size % PAGE == 0 and occupied >= status.st_size:
                taken.add(slot_id)
                self._slot_nbytes += occupied
                self._push(Slot(slot_id, status.st_size, occupied))
            else:
                self.unlink(slot_id)
        self._used += self._slot_nbytes + _DIRECTORY_NBYTES * len(self._directories)
        # Of the directories there are, and of no others: whatever number a stray file has for a name.
        self._spare_ids = sorted(
            slot_id for directory in self._directories for slot_id in _ids(directory) if slot_id not in taken
        )

    def move_in(self, slot: Slot, source_fd: int) -> Slot | None:
        """Renames a slot file of another shard into this one; None when there is no room to name it.

        Its bytes raise `limit` as much as they raise the count: they were the other shard's.
        """
        slot_id, fresh_directory = self._number()
        if fresh_directory and not self.reserve(_DIRECTORY_NBYTES):
            self._unnumber(slot_id, fresh_directory)
            return None
        with self._lock:
            self.limit += slot.charged
            self._used += slot.charged
            self._slot_nbytes += slot.charged
        name = _name(slot_id)
        self._make_directory(name)
        self._io.files.rename(_name(slot.id), name, source_fd, self._dir_fd)
        return Slot(slot_id, slot.nbytes, slot.charged)

    def _make_directory(self, name: str) -> None:
        with contextlib.suppress(FileExistsError):
            self._io.files.mkdir(name.partition("/")[0], self._dir_fd)

    # -- numbers ---------------------------------------------------------------------------------

    def _number(self) -> tuple[int, bool]:
        """A slot number not in use, and whether its directory has to be made."""
        with self._lock:
            if not self._spare_ids:
                directory = next(number for number in itertools.count() if number not in self._directories)
                self._spare_ids.extend(_ids(directory))
            slot_id = heapq.heappop(self._spare_ids)
            directory = slot_id // _DIRECTORY_SLOTS
            fresh_directory = directory not in self._directories
            self._directories.add(directory)
        return slot_id, fresh_directory

    def _unnumber(self, slot_id: int, fresh_directory: bool) -> None:
        with self._lock:
            heapq.heappush(self._spare_ids, slot_id)
            if fresh_directory:
                self._directories.discard(slot_id // _DIRECTORY_SLOTS)

    # -- under the lock --------------------------------------------------------------------------

    def _push(self, slot: Slot) -> None:
        self._free.setdefault(slot.nbytes, []).append(slot)
        self._free_nbytes += slot.charged

    def _pop(self, nbytes: int) -> Slot:
        slots = self._free[nbytes]
        slot = slots.pop()
        if not slots:
            del self._free[nbytes]
        self._free_nbytes -= slot.charged
        return slot

    def _pop_any(self) -> Slot | None:
        return self._pop(next(iter(self._free))) if self._free else None


def _ids(directory: int) -> range:
    return range(directory * _DIRECTORY_SLOTS, (directory + 1) * _DIRECTORY_SLOTS)


def _name(slot_id: int) -> str:
    return f"{slot_id // _DIRECTORY_SLOTS:06x}/{_NAMES[slot_id % _DIRECTORY_SLOTS]}"
