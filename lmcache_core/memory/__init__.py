"""The process's frame memory: one pool, leases and holds on its slots, and pins."""

from lmcache_core.memory.lease import Hold, Lease
from lmcache_core.memory.pins import Pin, PinTable
from lmcache_core.memory.pool import MemoryPool, PoolStats
from lmcache_core.memory.reclaim import Reclaimer

__all__ = ["Hold", "Lease", "MemoryPool", "Pin", "PinTable", "PoolStats", "Reclaimer"]
