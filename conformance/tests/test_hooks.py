"""A hook that a harness lacks leaves what needs it unproven, and says which: never passed, never failed."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from types import MethodType

import pytest

from conformance_backends.files import FileBackend
from conformance_backends.harness import SmallHarness
from conformance_backends.network import NetworkBackend
from lmcache_core_conformance import PROPERTIES, Unproven, Verdict, run
from lmcache_core_conformance.behind import Behind, Fault

NEEDED = {
    "raw_get": {"test_what_lies_in_the_medium_is_what_was_put"},
    "raw_put": {
        "test_a_flipped_bit_is_never_served",
        "test_a_truncated_or_grown_value_is_never_served",
        "test_another_value_in_its_place_is_never_served",
        "test_one_damaged_value_costs_only_itself",
        "test_a_damaged_value_is_replaced_by_the_next_put",
        "test_damage_is_not_an_outage",
    },
    "raw_delete": {
        "test_a_value_removed_behind_our_back_is_a_miss",
        "test_lost_events_in_any_order_never_hide_a_newer_copy",
    },
    "num_requests": {"test_an_expired_call_asks_the_store_nothing", "test_the_driver_retries_nothing"},
    "wrong_credentials": {"test_wrong_credentials_are_refused_when_opening"},
    "narrower_credentials": {"test_rights_narrower_than_declared_are_told_when_opening"},
}
MADE = {
    Fault.KILLED: {
        "test_a_dead_server_is_a_failure_and_never_a_miss",
        "test_a_server_that_comes_back_is_used_again",
    },
    Fault.STALLED: {
        "test_a_stalled_store_holds_no_call_beyond_its_deadline",
        "test_close_wakes_a_call_that_waits",
        "test_close_does_not_wait_for_a_stalled_call",
        "test_the_memory_of_a_late_read_is_kept_until_the_backend_lets_go",
        "test_a_put_that_lands_late_tells_the_truth",
    },
    Fault.TRICKLING: {"test_a_trickling_answer_does_not_stretch_the_deadline"},
    Fault.RESET: {
        "test_a_connection_reset_inside_a_value_is_a_failure_that_passes",
        "test_the_driver_retries_nothing",
    },
    Fault.HALF_CLOSED: {"test_a_half_closed_connection_is_noticed_at_once"},
    Fault.FULL: {"test_a_full_medium_is_full_and_loses_nothing"},
    Fault.READ_ONLY: {
        "test_a_read_only_medium_refuses_writes_and_serves_reads",
        "test_opening_without_the_right_to_write_says_so",
    },
}
ALL = set().union(*NEEDED.values(), *MADE.values())


class WithoutOneFault(SmallHarness):
    def __init__(self, fault: Fault) -> None:
        super().__init__(NetworkBackend)
        self.fault = fault

    def faulty(self, tmp: Path, fault: Fault) -> AbstractContextManager[None]:
        return Behind.faulty(self, tmp, fault) if fault is self.fault else super().faulty(tmp, fault)


def unproven(harness: SmallHarness) -> dict[str, str]:
    report = run(harness, properties=ALL)
    assert not report.of(Verdict.FAILED)
    return {result.prop.name: result.reason for result in report.of(Verdict.UNPROVEN)}


@pytest.mark.parametrize("hook", NEEDED)
def test_what_needs_a_missing_hook_is_unproven_and_names_it(hook: str) -> None:
    harness = SmallHarness(NetworkBackend)
    setattr(harness, hook, MethodType(getattr(Behind, hook), harness))
    found = unproven(harness)
    assert set(found) == NEEDED[hook]
    assert set(found.values()) == {f"harness hook `{hook}` is missing"}


@pytest.mark.parametrize("fault", MADE, ids=lambda fault: fault.value)
def test_what_needs_a_fault_that_can_not_be_made_is_unproven_and_names_it(fault: Fault) -> None:
    found = unproven(WithoutOneFault(fault))
    assert set(found) == MADE[fault]
    assert set(found.values()) == {f"harness hook `faulty` does not make a medium {fault.value}"}


def test_every_hook_is_needed_by_a_property() -> None:
    optional = {
        name for name, method in vars(Behind).items() if callable(method) and not name.startswith("_")
    }
    assert optional - set(NEEDED) == {"litter", "faulty"}
    assert set(MADE) == set(Fault)
    assert {prop.name for prop in PROPERTIES} >= ALL


def test_a_capability_that_the_harness_gives_no_way_to_try_is_a_failure() -> None:
    class Bare(SmallHarness):
        wrong_credentials = Behind.wrong_credentials

    name = "test_every_declared_capability_is_exercised"
    assert run(Bare(NetworkBackend), properties=[name]).results[0].verdict is Verdict.FAILED
    assert run(SmallHarness(NetworkBackend), properties=[name]).results[0].verdict is Verdict.PASSED


def test_the_default_litter_lies_in_every_directory(tmp_path: Path) -> None:
    (tmp_path / "shard").mkdir()
    Behind.litter(SmallHarness(FileBackend), tmp_path)
    assert (tmp_path / "shard" / "Foreign file.txt").is_file()
    assert (tmp_path / "Foreign directory").is_dir()


def test_no_hook_is_pretended(tmp_path: Path) -> None:
    with pytest.raises(Unproven, match="raw_get"):
        Behind.raw_get(SmallHarness(FileBackend), tmp_path, "key")  # type: ignore[arg-type]
