"""What a tier's index makes of copies that come in another order than they were made in."""

from __future__ import annotations

from scripted_backend import FRAME_NBYTES, key_of

from lmcache_core.events import EventBus
from lmcache_core.tiers.index import ResidencyIndex, Resident


def copy_of(number: int, token: int | None) -> Resident:
    return Resident(key_of(number), FRAME_NBYTES, FRAME_NBYTES, token=token)


def test_an_older_copy_does_not_replace_a_newer_one_and_gives_its_room_back() -> None:
    index = ResidencyIndex("tier", 4 * FRAME_NBYTES, pinned=lambda key: False, events=EventBus())
    newer, older, newest = copy_of(1, 7), copy_of(1, 6), copy_of(1, 8)
    assert index.admit(newer) is None
    assert index.take_room(older, [])
    assert index.admit(older) is older
    assert index.get(key_of(1)) is newer
    assert index.admit(newest) is newer
    assert index.get(key_of(1)) is newest
    stats = index.stats()
    assert (stats.entries, stats.used_bytes, stats.reserved_bytes) == (1, FRAME_NBYTES, 0)


def test_a_copy_without_a_token_replaces_any() -> None:
    index = ResidencyIndex("tier", None, pinned=lambda key: False, events=EventBus())
    first, second = copy_of(1, 7), copy_of(1, None)
    index.admit(first)
    assert index.admit(second) is first
    assert index.get(key_of(1)) is second
