"""An opened shard: its parts put together in order, and its share of the directory's capacity."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from lmcache_core.sdk import BackendUnavailable
from lmcache_core_disk.catalog import Catalog
from lmcache_core_disk.direct_io import DirectIO
from lmcache_core_disk.files import Files
from lmcache_core_disk.journal import Journal
from lmcache_core_disk.shard import SHARD_OVERHEAD_NBYTES, Directory, Shard
from lmcache_core_disk.slots import Slot, Slots

log = logging.getLogger(__name__)

_EXTEND_PAUSE_S = 1.0


class _Opening:
    """Nobody else commits while a shard opens: no wait."""

    def remaining(self) -> float:
        return 1.0


_OPENING = _Opening()


class Store:
    """This process's shard of `directory`. Built by `open_store`, under the directory's lock."""

    def __init__(self, files: Files, directory: Directory, shard: Shard, io: DirectIO) -> None:
        self.directory = directory
        self.shard = shard
        self.io = io
        self.slots = Slots(io, shard.slots_fd, overhead_nbytes=SHARD_OVERHEAD_NBYTES, extend=self._extend)
        self.journal = Journal(files, shard.fd, self.slots.reserve)
        self.catalog = Catalog(self.slots, self.journal)
        self._files = files
        self._claiming = threading.Lock()  # one thread at a time rewrites the shard's meta; others go on
        self._next_extend = 0.0

    def load(self) -> None:
        """Reads what there is, takes in surplus shards, and fits all of it into the capacity."""
        self.catalog.load()
        taken_in: set[int] = set()
        while (other := self.directory.surplus(self.shard, self.slots.used_nbytes)) is not None:
            try:
                if other.number in taken_in:
                    break  # it could not be removed before
                taken_in.add(other.number)
                self._take_in(other)
            finally:
                other.close()
        self._trim(self.directory.capacity_nbytes - self.directory.others_nbytes(self.shard))
        self.slots.limit = self.directory.divide(self.shard, self.slots.used_nbytes)
        self.slots.shrink()  # free slots above our share serve others better
        self.relax()
        if self.slots.limit <= 0:
            raise BackendUnavailable(f"{self.directory.path}: other processes hold all of its capacity")

    def relax(self) -> None:
        """Gives up the claim to bytes above the limit, once they are no longer used."""
        claim = max(self.slots.limit, self.slots.used_nbytes)
        if claim >= self.shard.meta.claim_nbytes or not self._claiming.acquire(blocking=False):
            return
        try:
            self.shard.write_meta(replace(self.shard.meta, claim_nbytes=claim))
        except OSError as error:
            log.warning("%s: the shard's claim could not be lowered: %s", self.directory.path, error)
        finally:
            self._claiming.release()

    def close(self) -> None:
        """Closes every descriptor. Nothing may be running."""
        self.journal.close()
        self.shard.close()
        self.directory.close()

    # -- inside ----------------------------------------------------------------------------------

    def _extend(self, used_nbytes: int) -> int:
        """A larger part of the capacity, where another process has given some up; the limit it gives."""
        limit, now = self.slots.limit, time.monotonic()
        if limit >= self.directory.share_nbytes or now < self._next_extend:
            return limit
        if not self._claiming.acquire(blocking=False):
            return limit
        try:
            self._next_extend = now + _EXTEND_PAUSE_S
            with self.directory.locked(0.0):
                return max(limit, self.directory.divide(self.shard, used_nbytes))
        except BackendUnavailable:
            return limit
        finally:
            self._claiming.release()

    def _trim(self, bound_nbytes: int) -> None:
        """Drops free slots, then values, children first, until all that is used fits `bound_nbytes`."""
        self.slots.limit = bound_nbytes
        self.slots.shrink()
        if self.slots.used_nbytes <= bound_nbytes:
            return
        for key in self.catalog.shedding_order():
            self.catalog.remove(key, _OPENING)
            if self.slots.used_nbytes <= bound_nbytes:
                break

    def _take_in(self, other: Shard) -> None:
        """Moves the values of a shard that nobody owns into this one, by renaming, and removes it."""
        other.prepare()
        slots = Slots(self.io, other.slots_fd, overhead_nbytes=SHARD_OVERHEAD_NBYTES, extend=lambda used: 0)
        journal = Journal(self._files, other.fd, slots.reserve)
        found = journal.load()
        present = slots.survey()
        values = [value for value in found.values.values() if value.slot in present]
        live = [(value.slot, value.charged) for value in values]
        slots.adopt(live, present.difference(slot for slot, _ in live))
        slots.charge(2 * journal.nbytes)
        slots.shrink()  # its free slots serve nobody

        others = self.directory.others_nbytes(self.shard, other)
        self.slots.limit = self.directory.capacity_nbytes - others - slots.used_nbytes
        for value in values:
            if value.key in self.catalog:
                continue
            slot = self.slots.move_in(Slot(value.slot, value.nbytes, value.charged), other.slots_fd)
            if slot is None:
                continue
            self.catalog.commit(value.key, value.parent, slot, _OPENING)
        other.remove()
        log.info("%s: took %d values in from %s", self.directory.path, len(values), other.name)


def open_store(
    files: Files,
    directory: Directory,
    *,
    parts: Sequence[str],
    direct_io: bool,
    timeout_s: float,
) -> Store:
    """Opens the directory and a shard of it, or leaves nothing open.

    Raises:
        ConfigError: the path can't be used, or holds a format that this version doesn't know.
        BackendUnavailable: no free shard, no capacity left, or another process is opening.
        OSError: the shard's files can't be used.
    """
    try:
        directory.open(timeout_s)
        with directory.locked(timeout_s):
            shard = directory.acquire(parts)
            try:
                shard.prepare()
                io = DirectIO(files, direct=direct_io, where=str(directory.path))
                io.probe(shard.fd)
                store = Store(files, directory, shard, io)
                try:
                    store.load()
                except BaseException:
                    store.journal.close()
                    raise
            except BaseException:
                shard.close()
                raise
    except BaseException:
        directory.close()
        raise
    return store
