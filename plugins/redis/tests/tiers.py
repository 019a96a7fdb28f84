"""A backend on a site, under the core's executor, with frames that say whose they are."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from lmcache_core.config import parse_options
from lmcache_core.sdk import Outcome, StorageKey
from lmcache_core_conformance import Harness
from lmcache_core_conformance.core import Core
from lmcache_core_conformance.values import PAGE, key_named, sealed_frame
from lmcache_core_redis.backend import RedisBackend
from lmcache_core_redis.config import RedisConfig

from .users import NAMESPACES

SEGMENTS = (PAGE, 3 * PAGE)
FRAME_NBYTES = len(sealed_frame(key_named("any"), 1, SEGMENTS))
_numbers = itertools.count()


class _Bounds(Harness):
    """What a call may take here."""

    backend = RedisBackend
    deadline_s = 5.0

    def fresh_config(self, tmp: object) -> Mapping[str, object]:
        raise NotImplementedError


def fresh_namespace() -> str:
    return f"{NAMESPACES}{next(_numbers)}"


def backend_of(options: Mapping[str, object]) -> RedisBackend:
    return RedisBackend(parse_options(RedisConfig, options, "options"))


class Tier:
    """One backend under an executor that retries nothing. Frames are small, unless said."""

    def __init__(self, options: Mapping[str, object], deadline_s: float = 5.0) -> None:
        bounds = _Bounds()
        bounds.deadline_s = deadline_s
        self.namespace = str(options["namespace"])
        self.core = Core(bounds, backend_of(options), capacity_bytes=1 << 30)

    def put(self, name: str, version: int = 1, segments: tuple[int, ...] = SEGMENTS) -> Outcome:
        from lmcache_core.storage import Operation

        key = key_named(name)
        job = self.core.run(Operation.PUT, [key], frames=[sealed_frame(key, version, segments)])
        return job.outcomes[0]

    def get(self, name: str, segments: tuple[int, ...] = SEGMENTS) -> tuple[Outcome, bytes]:
        return self.core.get(key_named(name), len(sealed_frame(key_named(name), 1, segments)))

    def stat(self, name: str) -> Outcome:
        from lmcache_core.storage import Operation

        return self.core.run(Operation.STAT, [key_named(name)]).outcomes[0]

    def holds(self, name: str, version: int = 1, segments: tuple[int, ...] = SEGMENTS) -> bool:
        outcome, value = self.get(name, segments)
        return outcome.status.name == "OK" and value == sealed_frame(key_named(name), version, segments)

    def name_of(self, name: str) -> str:
        """The value's key on the server."""
        return f"{self.namespace}:{{{StorageKey(key_named(name))}}}"


@contextmanager
def tier_on(options: Mapping[str, object], deadline_s: float = 5.0) -> Iterator[Tier]:
    tier = Tier(options, deadline_s)
    try:
        yield tier
    finally:
        tier.core.close()
