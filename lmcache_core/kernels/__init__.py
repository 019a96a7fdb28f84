"""Moving KV between an engine's paged tensors and frame payloads. Importing this does not load torch."""

from lmcache_core.kernels.layout import KVContent
from lmcache_core.kernels.reference import PagedKV

__all__ = ["KVContent", "PagedKV"]
