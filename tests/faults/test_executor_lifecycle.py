"""Opening, closing and scanning: each bounded, each one way."""

from __future__ import annotations

import dataclasses
import os
import threading

import pytest
from executor_scenario import Scenario
from scripted_backend import OK, PATIENCE_S, key_of, read_frames, settle_all, wait

from lmcache_core.errors import (
    BackendClosed,
    BackendError,
    BackendUnavailable,
    ConfigError,
    DeadlineExceeded,
    PermissionDenied,
    PluginError,
)
from lmcache_core.identity.keys import StorageKey
from lmcache_core.storage import BackendStats, Call, Capabilities, Entry, Operation, Page, Status


def test_the_capabilities_that_open_narrows_are_in_force() -> None:
    narrow = Capabilities(medium="memory", max_in_flight=2)
    with Scenario(is_open=False) as scenario:
        scenario.backend.on_open = lambda host: narrow
        assert scenario.executor.open(scenario.clock() + 30) is narrow
        assert scenario.executor.capabilities is narrow


@pytest.mark.parametrize(
    "wide",
    [
        Capabilities(delete=True),
        Capabilities(max_in_flight=2),
        Capabilities(max_batch=4, devices=frozenset({"cpu", "cuda"})),
        {"delete": True},
    ],
    ids=["deletes", "more calls at once", "batches and devices", "no capabilities at all"],
)
def test_open_may_not_offer_more_than_was_declared(wide: object) -> None:
    with Scenario(is_open=False, offers=Capabilities(max_batch=4)) as scenario:
        scenario.backend.on_open = lambda host: wide  # type: ignore[assignment,return-value]
        with pytest.raises(PluginError):
            scenario.executor.open(scenario.clock() + 30)
        assert scenario.backend.closed.is_set()


@pytest.mark.parametrize(
    ("raised", "kind", "message"),
    [
        (ConfigError("set path"), ConfigError, "set path"),
        (PermissionDenied("no"), PermissionDenied, "slow open: no"),
        (ConnectionRefusedError(111, "refused"), BackendUnavailable, "refused"),
        (ZeroDivisionError("x"), BackendError, "ZeroDivisionError: x"),
        (SystemExit(3), BackendError, "SystemExit: 3"),
    ],
    ids=lambda value: getattr(value, "__name__", repr(value)),
)
def test_a_backend_that_fails_to_open_is_closed_and_its_reason_passed_on(
    raised: BaseException, kind: type[Exception], message: str
) -> None:
    def refuse(host: object) -> None:
        raise raised

    with Scenario(is_open=False) as scenario:
        scenario.backend.on_open = refuse
        with pytest.raises(kind, match=message):
            scenario.executor.open(scenario.clock() + 30)
        assert scenario.backend.closed.is_set()
        assert isinstance(scenario.submit(Operation.STAT, 1).error(), BackendClosed)
        with pytest.raises(BackendClosed):
            scenario.executor.open(scenario.clock() + 30)


def test_a_backend_that_hangs_in_open_is_given_up_and_closed_when_it_returns() -> None:
    let_go = threading.Event()
    with Scenario(is_open=False) as scenario:
        scenario.backend.on_open = lambda host: wait(let_go)
        with pytest.raises(BackendUnavailable, match="did not open"):
            scenario.executor.open(scenario.clock())
        assert not scenario.backend.closed.is_set()
        let_go.set()
        wait(scenario.backend.closed)


def test_an_executor_closed_while_its_backend_opens_stays_closed() -> None:
    with Scenario(is_open=False) as scenario:
        opening, let_go = threading.Event(), threading.Event()

        def slow(host: object) -> None:
            opening.set()
            wait(let_go)

        scenario.backend.on_open = slow
        errors: list[Exception] = []

        def open_it() -> None:
            try:
                scenario.executor.open(scenario.clock() + 30)
            except BackendError as error:
                errors.append(error)

        thread = threading.Thread(target=open_it)
        thread.start()
        wait(opening)
        scenario.executor.close(scenario.clock())
        let_go.set()
        thread.join()
        assert [type(error) for error in errors] == [BackendClosed]


