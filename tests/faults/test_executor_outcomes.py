"""What the core believes of a backend: its words are checked, its exceptions are made ours."""

from __future__ import annotations

import gc
import pickle
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
from executor_scenario import RecordingJob, Scenario
from scripted_backend import (
    FRAME_NBYTES,
    MISS,
    OK,
    Behaviour,
    key_of,
    raising,
    read_frames,
    settle_all,
    wait,
)

from lmcache_core.errors import (
    BackendError,
    BackendUnavailable,
    Corrupt,
    LMCacheError,
    PermissionDenied,
)
from lmcache_core.storage import Call, Item, Operation, Outcome, Status

LIES = [
    (Operation.GET, Outcome(status=Status.OK, nbytes=FRAME_NBYTES + 4096)),
    (Operation.GET, Outcome(status=Status.OK, nbytes=-4096)),
    (Operation.GET, Outcome(status=Status.OK, nbytes=4096.0)),  # type: ignore[arg-type]
    (Operation.GET, Outcome(status=Status.OK, nbytes=True)),
    (Operation.GET, Outcome(status=Status.FULL)),
    (Operation.GET, Outcome(status=Status.TIMEOUT)),
    (Operation.GET, Outcome(status=Status.TOO_SMALL, nbytes=FRAME_NBYTES)),
    (Operation.GET, Outcome(status="ok")),  # type: ignore[arg-type]
    (Operation.GET, Outcome(status=[])),  # type: ignore[arg-type]
    (Operation.GET, None),
    (Operation.GET, True),
    (Operation.GET, Outcome(status=Status.FAILED, error="it broke")),  # type: ignore[arg-type]
    (Operation.PUT, Outcome(status=Status.OK, nbytes=100)),
    (Operation.PUT, Outcome(status=Status.OK, stored=-1)),
    (Operation.PUT, Outcome(status=Status.OK, token="v1")),  # type: ignore[arg-type]
    (Operation.PUT, Outcome(status=Status.OK, token=-1)),
    (Operation.PUT, Outcome(status=Status.MISS)),
    (Operation.PUT, Outcome(status=Status.TIMEOUT)),
    *(
        (operation, lie)
        for operation in (Operation.GET, Operation.PUT)
        for lie in (
            Outcome(status=Status.OK, nbytes=FRAME_NBYTES, stored=-1),
            Outcome(status=Status.OK, nbytes=FRAME_NBYTES, token=True),
            Outcome(status=Status.OK, nbytes=FRAME_NBYTES, error="none"),  # type: ignore[arg-type]
            Outcome(status=Status.OK, nbytes=float(FRAME_NBYTES)),  # type: ignore[arg-type]
        )
    ),
    (Operation.STAT, Outcome(status=Status.OK, nbytes=-1)),
    (Operation.STAT, Outcome(status=Status.FULL)),
    (Operation.DELETE, Outcome(status=Status.TOO_SMALL, nbytes=1 << 40)),
]


@pytest.mark.parametrize(("operation", "lie"), LIES, ids=str)
def test_a_dishonest_outcome_is_a_failure_of_the_backend(operation: Operation, lie: Any) -> None:
    with Scenario() as scenario:
        behave = settle_all(lie)
        scenario.backend.get = scenario.backend.put = scenario.backend.stat = scenario.backend.delete = behave
        job = scenario.submit(operation, 1)
        assert job.statuses() == [Status.FAILED]
        error = job.error()
        assert isinstance(error, BackendError)
        assert "contract" in str(error)
        assert (error.backend, error.op, error.key) == ("slow", operation.value, key_of(1))
        assert not error.retryable
        wait(job.is_finished)
        assert scenario.counters["contract_breaches"] == 1


def test_a_range_must_be_read_to_its_end() -> None:
    with Scenario() as scenario:
        scenario.backend.get = settle_all(Outcome(status=Status.OK, nbytes=4096))
        assert scenario.submit(Operation.GET, 1, whole=False, offset=4096).statuses() == [Status.FAILED]


