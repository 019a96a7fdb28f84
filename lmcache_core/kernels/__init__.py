"""Moving KV between an engine's paged tensors and frame payloads. Importing this does not load torch."""

from lmcache_core.kernels.compiled import mover_text, native_checksum
from lmcache_core.kernels.device import DeviceError, pin
from lmcache_core.kernels.layers import PagedLayers
from lmcache_core.kernels.layout import KVContent
from lmcache_core.kernels.opaque import OpaqueBlocks
from lmcache_core.kernels.paged import PagedKV

__all__ = [
    "DeviceError",
    "KVContent",
    "OpaqueBlocks",
    "PagedKV",
    "PagedLayers",
    "mover_text",
    "native_checksum",
    "pin",
]
