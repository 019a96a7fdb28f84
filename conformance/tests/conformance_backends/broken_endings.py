"""Broken in how things end: calls that are cancelled or come after close, and deletes."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from conformance_backends.asynchronous import AsynchronousBackend
from conformance_backends.catalogue import breaks
from conformance_backends.files import FileBackend, FileConfig
from conformance_backends.memory import MemoryBackend, failed
from conformance_backends.network import NetworkBackend
from lmcache_core.errors import DeadlineExceeded
from lmcache_core.identity.keys import StorageKey
from lmcache_core.sdk import strip_traceback
from lmcache_core.storage.contract import Call, Capabilities, Host, Item, Outcome, Status

T = TypeVar("T")
_CANCELLED = "a_batch_cancelled_under_way_settles_each_item_once_and_truly"
_CLOSED = "a_call_that_comes_after_close_does_no_harm"


# -- cancelled under way -------------------------------------------------------------------------


@breaks(_CANCELLED)
class SaysOkToWhatItGaveUp(MemoryBackend):
    """Nobody waits, so nobody minds."""

    def each(self, things: Sequence[T], call: Call, one: Callable[[T], Outcome]) -> None:
        call.remaining()
        for index, thing in enumerate(things):
            call.done(index, Outcome(status=Status.OK) if call.cancelled else one(thing))


@breaks(_CANCELLED)
class FailsTheWholeBatchThatItGaveUp(MemoryBackend):
    """Settles again what was settled before."""

    def each(self, things: Sequence[T], call: Call, one: Callable[[T], Outcome]) -> None:
        call.remaining()
        try:
            super().each(things, call, one)
        except DeadlineExceeded:
            for index in range(len(things)):
                call.done(index, failed("cancelled"))


@breaks(_CANCELLED)
class ReturnsFromWhatItGaveUp(MemoryBackend):
    def each(self, things: Sequence[T], call: Call, one: Callable[[T], Outcome]) -> None:
        call.remaining()
        for index, thing in enumerate(things):
            if call.cancelled:
                return
            call.done(index, one(thing))


@breaks(_CANCELLED)
class GoesOnLaterWithWhatItGaveUp(MemoryBackend):
    """Keeps the rest of a cancelled get, and reads it into its views with the next call."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.rest: list[Item] = []

    def get_many(self, items: Sequence[Item], call: Call) -> None:
        rest, self.rest = self.rest, []
        for item in rest:
            self.get_one(item)
        call.remaining()
        try:
            super().get_many(items, call)
        except DeadlineExceeded:
            self.rest = list(items)
            raise


class _Clock:
    """A call of which only the deadline is looked at."""

    cancelled = False

    def __init__(self, call: Call) -> None:
        self.call = call

    @property
    def deadline(self) -> float:
        return self.call.deadline

    def remaining(self) -> float:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded("the deadline passed")
        return left

    def done(self, index: int, outcome: Outcome) -> None:
        self.call.done(index, outcome)


@breaks("a_call_cancelled_while_its_answer_trickles_ends")
class LooksAtTheClockAlone(NetworkBackend):
    def fill(self, sock: socket.socket, item: Item, nbytes: int, call: Call) -> None:
        super().fill(sock, item, nbytes, _Clock(call))


# -- out of time under way -----------------------------------------------------------------------


class _Timeless:
    """A call that had time when it began, and has it ever after."""

    cancelled = False

    def __init__(self, call: Call) -> None:
        call.remaining()
        self.call = call
        self.deadline = call.deadline

    def remaining(self) -> float:
        return 30.0

    def done(self, index: int, outcome: Outcome) -> None:
        self.call.done(index, outcome)


@breaks("a_batch_does_nothing_more_once_its_time_is_over")
class WritesOnBeyondItsDeadline(FileBackend):
    def put_many(self, items: Sequence[Item], call: Call) -> None:
        super().put_many(items, _Timeless(call))


@breaks("a_batch_does_nothing_more_once_its_time_is_over")
class ReadsOnBeyondItsDeadline(FileBackend):
    def get_many(self, items: Sequence[Item], call: Call) -> None:
        super().get_many(items, _Timeless(call))