@pytest.mark.parametrize(
    ("operation", "outcome"),
    [
        (Operation.GET, Outcome(status=Status.MISS)),
        (Operation.GET, Outcome(status=Status.TOO_SMALL, nbytes=FRAME_NBYTES + 4096)),
        (Operation.PUT, Outcome(status=Status.OK, nbytes=FRAME_NBYTES, stored=9000, token=3)),
        (Operation.PUT, Outcome(status=Status.FULL)),
        (Operation.STAT, Outcome(status=Status.OK, nbytes=8192, token=1)),
        (Operation.STAT, Outcome(status=Status.MISS)),
        (Operation.DELETE, Outcome(status=Status.OK)),
        (Operation.DELETE, Outcome(status=Status.MISS)),
    ],
    ids=str,
)
def test_an_honest_outcome_is_passed_on_as_it_is(operation: Operation, outcome: Outcome) -> None:
    with Scenario() as scenario:
        behave = settle_all(outcome)
        scenario.backend.get = scenario.backend.put = scenario.backend.stat = scenario.backend.delete = behave
        job = scenario.submit(operation, 1)
        wait(job.is_settled)
        assert job.outcomes == {0: outcome}


def test_a_put_without_a_length_is_taken_to_be_whole() -> None:
    with Scenario() as scenario:
        scenario.backend.put = settle_all(Outcome(status=Status.OK, token=4))
        job = scenario.submit(Operation.PUT, 1)
        wait(job.is_settled)
        assert job.outcomes == {0: Outcome(status=Status.OK, nbytes=FRAME_NBYTES, token=4)}


def test_an_exception_settles_only_what_is_unsettled() -> None:
    with Scenario() as scenario:

        def put(items: Sequence[Item], call: Call) -> None:
            call.done(1, OK)
            raise ValueError("wrong turn")

        scenario.backend.put = put
        job = scenario.submit(Operation.PUT, 1, 2, 3)
        assert job.statuses() == [Status.FAILED, Status.OK, Status.FAILED]
        error = job.error()
        assert isinstance(error, BackendError)
        assert str(error) == "slow put: ValueError: wrong turn"


@pytest.mark.parametrize(
    ("raised", "kind", "retryable"),
    [
        (ConnectionResetError(104, "reset"), BackendUnavailable, True),
        (TimeoutError("timed out"), BackendUnavailable, True),
        (PermissionError(13, "no"), PermissionDenied, False),
        (OSError(5, "I/O error"), BackendError, False),
        (KeyError("slot"), BackendError, False),
        (SystemExit(1), BackendError, False),
        (LMCacheError("a plugin's own"), BackendError, False),
        (Corrupt("bad bytes"), Corrupt, False),
    ],
    ids=lambda value: getattr(value, "__name__", repr(value)),
)
def test_a_foreign_exception_becomes_the_narrowest_error_of_ours(
    raised: BaseException, kind: type[BackendError], retryable: bool
) -> None:
    with Scenario() as scenario:
        scenario.backend.stat = raising(raised)
        error = scenario.submit(Operation.STAT, 1).error()
        assert type(error) is kind
        assert (error.backend, error.op, error.retryable) == ("slow", "stat", retryable)
        assert isinstance(pickle.loads(pickle.dumps(error)), kind)
        scenario.backend.stat = settle_all(Outcome(status=Status.MISS))
        assert scenario.submit(Operation.STAT, 1).statuses() == [Status.MISS]


def test_an_error_that_cannot_even_be_printed_is_an_error() -> None:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    with Scenario() as scenario:
        scenario.backend.stat = raising(Unprintable())
        assert "Unprintable" in str(scenario.submit(Operation.STAT, 1).error())


class Careless(BackendError):
    """Its author forgot `super().__init__`."""

    def __init__(self, message: str) -> None:
        self.message = message


