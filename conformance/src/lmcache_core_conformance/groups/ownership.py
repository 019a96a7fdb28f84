"""Ownership: memory belongs to the caller; a backend borrows it until an item is settled."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lmcache_core.identity.keys import StorageKey
from lmcache_core.storage import Operation
from lmcache_core.storage.contract import Call, Item, Outcome, Status
from lmcache_core_conformance.driver import Buffer, Store, Want, item_for
from lmcache_core_conformance.properties import Group
from lmcache_core_conformance.values import PAGE, difference, key_named, value_of
from lmcache_core_conformance.verdicts import check

Method = Callable[[Sequence[Item], Call], None]


class Ownership(Group):
    group = "ownership"

    def test_a_put_keeps_no_view(self) -> None:
        """A kept view is memory that can't be given back, or that is read after it became another frame."""
        store, key = self.bench.open(), key_named("put")
        nbytes = self.bench.fit(2)
        for version in (1, 2):  # the second one replaces
            buffer = Buffer([PAGE] * (nbytes // PAGE), content=value_of(key, version, nbytes))
            status = self._call(store, store.backend.put_many, key, buffer)
            check(status is Status.OK, f"put: {status.name}")
            check(buffer.free(), "something still refers to the memory of a put that was settled")

    def test_a_get_keeps_no_view(self) -> None:
        """A kept view is a write waiting to land in a frame that meanwhile holds something else."""
        store, key = self.bench.open(), key_named("get")
        self.put(store, key, value_of(key, 1, self.bench.fit(2)))
        for what, wanted, pages in (
            ("hit", key, 2),
            ("larger view", key, 3),
            ("value too large", key, 1),
            ("miss", key_named("absent"), 1),
        ):
            buffer = Buffer([PAGE] * pages)
            self._call(store, store.backend.get_many, wanted, buffer)
            check(buffer.free(), f"something still refers to the memory of a settled get ({what})")

    def test_the_source_of_a_put_is_never_modified(self) -> None:
        """The frame being stored is read by others at the same time: encryption in place corrupts them."""
        store, key = self.bench.open(), key_named("source")
        value = value_of(key, 1, self.bench.fit(5))
        buffer = (
            Buffer([len(value) - PAGE, PAGE], content=value)
            if len(value) > PAGE
            else Buffer([PAGE], content=value)
        )
        status = self._call(store, store.backend.put_many, key, buffer)
        check(status is Status.OK, f"put: {status.name}")
        check(buffer.read() == value, "the put modified the value's own memory")
        check(buffer.outside_is_noise(), "the put wrote beside the value's memory")

    def test_changing_the_source_after_a_put_changes_nothing(self) -> None:
        """The caller's memory is reused at once: a store that refers to it serves the next request's KV."""
        store, key = self.bench.open(), key_named("reused")
        value = value_of(key, 1, self.bench.fit(3))
        buffer = Buffer([len(value)], content=value)
        status = self._call(store, store.backend.put_many, key, buffer)
        check(status is Status.OK, f"put: {status.name}")
        buffer.make_noise()
        self.holds(store, key, value, "a value whose source was reused after the put")

    def test_nothing_is_written_after_a_get_is_settled(self) -> None:
        """Once settled, the memory is another frame's: whatever lands late lands in that."""
        store = self.bench.open()
        values = self.some_values(3)
        for key, value in values:
            self.put(store, key, value)
        buffers = []
        for key, value in values:
            buffer = Buffer([len(value)])
            self._call(store, store.backend.get_many, key, buffer)
            buffer.make_noise()
            buffers.append(buffer)
        for key, value in values:
            self.holds(store, key, value)
        store.close()
        for buffer in buffers:
            check(buffer.is_noise_from(0), "memory of a settled get was written to later")

    def test_memory_is_let_go_of_when_its_item_is_settled(self) -> None:
        """The first items of a batch are used while the others run: reading or filling them later is late."""
        store, values = self.bench.open(), self.some_values(min(3, self.bench.capabilities.max_batch or 3))
        sources = [Buffer([len(value)], content=value) for _, value in values]
        puts = [Item(key, buffer.views()) for (key, _), buffer in zip(values, sources, strict=True)]
        store.on_settled = lambda index, outcome: sources[index].make_noise()
        store.call(len(puts), lambda call: store.backend.put_many(puts, call))
        store.on_settled = None
        for key, value in values:
            self.holds(store, key, value, "a value whose source was reused when its put was settled")
        buffers, seen = [Buffer([len(value)]) for _, value in values], [b""] * len(values)
        gets = [Item(key, buffer.views()) for (key, _), buffer in zip(values, buffers, strict=True)]

        def use(index: int, outcome: Outcome) -> None:
            seen[index] = buffers[index].read()
            buffers[index].make_noise()

        store.on_settled = use
        store.call(len(gets), lambda call: store.backend.get_many(gets, call))
        for (_, value), used, buffer in zip(values, seen, buffers, strict=True):
            check(used == value, f"the views when a get was settled: {difference(value, used)}")
            check(buffer.is_noise_from(0), "the views of a get were written to after it was settled")

    def test_a_stored_value_does_not_change_with_the_memory_it_was_read_into(self) -> None:
        """A get that hands out the store's own memory lets one reader spoil it for the next."""
        store, key = self.bench.open(), key_named("aliased")
        value = value_of(key, 1, self.bench.fit(2))
        self.put(store, key, value)
        buffer = Buffer([len(value)])
        self._call(store, store.backend.get_many, key, buffer)
        buffer.make_noise()
        self.holds(store, key, value, "a value whose last reader overwrote its memory")

    def test_leases_and_holds_return_to_zero(self) -> None:
        """A leaked lease is memory lost for ever; enough of them and nothing can be stored any more."""
        store = self.bench.open()
        values = self.some_values(4)
        for _ in range(3):
            for key, value in values:
                self.put(store, key, value)
                self.holds(store, key, value)
            self._fail_a_few(store, values[0][0])
        pool = store.host.pool_if_used
        if pool is None:
            return  # the backend never touched the pool
        check(pool.stats().leases == 0, f"{pool.stats().leases} leases are left while nothing runs")
        check(pool.stats().holds <= len(values), f"{pool.stats().holds} holds for {len(values)} values")
        store.backend.close()
        stats = pool.stats()
        check(
            stats.leases == 0 and stats.holds == 0 and stats.lost_leases == 0,
            f"after close: {stats.leases} leases, {stats.holds} holds, {stats.lost_leases} leases lost",
        )

    def test_all_memory_is_back_after_a_workload_through_the_core(self) -> None:
        """What an executor never gets back stays quarantined: after enough of it, nothing can be loaded."""
        core = self.bench.open_core()
        keys = [key_named(f"workload {n}") for n in range(min(4, self.bench.capabilities.max_batch or 4))]
        frames = [self.frame(key, 1) for key in keys]
        view_nbytes = len(frames[0])
        absent = [key_named(f"absent {n}") for n in range(len(keys))]
        jobs = [
            core.run(Operation.PUT, keys, frames=frames),
            core.run(Operation.GET, keys, view_nbytes=view_nbytes),
            core.run(Operation.GET, [*keys[1:], absent[0]], view_nbytes=view_nbytes),
            core.run(Operation.GET, keys, view_nbytes=PAGE),
            core.run(Operation.STAT, [*absent[1:], keys[0]]),
        ]
        if self.bench.capabilities.delete:
            jobs.append(core.run(Operation.DELETE, [keys[0], *absent[1:]]))
        faults = [fault for job in jobs for fault in job.faults]
        check(not faults, "; ".join(faults))
        for index, frame in enumerate(frames):
            check(jobs[1].values.get(index) == frame, f"item {index} did not come back through the core")
        counters = core.executor.stats().counters
        for what in ("contract_breaches", "repeated_settlements", "late_results"):
            check(not counters.get(what), f"the core counted {counters.get(what)} {what.replace('_', ' ')}")
        leases = core.pool.stats().leases
        check(not leases, f"{leases} leases on the core's pool are left while nothing runs")

    def _fail_a_few(self, store: Store, key: StorageKey) -> None:
        absent = key_named("absent")
        store.get(key, PAGE)
        store.get(absent, PAGE)
        if self.bench.capabilities.delete:
            store.delete(absent)
            store.delete(key)

    def _call(self, store: Store, method: Method, key: StorageKey, buffer: Buffer) -> Status:
        """One call whose views and items are gone when this returns."""
        item = item_for(Want(key, buffer.lengths), buffer)
        outcomes: list[Outcome] = store.call(1, lambda call: method([item], call))
        return outcomes[0].status
