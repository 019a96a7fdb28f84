"""Connections that break, stall or lie: never a wrong byte, never beyond the deadline, and over when over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import redis

from lmcache_core.sdk import Outcome, Status

from .servers import require
from .sites import Site
from .tiers import Tier, fresh_namespace, tier_on

DEADLINE_S = 0.8
SEGMENTS = (60_000, 100_000)  # more than the proxy lets through before it cuts
TRIES = 5
SILENT = ("stalled", "partitioned", "frozen", "killed")
CUTTING = ("reset", "half-closed")
"""What cuts large values only."""


@pytest.fixture(scope="module")
def site() -> Site:
    return Site(require("redis"))


@pytest.fixture(params=["one piece", "several pieces"])
def tier(site: Site, request: pytest.FixtureRequest) -> Iterator[Tier]:
    pieces = {"piece_bytes": "64KiB"} if request.param == "several pieces" else {}
    with tier_on({**site.options(fresh_namespace()), **pieces}, DEADLINE_S) as tier:
        yield tier


@contextmanager
def faulty(site: Site, fault: str) -> Iterator[None]:
    if fault == "frozen":
        with site.servers[0].frozen():
            yield
    elif fault == "killed":
        with site.killed():
            yield
    else:
        with site.proxy.faulty(fault):
            yield


@pytest.mark.parametrize("fault", [*SILENT, *CUTTING])
def test_a_get_and_a_put_fail_in_time_and_heal(site: Site, tier: Tier, fault: str) -> None:
    assert tier.put("value", 1, SEGMENTS).status is Status.OK
    with faulty(site, fault):
        assert broken(tier.get("value", SEGMENTS)[0])
        assert broken(tier.put("value", 2, SEGMENTS))
        assert fault in CUTTING or broken(tier.get("absent")[0]), "a dead server has no misses"
    if fault != "killed":  # that one comes back empty
        assert heals(lambda: tier.holds("value", 1, SEGMENTS) or tier.holds("value", 2, SEGMENTS))
    assert heals(lambda: tier.put("value", 3, SEGMENTS).status is Status.OK)
    assert tier.holds("value", 3, SEGMENTS)


def test_a_value_that_trickles_ends_at_the_deadline(site: Site, tier: Tier) -> None:
    assert tier.put("value", 1, SEGMENTS).status is Status.OK
    with faulty(site, "trickling"):
        assert broken(tier.get("value", SEGMENTS)[0])
    assert heals(lambda: tier.holds("value", 1, SEGMENTS))


def test_a_slow_server_is_waited_for_within_the_deadline(site: Site) -> None:
    with tier_on(site.options(fresh_namespace())) as tier, site.proxy.faulty("delayed"):
        assert tier.put("value", 1, SEGMENTS).status is Status.OK
        assert tier.holds("value", 1, SEGMENTS)


def test_a_server_that_comes_back_empty_has_misses(site: Site) -> None:
    with tier_on(site.options(fresh_namespace())) as tier:
        assert tier.put("value").status is Status.OK
        with site.killed():
            pass
        assert heals(lambda: tier.get("value")[0].status is Status.MISS)
        assert tier.put("value", 2).status is Status.OK
        assert tier.holds("value", 2)


@pytest.mark.parametrize("way", ["delete", "expire", "evict"])
def test_what_goes_behind_our_back_is_a_miss_and_the_next_store_repairs_it(site: Site, way: str) -> None:
    with tier_on(site.options(fresh_namespace())) as tier:
        assert tier.put("value").status is Status.OK
        node, name = site.nodes[0], tier.name_of("value")
        assert node.exists(name)
        if way == "delete":
            node.delete(name)
        elif way == "expire":
            node.pexpire(name, 1)
            while node.exists(name):
                pass
        else:
            site.configure(maxmemory_policy="allkeys-random", maxmemory=1)
            with pytest.raises(redis.OutOfMemoryError):  # in the end; all has been evicted for it
                node.set("one-more", "")
            site.configure(maxmemory=0, maxmemory_policy="noeviction")
        assert tier.stat("value").status is Status.MISS
        assert tier.get("value")[0].status is Status.MISS
        assert tier.put("value", 2).status is Status.OK
        assert tier.holds("value", 2)


def test_values_expire_where_they_are_told_to(site: Site) -> None:
    options = {**site.options(fresh_namespace()), "ttl": "1h", "piece_bytes": "64KiB"}
    with tier_on(options) as tier:
        for name, segments in (("short", (4096,)), ("long", SEGMENTS)):
            assert tier.put(name, 1, segments).status is Status.OK
            assert 3590 < site.nodes[0].ttl(tier.name_of(name)) <= 3600


def test_without_a_time_to_live_values_stay(site: Site) -> None:
    with tier_on({**site.options(fresh_namespace()), "piece_bytes": "64KiB"}) as tier:
        for name, segments in (("short", (4096,)), ("long", SEGMENTS)):
            assert tier.put(name, 1, segments).status is Status.OK
            assert site.nodes[0].ttl(tier.name_of(name)) == -1


def broken(outcome: Outcome) -> bool:
    """Whether it failed or ran out of time, in a way that may be tried again."""
    return outcome.status is Status.TIMEOUT or (
        outcome.status is Status.FAILED and outcome.error is not None and outcome.error.retryable
    )


def heals(works: Callable[[], bool]) -> bool:
    """Whether it works within a few tries."""
    return any(works() for _ in range(TRIES))
