"""Several clients at one value, and clients that die at it: whole or absent, and nothing stays behind."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import redis

from lmcache_core.sdk import Status
from lmcache_core_conformance.values import key_named, sealed_frame

from .servers import require
from .sites import Site, wait_until
from .tiers import Tier, fresh_namespace, tier_on

SEGMENTS = (300_000, 300_000)
ROUNDS = 150
VERSIONS = 4


@pytest.fixture(scope="module", params=["redis", "valkey"])
def site(request: pytest.FixtureRequest) -> Site:
    return Site(require(request.param))


@pytest.fixture
def options(site: Site) -> dict[str, object]:
    return {**site.options(fresh_namespace()), "piece_bytes": "64KiB"}


@pytest.fixture
def tiers(options: dict[str, object]) -> Iterator[list[Tier]]:
    """Four clients of one namespace."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(tier_on(options)) for _ in range(4)]


def test_two_writers_and_two_readers_of_a_value_never_see_a_torn_one(tiers: list[Tier]) -> None:
    """Frames of different versions differ in every page, and the core verifies what it is given."""
    frames = [sealed_frame(key_named("value"), version, SEGMENTS) for version in range(VERSIONS)]
    wrong: list[object] = []
    done = threading.Event()
    assert tiers[0].put("value", 0, SEGMENTS).status is Status.OK

    def write(tier: Tier) -> None:
        for number in range(ROUNDS):
            outcome = tier.put("value", number % VERSIONS, SEGMENTS)
            if outcome.status is not Status.OK:
                wrong.append(outcome)
        done.set()

    def read(tier: Tier) -> None:
        while not done.is_set():
            outcome, value = tier.get("value", SEGMENTS)
            if outcome.status is not Status.OK or value not in frames:
                wrong.append(outcome)

    workers = [(write, tiers[0]), (write, tiers[1]), (read, tiers[2]), (read, tiers[3])]
    threads = [threading.Thread(target=work, args=(tier,)) for work, tier in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_value_deleted_while_it_is_read_is_whole_or_absent(site: Site, tiers: list[Tier]) -> None:
    frame = sealed_frame(key_named("value"), 1, SEGMENTS)
    seen: set[Status] = set()
    done = threading.Event()

    def delete() -> None:
        for _ in range(ROUNDS):
            tiers[0].put("value", 1, SEGMENTS)
            site.nodes[0].delete(tiers[0].name_of("value"))
        done.set()

    deleting = threading.Thread(target=delete)
    deleting.start()
    while not done.is_set():
        outcome, value = tiers[1].get("value", SEGMENTS)
        assert outcome.status is Status.MISS or value == frame, outcome
        seen.add(outcome.status)
    deleting.join()
    assert seen <= {Status.OK, Status.MISS}


WRITER = """
import sys, json
sys.path[:] = json.loads(sys.argv[1])
from lmcache_core.config import parse_options
from lmcache_core_conformance.driver import RecordingHost, Store
from lmcache_core_conformance.values import key_named, value_of
from lmcache_core_redis.backend import RedisBackend

options = json.loads(sys.argv[2])
backend = RedisBackend(parse_options(RedisBackend.config_class, options, "options"))
host = RecordingHost(capacity_bytes=None, deadline_s=30.0, max_in_flight=1)
store = Store(backend, host, backend.open(host) or backend.capabilities, options)
value = value_of(key_named("value"), 2, 32 << 20)
while True:
    store.put(key_named("value"), value)
"""


def test_what_a_killed_writer_leaves_behind_expires_and_hides_nothing(
    site: Site, options: dict[str, object]
) -> None:
    node = site.nodes[0]
    with tier_on(options) as tier:
        assert tier.put("value").status is Status.OK
        before = tier.get("value")[1]
        left: list[bytes] = []
        while not left:  # nothing is, where it was killed between two puts
            left = names_left_by_a_killed_writer(node, options, f"{tier.namespace}.tmp:*")
        assert all(0 < node.ttl(name) <= 3600 for name in left)
        outcome, value = tier.get("value")
        assert value == before or outcome.status is Status.TOO_SMALL, "neither the old value nor the new"
        assert tier.put("value", 3).status is Status.OK
        assert tier.holds("value", 3)


def names_left_by_a_killed_writer(node: redis.Redis, options: dict[str, object], pattern: str) -> list[bytes]:
    program = [sys.executable, "-c", WRITER, json.dumps(sys.path), json.dumps(options)]
    with subprocess.Popen(program) as writer:
        wait_until(lambda: any(node.scan_iter(pattern)), 20.0)
        writer.kill()
    return [*node.scan_iter(pattern)]
