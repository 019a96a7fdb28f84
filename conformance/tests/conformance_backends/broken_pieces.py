"""Broken for some values, views, ranges and clients only: each right in every simple case."""

from __future__ import annotations

import itertools
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from conformance_backends.catalogue import breaks
from conformance_backends.files import FileBackend
from conformance_backends.memory import MISS, MemoryBackend, failed, write_at
from conformance_backends.network import NetworkBackend
from lmcache_core.errors import DeadlineExceeded
from lmcache_core.identity.keys import StorageKey
from lmcache_core.storage.contract import (
    Call,
    Capabilities,
    Entry,
    Host,
    Item,
    Outcome,
    Page,
    Status,
    View,
)

T = TypeVar("T")
PAGE = 4096
# -- views ---------------------------------------------------------------------------------------


@breaks("a_frame_of_many_layers_comes_back_in_as_many_views")
class Takes32Views(MemoryBackend):
    """A list of 32 pieces is all that its work requests take; the rest is left out in silence."""

    def gather(self, views: Sequence[View]) -> bytes:
        return super().gather(views[:32]).ljust(sum(view.nbytes for view in views), b"\0")

    def spread(self, part: bytes, views: Sequence[View]) -> None:
        super().spread(part, views[:32])


@breaks("a_frame_of_many_layers_comes_back_in_as_many_views")
class TakesFewViews(MemoryBackend):
    """As a `writev` of more than 1024 pieces: an invalid argument."""

    def put_one(self, item: Item) -> Outcome:
        return failed("invalid argument") if len(item.views) > 128 else super().put_one(item)


# -- ranges --------------------------------------------------------------------------------------


@breaks("a_range_may_cross_any_boundary_of_the_medium")
class CutsRangesAtAStripe(MemoryBackend):
    """Values are striped; a range that crosses into the next stripe wraps round in its own."""

    stripe = 64 << 10

    def cut(self, value: bytes, item: Item) -> bytes:
        first = item.offset // self.stripe * self.stripe
        own = value[first : first + self.stripe]
        part = own[item.offset - first :][: item.nbytes]
        if len(part) < item.nbytes and first + self.stripe < len(value):
            part += own[: item.nbytes - len(part)]
        return part


@breaks("a_range_may_cross_any_boundary_of_the_medium")
class CutsRangesAtALargeStripe(CutsRangesAtAStripe):
    stripe = 1 << 20


@breaks("a_range_touches_nothing_outside_its_views")
class OverrunsARange(MemoryBackend):
    """Reads in blocks of 8 KiB, and copies whole blocks."""

    def get_one(self, item: Item) -> Outcome:
        outcome, value = super().get_one(item), self.read(item.key)
        if not item.whole and outcome.status is Status.OK and value is not None:
            end, last = item.offset + item.nbytes, item.views[-1]
            write_at(last.address + last.nbytes, value[end : end + -item.nbytes % (2 * PAGE)])
        return outcome


@breaks("a_range_is_of_the_newest_copy")
class RangesFromAnOldHandle(MemoryBackend):
    """The handle that the first range opened serves the next ones, whatever the key holds by then."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.handles: dict[str, bytes] = {}

    def get_one(self, item: Item) -> Outcome:
        if item.whole:
            return super().get_one(item)
        value = self.handles.get(item.key) or self.read(item.key)
        if value is None:
            return MISS
        self.handles[item.key] = value
        part = self.cut(value, item)
        if len(part) < item.nbytes:
            return MISS
        self.spread(part, item.views)
        return Outcome(status=Status.OK, nbytes=len(part))


# -- values and keys -----------------------------------------------------------------------------


@breaks("a_value_may_be_any_bytes")
class TakesZerosForAHole(MemoryBackend):
    def read(self, key: StorageKey) -> bytes | None:
        value = super().read(key)
        return value if value is not None and any(value) else None


@breaks("a_value_may_be_any_bytes")
class MarksDeletionWithText(MemoryBackend):
    def read(self, key: StorageKey) -> bytes | None:
        value = super().read(key)
        return None if value is not None and value.startswith(b'{"key": null}') else value


@breaks("equal_values_under_two_keys_are_two_values")
class DeletesWhatOthersShare(MemoryBackend):
    """Equal values are stored once, and nobody counts for how many keys."""

    def delete_one(self, key: StorageKey) -> Outcome:
        with self.lock:
            value = self.values.pop(key, None)
            for other in [other for other, shared in self.values.items() if shared == value]:
                del self.values[other]
        return MISS if value is None else Outcome(status=Status.OK)


@breaks("equal_values_under_two_keys_are_two_values")
class OverwritesWhatOthersShare(MemoryBackend):
    def keep(self, key: StorageKey, value: bytes) -> Outcome:
        old, outcome = self.values.get(key), super().keep(key, value)
        if outcome.status is Status.OK and old is not None:
            self.values.update({other: value for other, shared in self.values.items() if shared == old})
        return outcome


@breaks("keys_that_look_alike_are_different_values", also=("a_scan_is_limited_to_its_prefix",))
class NamesValuesByContentAlone(MemoryBackend):
    """The part is left out of the name: one rank's KV is served to another."""

    def name(self, key: StorageKey) -> str:
        chunk = re.fullmatch("c-[0-9a-f]{16}-([0-9a-f]{64})", key)
        return f"c-{'0123456789abcdef'}-{chunk.group(1)}" if chunk else key


