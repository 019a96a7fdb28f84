"""What is asked of the driver: one round trip for many keys, and a way around where it doesn't fit."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from lmcache_core.sdk import Status
from lmcache_core.storage import Operation
from lmcache_core_conformance.values import key_named, sealed_frame
from lmcache_core_redis import links

from .servers import Server, require
from .sites import Site, wait_until
from .tiers import SEGMENTS, fresh_namespace, tier_on
from .users import RULE, TIER_PASSWORD, users

LONG = (100_000, 200_000)


@pytest.fixture(scope="module")
def site() -> Site:
    return Site(require("redis"))


def test_512_keys_are_looked_up_in_one_round_trip(site: Site) -> None:
    """While no answer comes back, the server has been asked everything."""
    with tier_on(site.options(fresh_namespace()), deadline_s=20.0) as tier:
        keys = [key_named(f"key {number}") for number in range(512)]
        assert tier.put("key 7").status is Status.OK
        before = calls_of(site, "hlen")
        with site.proxy.faulty("stalled"):
            job = tier.core.submit(Operation.STAT, keys)
            wait_until(lambda: calls_of(site, "hlen") - before == len(keys), 10.0)
        assert job.wait_settled(20.0)
        assert [n for n in range(512) if job.outcomes[n].status is Status.OK] == [7]
        assert {outcome.status for outcome in job.outcomes.values()} == {Status.OK, Status.MISS}


def test_a_batch_of_small_values_is_loaded_in_one_round_trip(site: Site) -> None:
    with tier_on(site.options(fresh_namespace()), deadline_s=20.0) as tier:
        keys = [key_named(f"value {number}") for number in range(32)]
        frames = [sealed_frame(key, 1, SEGMENTS) for key in keys]
        tier.core.run(Operation.PUT, keys, frames=frames)
        before = calls_of(site, "hget")
        with site.proxy.faulty("stalled"):
            job = tier.core.submit(Operation.GET, keys, view_nbytes=len(frames[0]))
            wait_until(lambda: calls_of(site, "hget") - before == 2 * len(keys), 10.0)
        assert job.wait_finished(20.0)
        assert [job.values[number] for number in range(32)] == frames


def calls_of(site: Site, command: str) -> int:
    """How often the server has run a command."""
    told = site.nodes[0].info("commandstats").get(f"cmdstat_{command}", {"calls": 0})
    return int(told["calls"])


class Unfit:
    """A zero-copy connection with a redis-py that changed underneath it."""

    def __init__(self, *arguments: object) -> None:
        raise AttributeError("redis-py has no such thing any more")


def test_a_redis_py_that_does_not_fit_is_said_once_and_values_are_copied(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(links, "DirectLink", Unfit)
    options = {**site.options(fresh_namespace()), "piece_bytes": "64KiB"}
    with caplog.at_level(logging.WARNING), tier_on(options) as tier:
        for version, segments in enumerate((SEGMENTS, LONG)):
            assert tier.put("value", version, segments).status is Status.OK
            assert tier.holds("value", version, segments)
        assert tier.get("absent")[0].status is Status.MISS
        assert tier.stat("value").status is Status.OK
    [warning] = [record for record in caplog.records if "zero-copy" in record.getMessage()]
    assert "slower" in warning.getMessage()


def test_a_unix_socket_leads_to_a_server(tmp_path: Path) -> None:
    path = tmp_path / "redis.sock"
    server = Server(require("redis"), settings={"unixsocket": path}, users=users(RULE))
    server.start()
    options = {"url": f"unix://{path}", "username": "tier", "namespace": fresh_namespace()}
    with tier_on({**options, "password": TIER_PASSWORD}) as tier:
        assert tier.put("value", 1, LONG).status is Status.OK
        assert tier.holds("value", 1, LONG)
    server.kill()
