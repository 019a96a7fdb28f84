"""Broken in how they treat a server: deadlines, faults, credentials, sharing, pins, eviction."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import msgspec

from conformance_backends.catalogue import RACES, breaks
from conformance_backends.memory import MISS
from conformance_backends.network import NetworkBackend
from lmcache_core.errors import BackendError, BackendUnavailable, DeadlineExceeded, PermissionDenied
from lmcache_core.identity.keys import StorageKey
from lmcache_core.sdk import host_memory
from lmcache_core.storage.contract import BackendStats, Call, Capabilities, Item, Outcome, Status, View

ABSENCES = (
    "a_value_removed_behind_our_back_is_a_miss",
    "a_value_deleted_by_another_client_is_a_miss",
    "a_value_put_by_another_process_is_seen",
    "an_overwrite_by_another_client_is_seen",
    "what_the_store_evicts_goes_whole",
)


# -- deadline ------------------------------------------------------------------------------------


@breaks("an_expired_call_asks_the_store_nothing")
class AsksBeforeItLooksAtTheClock(NetworkBackend):
    def stat_one(self, key: StorageKey, call: Call) -> Outcome:
        super().stat_one(key, _Patient())
        return super().stat_one(key, call)


class _Patient:
    """A call that has all the time there is."""

    deadline, cancelled = 0.0, False

    def remaining(self) -> float:
        return 0.3

    def done(self, index: int, outcome: Outcome) -> None:
        raise AssertionError("nothing is settled here")


class _Stubborn:
    """A call whose deadline nobody looks at once it runs: the driver has a time-out of its own."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.cancelled = False

    @property
    def deadline(self) -> float:
        return self.call.deadline

    def remaining(self) -> float:
        return 30.0

    def done(self, index: int, outcome: Outcome) -> None:
        self.call.done(index, outcome)


@breaks("a_stalled_store_holds_no_call_beyond_its_deadline")
class WaitsForItsOwnTimeout(NetworkBackend):
    def put_one(self, item: Item, call: Call) -> Outcome:
        call.remaining()
        return super().put_one(item, _Stubborn(call))


@breaks("a_trickling_answer_does_not_stretch_the_deadline")
class ArmsEachWaitAnew(NetworkBackend):
    def fill(self, sock: socket.socket, item: Item, nbytes: int, call: Call) -> None:
        super().fill(sock, item, nbytes, _Each(call))


class _Each(_Stubborn):
    """More for each wait than a trickle ever takes, on the busiest machine."""

    def remaining(self) -> float:
        return 5.0


@breaks("close_wakes_a_call_that_waits")
class LetsWaitingCallsWait(NetworkBackend):
    def wake(self, sock: socket.socket) -> None:
        return


@breaks(
    "close_does_not_wait_for_a_stalled_call",
    also=("close_wakes_a_call_that_waits",),
)
class WaitsForItsCallsWhenClosed(NetworkBackend):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.over = threading.Condition()
        self.inside = 0

    def get_one(self, item: Item, call: Call) -> Outcome:
        with self.over:
            self.inside += 1
        try:
            return super().get_one(item, call)
        finally:
            with self.over:
                self.inside -= 1
                self.over.notify_all()

    def wake(self, sock: socket.socket) -> None:
        return

    def close(self) -> None:
        with self.over:
            self.over.wait_for(lambda: not self.inside, 5.0)
        super().close()