def test_before_open_jobs_are_refused() -> None:
    with Scenario(is_open=False) as scenario:
        assert isinstance(scenario.submit(Operation.STAT, 1).error(), BackendUnavailable)
        assert scenario.backend.asked == []


def test_after_close_the_executor_not_the_backend_refuses() -> None:
    with Scenario() as scenario:
        scenario.executor.close(scenario.clock() + 30)
        job = scenario.submit(Operation.GET, 1)
        assert isinstance(job.error(), BackendClosed)
        assert job.is_finished.is_set()
        with pytest.raises(BackendClosed):
            scenario.executor.scan("", scenario.clock() + 30)
        assert scenario.backend.asked == []


def test_close_waits_for_running_calls_that_end_in_time() -> None:
    with Scenario() as scenario:
        hang = scenario.backend.put = scenario.hang(settle_all(OK))
        job = scenario.submit_into(hang, Operation.PUT, 1)
        scenario.backend.on_close = hang.let_go
        scenario.executor.close(scenario.clock() + 30)
        assert job.statuses() == [Status.OK]
        assert job.is_finished.is_set()
        assert scenario.executor.stats().traffic.running == 0


def test_close_settles_what_is_queued_at_once_and_what_hangs_at_its_deadline() -> None:
    with Scenario() as scenario:
        hang = scenario.backend.put = scenario.hang(settle_all(OK))
        running = scenario.submit_into(hang, Operation.PUT, 1)
        queued = scenario.submit(Operation.PUT, 2)
        scenario.executor.close(scenario.clock())
        for job in (running, queued):
            assert job.statuses() == [Status.FAILED]
            assert isinstance(job.error(), BackendClosed)
        assert queued.is_finished.is_set()
        assert not running.is_finished.is_set()
        assert scenario.executor.stats().traffic.stuck == 1
        assert hang.calls[0].cancelled
        hang.let_go()
        wait(running.is_finished)
        assert list(running.landings) == [0]


def test_close_does_not_wait_for_what_was_given_up_at_its_deadline() -> None:
    with Scenario(max_in_flight=2) as scenario:
        early, late = scenario.hang(settle_all(OK)), scenario.hang(settle_all(OK))
        scenario.backend.get, scenario.backend.put = early, late
        scenario.submit_into(early, Operation.GET, 1)
        running = scenario.submit_into(late, Operation.PUT, 2, deadline=scenario.clock() + 20)
        scenario.pass_time(10)
        closing = threading.Thread(
            target=scenario.executor.close, args=(scenario.clock() + 1e6,), daemon=True
        )
        scenario.backend.on_close = lambda: scenario.pass_time(10)
        closing.start()
        closing.join(PATIENCE_S)
        assert not closing.is_alive()
        assert running.statuses() == [Status.TIMEOUT]
        assert scenario.executor.stats().traffic.stuck == 2
        early.let_go()
        late.let_go()
        scenario.quiet()


def test_a_call_learns_of_close_before_the_backend_does() -> None:
    with Scenario() as scenario:
        hang = scenario.backend.get = scenario.hang()
        scenario.submit_into(hang, Operation.GET, 1)
        (call,) = hang.calls
        cancelled: list[bool] = []

        def close() -> None:
            cancelled.append(call.cancelled)
            hang.let_go()

        scenario.backend.on_close = close
        scenario.executor.close(scenario.clock() + 30)
        assert cancelled == [True]
        with pytest.raises(DeadlineExceeded, match="cancelled"):
            call.remaining()


def test_a_call_that_close_wakes_with_an_error_says_closed_and_is_no_failure_of_the_store() -> None:
    with Scenario(failures=1) as scenario:

        def woken(items: object, call: object) -> None:
            raise OSError(9, "bad file descriptor")

        hang = scenario.backend.get = scenario.hang(woken)
        job = scenario.submit_into(hang, Operation.GET, 1)
        scenario.backend.on_close = hang.let_go
        scenario.executor.close(scenario.clock() + 30)
        assert isinstance(job.error(), BackendClosed)
        assert "bad file descriptor" in str(job.error())
        assert scenario.events == []


