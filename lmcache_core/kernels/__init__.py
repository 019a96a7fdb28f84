"""Moving KV between an engine's paged tensors and frame payloads. Importing this does not load torch."""

from lmcache_core.kernels.compiled import mover_text, native_checksum
from lmcache_core.kernels.layout import KVContent
from lmcache_core.kernels.opaque import OpaqueBlocks
from lmcache_core.kernels.paged import PagedKV

__all__ = ["KVContent", "OpaqueBlocks", "PagedKV", "mover_text", "native_checksum"]
