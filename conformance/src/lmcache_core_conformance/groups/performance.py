"""Performance: as fast as the medium allows. Measured and reported always, enforced when asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TypeVar

from lmcache_core.storage.contract import Call, Item, Status
from lmcache_core_conformance.baselines import BareFiles, PlainCopy, RawDriver
from lmcache_core_conformance.driver import Buffer, Store
from lmcache_core_conformance.figures import Measure
from lmcache_core_conformance.harness import Harness
from lmcache_core_conformance.properties import Group
from lmcache_core_conformance.values import PAGE, key_named, value_of
from lmcache_core_conformance.verdicts import NotApplicable, Unproven, check

FLOOR = 0.5
"""What a backend must reach of its bare medium. One more copy, or a page cache on the way, costs more."""
BATCH_FLOOR = 0.8
"""What a batch must reach of its items one by one: all of it, less a margin for noise."""
_VALUES = 8
_BATCH = 16
T = TypeVar("T")


class Work:
    """Values in the caller's memory, and the calls that move all of them, as the core would make them."""

    def __init__(self, store: Store, name: str, count: int, nbytes: int) -> None:
        self.store = store
        self.nbytes = nbytes
        self.keys = [key_named(f"{name}-{number}") for number in range(count)]
        self.buffers = [Buffer([nbytes], content=value_of(key, 1, nbytes)) for key in self.keys]
        self.items = [Item(key, buffer.views()) for key, buffer in zip(self.keys, self.buffers, strict=True)]
        self._most = store.capabilities.max_batch or count

    @property
    def gigabytes(self) -> float:
        return len(self.items) * self.nbytes / 1e9

    @property
    def size(self) -> str:
        mib = self.nbytes / (1 << 20)
        return f"{mib:g} MiB" if mib >= 1 else f"{mib * 1024:g} KiB"

    def put(self, most: int | None = None) -> None:
        """Puts every value, up to `most` in a call."""
        self._calls(self.store.backend.put_many, self.items, most)

    def get(self, most: int | None = None) -> None:
        self._calls(self.store.backend.get_many, self.items, most)

    def stat(self, most: int | None = None) -> None:
        self._calls(self.store.backend.stat_many, self.keys, most)

    def bare(self, driver: RawDriver, *, put: bool) -> None:
        """The same by the bare driver."""
        move = driver.put if put else driver.get
        for key, item in zip(self.keys, self.items, strict=True):
            memory = item.views[0].host
            if memory is not None:
                move(key, memory)

    def check_bare(self, driver: RawDriver) -> None:
        """Checks that the bare driver, which put every value, has them."""
        for key, buffer in zip(self.keys, self.buffers, strict=True):
            read = Buffer([self.nbytes])
            [memory] = [view.host for view in read.views()]
            if memory is not None:
                driver.get(key, memory)
            check(read.read() == buffer.read(), "harness hook `raw_driver` does not read what it was given")

    def _calls(
        self, method: Callable[[Sequence[T], Call], None], things: Sequence[T], most: int | None
    ) -> None:
        step = most or self._most
        for first in range(0, len(things), step):
            some = things[first : first + step]
            for outcome in self.store.call(len(some), partial(method, some)):
                check(outcome.status is Status.OK, f"{outcome.status.name} while timed ({outcome.error})")
        self.store.calls.clear()


class Performance(Group):
    group = "performance"

    def test_writing_keeps_up_with_the_bare_medium(self) -> None:
        """Each chunk computed is written once: a slow tier sheds stores, and the hits never come."""
        self.compare_with_the_medium("writes", put=True)

    def test_reading_keeps_up_with_the_bare_medium(self) -> None:
        """Loading competes with computing: a tier slower than its medium loses where it should win."""
        work = self.compare_with_the_medium("reads", put=False)
        self.holds(work.store, work.keys[-1], value_of(work.keys[-1], 1, work.nbytes), "what was timed")

    def test_a_batch_is_as_fast_as_its_items_one_by_one(self) -> None:
        """Latency must not grow with each chunk of a prefix: a batch costs no more than its items."""
        count = min(_BATCH, self.bench.capabilities.max_batch or _BATCH)
        if count < 2:
            raise NotApplicable("capability max_batch is 1")
        nbytes = self.bench.fit(max(self.frame_nbytes() // 32 // PAGE, 1))
        work = Work(self.bench.open(), "batch", count, nbytes)
        work.put()
        for name, unit, amount, call in (
            (f"writes of {work.size}", "GB/s", work.gigabytes, work.put),
            (f"reads of {work.size}", "GB/s", work.gigabytes, work.get),
            ("stats", "keys/s", float(count), work.stat),
        ):
            figure = self.measure().compare(
                f"{name}, {count} a batch",
                unit=unit,
                amount=amount,
                ours=call,
                baseline=partial(call, 1),
                baseline_name="the same one by one",
                floor=BATCH_FLOOR,
            )
            self.bench.report(figure)

    def compare_with_the_medium(self, name: str, *, put: bool) -> Work:
        """Times the backend beside the bare medium. Both hold the values first, so nothing is new."""
        directory, medium = self.bench.place().directory, self.bench.capabilities.medium
        with closing(_bare_medium(self.bench.harness, medium, directory)) as driver:
            nbytes = self.bench.fit(self.frame_nbytes() // PAGE)
            work = Work(self.bench.open(), "frame", _VALUES, nbytes)
            work.put()
            work.bare(driver, put=True)
            work.check_bare(driver)
            figure = self.measure().compare(
                f"{name} of {work.size}",
                unit="GB/s",
                amount=work.gigabytes,
                ours=work.put if put else work.get,
                baseline=partial(work.bare, driver, put=put),
                baseline_name=driver.description,
                floor=FLOOR,
            )
        self.bench.report(figure)
        return work

    def frame_nbytes(self) -> int:
        """One value's size: a frame's, where a second copy of all values fits into the store."""
        harness = self.bench.harness
        most = min(harness.large_value_bytes // 8, harness.capacity_bytes // (4 * _VALUES))
        return max(most // PAGE * PAGE, PAGE)

    def measure(self) -> Measure:
        return Measure(rounds=self.bench.harness.measurements, budget_s=self.bench.harness.limit_s / 12)


def _bare_medium(harness: Harness, medium: str, directory: Path) -> RawDriver:
    """The harness's own driver, or the bare medium of a memory or file backend.

    Raises:
        Unproven: neither is there.
    """
    try:
        return harness.raw_driver(directory)
    except Unproven:
        if medium == "memory":
            return PlainCopy()
        if medium == "file":
            return BareFiles(directory)
        raise
