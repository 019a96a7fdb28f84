"""Destination: a get writes the value into the views, and not one byte elsewhere."""

from __future__ import annotations

from lmcache_core.identity.keys import StorageKey
from lmcache_core.storage.contract import Outcome, Status
from lmcache_core_conformance.driver import Buffer, Store, Want, item_for
from lmcache_core_conformance.properties import Group, needs
from lmcache_core_conformance.values import PAGE, key_named, value_of
from lmcache_core_conformance.verdicts import check


class Destination(Group):
    group = "destination"

    def test_nothing_outside_the_views_is_touched(self) -> None:
        """The bytes beside a view are another frame, perhaps one being attended to right now."""
        store, key = self.bench.open(), key_named("destination")
        value = value_of(key, 1, self.bench.fit(6))
        self.put(store, key, value)
        for lengths in ((6,), (1, 2, 3), (8,), (2, 2, 2, 2)):
            buffer, outcome = self._get(store, key, lengths)
            check(outcome.status is Status.OK, f"get into views of {lengths} pages: {outcome.status.name}")
            check(buffer.outside_is_noise(), f"bytes outside views of {lengths} pages were overwritten")

    @needs("ranged")
    def test_a_range_touches_nothing_outside_its_views(self) -> None:
        """A range rounded up to the medium's own block lands in the next layer, which is in use."""
        store, key = self.bench.open(), key_named("range")
        step = self.range_step()
        value = value_of(key, 1, self.bench.fit(8 * step // PAGE))
        self.put(store, key, value)
        for offset in range(0, len(value), step):
            for lengths in ((step,), (PAGE,) * (step // PAGE + 1)):
                if offset + sum(lengths) > len(value):
                    continue
                buffer = Buffer(lengths, gap=len(value))
                item = item_for(Want(key, lengths, offset=offset), buffer)
                outcome = store.call(1, lambda call, item=item: store.backend.get_many([item], call))[0]  # type: ignore[misc]
                check(outcome.status is Status.OK, f"a range at {offset}: {outcome.status.name}")
                check(buffer.outside_is_noise(), f"a range at {offset} was written outside its views")

    def test_bytes_beyond_the_value_are_not_touched(self) -> None:
        """The rest of a view still belongs to the caller: only the value's own bytes may change."""
        store, key = self.bench.open(), key_named("short")
        value = value_of(key, 1, self.bench.fit(3))
        self.put(store, key, value)
        for lengths in ((8,), (2, 4, 1), (3, 5)):
            buffer, outcome = self._get(store, key, lengths)
            check(outcome.status is Status.OK, f"get into views of {lengths} pages: {outcome.status.name}")
            check(
                buffer.is_noise_from(len(value)),
                f"{len(value)} bytes read into views of {lengths} pages: later bytes were overwritten",
            )

    def test_views_that_are_too_small_learn_the_size(self) -> None:
        """The caller repeats the get with enough memory, so the size must be told, and nothing overrun."""
        store, key = self.bench.open(), key_named("too small")
        value = value_of(key, 1, self.bench.fit(9))
        if len(value) == PAGE:
            return
        self.put(store, key, value)
        for lengths in ((1,), (1, 1), (len(value) // PAGE - 1,)):
            if sum(lengths) * PAGE >= len(value):
                continue
            buffer, outcome = self._get(store, key, lengths)
            check(
                outcome.status is Status.TOO_SMALL,
                f"get of {len(value)} bytes into views of {lengths} pages: {outcome.status.name}",
            )
            check(outcome.nbytes == len(value), f"TOO_SMALL says {outcome.nbytes}, not {len(value)}")
            check(buffer.outside_is_noise(), "a value too large for its views was written past them")

    def test_a_miss_touches_nothing_outside_the_views(self) -> None:
        """A miss leaves the views unspecified, and everything else as it was."""
        store = self.bench.open()
        buffer, outcome = self._get(store, key_named("absent"), (2, 2))
        check(outcome.status is Status.MISS, f"get of an absent key: {outcome.status.name}")
        check(buffer.outside_is_noise(), "a miss wrote outside the views")

    def _get(self, store: Store, key: StorageKey, pages: tuple[int, ...]) -> tuple[Buffer, Outcome]:
        want = Want(key, tuple(n * PAGE for n in pages))
        buffer = Buffer(want.lengths)
        item = item_for(want, buffer)
        return buffer, store.call(1, lambda call: store.backend.get_many([item], call))[0]
