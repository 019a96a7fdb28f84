"""When another server has what one asks for: slots that move, a primary that is replaced."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lmcache_core.sdk import BackendError, Status
from lmcache_core.storage import Operation
from lmcache_core_conformance.values import key_named, sealed_frame

from .sentinels import SentinelSite
from .servers import require
from .sites import NODES, ClusterSite, slot_of
from .tiers import SEGMENTS, Tier, fresh_namespace, tier_on

LONG = (100_000, 200_000)
TRIES = 5


@pytest.fixture(scope="module")
def cluster() -> ClusterSite:
    return ClusterSite(require("redis"))


@pytest.fixture
def tier(cluster: ClusterSite) -> Iterator[Tier]:
    with tier_on({**cluster.options(fresh_namespace()), "piece_bytes": "64KiB"}) as tier:
        yield tier


@pytest.mark.parametrize("segments", [SEGMENTS, LONG], ids=["one piece", "several pieces"])
def test_a_value_is_found_while_its_slot_moves_and_after(
    cluster: ClusterSite, tier: Tier, segments: tuple[int, ...]
) -> None:
    assert tier.put("value", 1, segments).status is Status.OK
    name = tier.name_of("value")
    to = (cluster.node_of(name) + 1) % NODES
    with cluster.moving(name, to):
        assert tier.stat("value").status is Status.OK, "ASK is followed"
        assert tier.holds("value", 1, segments)
        outcome = tier.put("value", 2, segments)
        assert outcome.status is Status.OK or (outcome.error is not None and outcome.error.retryable), outcome
        assert tier.holds("value", 2 if outcome.status is Status.OK else 1, segments)
    assert tier.stat("value").status is Status.OK, "MOVED is followed"
    assert tier.put("value", 3, segments).status is Status.OK
    assert tier.holds("value", 3, segments)
    assert cluster.nodes[to].exists(name)


def test_a_batch_over_all_nodes_follows_a_slot_that_has_moved(cluster: ClusterSite, tier: Tier) -> None:
    keys = [key_named(f"spread {number}") for number in range(12)]
    frames = [sealed_frame(key, 1, SEGMENTS) for key in keys]
    assert {o.status for o in tier.core.run(Operation.PUT, keys, frames=frames).outcomes.values()} == {
        Status.OK
    }
    name = tier.name_of("spread 5")
    with cluster.moving(name, (cluster.node_of(name) + 1) % NODES):
        pass
    job = tier.core.run(Operation.GET, keys, view_nbytes=len(frames[0]))
    assert [job.values.get(number) for number in range(len(keys))] == frames
    for number, key in enumerate(keys):
        assert job.outcomes[number].status is Status.OK, key


def test_a_node_that_is_down_has_no_misses(cluster: ClusterSite, tier: Tier) -> None:
    keys = [key_named(f"beside {number}") for number in range(12)]
    names = [tier.name_of(f"beside {number}") for number in range(12)]
    frames = [sealed_frame(key, 1, SEGMENTS) for key in keys]
    tier.core.run(Operation.PUT, keys, frames=frames)
    with cluster.servers[cluster.node_of(names[0])].frozen():
        job = tier.core.submit(Operation.STAT, keys, deadline_s=0.5)
        assert job.wait_settled(10.0)
        assert job.outcomes[0].status in (Status.FAILED, Status.TIMEOUT)
        assert not any(outcome.status is Status.MISS for outcome in job.outcomes.values())
    assert job.wait_finished(10.0)
    cluster.wait_until_serving()
    assert any(tier.holds("beside 0") for _ in range(TRIES))


def test_a_node_that_is_silent_costs_the_items_of_the_others_nothing(
    cluster: ClusterSite, tier: Tier
) -> None:
    keys = [key_named(f"beside {number}") for number in range(12)]
    nodes = [cluster.node_of(tier.name_of(f"beside {number}")) for number in range(12)]
    frames = [sealed_frame(key, 1, SEGMENTS) for key in keys]
    tier.core.run(Operation.PUT, keys, frames=frames)
    assert len(set(nodes)) == NODES
    for silent in range(NODES):
        with cluster.servers[silent].frozen():
            job = tier.core.submit(Operation.GET, keys, view_nbytes=len(frames[0]), deadline_s=2.0)
            assert job.wait_settled(10.0)
        for number, node in enumerate(nodes):
            status = job.outcomes[number].status
            if node != silent:
                assert status is Status.OK, (silent, number)
            else:
                assert status in (Status.FAILED, Status.TIMEOUT), (silent, number)
        assert job.wait_finished(10.0)
        cluster.wait_until_serving()


def test_a_slot_that_nobody_serves_costs_the_items_of_others_nothing(
    cluster: ClusterSite, tier: Tier
) -> None:
    keys = [key_named(f"slot {number}") for number in range(6)]
    frames = [sealed_frame(key, 1, SEGMENTS) for key in keys]
    tier.core.run(Operation.PUT, keys, frames=frames)
    name = tier.name_of("slot 3")
    for node in cluster.nodes:
        node.config_set("cluster-require-full-coverage", "no")
        node.execute_command("CLUSTER", "DELSLOTS", slot_of(name))
    for _ in range(2):  # with the map from before, and with one that has nobody for that slot
        job = tier.core.run(Operation.STAT, keys)
        error = job.outcomes[3].error
        assert error is not None
        assert error.retryable
        assert [n for n in range(6) if job.outcomes[n].status is Status.OK] == [0, 1, 2, 4, 5]
    cluster.client_of(name).execute_command("CLUSTER", "ADDSLOTS", slot_of(name))
    for node in cluster.nodes:
        node.config_set("cluster-require-full-coverage", "yes")
    cluster.wait_until_serving()


def test_a_node_of_a_cluster_is_not_taken_for_a_single_server(cluster: ClusterSite) -> None:
    options = cluster.options(fresh_namespace())
    for port in cluster.proxy.ports:
        single = {**options, "url": f"redis://127.0.0.1:{port}", "cluster": False}
        with pytest.raises(BackendError, match="cluster: true"), tier_on(single):
            pass


@pytest.mark.parametrize("server", ["redis", "valkey"])
def test_a_primary_that_dies_is_replaced_by_the_one_that_the_sentinel_names(server: str) -> None:
    site = SentinelSite(require(server))
    with tier_on(site.options(fresh_namespace())) as tier:
        assert tier.put("value").status is Status.OK
        assert tier.holds("value")
        assert site.primary.client().wait(1, 5000) == 1  # the replica has it
        site.fail_over()
        seen = [tier.get("value")[0] for _ in range(TRIES)]
        assert seen[-1].status is Status.OK, seen
        assert not any(outcome.status is Status.MISS for outcome in seen)
        assert tier.put("value", 2).status is Status.OK
        assert tier.holds("value", 2)
        assert site.replica.client().exists(tier.name_of("value"))