def test_a_close_that_hangs_or_raises_stops_nobody() -> None:
    let_go = threading.Event()
    with Scenario() as scenario:
        scenario.backend.on_close = lambda: wait(let_go)
        scenario.executor.close(scenario.clock())
        scenario.executor.close(scenario.clock() + 30)  # idempotent
        let_go.set()
    with Scenario() as scenario:

        def fail() -> None:
            raise ValueError("not now")

        scenario.backend.on_close = fail
        scenario.executor.close(scenario.clock() + 30)


def test_nothing_is_retried_once_closed() -> None:
    with Scenario(retries=1) as scenario:

        def woken(items: object, call: object) -> None:
            raise ConnectionResetError(104, "reset")

        hang = scenario.backend.put = scenario.hang(woken)
        job = scenario.submit_into(hang, Operation.PUT, 1)
        scenario.backend.on_close = hang.let_go
        scenario.executor.close(scenario.clock() + 30)
        assert job.statuses() == [Status.FAILED]
        assert len(scenario.backend.asked) == 1


def test_the_threads_end_with_close() -> None:
    before = set(threading.enumerate())
    with Scenario(max_in_flight=4) as scenario:
        hang = scenario.backend.get = scenario.hang(read_frames)
        for number in range(4):
            scenario.submit(Operation.GET, number)
        hang.wait_for_calls(4)
        threads = set(threading.enumerate()) - before
        hang.let_go()
        scenario.executor.close(scenario.clock() + 30)
        scenario.verifier.close()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()


def entries(*numbers: int) -> list[Entry]:
    return [Entry(key=key_of(number), nbytes=4096) for number in numbers]


def test_a_scan_collects_all_pages() -> None:
    with Scenario() as scenario:
        pages = {
            None: Page(entries=entries(1, 2), cursor="a"),
            "a": Page(entries=[], cursor="b"),
            "b": Page(entries=entries(3)),
        }
        scenario.backend.pages = lambda call, prefix, cursor, limit: pages[cursor]
        assert scenario.executor.scan("c-", scenario.clock() + 10) == entries(1, 2, 3)
        assert [keys for _, keys in scenario.backend.asked] == [["c-", None], ["c-", "a"], ["c-", "b"]]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("nbytes", "4096"),
        ("nbytes", True),
        ("stored", -5),
        ("stored", "4096"),
        ("stored", 4096.0),
        ("token", -1),
        ("token", "7"),
        ("parent", ["c-1"]),
        ("parent", "../../etc"),
        ("parent", 7),
    ],
)
def test_an_entry_with_a_field_that_makes_no_sense_is_an_error_that_names_it(
    field: str, value: object
) -> None:
    with Scenario() as scenario:
        entry = dataclasses.replace(Entry(key=key_of(1), nbytes=4096), **{field: value})  # type: ignore[arg-type]
        scenario.backend.pages = lambda call, prefix, cursor, limit: Page(entries=[entry])
        with pytest.raises(BackendError) as caught:
            scenario.executor.scan("c-", scenario.clock() + 10)
        assert str(caught.value) == f"slow scan {key_of(1)}: the scan says that {field} is {value!r}"


def test_a_scan_believes_large_values_and_pages_that_can_be_read_only_once() -> None:
    with Scenario() as scenario:
        found = [Entry(key=key_of(1), nbytes=1 << 70, stored=1 << 71, token=0, parent=key_of(2))]
        scenario.backend.pages = lambda *_: Page(entries=iter(found))  # type: ignore[arg-type]
        assert scenario.executor.scan("c-", scenario.clock() + 10) == found


