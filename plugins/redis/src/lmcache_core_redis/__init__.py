"""Redis or Valkey as a tier of `lmcache_core` that several engines share: zero copy, whole values."""

from __future__ import annotations

from lmcache_core.sdk import BackendSpec, hookimpl

__all__ = ["lmcache_backends"]


@hookimpl
def lmcache_backends() -> list[BackendSpec]:
    return [BackendSpec("redis", "lmcache_core_redis.backend:RedisBackend", (1, 0))]
