"""Sizes: every multiple of a page up to the maximum is stored whole, and nothing beyond it."""

from __future__ import annotations

from lmcache_core.storage.contract import Status
from lmcache_core_conformance.driver import Want
from lmcache_core_conformance.properties import Group, needs
from lmcache_core_conformance.values import PAGE, key_named, value_of
from lmcache_core_conformance.verdicts import check


class Sizes(Group):
    group = "sizes"

    def test_every_number_of_pages_is_stored_whole(self) -> None:
        """Off-by-one faults live at one page, at powers of two and just beside them."""
        store = self.bench.open()
        for pages in (1, 2, 3, 7, 8, 9, 15, 16, 17, 63, 64, 65, 255, 256, 257):
            key = key_named(f"pages-{pages}")
            value = value_of(key, 1, self.bench.fit(pages))
            self.put(store, key, value)
            self.holds(store, key, value, f"a value of {pages} pages")

    def test_larger_views_are_an_upper_bound(self) -> None:
        """The core doesn't know a stored tail's length: it offers a chunk's memory and reads `nbytes`."""
        store = self.bench.open()
        for pages, offered in ((1, (8,)), (3, (1, 1, 4)), (5, (5, 3)), (4, (3, 3, 3))):
            key = key_named(f"bound-{pages}-{offered}")
            value = value_of(key, 1, self.bench.fit(pages))
            self.put(store, key, value)
            got = store.get_many([Want(key, tuple(n * PAGE for n in offered))])[0]
            self.check_value(got, value, f"{pages} pages read into views of {offered} pages")

    def test_stat_tells_the_length_that_get_returns(self) -> None:
        """The core reserves memory by what stat says; a wrong length is a failed load later."""
        store = self.bench.open()
        for pages in (1, 2, 9):
            key = key_named(f"stat-{pages}")
            value = value_of(key, 1, self.bench.fit(pages))
            self.put(store, key, value)
            stat = store.stat(key)
            check(stat.status is Status.OK, f"stat of a stored value: {stat.status.name}")
            check(stat.nbytes == len(value), f"stat says {stat.nbytes} bytes, stored are {len(value)}")

    @needs("max_value_bytes")
    def test_a_value_of_the_declared_maximum_is_stored(self) -> None:
        """A maximum that is not reached is a promise the core builds frames on, and then can't keep."""
        store, key = self.bench.open(), key_named("maximum")
        value = value_of(key, 1, self.maximum())
        self.put(store, key, value)
        self.holds(store, key, value, "a value of the declared maximum")

    @needs("max_value_bytes")
    def test_a_value_over_the_maximum_is_refused_not_truncated(self) -> None:
        """A truncated value that "exists" is served as a hit, and never repaired."""
        store, key = self.bench.open(), key_named("too large")
        old = value_of(key, 1, PAGE)
        self.put(store, key, old)
        outcome = store.put(key, value_of(key, 2, self.maximum() + PAGE))
        check(
            outcome.status in (Status.FULL, Status.FAILED),
            f"a value of one page over the maximum ended {outcome.status.name}",
        )
        self.holds(store, key, old, "the value that was there before the refused one")

    def test_a_large_value_is_stored_whole(self) -> None:
        """Frames of long chunks exceed what one system call or one message moves: short writes show here."""
        maximum = self.bench.capabilities.max_value_bytes or self.bench.harness.large_value_bytes
        nbytes = min(maximum, self.bench.harness.large_value_bytes) // PAGE * PAGE
        store, key = self.bench.open(), key_named("large")
        value = value_of(key, 1, nbytes)
        self.put(store, key, value)
        self.holds(store, key, value, f"a value of {nbytes} bytes")