class Unprintable(BackendError):
    def __str__(self) -> str:
        raise SystemExit


class Undecided(BackendError):
    @property
    def retryable(self) -> bool:
        raise LookupError

    @retryable.setter
    def retryable(self, value: bool) -> None: ...


class Untouchable(Exception):
    def __setattr__(self, name: str, value: object) -> None:
        raise RuntimeError(name)


class Numberless(OSError):
    @property
    def errno(self) -> int:
        raise ValueError


@pytest.mark.parametrize("kind", [Careless, Unprintable, Undecided, Untouchable, Numberless])
@pytest.mark.parametrize("how", ["raised", "settled", "beside a miss"])
def test_an_error_that_raises_when_it_is_looked_at_ends_its_item_as_any_other(
    kind: type[Exception], how: str
) -> None:
    error: Any = kind("odd")
    with Scenario() as scenario:

        def stat(keys: Sequence[object], call: Call) -> None:
            if how == "raised":
                raise error
            call.done(0, Outcome(status=Status.FAILED if how == "settled" else Status.MISS, error=error))

        scenario.backend.stat = stat
        job = scenario.submit(Operation.STAT, 1)
        assert job.statuses() == [Status.MISS if how == "beside a miss" else Status.FAILED]
        wait(job.is_finished)
        assert scenario.submit(Operation.GET, 1).statuses() == [Status.OK]
        if how == "beside a miss":
            assert job.error() is None
        else:
            assert kind.__name__ in str(job.error())


class Memory(bytearray):
    """A bytearray that a weak reference may watch."""


@pytest.mark.parametrize("settles", [True, False], ids=["settled with an error", "raised"])
def test_an_error_that_is_kept_keeps_no_memory(settles: bool) -> None:
    with Scenario() as scenario:

        def get(items: Sequence[Item], call: Call) -> None:
            views = [view.host for item in items for view in item.views]
            try:
                try:
                    raise KeyError(views)
                except KeyError as cause:
                    raise BackendUnavailable("lost", retryable=False) from cause
            except BackendUnavailable as error:
                if not settles:
                    raise
                call.done(0, Outcome(status=Status.FAILED, error=error))

        scenario.backend.get = get
        watched: list[weakref.ref[Memory]] = []
        job = WatchedJob(scenario.clock() + 10, watched)
        scenario.executor.submit(job)
        error = job.error()
        wait(job.is_finished)
        del job
        scenario.submit(Operation.STAT, 1).statuses()  # the thread has left the first call
        gc.disable()  # only references count: a cycle would keep the memory until some later collection
        try:
            assert watched[0]() is None
        finally:
            gc.enable()
        assert isinstance(error, BackendUnavailable)


@pytest.mark.parametrize("behave", [settle_all(MISS), read_frames], ids=["a miss", "a hit"])
def test_a_driver_that_keeps_its_call_keeps_no_memory(behave: Behaviour) -> None:
    calls: list[Call] = []
    with Scenario() as scenario:

        def get(items: Sequence[Item], call: Call) -> None:
            calls.append(call)
            behave(items, call)

        scenario.backend.get = get
        watched: list[weakref.ref[Memory]] = []
        job = WatchedJob(scenario.clock() + 10, watched)
        scenario.executor.submit(job)
        wait(job.is_finished)
        del job
        scenario.submit(Operation.STAT, 1).statuses()  # the thread has left the first call
        gc.disable()
        try:
            assert watched[0]() is None
        finally:
            gc.enable()
        assert not calls[0].cancelled


class WatchedJob(RecordingJob):
    """A get into memory that a weak reference watches."""

    def __init__(self, deadline: float, watched: list[weakref.ref[Memory]]) -> None:
        super().__init__(Operation.GET, [1], deadline=deadline)
        self._watched = watched

    def prepare(self) -> Sequence[Any]:
        from lmcache_core.storage import View

        memory = Memory(FRAME_NBYTES)
        self._watched.append(weakref.ref(memory))
        return [Item(key_of(1), (View(0, FRAME_NBYTES, memoryview(memory)),))]


