"""The plugin contract, and the executor that runs a backend under it."""

from lmcache_core.storage.breaker import Breaker, BreakerState
from lmcache_core.storage.call import Job, Operation, Priority
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
from lmcache_core.storage.executor import ExecutorStats, TierExecutor
from lmcache_core.storage.host import TierHost
from lmcache_core.storage.retry import RetryBudget
from lmcache_core.storage.verifier import Verifier

__all__ = [
    "ALIGNMENT",
    "API",
    "Backend",
    "BackendStats",
    "Breaker",
    "BreakerState",
    "Call",
    "Capabilities",
    "Entry",
    "ExecutorStats",
    "Host",
    "Item",
    "Job",
    "Operation",
    "Outcome",
    "Page",
    "Priority",
    "Resident",
    "RetryBudget",
    "Status",
    "TierExecutor",
    "TierHost",
    "Verifier",
    "View",
]
