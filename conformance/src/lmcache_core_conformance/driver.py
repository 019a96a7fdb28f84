"""Drives one backend through the contract, as the core would: its own Call, Host, memory and opened store."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from lmcache_core.errors import BackendError, DeadlineExceeded
from lmcache_core.identity.keys import StorageKey
from lmcache_core.memory import MemoryPool
from lmcache_core.storage.contract import (
    Backend,
    BackendStats,
    Call,
    Capabilities,
    Entry,
    Item,
    Outcome,
    Page,
    Status,
    View,
)
from lmcache_core_conformance.values import PAGE

_noise = memoryview(hashlib.shake_128(b"noise").digest(16 * PAGE))
"""As long as any buffer was so far: made once, and only copied from."""
_SETTLING_S = 0.25
"""How long after its deadline a call that gives up there may take to say so."""


class Buffer:
    """Page-aligned memory in pieces, with `gap` bytes around each, all of it noise until written.

    Each buffer is a mapping of its own, so `free` can prove that nobody else refers to it.
    """

    def __init__(self, lengths: Sequence[int], *, content: bytes | None = None, gap: int = PAGE) -> None:
        self.lengths = tuple(lengths)
        self._starts: list[int] = []
        position = gap
        for length in self.lengths:
            self._starts.append(position)
            position += length + gap
        self._nbytes = max(position, PAGE)
        self._map = mmap.mmap(-1, self._nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # no more than advice: the first touch of a large buffer costs most of it
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._memory: memoryview | None = memoryview(self._map)
        self.make_noise()
        if content is not None:
            self.write(content)

    def views(self) -> tuple[View, ...]:
        """Fresh views of the pieces, in order."""
        return tuple(
            View(self._address + start, length, self._bytes(), start)
            for start, length in zip(self._starts, self.lengths, strict=True)
        )

    def write(self, content: bytes) -> None:
        """Fills the pieces with `content`, which is as long as they are."""
        position = 0
        for start, length in zip(self._starts, self.lengths, strict=True):
            self._bytes()[start : start + length] = content[position : position + length]
            position += length

    def read(self, nbytes: int | None = None) -> bytes:
        """The first `nbytes` bytes (all, by default) of the pieces."""
        joined = b"".join(
            bytes(self._bytes()[start : start + length])
            for start, length in zip(self._starts, self.lengths, strict=True)
        )
        return joined if nbytes is None else joined[:nbytes]

    def make_noise(self) -> None:
        """Fills everything, gaps included, with noise."""
        self._bytes()[:] = _noise_of(self._nbytes)

    def outside_is_noise(self) -> bool:
        """Whether every byte outside the pieces is still the noise put there."""
        noise = _noise_of(self._nbytes)
        ends = [0, *(start + length for start, length in zip(self._starts, self.lengths, strict=True))]
        return all(
            self._bytes()[end:start] == noise[end:start]
            for end, start in zip(ends, [*self._starts, self._nbytes], strict=True)
        )

    def is_noise_from(self, nbytes: int) -> bool:
        """Whether the pieces are still noise after their first `nbytes` bytes."""
        noise, position = _noise_of(self._nbytes), 0
        for start, length in zip(self._starts, self.lengths, strict=True):
            first = start + min(max(nbytes - position, 0), length)
            if self._bytes()[first : start + length] != noise[first : start + length]:
                return False
            position += length
        return True

    def free(self) -> bool:
        """Unmaps the memory. False when something still refers to it (it then stays mapped)."""
        self._memory = None
        try:
            self._map.close()
        except BufferError:
            return False
        return True

    def _bytes(self) -> memoryview:
        if self._memory is None:
            raise ValueError("the buffer was freed")
        return self._memory


def _noise_of(nbytes: int) -> memoryview:
    global _noise
    noise = _noise
    if nbytes > len(noise):
        noise = _noise = memoryview(bytes(noise) * -(-nbytes // len(noise)))
    return noise[:nbytes]


class RecordingCall:
    """A `Call` that keeps every settlement, the wrong ones too. Thread-safe."""

    def __init__(
        self,
        num_items: int,
        deadline_s: float,
        before_settling: Callable[[], None] | None = None,
        on_settled: Callable[[int, Outcome], None] | None = None,
    ) -> None:
        self._began = time.monotonic()
        self._ended: float | None = None
        self.deadline = self._began + deadline_s
        self.cancelled = False
        self.repeated: list[int] = []
        self.out_of_range: list[int] = []
        self.unsettled_at_return: list[int] = []
        self.raised: Exception | None = None
        self._before_settling = before_settling
        self._on_settled = on_settled
        self._outcomes: list[Outcome | None] = [None] * num_items
        self._settled = threading.Condition()  # guards the outcomes and the lists above

    def remaining(self) -> float:
        left = self.deadline - time.monotonic()
        if left <= 0 or self.cancelled:
            raise DeadlineExceeded("the call was cancelled" if self.cancelled else "the deadline passed")
        return left

    def done(self, index: int, outcome: Outcome) -> None:
        if self._before_settling is not None:
            self._before_settling()
        if self._on_settled is not None:
            self._on_settled(index, outcome)
        with self._settled:
            if not 0 <= index < len(self._outcomes):
                self.out_of_range.append(index)
            elif self._outcomes[index] is not None:
                self.repeated.append(index)
            else:
                self._outcomes[index] = outcome
            self._settled.notify_all()

    def finish(self, error: BackendError | None, *, wait: bool) -> None:
        """Settles what the backend left open as FAILED; with `wait`, only a moment after the deadline.

        Who gives up at the deadline settles just behind it.
        """
        with self._settled:
            if wait:
                patience_s = self.deadline - time.monotonic() + _SETTLING_S
                self._settled.wait_for(lambda: None not in self._outcomes, max(patience_s, 0))
            for index, outcome in enumerate(self._outcomes):
                if outcome is None:
                    self.unsettled_at_return.append(index)
                    failure = error or BackendError("the backend did not settle this item")
                    self._outcomes[index] = Outcome(status=Status.FAILED, error=failure)
        self._ended = time.monotonic()

    @property
    def took_s(self) -> float:
        """How long the call has run, and no longer once it has ended."""
        return (self._ended or time.monotonic()) - self._began

    @property
    def statuses(self) -> list[Status]:
        """How the items ended that are settled."""
        return [outcome.status for outcome in self.outcomes]

    @property
    def outcomes(self) -> list[Outcome]:
        with self._settled:
            return [outcome for outcome in self._outcomes if outcome is not None]


class RecordingHost:
    """A `Host` with a pool of its own; keeps what the backend reports as lost."""

    def __init__(self, *, capacity_bytes: int | None, deadline_s: float, max_in_flight: int) -> None:
        self.tier = "conformance"
        self.deadline_s = deadline_s
        self.max_in_flight = max_in_flight
        self.capacity_bytes = capacity_bytes
        self.parts: tuple[str, ...] = ()
        self.lost_copies: list[tuple[StorageKey, int | None]] = []
        self.lost_everything: list[str] = []
        self._pool: MemoryPool | None = None
        self._lock = threading.Lock()  # guards the making of the pool

    @property
    def pool(self) -> MemoryPool:
        with self._lock:
            if self._pool is None:
                self._pool = MemoryPool(2 * (self.capacity_bytes or 0) + (32 << 20), huge_pages=False)
            return self._pool

    @property
    def pool_if_used(self) -> MemoryPool | None:
        """The pool, unless nobody asked for it."""
        return self._pool

    def lost(self, copies: Sequence[tuple[StorageKey, int | None]], reason: str) -> None:
        self.lost_copies.extend(copies)

    def lost_all(self, reason: str) -> None:
        self.lost_everything.append(reason)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()


@dataclass(frozen=True, slots=True)
class Got:
    """What a get gave: the outcome, and the bytes it speaks of when it is OK."""

    outcome: Outcome
    value: bytes = b""

    @property
    def status(self) -> Status:
        return self.outcome.status


@dataclass(frozen=True, slots=True)
class Want:
    """One item of a get: the pieces of memory offered, and the range when not the whole value."""

    key: StorageKey
    lengths: tuple[int, ...]
    offset: int | None = None


@dataclass(slots=True)
class Store:
    """One opened backend. Every method is one call of the contract, as the core would make it."""

    backend: Backend[Any]
    host: RecordingHost
    capabilities: Capabilities
    options: Mapping[str, object] = field(repr=False)
    calls: list[RecordingCall] = field(default_factory=list, repr=False)
    """Every call in the order of their beginnings, those still running too."""
    before_settling: Callable[[], None] | None = None
    """Runs on the backend's thread before an item is settled: the place to hold a call up inside."""
    on_settled: Callable[[int, Outcome], None] | None = None
    """Runs on the backend's thread with what an item is settled with: does at once what the core might do."""
    after_method: Callable[[], None] | None = None
    """Runs when the backend's method has returned, whether or not its items are settled."""
    after_call: Callable[[], None] | None = None
    """Runs after each call."""
    closed: bool = False

    def put(self, key: StorageKey, value: bytes, lengths: Sequence[int] | None = None) -> Outcome:
        return self.put_many([(key, value)], lengths)[0]

    def put_many(
        self, values: Sequence[tuple[StorageKey, bytes]], lengths: Sequence[int] | None = None
    ) -> list[Outcome]:
        """Puts copies of `values`, each in pieces of `lengths` (one piece by default)."""
        buffers = [Buffer(lengths or [len(value)], content=value) for _, value in values]
        items = [Item(key, buffer.views()) for (key, _), buffer in zip(values, buffers, strict=True)]
        return self.call(len(items), lambda call: self.backend.put_many(items, call))

    def get(self, key: StorageKey, nbytes: int) -> Got:
        """Gets the whole value into one piece of at most `nbytes`."""
        return self.get_many([Want(key, (nbytes,))])[0]

    def get_many(self, wants: Sequence[Want]) -> list[Got]:
        buffers = [Buffer(want.lengths) for want in wants]
        items = [item_for(want, buffer) for want, buffer in zip(wants, buffers, strict=True)]
        outcomes = self.call(len(items), lambda call: self.backend.get_many(items, call))
        return [
            Got(outcome, buffer.read(outcome.nbytes) if outcome.status is Status.OK else b"")
            for outcome, buffer in zip(outcomes, buffers, strict=True)
        ]

    def stat(self, key: StorageKey) -> Outcome:
        return self.stat_many([key])[0]

    def stat_many(self, keys: Sequence[StorageKey]) -> list[Outcome]:
        return self.call(len(keys), lambda call: self.backend.stat_many(keys, call))

    def delete(self, key: StorageKey) -> Outcome:
        return self.delete_many([key])[0]

    def delete_many(self, keys: Sequence[StorageKey]) -> list[Outcome]:
        return self.call(len(keys), lambda call: self.backend.delete_many(keys, call))

    def scan_page(self, prefix: str, cursor: str | None, limit: int) -> Page:
        return self.backend.scan(RecordingCall(0, self.host.deadline_s), prefix, cursor, limit)

    def scan(self, prefix: str = "", *, limit: int = 100, max_pages: int = 10_000) -> list[Entry]:
        """Every page's entries; stops after `max_pages`, so that a scan without an end is seen."""
        entries: list[Entry] = []
        cursor: str | None = None
        for _ in range(max_pages):
            page = self.scan_page(prefix, cursor, limit)
            entries.extend(page.entries)
            cursor = page.cursor
            if cursor is None:
                return entries
        raise BackendError(f"the scan did not end within {max_pages} pages", op="scan")

    def stats(self) -> BackendStats:
        return self.backend.stats()

    def call(self, num_items: int, method: Callable[[Call], None]) -> list[Outcome]:
        """Runs one call and returns an outcome for each item; what is raised fails the unsettled ones."""
        call = RecordingCall(num_items, self.host.deadline_s, self.before_settling, self.on_settled)
        self.calls.append(call)
        try:
            method(call)
        except Exception as error:  # noqa: BLE001 (recorded boundary: the backend is foreign code)
            call.raised = error.with_traceback(None)  # a traceback keeps the call's views alive
            call.finish(_as_backend_error(error), wait=False)
        else:
            if self.after_method is not None:
                self.after_method()
            call.finish(None, wait=self.capabilities.asynchronous)
        if self.after_call is not None:
            self.after_call()
        return call.outcomes

    def close(self) -> None:
        """Closes the backend, then the pool, unless that was done."""
        if not self.closed:
            self.closed = True
            self.backend.close()
            self.host.close()


def item_for(want: Want, buffer: Buffer) -> Item:
    """The item that asks for `want` into `buffer`."""
    if want.offset is None:
        return Item(want.key, buffer.views())
    return Item(want.key, buffer.views(), offset=want.offset, whole=False)


def _as_backend_error(error: Exception) -> BackendError:
    if isinstance(error, BackendError):
        return error
    return BackendError(f"{type(error).__name__}: {error}")
