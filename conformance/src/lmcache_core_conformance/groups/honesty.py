"""Capability honesty: what is declared works, what isn't is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields

from lmcache_core.errors import ConfigError, NotSupported
from lmcache_core.identity.keys import StorageKey
from lmcache_core.storage.contract import Call, Capabilities, Item, Status
from lmcache_core_conformance.behind import Behind
from lmcache_core_conformance.bench import uneven_cuts
from lmcache_core_conformance.driver import Buffer, RecordingCall, Store, Want, item_for
from lmcache_core_conformance.properties import Group, needs
from lmcache_core_conformance.values import PAGE, PART, key_named, value_of
from lmcache_core_conformance.verdicts import NotApplicable, check

_NO_PROMISES = ("medium", "range_min", "stat_cost_s", "devices")
"""Capabilities that describe the others, and the one whose values count."""


class Honesty(Group):
    group = "honesty"

    def test_undeclared_operations_are_refused_as_not_supported(self) -> None:
        """An undeclared operation that does something is untested; one that does nothing is a lie."""
        store, offered = self.bench.open(), self.bench.capabilities
        key, value = self.some_values(1)[0]
        self.put(store, key, value)
        buffer = Buffer([PAGE])
        item = item_for(Want(key, buffer.lengths, offset=0), buffer)
        operations: dict[str, Callable[[Call], object]] = {
            "delete": lambda call: store.backend.delete_many([key], call),
            "scan": lambda call: store.backend.scan(call, "", None, 10),
            "pin": lambda call: store.backend.pin_many([key], 1.0, call),
            "ranged": lambda call: store.backend.get_many([item], call),
        }
        undeclared = [name for name in operations if not getattr(offered, name)]
        if not undeclared:
            raise NotApplicable("capabilities delete, scan, pin and ranged are all declared")
        for name in undeclared:
            operation = operations[name]
            store.call(1, lambda call, operation=operation: _discard(operation(call)))  # type: ignore[misc]
            call: RecordingCall = store.calls[-1]
            seen = call.raised or call.outcomes[0].error
            check(
                isinstance(seen, NotSupported),
                f"{name} is not declared, yet it gave {seen!r} instead of NotSupported",
            )
        self.holds(store, key, value, "a value after refused operations")

    @needs("delete")
    def test_a_deleted_value_is_gone_for_everyone(self) -> None:
        """Clearing a tenant's data must clear it, and the room it took must be there again."""
        store, values = self.bench.open(), self.some_values(4)
        for key, value in values:
            self.put(store, key, value)
        outcomes = store.delete_many([values[0][0], values[2][0]])
        check(all(o.status is Status.OK for o in outcomes), f"delete: {[o.status.name for o in outcomes]}")
        for place, (key, value) in enumerate(values):
            if place in (0, 2):
                self.lacks(store, key, len(value), "a deleted key")
            else:
                self.holds(store, key, value, "a value beside deleted ones")
        if self.bench.capabilities.scan:
            left = {entry.key for entry in store.scan()}
            check(values[0][0] not in left, "a deleted value is still listed by scan")

    @needs("delete")
    def test_deleting_what_is_absent_is_a_miss(self) -> None:
        """Two cleaners meet at one key: the second must learn that it was gone, not that something failed."""
        store, (key, value) = self.bench.open(), self.some_values(1)[0]
        self.put(store, key, value)
        seen = [store.delete(key).status.name for _ in range(2)]
        check(seen == ["OK", "MISS"], f"deleting a value twice ended {seen}, due are OK and MISS")
        self.put(store, key, value)
        self.holds(store, key, value, "a value put again after it was deleted")

    @needs("scan")
    def test_a_scan_reports_every_value_with_its_length(self) -> None:
        """The index is rebuilt from a scan: what it leaves out is orphaned, and fills the medium for ever."""
        store, values = self.bench.open(), self.some_values(9)
        for key, value in values:
            self.put(store, key, value)
        expected = {key: len(value) for key, value in values}
        for limit in (1, 4, 100):
            entries = store.scan(limit=limit, max_pages=50)
            found = {entry.key: entry.nbytes for entry in entries}
            check(found == expected, f"a scan by {limit} gave {len(found)} keys, stored are {len(expected)}")
        page = store.scan_page("", None, 4)
        check(len(page.entries) <= 4, f"a page of at most 4 entries has {len(page.entries)}")

    @needs("scan")
    def test_a_scan_gives_no_value_another_ones_parent(self) -> None:
        """Children leave before parents: under a wrong parent the middle of a prefix goes first."""
        place = self.bench.place()
        store, values = self.bench.open(place), self.some_values(4)
        due = {key: values[n - 1][0] if n else None for n, (key, _) in enumerate(values)}
        for key, value in (values[2], values[0], values[3], values[1]):
            buffer = Buffer([len(value)], content=value)
            item = Item(key, buffer.views(), parent=due[key])
            store.call(1, lambda call, item=item: store.backend.put_many([item], call))  # type: ignore[misc]
        known = self._parents(store, due)
        if self.bench.capabilities.persistent:
            store.close()
            for key, parent in self._parents(self.bench.open(place), due).items():
                check(parent == known[key], "a scan after reopening doesn't know a parent known before")

    @needs("scan")
    def test_a_scan_is_limited_to_its_prefix(self) -> None:
        """A prefix selects one part: keys of another would be counted, or deleted, as this one's."""
        store, values = self.bench.open(), self.some_values(4)
        other = key_named("other part").replace(PART, "f" * len(PART))
        for key, value in [*values, (type(values[0][0])(other), value_of(values[0][0], 9, PAGE))]:
            self.put(store, key, value)
        found = {entry.key for entry in store.scan(f"c-{PART}", limit=3)}
        check(found == {key for key, _ in values}, f"a scan of one part gave {len(found)} keys instead of 4")
        check(not store.scan("n-"), "a scan with a prefix of no key gave entries")

    @needs("scan", "delete")
    def test_a_value_present_during_a_whole_scan_is_reported(self) -> None:
        """Stores go on while an index is rebuilt; what stays must be found although its neighbours move."""
        store, values = self.bench.open(), self.some_values(12)
        for key, value in values:
            self.put(store, key, value)
        found, cursor = set[StorageKey](), None
        staying, leaving = ({key for key, _ in values[half::2]} for half in (1, 0))
        for number in range(200):
            page = store.scan_page("", cursor, 2)
            found |= {entry.key for entry in page.entries}
            cursor = page.cursor
            if cursor is None:
                break
            for key in leaving & found:  # among them those behind which the scan goes on
                leaving.remove(key)
                store.delete(key)
            if 3 <= number < 9:
                self.put(store, key_named(f"arriving {number}"), value_of(values[0][0], number, PAGE))
        check(cursor is None, "a scan did not end while values came and went")
        check(staying <= found, f"{len(staying - found)} values present all the time were not reported")

    @needs("ranged")
    def test_a_range_is_exactly_the_bytes_asked_for(self) -> None:
        """Layers are read one by one as ranges: a shifted one is another layer's KV."""
        store, key = self.bench.open(), key_named("ranged")
        step = self.range_step()
        value = value_of(key, 1, self.bench.fit(max(12, 3 * step // PAGE)))
        self.put(store, key, value)
        for offset in range(0, len(value) - step + 1, step):
            for nbytes in sorted({step, 2 * step, len(value) - offset}):
                if offset + nbytes > len(value):
                    continue
                got = store.get_many([Want(key, (nbytes,), offset=offset)])[0]
                self.check_value(got, value[offset : offset + nbytes], f"[{offset}, {offset + nbytes})")

    @needs("ranged")
    def test_a_range_may_cross_any_boundary_of_the_medium(self) -> None:
        """Values are cut into stripes, parts and blocks: a range that crosses into the next is one range."""
        store, key = self.bench.open(), key_named("striped")
        step = self.range_step()
        value = value_of(key, 1, self.bench.fit(max(self.bench.harness.large_value_bytes, 3 * step) // PAGE))
        self.put(store, key, value)
        for exponent in range(len(value).bit_length()):
            for boundary in (1 << exponent, 3 << exponent):
                for offset, nbytes in ((boundary - step, 2 * step), (boundary - 3 * step, 5 * step)):
                    if boundary % step or offset < 0 or offset + nbytes > len(value):
                        continue
                    got = store.get_many([Want(key, (nbytes,), offset=offset)])[0]
                    due = value[offset : offset + nbytes]
                    self.check_value(got, due, f"[{offset}, {offset + nbytes}), across {boundary}")
        if len(value) > 2 * step:
            got = store.get_many([Want(key, (len(value) - 2 * step,), offset=step)])[0]
            self.check_value(got, value[step : len(value) - step], "all but both ends")

    @needs("ranged")
    def test_a_range_is_of_the_newest_copy(self) -> None:
        """A handle kept for the next range reads a value that meanwhile was replaced or deleted."""
        store, key = self.bench.open(), key_named("ranges of several copies")
        step = self.range_step()
        want = Want(key, (step,), offset=step)
        for version, pages in enumerate((3, 3, 5, 2)):
            value = value_of(key, version, self.bench.fit(pages * step // PAGE))
            self.put(store, key, value)
            got = store.get_many([want])[0]
            if 2 * step <= len(value):
                self.check_value(got, value[step : 2 * step], f"a range of version {version}")
        if self.bench.capabilities.delete:
            store.delete(key)
            got = store.get_many([want])[0]
            check(got.status is Status.MISS, f"a range of a deleted value: {got.status.name}, due is MISS")

    @needs("ranged")
    def test_the_first_range_is_not_the_whole_value(self) -> None:
        """Offset 0 as a range is the header's read; taken for the whole value it would be TOO_SMALL."""
        store, key = self.bench.open(), key_named("first range")
        step = self.range_step()
        value = value_of(key, 1, self.bench.fit(max(5, 3 * step // PAGE)))
        self.put(store, key, value)
        if step < len(value):
            got = store.get_many([Want(key, (step,), offset=0)])[0]
            self.check_value(got, value[:step], "the first range")
            whole = store.get(key, step)
            check(whole.status is Status.TOO_SMALL, f"whole value into a first range: {whole.status.name}")

    @needs("ranged")
    def test_a_range_past_the_end_is_never_ok(self) -> None:
        """Bytes that were never stored must not be made up when a replaced value is shorter than expected."""
        store, key = self.bench.open(), key_named("past the end")
        step = self.range_step()
        value = value_of(key, 1, self.bench.fit(3 * step // PAGE))
        self.put(store, key, value)
        for offset in (len(value) - step, len(value), len(value) + 8 * step):
            got = store.get_many([Want(key, (2 * step,), offset=offset)])[0]
            check(got.status is not Status.OK, f"[{offset}, {offset + 2 * step}) of {len(value)} bytes is OK")
        absent = store.get_many([Want(key_named("absent"), (step,), offset=0)])[0]
        check(absent.status is Status.MISS, f"a range of an absent key: {absent.status.name}")

    @needs("ranged")
    def test_ranges_in_pieces_mix_with_whole_values_in_a_batch(self) -> None:
        """A prefix is read layer by layer over many chunks at once, each range into several places."""
        store, step = self.bench.open(), self.range_step()
        values = [
            (key, value_of(key, 1, self.bench.fit(max(9, 3 * step // PAGE))))
            for key, _ in self.some_values(self._few())
        ]
        for key, value in values:
            self.put(store, key, value)
        wants, due = [], []
        for n, (key, value) in enumerate(values):
            if n % 2 == 0 or 3 * step > len(value):
                wants.append(Want(key, tuple(uneven_cuts(len(value), 2))))
                due.append(value)
            else:
                wants.append(Want(key, (step, step), offset=step))
                due.append(value[step : 3 * step])
        for n, (got, content) in enumerate(zip(store.get_many(wants), due, strict=True)):
            self.check_value(got, content, f"item {n} of a batch of ranges and whole values")

    def test_every_declared_capability_is_exercised(self) -> None:
        """What is declared and never tried is a promise that the first user tests in production."""
        from lmcache_core_conformance.suite import PROPERTIES

        offered, exercised = self.bench.capabilities, {name for prop in PROPERTIES for name in prop.needs}
        promises = [field.name for field in fields(Capabilities) if field.name not in _NO_PROMISES]
        untried = sorted(name for name in promises if getattr(offered, name) and name not in exercised)
        check(not untried, f"capabilities {', '.join(untried)} are declared, and no property exercises them")
        shown = Behind.wrong_credentials is not type(self.bench.harness).wrong_credentials
        check(shown or not offered.authenticated, "authenticated is declared: show it by `wrong_credentials`")
        foreign = sorted(offered.devices - {"cpu"})
        check(not foreign, f"devices {', '.join(foreign)} are declared; only host memory is exercised here")
        if offered.shared or offered.self_evicting:
            self._works_without_a_bound()

    def test_stats_count_what_is_stored(self) -> None:
        """Operators size tiers by these figures; a counter that rises while writes fail hides an outage."""
        store, values = self.bench.open(), self.some_values(5)
        check(store.stats().entries == 0, f"an empty store counts {store.stats().entries} entries")
        for key, value in [*values, values[0]]:
            self.put(store, key, value)
        if self.bench.capabilities.shared and store.stats().entries == 0:
            raise NotApplicable("capability shared is True, and stats counts no entries: asking would be I/O")
        stored = sum(len(value) for _, value in values)
        check(store.stats().entries == 5, f"5 values are stored, stats counts {store.stats().entries}")
        check(store.stats().used_bytes >= stored, f"stats says {store.stats().used_bytes} bytes of {stored}")
        if self.bench.capabilities.delete:
            store.delete_many([key for key, _ in values])
            check(store.stats().entries == 0, f"all is deleted, stats counts {store.stats().entries}")
            check(store.stats().used_bytes >= 0, f"stats says {store.stats().used_bytes} bytes are used")

    def test_nothing_is_told_lost_that_is_there(self) -> None:
        """What is told lost is forgotten and computed again, although it lies there and takes its room."""
        store, values = self.bench.open(), self.some_values(4, pages=3)
        for version in (1, 2):
            for key, value in values:
                self.put(store, key, value_of(key, version, len(value)))
                store.get(key, PAGE)
                store.get(key, len(value))
                store.stat(key)
        for operation in (store.delete, store.stat):
            if operation == store.stat or self.bench.capabilities.delete:
                operation(key_named("absent"))
        store.get(key_named("absent"), PAGE)
        there = {key for key, _ in values}
        told = [key for key, _ in store.host.lost_copies if key in there]
        check(not told, f"{len(told)} values are there, and were told lost")
        check(not store.host.lost_everything, f"everything was told lost: {store.host.lost_everything}")

    def _parents(
        self, store: Store, due: Mapping[StorageKey, StorageKey | None]
    ) -> dict[StorageKey, StorageKey | None]:
        """What a scan says: None is allowed, the backend then keeps no parents."""
        found = {entry.key: entry.parent for entry in store.scan()}
        wrong = [key for key, parent in found.items() if parent not in (None, due[key])]
        check(not wrong, f"a scan gives {len(wrong)} of {len(due)} values a parent they were not put with")
        return found

    def _works_without_a_bound(self) -> None:
        """A config file may leave its capacity out; a backend that needs one then says so."""
        place = self.bench.place()
        backend, (key, value) = self.bench.build(place), self.some_values(1)[0]
        host = self.bench.host(backend)
        host.capacity_bytes = None
        try:
            store = Store(backend, host, backend.open(host) or backend.capabilities, place.options)
            self.put(store, key, value)
            self.holds(store, key, value, "a value of a store without a bound")
            store.stats()
        except ConfigError:
            return
        finally:
            backend.close()
            host.close()

    def _few(self) -> int:
        return min(5, self.bench.capabilities.max_batch or 5)


def _discard(result: object) -> None:
    """Operations that return something are called for their settlement alone."""
