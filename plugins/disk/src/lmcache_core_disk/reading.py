"""One read under way: its value safe from recycling, its file open."""

from __future__ import annotations

from lmcache_core.sdk import Item, Outcome, Status, StorageKey, cut, host_memory
from lmcache_core_disk.journal import Value
from lmcache_core_disk.store import Store

MISS = Outcome(status=Status.MISS)


class Lost(Exception):
    """A value's file was removed or cut behind our back."""

    def __init__(self, value: Value, reason: str) -> None:
        super().__init__(f"{value.key} was lost: {reason}")
        self.value = value
        self.reason = reason


class Reading:
    """Started ahead of its turn, so that nothing stands between two transfers of a batch.

    Settling an item wakes the thread that verifies it, and that thread then holds the interpreter for
    milliseconds; a call that lets go of it in between, as opening a file does, would wait as long while
    the disk idles.
    """

    __slots__ = ("_error", "_fd", "_item", "_store", "_value")

    def __init__(self, store: Store, item: Item) -> None:
        self._store = store
        self._item = item
        self._fd = -1
        self._error: OSError | None = None
        self._value = store.catalog.acquire(item.key)
        if self._value is not None:
            try:
                self._fd = store.slots.open(self._value.slot)
            except OSError as error:
                self._error = error.with_traceback(None)

    @property
    def key(self) -> StorageKey:
        return self._item.key

    def run(self) -> Outcome:
        """Transfers into the item's views.

        Raises:
            Lost: the file is gone or too short.
            OSError: it can't be read.
        """
        value, item = self._value, self._item
        if value is None or (not item.whole and item.offset + item.nbytes > value.nbytes):
            return MISS
        if item.whole and value.nbytes > item.nbytes:
            return Outcome(status=Status.TOO_SMALL, nbytes=value.nbytes)
        if isinstance(self._error, FileNotFoundError):
            raise Lost(value, "its file is gone")
        if self._error is not None:
            raise self._error
        wanted = value.nbytes if item.whole else item.nbytes
        buffers = [host_memory(view) for view in cut(item.views, 0, wanted)]
        if self._store.io.read(self._fd, buffers, item.offset) < wanted:
            raise Lost(value, "its file is too short")
        return Outcome(status=Status.OK, nbytes=wanted, token=value.token)

    def close(self) -> None:
        """Lets go of file and value. Idempotent."""
        fd, self._fd = self._fd, -1
        value, self._value = self._value, None
        try:
            if fd >= 0:
                self._store.io.files.close(fd)
        finally:
            if value is not None:
                self._store.catalog.release(value)
