"""Broken in how they behave under the core: deadlines, completion, configuration, pickling, promises."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from conformance_backends.asynchronous import AsynchronousBackend
from conformance_backends.catalogue import ANYTHING, breaks
from conformance_backends.memory import MemoryBackend
from lmcache_core.identity.keys import StorageKey
from lmcache_core.storage.contract import Call, Capabilities, Item, Outcome, Status

T = TypeVar("T")
PAGE = 4096


@breaks("an_expired_call_changes_nothing", also=("a_batch_cancelled_before_it_starts_changes_nothing",))
class NeverLooksAtTheClock(MemoryBackend):
    def each(self, things: Sequence[T], call: Call, one: Callable[[T], Outcome]) -> None:
        for index, thing in enumerate(things):
            call.done(index, one(thing))


# Its neighbours would wait half a minute, one closing after the other.
@breaks("closing_through_the_core_is_quick_and_final", also=ANYTHING)
class TakesItsTimeToClose(MemoryBackend):
    """Waits for a flush that nobody asked for, where the core closes it."""

    def close(self) -> None:
        if self.values and threading.current_thread().name.startswith("lmcache-close"):
            threading.Event().wait(2.5)
        super().close()


@breaks("an_asynchronous_call_returns_before_its_items_are_settled")
class WaitsForItsCompletions(AsynchronousBackend):
    def each(self, things: Sequence[T], call: Call, one: Callable[[T], Outcome]) -> None:
        super().each(things, call, one)
        over = threading.Event()
        self.work.put(over.set)
        over.wait(5.0)


@breaks("close_settles_what_is_under_way")
class DropsWhatIsUnderWay(AsynchronousBackend):
    def settle(self, index: int, thing: T, call: Call, one: Callable[[T], Outcome]) -> None:
        if not self.closed:
            super().settle(index, thing, call, one)


@breaks(
    "all_memory_is_back_after_a_workload_through_the_core",
    also=(
        "every_item_is_settled_exactly_once_with_a_status_of_its_operation",
        "views_that_are_too_small_learn_the_size",
        "one_bad_get_leaves_the_others",
        "any_sequence_of_operations_agrees_with_a_plain_dictionary",
        "the_first_range_is_not_the_whole_value",
    ),
)
class SettlesTwiceWhatDoesNotFit(MemoryBackend):
    def get_many(self, items: Sequence[Item], call: Call) -> None:
        super().get_many(items, call)
        for index, item in enumerate(items):
            value = self.read(item.key)
            if item.whole and value is not None and len(value) > item.nbytes:
                call.done(index, self.too_small(item, value))


@breaks("ranges_in_pieces_mix_with_whole_values_in_a_batch")
class ReadsRangesIntoTheFirstViewAlone(MemoryBackend):
    def get_one(self, item: Item) -> Outcome:
        if item.whole or len(item.views) == 1:
            return super().get_one(item)
        outcome = super().get_one(Item(item.key, item.views[:1], offset=item.offset, whole=False))
        return replace(outcome, nbytes=item.nbytes) if outcome.status is Status.OK else outcome


@breaks("every_declared_capability_is_exercised")
class DeclaresADevice(MemoryBackend):
    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, devices=frozenset({"cpu", "cuda"}))


@breaks(
    "a_batch_of_the_declared_maximum_is_taken_by_every_operation",
    also=("a_store_of_many_values_holds_counts_and_lists_all_of_them",),
)
class StatsOnlyTwentyKeys(MemoryBackend):
    def stat_many(self, keys: Sequence[StorageKey], call: Call) -> None:
        super().stat_many(keys[:20], call)
        for index in range(20, len(keys)):
            call.done(index, Outcome(status=Status.MISS))


@breaks("any_sequence_of_operations_agrees_with_a_plain_dictionary")
class ForgetsWhatDidNotFit(MemoryBackend):
    """After a get into too little, stat calls the value absent."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.refused: set[str] = set()

    def too_small(self, item: Item, value: bytes) -> Outcome:
        self.refused.add(item.key)
        return super().too_small(item, value)

    def keep(self, key: StorageKey, value: bytes) -> Outcome:
        self.refused.discard(key)
        return super().keep(key, value)

    def stat_one(self, key: StorageKey) -> Outcome:
        return Outcome(status=Status.MISS) if key in self.refused else super().stat_one(key)


# -- configuration -------------------------------------------------------------------------------


class _Tuning(msgspec.Struct, frozen=True, kw_only=True):
    depth: int = 4


class _LooseConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_value_bytes: int = 1536 * 1024
    tuning: _Tuning = _Tuning()


class _UntypedConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_value_bytes: int = 1536 * 1024
    shards: object = 4


@breaks("an_unknown_option_is_refused_with_the_nearest_name")
class TakesUnknownOptionsInside(MemoryBackend):
    config_class = _LooseConfig  # type: ignore[assignment]


@breaks("an_ill_typed_option_is_refused_before_any_io")
class TakesOptionsOfAnyType(MemoryBackend):
    config_class = _UntypedConfig  # type: ignore[assignment]


@breaks("everything_that_leaves_the_backend_pickles")
class PutsALockIntoItsErrors(MemoryBackend):
    def put_many(self, items: Sequence[Item], call: Call) -> None:
        try:
            super().put_many(items, call)
        except Exception as error:
            error.lock = threading.Lock()  # type: ignore[attr-defined]
            raise
