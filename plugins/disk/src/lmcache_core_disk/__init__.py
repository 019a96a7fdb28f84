"""A local directory as a tier of `lmcache_core`: direct I/O, crash-safe, a hard byte cap."""

from __future__ import annotations

from lmcache_core.sdk import BackendSpec, hookimpl

__all__ = ["lmcache_backends"]


@hookimpl
def lmcache_backends() -> list[BackendSpec]:
    return [BackendSpec("disk", "lmcache_core_disk.backend:DiskBackend", (1, 0))]
