"""The chain of tiers: where a frame is, where it should be, what leaves."""

from lmcache_core.tiers.backends import PreparedTier, prepare_tiers
from lmcache_core.tiers.build import build_chain
from lmcache_core.tiers.chain import TierChain
from lmcache_core.tiers.frames import Frame
from lmcache_core.tiers.index import ResidencyIndex
from lmcache_core.tiers.layers import LayeredFrame
from lmcache_core.tiers.locating import find_first, locate
from lmcache_core.tiers.memory_tier import MemoryTier
from lmcache_core.tiers.requests import Deadlines, Marks, Policy, Run, Tier
from lmcache_core.tiers.storage_tier import StorageTier

__all__ = [
    "Deadlines",
    "Frame",
    "LayeredFrame",
    "Marks",
    "MemoryTier",
    "Policy",
    "PreparedTier",
    "ResidencyIndex",
    "Run",
    "StorageTier",
    "Tier",
    "TierChain",
    "build_chain",
    "find_first",
    "locate",
    "prepare_tiers",
]
