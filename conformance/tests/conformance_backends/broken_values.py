"""Broken in what they store and return: round trip, sizes, batching, destination."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from conformance_backends.catalogue import ANYTHING, DAMAGE, FILLING, RACES, RANGES, THROUGH_THE_CORE, breaks
from conformance_backends.memory import FULL, MISS, MemoryBackend, failed, write_at
from lmcache_core.identity.keys import StorageKey
from lmcache_core.storage.contract import Call, Item, Outcome, Status, View

T = TypeVar("T")
PAGE = 4096


@breaks("a_value_comes_back_byte_for_byte", also=ANYTHING)
class FlipsABit(MemoryBackend):
    def gather(self, views: Sequence[View]) -> bytes:
        value = bytearray(super().gather(views))
        value[-1] ^= 1
        return bytes(value)


@breaks(
    "a_value_in_many_views_comes_back_in_order", also=("a_frame_of_many_layers_comes_back_in_as_many_views",)
)
class GathersViewsBackwards(MemoryBackend):
    def gather(self, views: Sequence[View]) -> bytes:
        return super().gather(views[::-1])


@breaks(
    "overwriting_replaces_the_whole_value",
    also=(
        *RANGES,
        *DAMAGE,
        "any_sequence_of_operations_agrees_with_a_plain_dictionary",
        "an_overwrite_is_seen_whole_by_readers",
    ),
)
class LeavesTheEndOfALongerValue(MemoryBackend):
    def keep(self, key: StorageKey, value: bytes) -> Outcome:
        old = self.values.get(key, b"")
        return super().keep(key, value + old[len(value) :])


@breaks(
    "reading_twice_gives_the_same_bytes",
    also=(
        *RANGES,
        "a_key_may_occur_twice_in_a_batch",
        "a_value_in_many_views_comes_back_in_order",
        "any_sequence_of_operations_agrees_with_a_plain_dictionary",
        "a_full_store_says_so_and_keeps_what_it_has",
        "a_range_is_exactly_the_bytes_asked_for",
        "bytes_beyond_the_value_are_not_touched",
        "nothing_outside_the_views_is_touched",
        "overwriting_replaces_the_whole_value",
        *RACES,
        "views_that_are_too_small_learn_the_size",
        "deleting_makes_room_again",
        "a_range_past_the_end_is_never_ok",
        "leases_and_holds_return_to_zero",
        "nothing_survives_close",
        "calls_that_succeed_leave_nothing_behind",
        "calls_that_end_badly_take_nothing_from_later_ones",
    ),
)
class LosesAValueWhenItIsReadTwice(MemoryBackend):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.reads: Counter[str] = Counter()

    def read(self, key: StorageKey) -> bytes | None:
        self.reads[key] += 1
        return None if self.reads[key] > 2 else super().read(key)


@breaks(
    "an_absent_key_is_a_miss",
    also=(
        *FILLING,
        *RANGES,
        "an_expired_call_changes_nothing",
        "a_deleted_value_is_gone_for_everyone",
        "a_full_store_says_so_and_keeps_what_it_has",
        "a_miss_touches_nothing_outside_the_views",
        "a_range_past_the_end_is_never_ok",
        "an_overwrite_that_does_not_fit_keeps_the_old_value",
        "any_sequence_of_operations_agrees_with_a_plain_dictionary",
        "deleting_makes_room_again",
        "hits_and_misses_mix_in_one_batch",
        *RACES,
    ),
)
class FailsWhenAbsent(MemoryBackend):
    def absent(self, item: Item) -> Outcome:
        return failed("no such value")


@breaks("keys_that_look_alike_are_different_values")
class CutsLongNames(MemoryBackend):
    def name(self, key: StorageKey) -> str:
        return key[:100]


@breaks("keys_that_look_alike_are_different_values")
class StripsDashes(MemoryBackend):
    def name(self, key: StorageKey) -> str:
        return key.strip("-")


@breaks("keys_that_look_alike_are_different_values")
class DeletesWhatBeginsAlike(MemoryBackend):
    """As a server does that is told to delete all under a prefix."""

    def delete_one(self, key: StorageKey) -> Outcome:
        outcome = super().delete_one(key)
        with self.lock:
            self.values = {name: value for name, value in self.values.items() if not name.startswith(key)}
        return outcome


@breaks(
    "a_sealed_frame_still_verifies_after_a_round_trip", also=(*THROUGH_THE_CORE, "a_value_may_be_any_bytes")
)
class TrimsTrailingZeros(MemoryBackend):
    def gather(self, views: Sequence[View]) -> bytes:
        value = super().gather(views)
        return value.rstrip(b"\0") if value.endswith(bytes(16)) else value


@breaks("any_sequence_of_operations_agrees_with_a_plain_dictionary", also=(*RANGES,))
class BringsBackWhatAShorterValueReplaced(MemoryBackend):
    """Put, put something shorter, delete: the first value is there again."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.beneath: dict[str, bytes] = {}

    def keep(self, key: StorageKey, value: bytes) -> Outcome:
        old = self.values.get(key, b"")
        if len(value) < len(old):
            self.beneath[key] = old
        return super().keep(key, value)

    def delete_one(self, key: StorageKey) -> Outcome:
        outcome = super().delete_one(key)
        if key in self.beneath:
            self.values[key] = self.beneath.pop(key)
        return outcome