def test_a_second_settlement_is_ignored_and_counted() -> None:
    with Scenario() as scenario:

        def put(items: Sequence[Item], call: Call) -> None:
            call.done(0, OK)
            call.done(0, Outcome(status=Status.FULL))

        scenario.backend.put = put
        job = scenario.submit(Operation.PUT, 1)
        assert job.statuses() == [Status.OK]
        wait(job.is_finished)
        assert scenario.counters["repeated_settlements"] == 1


def test_a_settlement_after_a_blocking_call_returned_is_ignored_and_counted() -> None:
    calls: list[Call] = []
    with Scenario() as scenario:
        scenario.backend.put = lambda items, call: calls.append(call)
        job = scenario.submit(Operation.PUT, 1)
        assert job.statuses() == [Status.FAILED]
        assert "without settling" in str(job.error())
        wait(job.is_finished)
        calls[0].done(0, OK)
        assert scenario.counters["repeated_settlements"] == 1
        assert scenario.counters["contract_breaches"] == 1


@pytest.mark.parametrize("index", [-1, 2, 1 << 70, "0", None, 0.0], ids=repr)
def test_an_index_that_is_none_of_the_batch_settles_nothing(index: Any) -> None:
    with Scenario() as scenario:

        def put(items: Sequence[Item], call: Call) -> None:
            call.done(index, OK)
            call.done(0, OK)

        scenario.backend.put = put
        job = scenario.submit(Operation.PUT, 1, 2)
        assert job.statuses() == [Status.OK, Status.FAILED]
        wait(job.is_finished)
        assert scenario.counters["contract_breaches"] == 2  # the index, and the item left unsettled


@pytest.mark.parametrize("change", [list.clear, list.reverse], ids=["emptied", "reversed"])
def test_a_batch_that_the_backend_changes_is_judged_as_it_was_given(change: Any) -> None:
    with Scenario() as scenario:

        def put(items: Sequence[Item], call: Call) -> None:
            change(items)
            for index, nbytes in enumerate((FRAME_NBYTES, 4096)):
                call.done(index, Outcome(status=Status.OK, nbytes=nbytes))

        scenario.backend.put = put
        job = scenario.submit(Operation.PUT, 1, 2)
        assert job.statuses() == [Status.OK, Status.FAILED]  # the second one has another length
        wait(job.is_finished)


def test_items_may_be_settled_from_other_threads() -> None:
    with Scenario() as scenario:

        def put(items: Sequence[Item], call: Call) -> None:
            threads = [threading.Thread(target=call.done, args=(index, OK)) for index in range(len(items))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        scenario.backend.put = put
        assert scenario.submit(Operation.PUT, *range(8)).statuses() == [Status.OK] * 8


def test_many_threads_that_settle_the_same_item_settle_it_once() -> None:
    with Scenario() as scenario:
        barrier = threading.Barrier(8)

        def settle(call: Call) -> None:
            barrier.wait(30)
            call.done(0, OK)

        def put(items: Sequence[Item], call: Call) -> None:
            threads = [threading.Thread(target=settle, args=(call,)) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        scenario.backend.put = put
        job = scenario.submit(Operation.PUT, 1)
        assert job.statuses() == [Status.OK]
        wait(job.is_finished)
        assert scenario.counters["repeated_settlements"] == 7


def test_a_method_that_turns_out_to_be_a_coroutine_fails_its_items() -> None:
    with Scenario() as scenario:
        started: list[Any] = []

        async def get(items: Sequence[Item], call: Call) -> None:
            read_frames(items, call)

        scenario.backend.get = lambda items, call: started.append(get(items, call))
        assert scenario.submit(Operation.GET, 1).statuses() == [Status.FAILED]
        started[0].close()
