"""Everything a storage plugin needs of the core. Nothing inside lmcache_core imports this.

A plugin subclasses `Backend`, keeps its options in a frozen `msgspec.Struct`, and names the class in a
`BackendSpec` that it returns from a `hookimpl` called `lmcache_backends`.
"""

from lmcache_core.config.types import ByteSize, Duration
from lmcache_core.errors import (
    BackendClosed,
    BackendError,
    BackendUnavailable,
    ConfigError,
    Corrupt,
    DeadlineExceeded,
    LMCacheError,
    NotSupported,
    PermissionDenied,
    PluginError,
)
from lmcache_core.identity.keys import StorageKey, storage_key
from lmcache_core.memory import Hold, Lease, MemoryPool
from lmcache_core.registry import BackendSpec, hookimpl
from lmcache_core.storage.contract import (
    ALIGNMENT,
    API,
    Backend,
    BackendStats,
    Call,
    Capabilities,
    Entry,
    Host,
    Item,
    Outcome,
    Page,
    Resident,
    Status,
    View,
)
from lmcache_core.storage.faults import status_for_errno, status_for_http, strip_traceback
from lmcache_core.storage.helpers import ViewReader, copy, cut, host_memory, recv_into
from lmcache_core.storage.secret import Secret

__all__ = [
    "ALIGNMENT",
    "API",
    "Backend",
    "BackendClosed",
    "BackendError",
    "BackendSpec",
    "BackendStats",
    "BackendUnavailable",
    "ByteSize",
    "Call",
    "Capabilities",
    "ConfigError",
    "Corrupt",
    "DeadlineExceeded",
    "Duration",
    "Entry",
    "Hold",
    "Host",
    "Item",
    "LMCacheError",
    "Lease",
    "MemoryPool",
    "NotSupported",
    "Outcome",
    "Page",
    "PermissionDenied",
    "PluginError",
    "Resident",
    "Secret",
    "Status",
    "StorageKey",
    "View",
    "ViewReader",
    "copy",
    "cut",
    "hookimpl",
    "host_memory",
    "recv_into",
    "status_for_errno",
    "status_for_http",
    "storage_key",
    "strip_traceback",
]