@pytest.mark.parametrize(
    ("page", "message"),
    [
        (Page(entries=[Entry(key=StorageKey("../../etc"), nbytes=1)]), "a key that is none"),
        (Page(entries=[Entry(key=StorageKey("n-00"), nbytes=1)]), "returned n-00"),
        (Page(entries=[Entry(key=key_of(1), nbytes=-1)]), "c-.*: .* nbytes is -1"),
        (Page(entries=["c-1"]), "returned a str"),  # type: ignore[list-item]
        (Page(entries=[], cursor="a"), "doesn't advance"),
        (None, "NoneType"),
    ],
    ids=["no key", "other prefix", "negative", "no entry", "stands still", "no page"],
)
def test_a_scan_that_makes_no_sense_is_an_error(page: Page, message: str) -> None:
    with Scenario() as scenario:
        scenario.backend.pages = lambda call, prefix, cursor, limit: page
        with pytest.raises(BackendError, match=message):
            scenario.executor.scan("c-", scenario.clock() + 10)


def test_a_scan_without_end_ends_at_its_deadline() -> None:
    with Scenario() as scenario:

        def page(call: Call, prefix: str, cursor: str | None, limit: int) -> Page:
            scenario.clock.now += 1
            return Page(entries=entries(1), cursor=str(int(cursor or 0) + 1))

        scenario.backend.pages = page
        with pytest.raises(DeadlineExceeded):
            scenario.executor.scan("", scenario.clock() + 10)


def test_a_scan_that_hangs_ends_at_its_deadline() -> None:
    with Scenario() as scenario:
        hang = scenario.hang(lambda targets, call: None)

        def page(call: Call, prefix: str, cursor: str | None, limit: int) -> Page:
            hang([], call)
            return Page(entries=[])

        scenario.backend.pages = page
        errors: list[BackendError] = []

        def scan() -> None:
            try:
                scenario.executor.scan("", scenario.clock() + 10)
            except BackendError as error:
                errors.append(error)

        thread = threading.Thread(target=scan)
        thread.start()
        wait(hang.entered)
        scenario.pass_time(10)
        thread.join(30)
        assert [type(error) for error in errors] == [DeadlineExceeded]


def test_the_backends_stats_are_passed_on_and_without_them_there_are_empty_ones() -> None:
    with Scenario() as scenario:
        scenario.backend.on_stats = lambda: BackendStats(entries=3)
        assert scenario.executor.backend_stats() == BackendStats(entries=3)
        for broken in (lambda: 1 / 0, lambda: {"entries": 3}):
            scenario.backend.on_stats = broken  # type: ignore[assignment]
            assert scenario.executor.backend_stats() == BackendStats()


def test_lost_copies_reach_the_tier_and_its_errors_reach_no_driver() -> None:
    with Scenario(is_open=False) as scenario:
        hosts = []
        scenario.backend.on_open = hosts.append
        scenario.executor.open(scenario.clock() + 30)
        (host,) = hosts
        host.lost([(key_of(1), 7)], "expired")
        host.lost_all("flushed")
        assert scenario.lost == [([(key_of(1), 7)], "expired"), ("all", "flushed")]
        scenario.lost = None  # type: ignore[assignment]  # the tier's callbacks now raise
        host.lost([(key_of(1), 7)], "expired")
        host.lost_all("flushed")


def test_a_forked_child_is_refused_at_once_and_its_parent_goes_on() -> None:
    with Scenario() as scenario:
        assert scenario.submit(Operation.GET, 1).statuses() == [Status.OK]
        asked = len(scenario.backend.asked)
        with scenario.executor._traffic._lock:  # as a thread of the parent may hold it while another forks
            child = os.fork()
            if child == 0:
                job = scenario.submit(Operation.GET, 2)
                refused = job.is_finished.is_set() and isinstance(job.outcomes[0].error, BackendClosed)
                scenario.executor.close(scenario.clock() + 30)
                os._exit(0 if refused and len(scenario.backend.asked) == asked else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert scenario.submit(Operation.GET, 2).statuses() == [Status.OK]
