"""What is shown of a property that hangs: each of its threads, where it stands, and in which round."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

import pytest

from conformance_backends.files import FileBackend
from conformance_backends.harness import LIMITS_S, SmallHarness, judged_hanging
from conformance_backends.memory import MemoryBackend
from lmcache_core.storage.contract import Call, Item
from lmcache_core_conformance import Verdict, Violation, run
from lmcache_core_conformance.crash import end_child
from lmcache_core_conformance.timing import in_time
from lmcache_core_conformance.watch import bounded, rounds

ACKNOWLEDGED = "test_a_put_that_was_acknowledged_survives_kill_9"
OURS = "CONFORMANCE_TEST_PROCESS"
RACE = "test_racing_calls_on_one_key_have_an_order_that_explains_them"


class HangsInARace(MemoryBackend):
    """Holds back whoever comes while another is inside, for ever; a thread of its own waits, too."""

    def get_many(self, items: Sequence[Item], call: Call) -> None:
        if not threading.current_thread().name.startswith("conformance-race"):
            return super().get_many(items, call)
        driver = threading.Thread(target=waits_in_the_driver, args=(threading.Event(),), daemon=True)
        driver.start()
        threading.Event().wait()
        return None


def waits_in_the_driver(event: threading.Event) -> None:
    event.wait()


def hang(work: Callable[[], None], stand: str = "in ") -> str:
    """What is said of work that hangs, and has come as far as `stand` in its time."""
    for limit_s in LIMITS_S:
        with pytest.raises(Violation) as caught:
            bounded(work, limit_s)
        if stand in str(caught.value):
            break
    return str(caught.value)


def test_the_threads_of_a_race_and_of_the_backend_are_shown_where_they_hang() -> None:
    harness = SmallHarness(HangsInARace)
    harness.rounds = 30
    result = judged_hanging(harness, RACE, "in get_many", "in waits_in_the_driver")
    assert result.verdict is Verdict.FAILED
    told = result.reason.splitlines()
    assert told[0] == f"still running after {harness.limit_s:g} s"
    assert told[1] == "thread conformance-property, round 1 of 3:"
    assert "in get_many" in result.reason
    assert "in waits_in_the_driver" in result.reason
    racing = [line for line in told if line.startswith("thread conformance-race-")]
    assert racing
    assert all("round" in line for line in racing)


class HangsInAnotherProcess(FileBackend):
    def put_many(self, items: Sequence[Item], call: Call) -> None:
        if str(os.getpid()) != os.environ[OURS]:
            threading.Event().wait()
        super().put_many(items, call)


def test_a_victim_that_hangs_fails_its_property_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    end_child()  # an earlier one doesn't know which process is ours
    monkeypatch.setenv(OURS, str(os.getpid()))
    harness = SmallHarness(HangsInAnotherProcess)
    result = judged_hanging(harness, ACKNOWLEDGED, "crash.py")
    assert result.verdict is Verdict.FAILED
    assert f"still running after {harness.limit_s:g} s" in result.reason
    assert "crash.py" in result.reason
    [result] = run(SmallHarness(FileBackend), properties=[ACKNOWLEDGED]).results
    assert result.verdict is Verdict.PASSED, result.reason
    end_child()


class HangsInAFault(FileBackend):
    """Doesn't return while its medium is read-only."""

    def put_many(self, items: Sequence[Item], call: Call) -> None:
        while self.medium.fault:
            threading.Event().wait(0.02)
        super().put_many(items, call)


def test_the_fault_of_a_property_that_hangs_is_undone() -> None:
    harness, before = SmallHarness(HangsInAFault), set(threading.enumerate())
    harness.slack_s = 100.0  # the property's time is over first
    name = "test_a_read_only_medium_refuses_writes_and_serves_reads"
    result = judged_hanging(harness, name, "in put_many")
    assert f"still running after {harness.limit_s:g} s" in result.reason
    assert "in put_many" in result.reason
    for thread in set(threading.enumerate()) - before:
        thread.join(20)  # it ends only once the medium can be written again
        assert not thread.is_alive()


def test_a_call_that_takes_too_long_is_shown_where_it_stands() -> None:
    ended = threading.Event()

    def late() -> None:
        with pytest.raises(Violation, match=r"a get took more than 0\.1 s") as caught:
            in_time("a get", ended.wait, 0.1)
        ended.set()
        assert "thread conformance-call:" in str(caught.value)
        assert "in wait" in str(caught.value)

    bounded(late, 20)


def test_threads_that_were_there_before_are_not_shown() -> None:
    ended = threading.Event()
    before = threading.Thread(target=waits_in_the_driver, args=(ended,), daemon=True)
    before.start()
    told = hang(lambda: waits_in_the_driver(ended), "event.wait()")
    ended.set()
    before.join()
    assert told.count("in waits_in_the_driver") == 1


def test_the_round_is_that_of_the_loop_that_hangs() -> None:
    ended = threading.Event()

    def work() -> None:
        for number in rounds(["a", "b", "c"]):
            if number == "b":
                ended.wait()

    told = hang(work, "round 2 of 3")
    ended.set()
    assert "thread conformance-property, round 2 of 3:" in told


def test_a_property_that_hangs_at_work_is_stopped() -> None:
    """Else it would take its share of the machine from those that follow."""
    ended = threading.Event()

    def work() -> None:
        try:
            while True:
                sum(range(1000))
        finally:
            ended.set()

    hang(work)
    assert ended.wait(20)


def test_many_threads_are_shown_by_their_first() -> None:
    ended = threading.Event()

    def work() -> None:
        for _ in range(20):
            threading.Thread(target=waits_in_the_driver, args=(ended,), daemon=True).start()
        ended.wait()

    told = hang(work, "and 9 threads more")
    ended.set()
    assert told.count("\nthread ") == 12
    assert told.endswith("and 9 threads more\n")
