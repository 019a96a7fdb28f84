"""The backend contract: what a storage plugin implements and what it is handed.

The core owns threads, deadlines, retries, breakers, capacity and integrity; a backend owns its driver.
Memory always belongs to the caller. Calls are batched, and each item is settled by itself.
Plugins never construct `View`, `Item`, `Call` or `Host`, so these can grow without breaking one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar, Generic, Protocol, TypeVar, runtime_checkable

from lmcache_core.errors import BackendError, NotSupported
from lmcache_core.identity.keys import StorageKey
from lmcache_core.memory import Hold, Lease, MemoryPool

API = (1, 0)
"""Version of this contract. A plugin with the same major and at most this minor is accepted."""

ALIGNMENT = 4096
"""Every view's address and length, and every stored value's length, is a multiple of this."""


class View:
    """A piece of the caller's memory: `[address, address + nbytes)`, both multiples of 4096.

    Borrowed: valid from the call until its item is settled, and not a moment longer. On `put_many` it
    may only be read. `device` is `cpu` or a torch-style device name; `region` is the index of the
    `Host.regions` entry it lies in.
    """

    __slots__ = ("_memory", "_start", "address", "device", "nbytes", "region")

    def __init__(
        self,
        address: int,
        nbytes: int,
        memory: memoryview | None,
        start: int = 0,
        *,
        device: str = "cpu",
        region: int = 0,
    ) -> None:
        self.address = address
        self.nbytes = nbytes
        self.device = device
        self.region = region
        self._memory = memory
        self._start = start

    @property
    def host(self) -> memoryview | None:
        """The bytes as a fresh flat memoryview, or None when they aren't in host memory."""
        if self._memory is None:
            return None
        return self._memory[self._start : self._start + self.nbytes]

    def slice(self, start: int, nbytes: int) -> View:
        """The view of `[start, start + nbytes)` of this one.

        Raises:
            ValueError: the range does not lie inside this view.
        """
        if start < 0 or nbytes < 0 or start + nbytes > self.nbytes:
            raise ValueError(f"[{start}, {start + nbytes}) is not inside a view of {self.nbytes} bytes")
        return View(
            self.address + start,
            nbytes,
            self._memory,
            self._start + start,
            device=self.device,
            region=self.region,
        )

    def __repr__(self) -> str:
        return f"View(nbytes={self.nbytes}, device={self.device!r}, region={self.region})"


class Item:
    """One value of a batch: its key and the caller's memory, first byte first.

    On `put_many` the views are the whole value. On `get_many`, `whole` asks for the value from its
    first byte, the views being an upper bound of its length; otherwise exactly `nbytes` bytes are
    wanted from `offset` on (a range, only where `Capabilities.ranged`). `parent` is the key this
    value's tokens follow, where known: a backend that scans returns it, one that evicts should drop
    children before parents.
    """

    __slots__ = ("key", "nbytes", "offset", "parent", "views", "whole")

    def __init__(
        self,
        key: StorageKey,
        views: Sequence[View],
        *,
        offset: int = 0,
        whole: bool = True,
        parent: StorageKey | None = None,
    ) -> None:
        self.key = key
        self.views = tuple(views)
        self.offset = offset
        self.whole = whole
        self.parent = parent
        self.nbytes = sum(view.nbytes for view in self.views)

    def __repr__(self) -> str:
        kind = "whole" if self.whole else f"range at {self.offset}"
        return f"Item({self.key!r}, {self.nbytes} bytes, {kind})"


class Status(Enum):
    """How one item ended."""

    OK = "ok"
    MISS = "miss"
    """The store answered that it holds no such value (or range)."""
    FULL = "full"
    """No room; what was there is unchanged."""
    FAILED = "failed"
    """`Outcome.error` says why. Unknown whether a put took effect."""
    TOO_SMALL = "too-small"
    """The value is larger than the views; `Outcome.nbytes` is its length."""
    TIMEOUT = "timeout"
    """Set by the core alone: the deadline passed; the operation may still land."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one item ended, with what the store knows about it.

    `nbytes` is the value's (or the range's) length in bytes. `stored` is what the store charges for a
    value it has put, where that differs from its length. `token` grows with each copy of a key the
    store makes; it tells a late event about an old copy from the present one.
    """

    status: Status
    nbytes: int = 0
    stored: int | None = None
    token: int | None = None
    error: BackendError | None = None


