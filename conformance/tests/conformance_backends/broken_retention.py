"""Broken in what stays and what leaves: pins, eviction, losses, values shared with other clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from conformance_backends.catalogue import RACES, breaks
from conformance_backends.memory import MISS
from conformance_backends.network import NetworkBackend
from conformance_backends.retaining_files import EvictingFiles
from lmcache_core.identity.keys import StorageKey
from lmcache_core.sdk import host_memory
from lmcache_core.storage.contract import BackendStats, Call, Capabilities, Item, Outcome, Status

ABSENCES = (
    "a_value_removed_behind_our_back_is_a_miss",
    "a_value_deleted_by_another_client_is_a_miss",
    "a_value_put_by_another_process_is_seen",
    "an_overwrite_by_another_client_is_seen",
    "what_the_store_evicts_goes_whole",
)


@breaks(
    "a_value_removed_behind_our_back_is_a_miss",
    also=(
        *ABSENCES,
        "a_pin_ends_with_its_time",
        "a_stalled_store_holds_no_call_beyond_its_deadline",
        "a_dead_server_is_a_failure_and_never_a_miss",
    ),
)
class RemembersWhatExists(NetworkBackend):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.exists: dict[str, Outcome] = {}

    def put_one(self, item: Item, call: Call) -> Outcome:
        outcome = super().put_one(item, call)
        if outcome.status is Status.OK:
            self.exists[item.key] = outcome
        return outcome

    def stat_one(self, key: StorageKey, call: Call) -> Outcome:
        return self.exists.get(key) or super().stat_one(key, call)

    def delete_many(self, keys: Sequence[StorageKey], call: Call) -> None:
        for key in keys:
            self.exists.pop(key, None)
        super().delete_many(keys, call)

    def get_one(self, item: Item, call: Call) -> Outcome:
        outcome = super().get_one(item, call)
        if outcome.status is Status.MISS:
            self.exists.pop(item.key, None)
        return outcome


@breaks(
    "what_the_store_evicts_goes_whole",
    also=(
        "any_sequence_of_operations_agrees_with_a_plain_dictionary",
        "each_copy_has_a_higher_token_than_the_one_before",
        "the_driver_retries_nothing",
        *ABSENCES,
    ),
)
class KeepsAMarkerBesideEachValue(NetworkBackend):
    """Stat asks for a small value of its own, which the server evicts apart from the large one."""

    def put_one(self, item: Item, call: Call) -> Outcome:
        outcome = super().put_one(item, call)
        if outcome.status is Status.OK:
            with self.connection(call) as (sock, _):
                self.send(sock, call, b"P", f"marker.{item.key}", nbytes=8)
                sock.sendall(item.nbytes.to_bytes(8, "little"))
                self.reply(sock, call)
        return outcome

    def stat_one(self, key: StorageKey, call: Call) -> Outcome:
        with self.connection(call) as (sock, _):
            self.send(sock, call, b"G", f"marker.{key}", nbytes=8)
            status, nbytes, token = self.reply(sock, call)
            length = bytearray(nbytes)
            sock.recv_into(length)
        return replace(self.outcome(status, nbytes, token), nbytes=int.from_bytes(length, "little"))

    def delete_many(self, keys: Sequence[StorageKey], call: Call) -> None:
        for key in keys:
            self.simple(b"X", StorageKey(f"marker.{key}"), call)
        super().delete_many(keys, call)

    def stats(self) -> BackendStats:
        known = super().stats()
        return replace(known, entries=-(-known.entries // 2))


@breaks(
    "each_copy_has_a_higher_token_than_the_one_before",
    also=(
        "tokens_grow_whoever_puts",
        "lost_events_in_any_order_never_hide_a_newer_copy",
    ),
)
class GivesEveryCopyTheSameToken(NetworkBackend):
    def outcome(self, status: bytes, nbytes: int, token: int) -> Outcome:
        return super().outcome(status, nbytes, min(token, 1))


@breaks("a_pinned_value_is_not_evicted", also=("a_pin_ends_with_its_time",))
class PinsForNoTime(NetworkBackend):
    def pin_one(self, key: StorageKey, ttl_s: float, call: Call) -> Outcome:
        return super().pin_one(key, 0.0, call)


@breaks("a_pin_ends_with_its_time")
class PinsForEver(NetworkBackend):
    def pin_one(self, key: StorageKey, ttl_s: float, call: Call) -> Outcome:
        return super().pin_one(key, 1e6, call)


@breaks("a_pinned_value_is_not_evicted")
class PinsForAThousandthOfItsTime(NetworkBackend):
    """Hands seconds to a server that counts in milliseconds."""

    def pin_one(self, key: StorageKey, ttl_s: float, call: Call) -> Outcome:
        return super().pin_one(key, ttl_s / 1000, call)


@breaks("a_pinned_value_is_not_evicted")
class LetsItsPinGoWhenItIsRead(EvictingFiles):
    def get_one(self, item: Item) -> Outcome:
        self.pins.pop(item.key, None)
        return super().get_one(item)


@breaks("a_pinned_value_is_not_evicted")
class KeepsTheLastPinAlone(EvictingFiles):
    """A second request's shorter pin ends what the first one was promised."""

    def pin_one(self, key: StorageKey, ttl_s: float) -> Outcome:
        self.pins.pop(key, None)
        return super().pin_one(key, ttl_s)