@breaks(
    "a_stalled_store_holds_no_call_beyond_its_deadline",
    also=(
        "a_batch_does_nothing_more_once_its_time_is_over",
        "a_call_behind_a_stalled_one_keeps_its_own_deadline",
    ),
)
class GivesEachItemTheTimeOfAll(NetworkBackend):
    def get_many(self, items: Sequence[Item], call: Call) -> None:
        left_s = call.remaining()
        for index, item in enumerate(items):
            try:
                outcome = self.get_one(item, _Within(call, left_s))
            except DeadlineExceeded as error:
                outcome = Outcome(status=Status.FAILED, error=strip_traceback(error))
            call.done(index, outcome)


class _Within(_Timeless):
    def __init__(self, call: Call, left_s: float) -> None:
        self.call = call
        self.deadline = time.monotonic() + left_s

    def remaining(self) -> float:
        left = self.deadline - time.monotonic()
        if left <= 0 or self.call.cancelled:
            raise DeadlineExceeded("the item's time is over")
        return left


@breaks(
    "a_stalled_store_holds_no_call_beyond_its_deadline",
    also=(
        "a_call_behind_a_stalled_one_keeps_its_own_deadline",
        "a_trickling_answer_does_not_stretch_the_deadline",
        "a_call_cancelled_while_its_answer_trickles_ends",
        "the_memory_of_a_late_read_is_kept_until_the_backend_lets_go",
        "a_put_that_lands_late_tells_the_truth",
    ),
)
class KeepsAConnectionThatOwesAnAnswer(NetworkBackend):
    """Which comes late, and is then taken for the answer to what is asked next."""

    def give_back(self, sock: socket.socket, *, whole: bool) -> None:
        late = isinstance(sys.exception(), TimeoutError | DeadlineExceeded)
        super().give_back(sock, whole=whole or late)


# -- after close ---------------------------------------------------------------------------------


@breaks(_CLOSED)
class NotesCallsInAFileItHasClosed(FileBackend):
    """By then, the descriptor's number is that of another file."""

    note, closed = -1, False

    def open(self, host: Host) -> Capabilities | None:
        narrowed = super().open(host)
        self.note = os.open(self.path / ".note", os.O_WRONLY | os.O_CREAT, 0o600)
        return narrowed

    def close(self) -> None:
        super().close()
        if self.note >= 0 and not self.closed:
            os.close(self.note)
            self.closed = True

    def put_many(self, items: Sequence[Item], call: Call) -> None:
        os.pwrite(self.note, b"put", 0)
        super().put_many(items, call)


@breaks(_CLOSED)
class ConnectsAgainAfterClose(NetworkBackend):
    def close(self) -> None:
        super().close()
        self.closed = False


@breaks(_CLOSED)
class TakesOnWhatItWillNeverDo(AsynchronousBackend):
    """Its completion thread has ended: nobody settles what is handed over afterwards."""

    def each(self, things: Sequence[T], call: Call, one: Callable[[T], Outcome]) -> None:
        call.remaining()
        for index, thing in enumerate(things):
            self.hand_over(index, thing, call, one)


@breaks(_CLOSED, also=("stats_are_told_at_any_time",))
class StumblesOverWhatItLetGo(MemoryBackend):
    def close(self) -> None:
        self.__dict__.pop("values", None)


@breaks("deleted_values_stay_deleted_after_reopen")
class DeletesWhenClosed(FileBackend):
    """Until then, what is deleted is only out of sight."""

    def __init__(self, config: FileConfig) -> None:
        super().__init__(config)
        self.hidden: set[StorageKey] = set()

    def remove(self, key: StorageKey) -> None:
        self.hidden.add(key)

    def store(self, key: StorageKey, value: bytes) -> None:
        super().store(key, value)
        self.hidden.discard(key)

    def read(self, key: StorageKey) -> bytes | None:
        return None if key in self.hidden else super().read(key)

    def close(self) -> None:
        while self.hidden:
            (self.path / self.hidden.pop()).unlink(missing_ok=True)
        super().close()