class Call(Protocol):
    """One running batch: the deadline in, the outcomes out. Every method may be called on any thread."""

    @property
    def deadline(self) -> float:
        """Absolute `time.monotonic()` seconds."""

    @property
    def cancelled(self) -> bool:
        """True once nobody waits for the unsettled items: return as soon as you can."""

    def remaining(self) -> float:
        """Seconds left, more than 0. Re-arm every wait on the driver with it.

        Raises:
            DeadlineExceeded: none left, or cancelled.
        """

    def done(self, index: int, outcome: Outcome) -> None:
        """Settles item `index`, once; a second time is ignored and counted. Late is welcome.

        What a get read is verified meanwhile, and used at once; what it settles last, when it has returned.
        """


class Host(Protocol):
    """What the core gives a backend at `open`. Valid until `close`."""

    @property
    def tier(self) -> str:
        """The tier's name in the config: for messages."""

    @property
    def deadline_s(self) -> float:
        """Seconds that one call may take in this tier."""

    @property
    def max_in_flight(self) -> int:
        """The most calls the core will have inside this backend at once."""

    @property
    def capacity_bytes(self) -> int | None:
        """The bound on everything this tier keeps in its medium, temporaries and index included.

        The core evicts before it puts. What would exceed the bound all the same is FULL.
        """

    @property
    def parts(self) -> tuple[str, ...]:
        """Part digests this process stores and loads (a key's second field); empty when unknown."""

    @property
    def pool(self) -> MemoryPool:
        """The process's frame memory: regions to register, holds to adopt."""

    def lost(self, copies: Sequence[tuple[StorageKey, int | None]], reason: str) -> None:
        """These (key, token) copies are gone behind the core's back (evicted, expired, deleted)."""

    def lost_all(self, reason: str) -> None:
        """Everything this tier was known to hold is in doubt: its index is forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a backend offers. Every default means 'not offered'; undeclared operations raise NotSupported."""

    medium: str = "network"
    """`memory`, `file` or `network`."""
    delete: bool = False
    """`delete_many` removes values."""
    scan: bool = False
    """`scan` lists what is stored."""
    ranged: bool = False
    """`get_many` takes items that aren't whole."""
    range_min: int = ALIGNMENT
    """The least number of bytes that a range may have."""
    persistent: bool = False
    """Values outlive the process."""
    shared: bool = False
    """Other processes put and delete here too."""
    self_evicting: bool = False
    """The store drops values by itself."""
    authenticated: bool = False
    """The store checks credentials."""
    pin: bool = False
    """`pin_many` keeps values from the store's own eviction."""
    asynchronous: bool = False
    """Methods may return before every item is settled."""
    devices: frozenset[str] = frozenset({"cpu"})
    """Where views may lie."""
    max_value_bytes: int | None = None
    """The longest value; None: any length."""
    max_batch: int | None = None
    """Items in one call, at most; None: any number."""
    max_in_flight: int = 1
    """Calls the backend takes at once, abandoned ones included."""
    stat_cost_s: float = 0.0
    """What one `stat_many` of a few keys costs, roughly; above 10 ms the core prefers scans and hints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendStats:
    """Counters and gauges, read without I/O. `used_bytes` covers everything in the medium."""

    entries: int = 0
    used_bytes: int = 0
    capacity_bytes: int | None = None
    counters: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One stored value as `scan` reports it. `nbytes` its length, `stored` what the store charges."""

    key: StorageKey
    nbytes: int
    stored: int | None = None
    parent: StorageKey | None = None
    token: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Part of a scan, oldest first where the store knows. `cursor` continues it; None: that was all."""

    entries: Sequence[Entry]
    cursor: str | None = None


C = TypeVar("C")


class Backend(ABC, Generic[C]):
    """A storage backend. Built without I/O, then opened once, then closed: one way.

    Methods are thread-safe and at most `max_in_flight` run at once. A blocking backend settles every
    item before it returns; one that declares `asynchronous` may settle later, from any thread. An
    exception settles as FAILED exactly the items not yet settled. Driver retries are off: the core
    decides what to repeat. After `close` the core refuses calls; the backend need not.

    `config_class` is a frozen `msgspec.Struct`: it holds every option and default of the backend, and
    unknown or ill-typed options are refused by the core before the backend is built.
    """

    api: ClassVar[tuple[int, int]] = API
    config_class: type[C]

    @abstractmethod
    def __init__(self, config: C) -> None:
        """Keeps `config`; opens nothing."""

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """The most this backend offers, known before `open`."""

    @abstractmethod
    def open(self, host: Host) -> Capabilities | None:
        """Connects and proves access; may return narrower capabilities.

        Raises:
            ConfigError: the configuration can't work (says what to change).
            BackendUnavailable: not usable now; the core tries again later.
            PermissionDenied: the store refuses these credentials or rights.
        """

    @abstractmethod
    def close(self) -> None:
        """Wakes running calls, doesn't wait for them, lets go of everything. Idempotent, never raises.

        May be called in a forked child, which shares connections, files and their locks with its parent.
        There it closes its own descriptors at most: it must not shut a connection down, send anything on
        it, unlock a file, or wait for a thread or a lock that only the parent has.
        """

    @abstractmethod
    def put_many(self, items: Sequence[Item], call: Call) -> None:
        """Stores each value whole or not at all, seen so by get, stat and the store's own eviction.

        Replaces a value that is there, atomically. OK, FULL or FAILED.
        """

    @abstractmethod
    def get_many(self, items: Sequence[Item], call: Call) -> None:
        """Reads each value (or range) into the item's views.

        OK with the bytes read, MISS, TOO_SMALL with the value's length, or FAILED. Unless OK, the
        views' contents are unspecified. Bytes beyond the value and outside the views are never touched.
        """

    @abstractmethod
    def stat_many(self, keys: Sequence[StorageKey], call: Call) -> None:
        """OK with `nbytes` only for a value that can be read whole; MISS; FAILED when it can't be known."""

    @abstractmethod
    def stats(self) -> BackendStats:
        """Counters, without I/O: at any time, also before `open` and after `close`, and on any thread."""

    def delete_many(self, keys: Sequence[StorageKey], call: Call) -> None:
        """Removes values: OK or MISS, then absent to everyone. Only where `Capabilities.delete`."""
        raise NotSupported("this backend does not delete", op="delete")

    def scan(self, call: Call, prefix: str, cursor: str | None, limit: int) -> Page:
        """Up to `limit` entries whose key starts with `prefix`. Only where `Capabilities.scan`.

        A value present for the whole scan is reported at least once.
        """
        raise NotSupported("this backend does not scan", op="scan")

    def pin_many(self, keys: Sequence[StorageKey], ttl_s: float, call: Call) -> None:
        """Keeps values from the store's own eviction for `ttl_s`. Only where `Capabilities.pin`."""
        raise NotSupported("this backend does not pin", op="pin")


@runtime_checkable
class Resident(Protocol):
    """A backend that keeps frames where they already lie, in the pool: no byte moves either way.

    The methods return at once, never block, and are called without any lock held.
    """

    def adopt(self, key: StorageKey, hold: Hold) -> Outcome:
        """Takes over `hold` as the value of `key`; the hold it replaces is dropped. FULL: not taken."""

    def borrow(self, key: StorageKey) -> Lease | None:
        """A new lease on the value's bytes, or None for a miss."""

    def discard(self, key: StorageKey, hold: Hold) -> bool:
        """Drops `hold` and, while it is still the value of `key`, the value. False when it was not."""
