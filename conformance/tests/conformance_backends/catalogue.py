"""The list of broken backends: which property each must fail, and which neighbours it may fail too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from lmcache_core.storage.contract import Backend

B = TypeVar("B", bound=type[Backend[Any]])
ANYTHING = ("*",)
RACES = (
    "an_overwrite_is_seen_whole_by_readers",
    "as_many_calls_as_declared_run_at_once",
    "racing_calls_on_one_key_have_an_order_that_explains_them",
    "writers_of_different_keys_do_not_disturb_each_other",
    "a_call_held_up_at_any_line_does_not_spoil_another",
    "a_value_that_grows_during_a_get_stays_inside_the_views",
    "batches_that_overlap_neither_mix_nor_wait_for_each_other",
    "scans_and_stats_beside_a_writer_tell_what_is_there",
)
RANGES = (
    "a_range_is_exactly_the_bytes_asked_for",
    "a_range_is_of_the_newest_copy",
    "a_range_may_cross_any_boundary_of_the_medium",
    "a_range_past_the_end_is_never_ok",
    "a_range_touches_nothing_outside_its_views",
    "ranges_in_pieces_mix_with_whole_values_in_a_batch",
)
FILLING = (
    "a_full_store_says_so_and_keeps_what_it_has",
    "an_overwrite_that_does_not_fit_keeps_the_old_value",
    "deleting_makes_room_again",
    "refused_puts_cost_no_room",
    "what_is_charged_explains_that_the_store_is_full",
)
DAMAGE = (
    "a_flipped_bit_is_never_served",
    "a_truncated_or_grown_value_is_never_served",
    "another_value_in_its_place_is_never_served",
    "one_damaged_value_costs_only_itself",
    "a_damaged_value_is_replaced_by_the_next_put",
    "damage_is_not_an_outage",
)
THROUGH_THE_CORE = (
    *DAMAGE,
    "all_memory_is_back_after_a_workload_through_the_core",
    "a_forked_child_is_refused_and_leaves_its_parent_alone",
    "closing_through_the_core_is_quick_and_final",
    "the_memory_of_a_late_read_is_kept_until_the_backend_lets_go",
    "a_put_that_lands_late_tells_the_truth",
)


@dataclass(frozen=True)
class Broken:
    """`fails` must fail; those in `also` may (`ANYTHING`: all of them); every other must pass."""

    backend: type[Backend[Any]]
    fails: str
    also: tuple[str, ...]


CATALOGUE: list[Broken] = []


def breaks(fails: str, *, also: tuple[str, ...] = ()) -> Callable[[B], B]:
    """Enters a backend into the catalogue. Names are given without `test_`."""

    def enter(backend: B) -> B:
        CATALOGUE.append(
            Broken(backend, f"test_{fails}", tuple(f"test_{n}" if n != "*" else n for n in also))
        )
        return backend

    return enter
