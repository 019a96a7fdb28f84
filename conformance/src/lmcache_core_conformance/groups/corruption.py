"""Corruption: whatever happens to stored bytes, nobody is served anything but what was put."""

from __future__ import annotations

from collections.abc import Callable

from lmcache_core.identity.keys import StorageKey
from lmcache_core.storage import BreakerState, Operation
from lmcache_core.storage.contract import Status
from lmcache_core_conformance.bench import Place
from lmcache_core_conformance.core import Core
from lmcache_core_conformance.properties import Group
from lmcache_core_conformance.reach import Reach
from lmcache_core_conformance.values import PAGE, key_named, sealed_frame, value_of
from lmcache_core_conformance.verdicts import check

Damage = Callable[[bytes], bytes]
_BREAKER_PATIENCE = 6


class Corruption(Group):
    group = "corruption"

    def test_a_flipped_bit_is_never_served(self) -> None:
        """One bit in a checksum-free tier is another token's attention, and nobody notices."""
        places = {"the header's first bytes": 2, "the header's padding": PAGE - 1}
        start = PAGE
        for number, nbytes in enumerate(self._segments(), 1):
            places[f"the start of segment {number}"] = start + 17
            places[f"the end of segment {number}"] = start + nbytes - 1
            end = start + -(-nbytes // PAGE) * PAGE
            if start + nbytes < end:
                places[f"the padding of segment {number}"] = start + nbytes
            start = end
        self._never_served({f"a bit flipped in {where}": _flip(at) for where, at in places.items()})

    def test_a_truncated_or_grown_value_is_never_served(self) -> None:
        """A write that was cut short leaves a value that exists: served, it is a hit on nothing."""
        self._never_served(
            {
                "a value cut to nothing": lambda frame: b"",
                "a value cut to its header": lambda frame: frame[:PAGE],
                "a value without its last page": lambda frame: frame[:-PAGE],
                "a value cut in the middle of a page": lambda frame: frame[: 100 - PAGE],
                "a value with a page too many": lambda frame: frame + bytes(PAGE),
            }
        )

    def test_another_value_in_its_place_is_never_served(self) -> None:
        """A name that leads to another value's bytes serves one request the KV of another."""
        other = key_named("somebody else's")
        junk = value_of(other, 7, 5 * PAGE)
        self._never_served(
            {
                "another key's value": lambda frame: sealed_frame(other, 1, self._segments()),
                "bytes that are no value": lambda frame: junk[: len(frame)],
                "zeros": lambda frame: bytes(len(frame)),
            }
        )

    def test_one_damaged_value_costs_only_itself(self) -> None:
        """A prefix is read as one batch: one bad sector must not lose the rest of it."""
        core, place = self._open()
        keys = [key_named(f"beside damage {n}") for n in range(min(5, self._max_batch()))]
        frames = [sealed_frame(key, 1, self._segments()) for key in keys]
        for key, frame in zip(keys, frames, strict=True):
            core.put(key, frame)
        bad = len(keys) // 2
        self._damage(core, place, keys[bad], frames[bad][:-PAGE])
        job = core.run(Operation.GET, keys, view_nbytes=len(frames[0]))
        for index, frame in enumerate(frames):
            outcome = job.outcomes[index]
            if index == bad:
                check(outcome.status is not Status.OK, "a truncated value in a batch ended OK")
            else:
                served = outcome.status is Status.OK and job.values[index] == frame
                check(served, f"item {index} beside a damaged one: {outcome.status.name} ({outcome.error})")

    def test_a_damaged_value_is_replaced_by_the_next_put(self) -> None:
        """A store that skips what it "already has" keeps a damaged value for ever, and misses each time."""
        core, place = self._open()
        for name, damage in (("flipped", _flip(PAGE + 9)), ("cut", lambda frame: frame[:PAGE])):
            key = key_named(f"repaired {name}")
            frame = sealed_frame(key, 1, self._segments())
            core.put(key, frame)
            self._damage(core, place, key, damage(frame))
            core.get(key, len(frame))
            core.put(key, frame)
            outcome, value = core.get(key, len(frame))
            whole = outcome.status is Status.OK and value == frame
            check(whole, f"a damaged ({name}) value put again: {outcome.status.name} ({outcome.error})")

    def test_damage_is_not_an_outage(self) -> None:
        """Damage told as a failure of the store opens the breaker: one bad file takes the tier away."""
        core, place = self._open()
        good = key_named("undamaged")
        core.put(good, sealed_frame(good, 1, self._segments()))
        for what, damage in (("a bit flipped", _flip(PAGE)), ("cut", lambda frame: frame[:PAGE])):
            for n in range(_BREAKER_PATIENCE):
                key = key_named(f"{what} {n}")
                frame = sealed_frame(key, 1, self._segments())
                core.put(key, frame)
                self._damage(core, place, key, damage(frame))
                core.get(key, len(frame))
            self._is_closed(core, f"{_BREAKER_PATIENCE} values with {what}")
        outcome, _ = core.get(good, len(sealed_frame(good, 1, self._segments())))
        check(outcome.status is Status.OK, f"a good value after damaged ones: {outcome.status.name}")

    def test_what_belongs_to_others_is_neither_listed_nor_touched(self) -> None:
        """Users put files where they please: counted, they fill the bound; deleted, they are a disaster."""
        self.bench.require_medium("file", "network", why="nobody else can leave anything in it")
        place = self.bench.place()
        store, values = self.bench.open(place), self.some_values(3)
        for key, value in values:
            self.put(store, key, value)
        reach = Reach(self.bench, place)
        foreign = reach.litter()
        for reopened in (False, True):
            when = "after reopening" if reopened else "while open"
            if reopened:
                store.close()
                store = self.bench.open(place)
            if reopened and not self.bench.capabilities.persistent:
                break
            counted = self.bench.capabilities.shared or store.stats().entries == len(values)
            check(counted, f"{when} stats counts what is not the store's own")
            for key, value in values:
                self.holds(store, key, value, f"a value among foreign things {when}")
            if self.bench.capabilities.scan:
                found = {entry.key for entry in store.scan()}
                check(found == {key for key, _ in values}, f"a scan {when} lists {len(found)} of 3 keys")
        removed = foreign - reach.paths(foreign)
        check(not removed, f"foreign things were removed: {sorted(removed)[:3]}")

    # -- what these properties share -------------------------------------------------------------

    def _never_served(self, damages: dict[str, Damage]) -> None:
        """Damages the newer of two copies in each way; then only that very copy may be served."""
        core, place = self._open()
        for number, (what, damage) in enumerate(damages.items()):
            key = key_named(f"damaged {number}")
            for version in (1, 2):
                core.put(key, frame := sealed_frame(key, version, self._segments()))
            self._damage(core, place, key, damage(frame))
            outcome, value = core.get(key, len(frame) + PAGE)
            served_wrong = outcome.status is Status.OK and value != frame
            check(not served_wrong, f"{what} ended OK with bytes that are not what was put")

    def _segments(self) -> tuple[int, ...]:
        """Those of a frame that may also grow by a page."""
        return self.segments((3000, PAGE, 5001), spare_pages=1)

    def _is_closed(self, core: Core, what: str) -> None:
        closed = core.read_breaker.state is BreakerState.CLOSED
        check(closed, f"{what} opened the breaker, and with it the whole tier is away")

    def _open(self) -> tuple[Core, Place]:
        place = self.bench.place()
        return self.bench.open_core(place), place

    def _damage(self, core: Core, place: Place, key: StorageKey, content: bytes) -> None:
        """Puts `content` where the value of `key` is; through the backend where nothing is behind it."""
        if self.bench.capabilities.medium != "memory":
            Reach(self.bench, place).raw_put(key, content)
        elif content:
            core.put(key, content + bytes(-len(content) % PAGE))

    def _max_batch(self) -> int:
        return self.bench.capabilities.max_batch or 5


def _flip(at: int) -> Damage:
    def damage(frame: bytes) -> bytes:
        return frame[:at] + bytes([frame[at] ^ 4]) + frame[at + 1 :]

    return damage
