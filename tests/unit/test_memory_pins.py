"""Pins: promises not to evict, with owner and expiry."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator

import pytest

from lmcache_core.errors import LeaseError
from lmcache_core.identity.keys import StorageKey, storage_key
from lmcache_core.memory import PinTable

A, B = storage_key("c-a"), storage_key("c-b")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pins(clock: Clock) -> PinTable:
    return PinTable(clock)


def test_a_pin_covers_its_key_in_its_tier_alone(pins: PinTable) -> None:
    pins.pin([("cpu", A)], owner="engine", ttl_s=60)
    assert pins.pinned("cpu", A)
    assert not pins.pinned("disk", A)
    assert not pins.pinned("cpu", B)


def test_unpin_ends_exactly_the_pins_of_its_lookup(pins: PinTable) -> None:
    first = pins.pin([("cpu", A), ("cpu", B)], owner="engine", ttl_s=60)
    second = pins.pin([("cpu", A)], owner="engine", ttl_s=60)
    assert first != second
    assert pins.unpin(first) == 2
    assert pins.pinned("cpu", A)
    assert not pins.pinned("cpu", B)
    assert pins.unpin(second) == 1
    assert not pins.pinned("cpu", A)


def test_a_key_pinned_twice_by_one_lookup_needs_one_unpin(pins: PinTable) -> None:
    lookup_id = pins.pin([("cpu", A), ("cpu", A)], owner="engine", ttl_s=60)
    assert pins.unpin(lookup_id) == 2
    assert not pins.pinned("cpu", A)


def test_a_second_unpin_raises(pins: PinTable) -> None:
    lookup_id = pins.pin([("cpu", A)], owner="engine", ttl_s=60)
    pins.unpin(lookup_id)
    with pytest.raises(LeaseError, match="unknown, or unpinned before"):
        pins.unpin(lookup_id)


def test_an_unknown_lookup_raises_and_ends_nothing(pins: PinTable) -> None:
    pins.pin([("cpu", A)], owner="engine", ttl_s=60)
    with pytest.raises(LeaseError, match="'elsewhere'"):
        pins.unpin("elsewhere")
    assert pins.pinned("cpu", A)


def test_an_expired_pin_covers_nothing_and_its_unpin_is_forgiven_once(pins: PinTable, clock: Clock) -> None:
    lookup_id = pins.pin([("cpu", A)], owner="engine", ttl_s=60)
    clock.now += 59.9
    assert pins.pinned("cpu", A)
    clock.now += 0.1
    assert not pins.pinned("cpu", A)
    assert (pins.num_expired, pins.active()) == (1, ())
    assert pins.unpin(lookup_id) == 0
    with pytest.raises(LeaseError):
        pins.unpin(lookup_id)


def test_expiry_of_one_lookup_leaves_anothers_pins(pins: PinTable, clock: Clock) -> None:
    pins.pin([("cpu", A)], owner="engine", ttl_s=10)
    pins.pin([("cpu", A)], owner="engine", ttl_s=20)
    clock.now += 15
    assert pins.pinned("cpu", A)
    clock.now += 5
    assert not pins.pinned("cpu", A)


def test_pinning_more_under_a_lookup_prolongs_all_of_it(pins: PinTable, clock: Clock) -> None:
    lookup_id = pins.pin([("cpu", A)], owner="engine", ttl_s=10)
    clock.now += 5
    assert pins.pin([("disk", B)], owner="engine", ttl_s=10, lookup_id=lookup_id) == lookup_id
    clock.now += 7
    assert pins.pinned("cpu", A)
    (pin,) = pins.active()
    assert (pin.lookup_id, pin.owner, pin.expires_at) == (lookup_id, "engine", 115.0)
    assert pin.keys == (("cpu", A), ("disk", B))
    assert pins.unpin(lookup_id) == 2


def test_a_shorter_ttl_does_not_shorten_a_lookup(pins: PinTable, clock: Clock) -> None:
    lookup_id = pins.pin([("cpu", A)], owner="engine", ttl_s=60)
    pins.pin([("cpu", B)], owner="engine", ttl_s=1, lookup_id=lookup_id)
    clock.now += 30
    assert pins.pinned("cpu", B)


def test_a_lookup_of_another_owner_is_not_extended(pins: PinTable) -> None:
    lookup_id = pins.pin([("cpu", A)], owner="engine", ttl_s=60)
    with pytest.raises(LeaseError, match="pinned by engine, not by intruder"):
        pins.pin([("cpu", B)], owner="intruder", ttl_s=60, lookup_id=lookup_id)
    assert not pins.pinned("cpu", B)


@pytest.mark.parametrize("ttl_s", [math.nan, math.inf, -math.inf, 0, -1.0, 10**400])
def test_a_lifetime_that_is_none_is_refused_and_later_pins_expire(
    pins: PinTable, clock: Clock, ttl_s: float
) -> None:
    with pytest.raises(ValueError, match="a finite number of seconds above 0"):
        pins.pin([("cpu", A)], owner="engine", ttl_s=ttl_s)
    assert pins.active() == ()
    pins.pin([("cpu", B)], owner="engine", ttl_s=1)
    clock.now += 1
    assert pins.active() == ()
    assert not pins.pinned("cpu", B)


def test_lookup_ids_of_two_tables_differ() -> None:
    """An id from before a restart must not release somebody else's pins."""
    assert PinTable().pin([], owner="a", ttl_s=1) != PinTable().pin([], owner="a", ttl_s=1)


def test_ended_and_expired_lookups_leave_nothing_that_grows(pins: PinTable, clock: Clock) -> None:
    for _ in range(5000):
        pins.unpin(pins.pin([("cpu", A)], owner="engine", ttl_s=1e9))
    assert len(pins._expiries) < 200
    for _ in range(12_000):
        pins.pin([("cpu", A)], owner="engine", ttl_s=1)
        clock.now += 1
    assert not pins.pinned("cpu", A)
    assert len(pins._expired) <= 10_000
    assert not pins._counts


def test_a_finalizer_that_unpins_inside_the_table_does_not_hang(pins: PinTable) -> None:
    lookup_id = pins.pin([("cpu", A)], owner="engine", ttl_s=60)

    def keys() -> Iterator[tuple[str, StorageKey]]:
        assert pins.unpin(lookup_id) == 1  # runs while `pin` holds the table's lock
        yield "cpu", B

    pins.pin(keys(), owner="engine", ttl_s=60)
    assert not pins.pinned("cpu", A)
    assert pins.pinned("cpu", B)


def test_threads_that_pin_and_unpin_leave_nothing_pinned(pins: PinTable) -> None:
    barrier = threading.Barrier(4)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            barrier.wait()
            for _ in range(500):
                lookup_id = pins.pin([("cpu", A), ("cpu", B)], owner=str(number), ttl_s=60)
                assert pins.pinned("cpu", A)
                assert pins.unpin(lookup_id) == 2
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert not pins.pinned("cpu", A)
    assert pins.active() == ()
