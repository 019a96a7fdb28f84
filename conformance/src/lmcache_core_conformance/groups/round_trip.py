"""Round trip: what was put is what comes back."""

from __future__ import annotations

from lmcache_core.frame import verify
from lmcache_core.identity.keys import storage_key
from lmcache_core.storage.contract import Status
from lmcache_core_conformance.bench import uneven_cuts
from lmcache_core_conformance.driver import Want
from lmcache_core_conformance.model import live
from lmcache_core_conformance.properties import Group
from lmcache_core_conformance.values import PAGE, PART, difference, key_named, sealed_frame, value_of
from lmcache_core_conformance.verdicts import check

_MOST_VIEWS = 1100
"""More than the 1024 pieces that one system call takes."""


class RoundTrip(Group):
    group = "round-trip"

    def test_a_value_comes_back_byte_for_byte(self) -> None:
        """A wrong byte is another token's KV: the worst fault, because nobody notices it."""
        store = self.bench.open()
        for key, value in self.some_values(3):
            self.put(store, key, value)
            self.holds(store, key, value)

    def test_a_value_in_many_views_comes_back_in_order(self) -> None:
        """Frames reach a backend in pieces; pieces written or read out of order are other layers' KV."""
        store, key = self.bench.open(), key_named("pieces")
        value = value_of(key, 1, self.bench.fit(23))
        outcome = store.put(key, value, uneven_cuts(len(value), 9))
        check(outcome.status is Status.OK, f"put of 9 views: {outcome.status.name} ({outcome.error})")
        for pieces in (1, 4, 23):
            got = store.get_many([Want(key, tuple(uneven_cuts(len(value), pieces)))])[0]
            self.check_value(got, value, f"a value put in 9 views and read into {pieces}")

    def test_a_frame_of_many_layers_comes_back_in_as_many_views(self) -> None:
        """A frame has a view a layer and one more; system calls and work requests take far fewer at once."""
        store, most = self.bench.open(), self.bench.fit(_MOST_VIEWS) // PAGE
        for count in sorted({min(count, most) for count in (33, 129, _MOST_VIEWS)}):
            key = key_named(f"layers {count}")
            value, lengths = value_of(key, 1, count * PAGE), (PAGE,) * count
            outcome = store.put(key, value, lengths)
            check(
                outcome.status is Status.OK, f"put of {count} views: {outcome.status.name} ({outcome.error})"
            )
            got = store.get_many([Want(key, lengths)])[0]
            self.check_value(got, value, f"a value put in {count} views and read into as many")

    def test_a_value_may_be_any_bytes(self) -> None:
        """A marker that values may contain, or an encoding they don't fit, loses KV that looks like it."""
        store = self.bench.open()
        contents = {
            "zeros": bytes(2 * PAGE),
            "ones": b"\xff" * (2 * PAGE),
            "a page of zeros at the end": value_of(key_named("random"), 1, PAGE) + bytes(PAGE),
            "a page of zeros at the start": bytes(PAGE) + value_of(key_named("random"), 1, PAGE),
            "ends of lines": b"\r\n\x1a\0" * (PAGE // 4),
            "text": b'{"key": null}\n'.ljust(PAGE),
        }
        for name, value in contents.items():
            if len(value) <= self.bench.fit(2):
                self.put(store, key_named(name), value)
                self.holds(store, key_named(name), value, f"a value of {name}")
                stat = store.stat(key_named(name))
                check(stat.status is Status.OK, f"stat of a value of {name}: {stat.status.name}")

    def test_equal_values_under_two_keys_are_two_values(self) -> None:
        """What is stored once for two keys must outlive the first that is deleted or replaced."""
        store, keys = self.bench.open(), [key_named(f"equal {n}") for n in range(3)]
        value = value_of(keys[0], 1, self.bench.fit(2))
        for key in keys:
            self.put(store, key, value)
        if self.bench.capabilities.delete:
            store.delete(keys[0])
        new = value_of(keys[1], 2, len(value))
        self.put(store, keys[1], new)
        self.holds(store, keys[1], new, "a new value that replaced one of two equal ones")
        self.holds(store, keys[2], value, "a value whose equals were deleted and replaced")

    def test_what_lies_in_the_medium_is_what_was_put(self) -> None:
        """Put and get that are wrong in the same way agree with each other, and with nobody else."""
        self.bench.require_medium("file", "network", why="there is no other way to look at it")
        place = self.bench.place()
        store, key = self.bench.open(place), key_named("from outside")
        for version, pages in enumerate((5, 2)):
            value = value_of(key, version, self.bench.fit(pages))
            self.put(store, key, value)
            seen = self.bench.harness.raw_get(place.directory, key)
            check(seen is not None, "the medium holds nothing under the key of a stored value")
            if seen is not None:
                check(seen == value, f"the medium, seen from outside: {difference(value, seen)}")

    def test_overwriting_replaces_the_whole_value(self) -> None:
        """A new value that leaves the end of a longer old one behind is a mixture of two chunks."""
        store, key = self.bench.open(), key_named("overwritten")
        for version, pages in enumerate((5, 2, 7, 7, 1)):
            value = value_of(key, version, self.bench.fit(pages))
            self.put(store, key, value)
            got = store.get(key, self.bench.fit(8))
            self.check_value(got, value, f"version {version} of {pages} pages")

    def test_reading_twice_gives_the_same_bytes(self) -> None:
        """A get that consumes or alters what it reads turns the second hit into a miss or a lie."""
        store = self.bench.open()
        key, value = self.some_values(1)[0]
        self.put(store, key, value)
        for reading in ("first", "second", "third"):
            self.holds(store, key, value, f"the {reading} reading")

    def test_an_absent_key_is_a_miss(self) -> None:
        """Absent is an answer, not a failure: FAILED here opens the breaker of a healthy tier."""
        store = self.bench.open()
        self.lacks(store, key_named("never stored"), PAGE, "a key in an empty store")
        for key, value in self.some_values(2):
            self.put(store, key, value)
        self.lacks(store, key_named("still never stored"), PAGE, "a key beside others")

    def test_keys_that_look_alike_are_different_values(self) -> None:
        """A name cut, folded or joined on the way to the medium serves one request another's KV."""
        store = self.bench.open()
        names = ["a", "a-", "-a", "a-b", "ab", "a--b", "-", "0", "00", "con", "nul"]
        names += ["c" * length for length in (31, 32, 63, 64, 100, 119, 120)]
        names += ["d" * 119 + "e", "d" * 119 + "f", "e" + "d" * 119, "f" + "d" * 119]
        content = "0123456789abcdef" * 4
        names += [f"c-{PART}-{content}", f"c-{PART[::-1]}-{content}", f"n-{content}", content]
        values = [(storage_key(name), value_of(storage_key(name), 1, PAGE)) for name in names]
        for key, value in values:
            self.put(store, key, value)
        for key, value in values:
            self.holds(store, key, value, f"key {key!r}")
        if self.bench.capabilities.delete:
            for key, _ in values[::3]:
                store.delete(key)
            for place, (key, value) in enumerate(values):
                if place % 3:
                    self.holds(store, key, value, f"key {key!r}, when others like it were deleted")

    def test_a_sealed_frame_still_verifies_after_a_round_trip(self) -> None:
        """The core trusts only what its own checksums prove; a frame must arrive as it left."""
        store, key = self.bench.open(), key_named("frame")
        segments = self.segments((3000, PAGE, 5001))
        frame = sealed_frame(key, 1, segments)
        self.put(store, key, frame)
        got = store.get(key, len(frame) + 2 * PAGE)
        self.check_value(got, frame, "a sealed frame")
        header = verify(memoryview(got.value), key=key, part=PART)
        check(len(header.segments) == len(segments), "the frame lost segments")

    def test_any_sequence_of_operations_agrees_with_a_plain_dictionary(self) -> None:
        """Faults hide in orders nobody thought of; an independent oracle knows what each step must say."""
        live(self.bench)
