"""Frames are verified as they arrive; what can't be proved right is served to nobody.

The last frame of a call is verified on the thread that read it, the others on another.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest
from executor_scenario import RecordingJob, Scenario
from scripted_backend import FRAME_NBYTES, OK, fill, frame_of, key_of, read_frames, settle_all, wait

from lmcache_core.errors import BackendError, Corrupt
from lmcache_core.frame import FrameHeader
from lmcache_core.storage import BreakerState, Call, Item, Operation, Outcome, Status
from lmcache_core.storage.transfer import check_frame


def serving(content: bytes | bytearray, nbytes: int | None = None) -> Callable[[Sequence[Item], Call], None]:
    def get(items: Sequence[Item], call: Call) -> None:
        for index, item in enumerate(items):
            fill(item, content)
            call.done(index, Outcome(status=Status.OK, nbytes=len(content) if nbytes is None else nbytes))

    return get


def flipped(position: int) -> bytearray:
    frame = frame_of(1)
    frame[position] ^= 1
    return frame


def test_a_good_frame_comes_with_its_header() -> None:
    with Scenario() as scenario:
        job = scenario.submit(Operation.GET, 1, 2)
        assert job.statuses() == [Status.OK, Status.OK]
        for index, number in enumerate((1, 2)):
            header = job.headers[index]
            assert header is not None
            assert header.key == key_of(number)
            assert job.outcomes[index].nbytes == FRAME_NBYTES
            assert job.buffers[index] == frame_of(number)


@pytest.mark.parametrize(
    ("content", "nbytes"),
    [
        (flipped(100), None),
        (flipped(FRAME_NBYTES - 1), None),
        (frame_of(2), None),
        (frame_of(1, part="fedcba9876543210"), None),
        (frame_of(1)[:-4096], None),
        (frame_of(1), FRAME_NBYTES - 4096),
        (frame_of(1), 0),
        (b"", 0),
        (bytes(FRAME_NBYTES), None),
    ],
    ids=[
        "header",
        "payload",
        "other key",
        "other part",
        "short",
        "short claim",
        "empty claim",
        "empty",
        "zeros",
    ],
)
def test_bytes_that_are_not_the_keys_own_are_corrupt(content: bytes, nbytes: int | None) -> None:
    with Scenario(failures=1) as scenario:
        scenario.backend.get = serving(content, nbytes)
        job = scenario.submit(Operation.GET, 1)
        assert job.statuses() == [Status.FAILED]
        error = job.error()
        assert isinstance(error, Corrupt)
        assert (error.backend, error.op, error.key) == ("slow", "get", key_of(1))
        assert job.headers == {0: None}
        scenario.quiet()
        assert scenario.counters["corrupt_frames"] == 1
        assert scenario.read_breaker.state is BreakerState.CLOSED


def test_one_corrupt_frame_does_not_taint_the_others() -> None:
    with Scenario() as scenario:

        def get(items: Sequence[Item], call: Call) -> None:
            read_frames(items, call)

        def get_with_a_flip(items: Sequence[Item], call: Call) -> None:
            get(items[:1], call)
            fill(items[1], flipped(5000))
            call.done(1, Outcome(status=Status.OK, nbytes=FRAME_NBYTES))

        scenario.backend.get = get_with_a_flip
        assert scenario.submit(Operation.GET, 7, 1).statuses() == [Status.OK, Status.FAILED]


def test_a_frame_in_a_larger_view_is_found_by_its_length() -> None:
    with Scenario() as scenario:
        job = scenario.submit(Operation.GET, 1, view_nbytes=FRAME_NBYTES + 8192)
        assert job.statuses() == [Status.OK]


def test_a_frame_is_verified_and_usable_while_the_next_one_is_read() -> None:
    with Scenario() as scenario:
        first_usable = threading.Event()

        def get(items: Sequence[Item], call: Call) -> None:
            fill(items[0], frame_of(1))
            call.done(0, Outcome(status=Status.OK, nbytes=FRAME_NBYTES))
            wait(first_usable)  # comes only if the first is settled before this call returns
            fill(items[1], frame_of(2))
            call.done(1, Outcome(status=Status.OK, nbytes=FRAME_NBYTES))

        scenario.backend.get = get
        threads: list[str] = []
        job = scenario.job(Operation.GET, 1, 2)

        def settled(index: int, outcome: Outcome) -> None:
            threads.append(threading.current_thread().name)
            first_usable.set()

        job.on_settled = settled
        scenario.executor.submit(job)
        assert job.statuses() == [Status.OK, Status.OK]
        assert threads == ["lmcache-verifier", "lmcache-slow-1"]


def test_the_last_frame_is_left_to_the_verifier_where_a_job_waits_for_the_thread() -> None:
    with Scenario() as scenario:
        next_read = threading.Event()

        def get_when_another_waits(items: Sequence[Item], call: Call) -> None:
            scenario.backend.get = get_next
            jobs.append(scenario.submit(Operation.GET, 2))
            read_frames(items, call)

        def get_next(items: Sequence[Item], call: Call) -> None:
            next_read.set()
            read_frames(items, call)

        jobs: list[RecordingJob] = []
        scenario.backend.get = get_when_another_waits
        threads: list[str] = []
        job = scenario.job(Operation.GET, 1)

        def settled(index: int, outcome: Outcome) -> None:
            wait(next_read)  # comes only if the thread that read this frame takes the next job
            threads.append(threading.current_thread().name)

        job.on_settled = settled
        scenario.executor.submit(job)
        assert job.statuses() == [Status.OK]
        assert jobs[0].statuses() == [Status.OK]
        wait(job.is_finished)
        assert threads == ["lmcache-verifier"]


def test_a_last_frame_whose_call_does_not_return_is_timed_out_and_takes_no_memory_with_it() -> None:
    with Scenario() as scenario:
        hang = scenario.hang(lambda items, call: None)

        def get(items: Sequence[Item], call: Call) -> None:
            read_frames(items, call)
            hang(items, call)

        scenario.backend.get = get
        job = scenario.submit_into(hang, Operation.GET, 1)
        scenario.pass_time(10)
        assert job.statuses() == [Status.TIMEOUT]
        hang.let_go()
        wait(job.is_finished)
        scenario.quiet()
        assert scenario.counters["late_results"] == 1


def test_memory_is_not_released_while_a_frame_is_being_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    with Scenario() as scenario:
        checking, go_on = threading.Event(), threading.Event()

        def check(item: Item, nbytes: int) -> FrameHeader:
            checking.set()
            wait(go_on)
            return check_frame(item, nbytes)

        monkeypatch.setattr("lmcache_core.storage.transfer.check_frame", check)
        job = scenario.submit(Operation.GET, 1)
        wait(checking)
        scenario.pass_time(10)
        assert job.statuses() == [Status.TIMEOUT]
        assert not job.is_finished.is_set()
        go_on.set()
        wait(job.is_finished)
        assert job.statuses() == [Status.TIMEOUT]
        assert scenario.read_breaker.state is BreakerState.CLOSED


def test_a_check_that_crashes_loses_no_item(monkeypatch: pytest.MonkeyPatch) -> None:
    with Scenario() as scenario:
        with monkeypatch.context() as patch:

            def crash(item: Item, nbytes: int) -> FrameHeader:
                raise MemoryError("in the checker")

            patch.setattr("lmcache_core.storage.transfer.check_frame", crash)
            job = scenario.submit(Operation.GET, 1)
            assert job.statuses() == [Status.FAILED]
            assert "MemoryError" in str(job.error())
            wait(job.is_finished)
        assert scenario.submit(Operation.GET, 1).statuses() == [Status.OK]


def test_frames_are_still_verified_when_the_verifier_is_closed() -> None:
    with Scenario() as scenario:
        scenario.verifier.close()
        assert scenario.submit(Operation.GET, 1).statuses() == [Status.OK]
        scenario.backend.get = serving(flipped(9000))
        assert scenario.submit(Operation.GET, 1).statuses() == [Status.FAILED]


def test_the_first_range_is_verified_up_to_its_first_segment() -> None:
    with Scenario() as scenario:
        beginning = frame_of(1)[:8192]  # header and first of two segments
        scenario.backend.get = serving(beginning)
        job = scenario.submit(Operation.GET, 1, whole=False, view_nbytes=8192)
        assert job.statuses() == [Status.OK]
        header = job.headers[0]
        assert header is not None
        assert header.frame_nbytes == FRAME_NBYTES
        scenario.backend.get = serving(flipped(5000)[:8192])
        assert isinstance(scenario.submit(Operation.GET, 1, whole=False, view_nbytes=8192).error(), Corrupt)


def test_a_later_range_is_left_to_the_caller_to_verify() -> None:
    with Scenario() as scenario:
        scenario.backend.get = serving(frame_of(1)[8192:])
        job = scenario.submit(Operation.GET, 1, whole=False, offset=8192, view_nbytes=4096)
        assert job.statuses() == [Status.OK]
        assert job.headers == {0: None}


def test_a_corrupt_copy_reported_by_the_backend_itself_does_not_trip_the_breaker() -> None:
    with Scenario(failures=1) as scenario:
        scenario.backend.get = settle_all(Outcome(status=Status.FAILED, error=Corrupt("bad checksum")))
        assert isinstance(scenario.submit(Operation.GET, 1).error(), Corrupt)
        scenario.quiet()
        assert scenario.read_breaker.state is BreakerState.CLOSED


def test_a_put_is_not_verified() -> None:
    with Scenario() as scenario:
        scenario.backend.put = settle_all(OK)
        assert scenario.submit(Operation.PUT, 1).statuses() == [Status.OK]  # of zeros


def test_bytes_outside_host_memory_are_not_believed() -> None:
    from lmcache_core.storage import View

    item = Item(key_of(1), (View(0, 4096, None, device="cuda:0"),))
    with pytest.raises(BackendError, match="cuda:0"):
        check_frame(item, 4096)


def test_a_frame_read_into_several_views_is_verified_as_one() -> None:
    from lmcache_core.storage import View

    frame = frame_of(3)
    halves = [bytearray(frame[:4096]), bytearray(frame[4096:]), bytearray(4096)]
    views = tuple(View(0, len(half), memoryview(half)) for half in halves)
    assert check_frame(Item(key_of(3), views), FRAME_NBYTES).key == key_of(3)
