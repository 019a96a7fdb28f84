"""Broken in how they treat a server: deadlines, faults, credentials."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

from conformance_backends.catalogue import breaks
from conformance_backends.memory import MISS
from conformance_backends.network import NetworkBackend
from lmcache_core.errors import BackendError, BackendUnavailable, DeadlineExceeded, PermissionDenied
from lmcache_core.identity.keys import StorageKey
from lmcache_core.storage.contract import Call, Capabilities, Host, Item, Outcome, Page, Status, View

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


@breaks(
    "a_stalled_store_holds_no_call_beyond_its_deadline",
    also=("a_call_behind_a_stalled_one_keeps_its_own_deadline",),
)
class WaitsForItsOwnTimeout(NetworkBackend):
    def put_one(self, item: Item, call: Call) -> Outcome:
        call.remaining()
        return super().put_one(item, _Stubborn(call))


class _Long(_Stubborn):
    """A call that has begun in time, and then has all the time there is."""

    def remaining(self) -> float:
        self.call.remaining()
        return 30.0


@breaks("a_stalled_store_holds_no_call_beyond_its_deadline")
class OpensForAsLongAsItTakes(NetworkBackend):
    opened = False

    def open(self, host: Host) -> Capabilities | None:
        in_force = super().open(host)
        self.opened = True
        return in_force

    def prove(self, sock: socket.socket, call: Call) -> None:
        super().prove(sock, _Stubborn(call))

    def log_in(self, sock: socket.socket, call: Call) -> str:
        return super().log_in(sock, call if self.opened else _Stubborn(call))


@breaks("every_declared_capability_is_exercised")
class NeedsABoundAndDoesNotSaySo(NetworkBackend):
    def open(self, host: Host) -> Capabilities | None:
        assert host.capacity_bytes
        return super().open(host)


@breaks("a_stalled_store_holds_no_call_beyond_its_deadline")
class ListsForAsLongAsItTakes(NetworkBackend):
    def scan(self, call: Call, prefix: str, cursor: str | None, limit: int) -> Page:
        return super().scan(_Long(call), prefix, cursor, limit)


@breaks("a_stalled_store_holds_no_call_beyond_its_deadline")
class PinsForAsLongAsItTakes(NetworkBackend):
    def pin_one(self, key: StorageKey, ttl_s: float, call: Call) -> Outcome:
        return super().pin_one(key, ttl_s, _Long(call))


@breaks("a_call_behind_a_stalled_one_keeps_its_own_deadline")
class TakesTurns(NetworkBackend):
    """One call after another, however long the one before takes."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.turn = threading.Lock()

    @contextmanager
    def connection(self, call: Call) -> Iterator[tuple[socket.socket, str]]:
        with self.turn, super().connection(call) as connected:
            yield connected


@breaks(
    "a_trickling_answer_does_not_stretch_the_deadline",
    also=("a_call_cancelled_while_its_answer_trickles_ends",),
)
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
    also=(
        "a_stalled_store_holds_no_call_beyond_its_deadline",
        "a_call_behind_a_stalled_one_keeps_its_own_deadline",
        "the_driver_retries_nothing",
    ),
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


@breaks("a_dead_server_is_a_failure_and_never_a_miss")
class RemembersWhatADeadServerSaid(NetworkBackend):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.said: dict[StorageKey, Outcome] = {}

    def stat_one(self, key: StorageKey, call: Call) -> Outcome:
        try:
            self.said[key] = super().stat_one(key, call)
        except BackendUnavailable:
            if key not in self.said:
                raise
        return self.said[key]


@breaks("a_dead_server_is_a_failure_and_never_a_miss")
class ScansADeadServerAsEmpty(NetworkBackend):
    def scan(self, call: Call, prefix: str, cursor: str | None, limit: int) -> Page:
        try:
            return super().scan(call, prefix, cursor, limit)
        except BackendUnavailable:
            return Page(entries=[])


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
            threading.Event().wait(min(call.remaining(), 5.0))
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