@breaks("pinning_what_is_absent_is_a_miss")
class PinsAnything(NetworkBackend):
    def pin_one(self, key: StorageKey, ttl_s: float, call: Call) -> Outcome:
        super().pin_one(key, ttl_s, call)
        return Outcome(status=Status.OK)


@breaks("lost_events_in_any_order_never_hide_a_newer_copy")
class TellsLossesLate(NetworkBackend):
    """Keeps losses until the next get that finds something, and tells them without a token."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.missed: list[StorageKey] = []

    def open(self, host: Any) -> Capabilities | None:
        self.host = host
        return super().open(host)

    def get_one(self, item: Item, call: Call) -> Outcome:
        outcome = super().get_one(item, call)
        if outcome.status is Status.MISS:
            self.missed.append(item.key)
        elif self.missed:
            self.host.lost([(key, None) for key in self.missed], "gone")
            self.missed = []
        return outcome


class RemembersItsOwn(NetworkBackend):
    """Keeps the keys that this object has put."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.own: set[str] = set()

    def put_one(self, item: Item, call: Call) -> Outcome:
        self.own.add(item.key)
        return super().put_one(item, call)


@breaks(
    "a_value_put_by_another_process_is_seen",
    also=(*ABSENCES, "a_dead_server_is_a_failure_and_never_a_miss"),
)
class KnowsOnlyItsOwnValues(RemembersItsOwn):
    def get_one(self, item: Item, call: Call) -> Outcome:
        return super().get_one(item, call) if item.key in self.own else MISS


@breaks("an_overwrite_by_another_client_is_seen", also=(*ABSENCES, *RACES))
class CachesWhatItRead(NetworkBackend):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.cache: dict[str, tuple[bytes, Outcome]] = {}

    def put_one(self, item: Item, call: Call) -> Outcome:
        outcome = super().put_one(item, call)
        self.cache.pop(item.key, None)
        return outcome

    def delete_many(self, keys: Sequence[StorageKey], call: Call) -> None:
        super().delete_many(keys, call)
        for key in keys:
            self.cache.pop(key, None)

    def get_one(self, item: Item, call: Call) -> Outcome:
        call.remaining()
        cached = self.cache.get(item.key)
        if cached is not None and item.whole and len(item.views) == 1:
            value, outcome = cached
            if self.stat_one(item.key, call).status is not Status.OK:
                return MISS
            if len(value) <= item.nbytes:
                host_memory(item.views[0])[: len(value)] = value
                return outcome
        outcome = super().get_one(item, call)
        if outcome.status is Status.OK and item.whole and len(item.views) == 1:
            value = bytes(host_memory(item.views[0])[: outcome.nbytes])
            self.cache[item.key] = (value, outcome)
        return outcome


@breaks("a_value_deleted_by_another_client_is_a_miss", also=ABSENCES)
class DeletesOnlyItsOwnValues(RemembersItsOwn):
    def delete_many(self, keys: Sequence[StorageKey], call: Call) -> None:
        for index, key in enumerate(keys):
            call.done(index, self.simple(b"X", key, call) if key in self.own else MISS)


@breaks("a_forked_child_is_refused_and_leaves_its_parent_alone")
class ShutsItsParentsConnections(NetworkBackend):
    def close(self) -> None:
        with self.lock:
            for sock in self.idle:
                self.wake(sock)
        super().close()