@breaks("a_key_may_occur_twice_in_a_batch")
class StatsEachKeyOnce(MemoryBackend):
    def stat_many(self, keys: Sequence[StorageKey], call: Call) -> None:
        for key, index in {key: index for index, key in enumerate(keys)}.items():
            call.remaining()
            call.done(index, self.stat_one(key))


@breaks("a_key_may_occur_twice_in_a_batch")
class DeletesEachKeyOnce(MemoryBackend):
    def delete_many(self, keys: Sequence[StorageKey], call: Call) -> None:
        for key, index in {key: index for index, key in enumerate(keys)}.items():
            call.remaining()
            call.done(index, self.delete_one(key))


@breaks("a_batch_cancelled_before_it_starts_changes_nothing")
class LooksAtTheDeadlineAlone(MemoryBackend):
    def each(self, things: Sequence[T], call: Call, one: Callable[[T], Outcome]) -> None:
        for index, thing in enumerate(things):
            if time.monotonic() > call.deadline:
                raise DeadlineExceeded("too late")
            call.done(index, one(thing))


# -- what is told --------------------------------------------------------------------------------


@breaks("nothing_is_told_lost_that_is_there")
class SaysLostWhatDoesNotFit(MemoryBackend):
    def open(self, host: Host) -> Capabilities | None:
        self.host = host
        return super().open(host)

    def too_small(self, item: Item, value: bytes) -> Outcome:
        self.host.lost([(item.key, None)], "unreadable")
        return super().too_small(item, value)


@breaks("a_scan_gives_no_value_another_ones_parent")
class GivesTheLastParentToAll(MemoryBackend):
    parent: StorageKey | None = None

    def put_one(self, item: Item) -> Outcome:
        self.parent = item.parent
        return super().put_one(item)

    def scan(self, call: Call, prefix: str, cursor: str | None, limit: int) -> Page:
        page = super().scan(call, prefix, cursor, limit)
        return replace(page, entries=[replace(entry, parent=self.parent) for entry in page.entries])


@breaks("a_scan_gives_no_value_another_ones_parent")
class ForgetsParentsWhenReopened(FileBackend):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.parents: dict[str, StorageKey | None] = {}

    def put_one(self, item: Item) -> Outcome:
        self.parents[item.key] = item.parent
        return super().put_one(item)

    def scan(self, call: Call, prefix: str, cursor: str | None, limit: int) -> Page:
        page = super().scan(call, prefix, cursor, limit)
        entries: list[Entry] = [replace(entry, parent=self.parents.get(entry.key)) for entry in page.entries]
        return replace(page, entries=entries)


@breaks("tokens_grow_whoever_puts", also=("each_copy_has_a_higher_token_than_the_one_before",))
class CountsItsOwnTokens(NetworkBackend):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.numbers = itertools.count(1)

    def put_one(self, item: Item, call: Call) -> Outcome:
        outcome = super().put_one(item, call)
        return replace(outcome, token=next(self.numbers)) if outcome.token else outcome

    def get_one(self, item: Item, call: Call) -> Outcome:
        return replace(super().get_one(item, call), token=None)


@breaks("an_overwrite_by_another_client_is_seen")
class StatsFromItsOwnPuts(NetworkBackend):
    """Knows the lengths that it put itself."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.lengths: dict[str, int] = {}

    def put_one(self, item: Item, call: Call) -> Outcome:
        outcome = super().put_one(item, call)
        if outcome.status is Status.OK:
            self.lengths[item.key] = item.nbytes
        return outcome

    def stat_one(self, key: StorageKey, call: Call) -> Outcome:
        outcome = super().stat_one(key, call)
        ours = self.lengths.get(key)
        return outcome if ours is None or outcome.status is not Status.OK else replace(outcome, nbytes=ours)


# -- what is left behind -------------------------------------------------------------------------


@breaks("calls_that_end_badly_leave_nothing_behind")
class LeaksADescriptorWhenTooSmall(FileBackend):
    """The early return forgets to close."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.leaked: list[int] = []

    def get_one(self, item: Item) -> Outcome:
        outcome = super().get_one(item)
        if outcome.status is Status.TOO_SMALL:
            self.leaked.append(os.open(self.path / item.key, os.O_RDONLY))
        return outcome

    def close(self) -> None:
        super().close()
        while self.leaked:
            os.close(self.leaked.pop())


@breaks("calls_that_end_badly_leave_nothing_behind")
class StartsAThreadForEachMiss(MemoryBackend):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.end = threading.Event()

    def absent(self, item: Item) -> Outcome:
        threading.Thread(target=self.end.wait, daemon=True).start()
        return super().absent(item)

    def close(self) -> None:
        self.end.set()
        super().close()


@breaks("calls_that_end_badly_leave_nothing_behind")
class RemembersEachMiss(MemoryBackend):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.missed: list[tuple[float, str]] = []

    def absent(self, item: Item) -> Outcome:
        self.missed.append((time.monotonic(), item.key))
        return super().absent(item)