@breaks("every_number_of_pages_is_stored_whole", also=("a_frame_of_many_layers_comes_back_in_as_many_views",))
class LosesThePageAfterA64PageBlock(MemoryBackend):
    def gather(self, views: Sequence[View]) -> bytes:
        value = super().gather(views)
        return value[:-PAGE] if len(value) == 65 * PAGE else value


@breaks(
    "larger_views_are_an_upper_bound",
    also=(
        "damage_is_not_an_outage",
        "a_get_keeps_no_view",
        "a_sealed_frame_still_verifies_after_a_round_trip",
        *RACES,
        "any_sequence_of_operations_agrees_with_a_plain_dictionary",
        "bytes_beyond_the_value_are_not_touched",
        "nothing_outside_the_views_is_touched",
        "overwriting_replaces_the_whole_value",
    ),
)
class InsistsOnExactViews(MemoryBackend):
    def get_one(self, item: Item) -> Outcome:
        value = self.read(item.key)
        if value is not None and item.whole and len(value) < item.nbytes:
            return failed("views of another size")
        return super().get_one(item)


@breaks(
    "stat_tells_the_length_that_get_returns",
    also=(
        "any_sequence_of_operations_agrees_with_a_plain_dictionary",
        "each_item_is_settled_under_its_own_index",
        "a_store_of_many_values_holds_counts_and_lists_all_of_them",
    ),
)
class SaysNoLength(MemoryBackend):
    def stat_one(self, key: StorageKey) -> Outcome:
        return MISS if super().stat_one(key) is MISS else Outcome(status=Status.OK)


@breaks(
    "a_value_of_the_declared_maximum_is_stored",
    also=(
        "a_frame_of_many_layers_comes_back_in_as_many_views",
        *RANGES,
        "a_large_value_is_stored_whole",
    ),
)
class RefusesItsMaximum(MemoryBackend):
    def put_one(self, item: Item) -> Outcome:
        return FULL if item.nbytes >= self.config.max_value_bytes else super().put_one(item)


@breaks("a_value_over_the_maximum_is_refused_not_truncated", also=("one_bad_put_leaves_the_others",))
class TruncatesAtItsMaximum(MemoryBackend):
    def put_one(self, item: Item) -> Outcome:
        with self.lock:
            return self.keep(item.key, self.gather(item.views)[: self.config.max_value_bytes])


@breaks(
    "a_large_value_is_stored_whole",
    also=(
        "a_frame_of_many_layers_comes_back_in_as_many_views",
        *RANGES,
        "a_value_of_the_declared_maximum_is_stored",
    ),
)
class WritesOnlyTheFirstPartOfLargeValues(MemoryBackend):
    def gather(self, views: Sequence[View]) -> bytes:
        value = super().gather(views)
        return value[: 300 * PAGE].ljust(len(value), b"\0")


@breaks("each_item_is_settled_under_its_own_index", also=ANYTHING)
class SettlesBackwards(MemoryBackend):
    def each(self, things: Sequence[T], call: Call, one: Callable[[T], Outcome]) -> None:
        for index, thing in enumerate(things):
            call.remaining()
            call.done(len(things) - 1 - index, one(thing))


@breaks("hits_and_misses_mix_in_one_batch")
class StopsAtTheFirstMiss(MemoryBackend):
    def get_many(self, items: Sequence[Item], call: Call) -> None:
        missed = False
        for index, item in enumerate(items):
            call.remaining()
            outcome = MISS if missed else self.get_one(item)
            missed = outcome is MISS
            call.done(index, outcome)


