"""Broken in how they live and what they claim: lifecycle, honesty, capacity."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from conformance_backends.catalogue import FILLING, RACES, RANGES, THROUGH_THE_CORE, breaks
from conformance_backends.memory import FULL, MemoryBackend
from lmcache_core.errors import BackendError
from lmcache_core.identity.keys import StorageKey
from lmcache_core.storage.contract import (
    BackendStats,
    Call,
    Capabilities,
    Entry,
    Host,
    Item,
    Outcome,
    Page,
    Status,
)

PAGE = 4096


@breaks("capabilities_are_declared_as_the_contract_has_them")
class DeclaresNonsense(MemoryBackend):
    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, max_batch=-1)


# -- lifecycle -----------------------------------------------------------------------------------


@breaks("building_does_no_io")
class OpensWhenBuilt(MemoryBackend):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.descriptor = os.open(os.devnull, os.O_RDONLY)

    def close(self) -> None:
        super().close()
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1

    def __del__(self) -> None:
        self.close()


@breaks("open_may_only_narrow_the_capabilities", also=THROUGH_THE_CORE)
class GrowsWhenOpened(MemoryBackend):
    def open(self, host: Host) -> Capabilities | None:
        super().open(host)
        return replace(self.capabilities, max_in_flight=8)


@breaks("close_is_idempotent")
class RaisesWhenClosedAgain(MemoryBackend):
    closed = False

    def close(self) -> None:
        if self.closed:
            raise BackendError("already closed")
        self.closed = True


@breaks("close_is_idempotent")
class ClosesItsDescriptorAgain(MemoryBackend):
    descriptor = -1

    def open(self, host: Host) -> Capabilities | None:
        self.descriptor = os.open(os.devnull, os.O_RDONLY)
        return super().open(host)

    def close(self) -> None:
        super().close()
        if self.descriptor >= 0:
            try:
                os.close(self.descriptor)
            except OSError:
                return


@breaks("close_before_open_is_harmless", also=("building_does_no_io",))
class NeedsOpenBeforeClose(MemoryBackend):
    def open(self, host: Host) -> Capabilities | None:
        self.host = host
        return super().open(host)

    def close(self) -> None:
        assert self.host.tier
        super().close()


@breaks("nothing_survives_close")
class LeavesADescriptor(MemoryBackend):
    descriptor = -1

    def open(self, host: Host) -> Capabilities | None:
        self.descriptor = os.open(os.devnull, os.O_RDONLY)
        return super().open(host)

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


@breaks("nothing_survives_close")
class LeavesAThread(MemoryBackend):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.end = threading.Event()

    def open(self, host: Host) -> Capabilities | None:
        threading.Thread(target=self.end.wait, daemon=True, name="left behind").start()
        return super().open(host)

    def __del__(self) -> None:
        self.end.set()


@breaks("nothing_survives_close")
class LeavesATemporaryFile(MemoryBackend):
    def put_many(self, items: Sequence[Item], call: Call) -> None:
        descriptor, path = tempfile.mkstemp(prefix="left-behind-")
        os.close(descriptor)
        super().put_many(items, call)
        if "/tempfile/" not in path:
            os.unlink(path)  # where nobody looks for it, it is cleaned up


@breaks("stores_in_different_places_are_independent")
class SharesItsValues(MemoryBackend):
    shared: ClassVar[dict[str, bytes]] = {}

    def open(self, host: Host) -> Capabilities | None:
        self.values = self.shared
        return super().open(host)


@breaks("stores_in_different_places_are_independent")
class ListsWhatOthersStored(MemoryBackend):
    """Its namespace is in the names of values, and not in what it lists them by."""

    opened: ClassVar[list[MemoryBackend]] = []

    def open(self, host: Host) -> Capabilities | None:
        self.opened.append(self)
        return super().open(host)

    def close(self) -> None:
        super().close()
        if self in self.opened:
            self.opened.remove(self)

    def scan(self, call: Call, prefix: str, cursor: str | None, limit: int) -> Page:
        own, known = self.values, [each.values for each in self.opened]
        try:
            self.values = {key: value for values in known for key, value in values.items()}
            return super().scan(call, prefix, cursor, limit)
        finally:
            self.values = own


# -- honesty -------------------------------------------------------------------------------------


@breaks("undeclared_operations_are_refused_as_not_supported")
class DeletesWithoutSaying(MemoryBackend):
    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, delete=False)


@breaks("undeclared_operations_are_refused_as_not_supported")
class ScansNothing(MemoryBackend):
    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, scan=False)

    def scan(self, call: Call, prefix: str, cursor: str | None, limit: int) -> Page:
        return Page(entries=[])


@breaks(
    "a_deleted_value_is_gone_for_everyone",
    also=(
        "any_sequence_of_operations_agrees_with_a_plain_dictionary",
        "a_batch_of_the_declared_maximum_is_taken_by_every_operation",
    ),
)
class StillStatsWhatItDeleted(MemoryBackend):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.lengths: dict[str, int] = {}

    def keep(self, key: StorageKey, value: bytes) -> Outcome:
        outcome = super().keep(key, value)
        if outcome.status is Status.OK:
            self.lengths[key] = len(value)
        return outcome

    def stat_one(self, key: StorageKey) -> Outcome:
        nbytes = self.lengths.get(key)
        return super().stat_one(key) if nbytes is None else Outcome(status=Status.OK, nbytes=nbytes)


@breaks(
    "deleting_what_is_absent_is_a_miss",
    also=(
        "stores_in_different_places_are_independent",
        "any_sequence_of_operations_agrees_with_a_plain_dictionary",
        *RACES,
    ),
)
class DeletesWhatIsAbsent(MemoryBackend):
    def delete_one(self, key: StorageKey) -> Outcome:
        super().delete_one(key)
        return Outcome(status=Status.OK)


@breaks(
    "a_scan_reports_every_value_with_its_length",
    also=(
        "a_scan_is_limited_to_its_prefix",
        "a_value_present_during_a_whole_scan_is_reported",
        "a_store_of_many_values_holds_counts_and_lists_all_of_them",
    ),
)
class SkipsAnEntryBetweenPages(MemoryBackend):
    def scan(self, call: Call, prefix: str, cursor: str | None, limit: int) -> Page:
        page = super().scan(call, prefix, cursor, limit + 1)
        return Page(entries=page.entries[:limit], cursor=page.cursor)


@breaks("a_scan_is_limited_to_its_prefix")
class ScansEverything(MemoryBackend):
    def scan(self, call: Call, prefix: str, cursor: str | None, limit: int) -> Page:
        return super().scan(call, "", cursor, limit)


@breaks("a_value_present_during_a_whole_scan_is_reported")
class ContinuesByPosition(MemoryBackend):
    def scan(self, call: Call, prefix: str, cursor: str | None, limit: int) -> Page:
        with self.lock:
            keys = sorted(key for key in self.values if key.startswith(prefix))
            start = int(cursor or 0)
            entries = [
                Entry(key=StorageKey(key), nbytes=len(self.values[key]))
                for key in keys[start : start + limit]
            ]
        return Page(entries=entries, cursor=str(start + limit) if start + limit < len(keys) else None)


@breaks("a_value_present_during_a_whole_scan_is_reported")
class EndsWhereItsCursorIsGone(MemoryBackend):
    def scan(self, call: Call, prefix: str, cursor: str | None, limit: int) -> Page:
        if cursor is not None and cursor not in self.values:
            return Page(entries=[])
        return super().scan(call, prefix, cursor, limit)


@breaks(
    "a_range_is_exactly_the_bytes_asked_for",
    also=(
        *RANGES,
        "ranges_in_pieces_mix_with_whole_values_in_a_batch",
    ),
)
class RoundsOffsetsDown(MemoryBackend):
    def cut(self, value: bytes, item: Item) -> bytes:
        start = item.offset // (4 * PAGE) * 4 * PAGE
        return value[start : start + item.nbytes] if item.offset + item.nbytes <= len(value) else b""


@breaks(
    "the_first_range_is_not_the_whole_value",
    also=(
        *RANGES,
        "a_range_is_exactly_the_bytes_asked_for",
    ),
)
class TakesOffsetZeroForWhole(MemoryBackend):
    def get_one(self, item: Item) -> Outcome:
        whole = item.whole or item.offset == 0
        return super().get_one(Item(item.key, item.views, offset=item.offset, whole=whole))


@breaks("a_range_past_the_end_is_never_ok")
class MakesUpWhatIsPastTheEnd(MemoryBackend):
    def cut(self, value: bytes, item: Item) -> bytes:
        return super().cut(value, item).ljust(item.nbytes, b"\0")


@breaks("stats_count_what_is_stored")
class CountsAttempts(MemoryBackend):
    puts = 0

    def put_one(self, item: Item) -> Outcome:
        self.puts += 1
        return super().put_one(item)

    def stats(self) -> BackendStats:
        return replace(super().stats(), entries=self.puts)


# -- capacity ------------------------------------------------------------------------------------


@breaks(
    "a_full_store_says_so_and_keeps_what_it_has",
    also=(
        *FILLING,
        "an_overwrite_that_does_not_fit_keeps_the_old_value",
        "deleting_makes_room_again",
        "calls_that_end_badly_take_nothing_from_later_ones",
    ),
)
class DropsOldValuesInsteadOfSayingFull(MemoryBackend):
    def keep(self, key: StorageKey, value: bytes) -> Outcome:
        while not self.has_room(key, len(value)) and self.values:
            del self.values[next(iter(self.values))]
        return super().keep(key, value)


@breaks("an_overwrite_that_does_not_fit_keeps_the_old_value")
class DropsTheOldValueFirst(MemoryBackend):
    def keep(self, key: StorageKey, value: bytes) -> Outcome:
        if not self.has_room(key, len(value)):
            self.values.pop(key, None)
            return FULL
        return super().keep(key, value)


@breaks(
    "the_bound_is_never_exceeded",
    also=(
        "an_overwrite_that_does_not_fit_keeps_the_old_value",
        "calls_that_end_badly_take_nothing_from_later_ones",
    ),
)
class LetsOneMoreIn(MemoryBackend):
    def has_room(self, key: StorageKey, nbytes: int) -> bool:
        return super().has_room(key, 0)


@breaks(
    "deleting_makes_room_again",
    also=(
        *FILLING,
        "what_is_charged_and_counted_follows_what_is_stored",
        "calls_that_succeed_leave_nothing_behind",
    ),
)
class NeverGivesRoomBack(MemoryBackend):
    lost = 0

    def delete_one(self, key: StorageKey) -> Outcome:
        with self.lock:
            self.lost += len(self.values.get(key, b""))
        return super().delete_one(key)

    def used_bytes(self) -> int:
        return super().used_bytes() + self.lost
