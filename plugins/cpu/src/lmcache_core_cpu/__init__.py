"""CPU memory as a tier of `lmcache_core`: frames stay where they lie in the pool."""

from __future__ import annotations

from lmcache_core.sdk import BackendSpec, hookimpl

__all__ = ["lmcache_backends"]


@hookimpl
def lmcache_backends() -> list[BackendSpec]:
    return [BackendSpec("cpu", "lmcache_core_cpu.backend:CpuBackend", (1, 0))]