@breaks("a_key_may_occur_twice_in_a_batch")
class ServesEachKeyOnce(MemoryBackend):
    def get_many(self, items: Sequence[Item], call: Call) -> None:
        places = {item.key: index for index, item in enumerate(items)}
        for index in places.values():
            call.remaining()
            call.done(index, self.get_one(items[index]))


@breaks("an_empty_batch_returns_at_once")
class NeedsAFirstItem(MemoryBackend):
    def each(self, things: Sequence[T], call: Call, one: Callable[[T], Outcome]) -> None:
        assert things[0] is not None
        super().each(things, call, one)


@breaks(
    "a_batch_of_the_maximum_number_of_items_is_taken",
    also=(
        "a_batch_of_the_declared_maximum_is_taken_by_every_operation",
        "a_store_of_many_values_holds_counts_and_lists_all_of_them",
    ),
)
class ForgetsItemsAfterTheTwentieth(MemoryBackend):
    def put_many(self, items: Sequence[Item], call: Call) -> None:
        for index, item in enumerate(items):
            call.remaining()
            call.done(index, self.put_one(item) if index < 20 else Outcome(status=Status.OK))


@breaks("one_bad_get_leaves_the_others")
class FailsTheBatchForOneSmallView(MemoryBackend):
    def get_many(self, items: Sequence[Item], call: Call) -> None:
        call.remaining()
        outcomes = [self.get_one(item) for item in items]
        bad = len(items) > 1 and any(outcome.status is Status.TOO_SMALL for outcome in outcomes)
        for index, outcome in enumerate(outcomes):
            call.done(index, failed("bad batch") if bad else outcome)


@breaks("one_bad_put_leaves_the_others")
class RefusesTheBatchForOneLargeValue(MemoryBackend):
    def put_many(self, items: Sequence[Item], call: Call) -> None:
        if any(item.nbytes > self.config.max_value_bytes for item in items):
            raise ValueError("a value is too large")
        super().put_many(items, call)


@breaks(
    "every_item_is_settled_exactly_once_with_a_status_of_its_operation",
    also=("all_memory_is_back_after_a_workload_through_the_core",),
)
class SettlesTwice(MemoryBackend):
    def stat_many(self, keys: Sequence[StorageKey], call: Call) -> None:
        super().stat_many(keys, call)
        super().stat_many(keys, call)


@breaks(
    "every_item_is_settled_exactly_once_with_a_status_of_its_operation",
    also=ANYTHING,
)
class SaysTimeoutForAMiss(MemoryBackend):
    def absent(self, item: Item) -> Outcome:
        return Outcome(status=Status.TIMEOUT)


@breaks(
    "nothing_outside_the_views_is_touched",
    also=(
        *RANGES,
        "a_value_that_grows_during_a_get_stays_inside_the_views",
    ),
)
class OverrunsTheLastView(MemoryBackend):
    def spread(self, part: bytes, views: Sequence[View]) -> None:
        super().spread(part, views)
        write_at(views[-1].address + views[-1].nbytes, b"\0")


@breaks("bytes_beyond_the_value_are_not_touched")
class ClearsTheRestOfTheViews(MemoryBackend):
    def spread(self, part: bytes, views: Sequence[View]) -> None:
        super().spread(part.ljust(sum(view.nbytes for view in views), b"\0"), views)


@breaks(
    "views_that_are_too_small_learn_the_size",
    also=(
        "any_sequence_of_operations_agrees_with_a_plain_dictionary",
        "all_memory_is_back_after_a_workload_through_the_core",
    ),
)
class DoesNotSayTheSize(MemoryBackend):
    def too_small(self, item: Item, value: bytes) -> Outcome:
        return Outcome(status=Status.TOO_SMALL)


@breaks(
    "views_that_are_too_small_learn_the_size",
    also=(
        "a_value_that_grows_during_a_get_stays_inside_the_views",
        "one_bad_get_leaves_the_others",
        "the_first_range_is_not_the_whole_value",
        "any_sequence_of_operations_agrees_with_a_plain_dictionary",
    ),
)
class TruncatesIntoSmallViews(MemoryBackend):
    def too_small(self, item: Item, value: bytes) -> Outcome:
        self.spread(value[: item.nbytes], item.views)
        return Outcome(status=Status.OK, nbytes=item.nbytes)


@breaks("a_miss_touches_nothing_outside_the_views")
class ClearsEverythingOnAMiss(MemoryBackend):
    def absent(self, item: Item) -> Outcome:
        first, last = item.views[0], item.views[-1]
        ctypes.memset(first.address, 0, last.address + last.nbytes - first.address)
        return MISS