@breaks(
    "the_memory_of_a_late_read_is_kept_until_the_backend_lets_go",
    also=("a_stalled_store_holds_no_call_beyond_its_deadline",),
)
class LandsInMemoryItLetGo(NetworkBackend):
    """Gives up at the deadline, and leaves a thread behind that goes on receiving into the views."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.stragglers: list[threading.Thread] = []

    def get_one(self, item: Item, call: Call) -> Outcome:
        for straggler in self.stragglers:
            straggler.join(1.0)
        call.remaining()
        try:
            return super().get_one(item, call)
        except DeadlineExceeded:
            views = item.views
            thread = threading.Thread(target=self.go_on, args=(item.key, views), daemon=True)
            self.stragglers.append(thread)
            thread.start()
            raise

    def go_on(self, key: StorageKey, views: Sequence[View]) -> None:
        if self.closed:
            return
        with suppress(BackendError):
            super().get_one(Item(key, views), _Patient())


@breaks(
    "a_put_that_lands_late_tells_the_truth",
    also=("a_stalled_store_holds_no_call_beyond_its_deadline", "the_driver_retries_nothing"),
)
class SaysOkToWhatItWillNeverWrite(NetworkBackend):
    """Asks whether the server is there, and promises to write later when it does not answer."""

    def put_one(self, item: Item, call: Call) -> Outcome:
        call.remaining()
        try:
            self.stat_one(item.key, call)
        except DeadlineExceeded:
            return Outcome(status=Status.OK, nbytes=item.nbytes)
        return super().put_one(item, call)


@breaks("the_driver_retries_nothing", also=("a_connection_reset_inside_a_value_is_a_failure_that_passes",))
class RetriesByItself(NetworkBackend):
    def get_one(self, item: Item, call: Call) -> Outcome:
        try:
            return super().get_one(item, call)
        except BackendUnavailable:
            return super().get_one(item, call)


# -- faults --------------------------------------------------------------------------------------


@breaks(
    "a_dead_server_is_a_failure_and_never_a_miss",
    also=(
        "a_server_that_comes_back_is_used_again",
        "a_connection_reset_inside_a_value_is_a_failure_that_passes",
        "a_half_closed_connection_is_noticed_at_once",
        "the_driver_retries_nothing",
    ),
)
class CallsADeadServerAMiss(NetworkBackend):
    def get_one(self, item: Item, call: Call) -> Outcome:
        try:
            return super().get_one(item, call)
        except BackendUnavailable:
            return MISS


@breaks(
    "a_server_that_comes_back_is_used_again",
    also=(
        "a_connection_reset_inside_a_value_is_a_failure_that_passes",
        "a_half_closed_connection_is_noticed_at_once",
        "the_driver_retries_nothing",
    ),
)
class KeepsItsDeadConnection(NetworkBackend):
    broken = False

    @contextmanager
    def connection(self, call: Call) -> Iterator[tuple[socket.socket, str]]:
        if self.broken:
            raise BackendUnavailable("the connection is broken")
        try:
            with super().connection(call) as connected:
                yield connected
        except BackendUnavailable:
            self.broken = True
            raise


@breaks(
    "a_connection_reset_inside_a_value_is_a_failure_that_passes",
    also=("a_half_closed_connection_is_noticed_at_once", "the_driver_retries_nothing"),
)
class TakesHalfAValue(NetworkBackend):
    def fill(self, sock: socket.socket, item: Item, nbytes: int, call: Call) -> None:
        with suppress(BackendUnavailable, OSError):
            super().fill(sock, item, nbytes, call)


@breaks("a_half_closed_connection_is_noticed_at_once")
class ReadsOnAtTheEndOfFile(NetworkBackend):
    def fill(self, sock: socket.socket, item: Item, nbytes: int, call: Call) -> None:
        try:
            super().fill(sock, item, nbytes, call)
        except BackendUnavailable:
            threading.Event().wait(min(call.remaining(), 1.0))
            raise


@breaks("wrong_credentials_are_refused_when_opening", also=("opening_without_the_right_to_write_says_so",))
class FindsOutLater(NetworkBackend):
    def open(self, host: Any) -> Capabilities | None:
        try:
            return super().open(host)
        except PermissionDenied:
            return None


@breaks("rights_narrower_than_declared_are_told_when_opening")
class PromisesWhatItsAccountMayNot(NetworkBackend):
    def narrow(self, rights: str) -> Capabilities | None:
        return None


@breaks("opening_without_the_right_to_write_says_so")
class ProvesOnlyThatItCanRead(NetworkBackend):
    def prove(self, sock: socket.socket, call: Call) -> None:
        return


@breaks(
    "a_read_only_medium_refuses_writes_and_serves_reads",
    also=("rights_narrower_than_declared_are_told_when_opening",),
)
class CallsARefusalAnOutage(NetworkBackend):
    def put_one(self, item: Item, call: Call) -> Outcome:
        try:
            return super().put_one(item, call)
        except PermissionDenied as error:
            raise BackendUnavailable(str(error)) from None


# -- configuration -------------------------------------------------------------------------------


class _Account(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    port: int
    password: str

    @property
    def address(self) -> str:
        return "127.0.0.1"


@breaks("secrets_are_never_shown")
class KeepsItsPasswordAsText(NetworkBackend):
    config_class = _Account  # type: ignore[assignment]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.account = config

    def log_in(self, sock: socket.socket, call: Call) -> str:
        nbytes, _ = self.ask(sock, call, b"A", self.account.password, offset=self.capacity_bytes)
        rights = bytearray(nbytes)
        sock.recv_into(rights)
        return rights.decode()


@breaks("secrets_are_never_shown")
class NamesItsPasswordWhenRefused(NetworkBackend):
    def log_in(self, sock: socket.socket, call: Call) -> str:
        try:
            return super().log_in(sock, call)
        except PermissionDenied as error:
            raise PermissionDenied(f"{error}: {self.config.password.reveal()}") from None


# -- retention and sharing -----------------------------------------------------------------------


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


@breaks(
    "a_value_put_by_another_process_is_seen",
    also=(*ABSENCES, "a_dead_server_is_a_failure_and_never_a_miss"),
)
class KnowsOnlyItsOwnValues(NetworkBackend):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.own: set[str] = set()

    def put_one(self, item: Item, call: Call) -> Outcome:
        self.own.add(item.key)
        return super().put_one(item, call)

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
class DeletesOnlyItsOwnValues(NetworkBackend):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.own: set[str] = set()

    def put_one(self, item: Item, call: Call) -> Outcome:
        self.own.add(item.key)
        return super().put_one(item, call)

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
