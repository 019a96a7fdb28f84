"""What the tier layer hands an executor: jobs, each one batch of one operation with a deadline."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum, IntEnum

from lmcache_core.frame import FrameHeader
from lmcache_core.identity.keys import StorageKey
from lmcache_core.storage.contract import Item, Outcome


class Operation(Enum):
    """What a batch does. The value is the `op` that errors name."""

    GET = "get"
    PUT = "put"
    STAT = "stat"
    DELETE = "delete"
    SCAN = "scan"
    """The executor's own, see `TierExecutor.scan`; not for submitted jobs."""

    __hash__ = object.__hash__  # in C: that of an Enum is Python code, and every call looks things up by this

    @property
    def writes(self) -> bool:
        """Whether it changes the store, so that a late result still matters."""
        return self is Operation.PUT or self is Operation.DELETE


class Priority(IntEnum):
    """Which queued jobs go first; within one priority, the first submitted."""

    LOAD = 0
    PREFETCH = 1
    STORE = 2


class Job(ABC):
    """One batch on its way to a backend.

    The callbacks come from any thread, the submitting one included, with no lock of the executor held.
    None of them may block; what they raise is logged and counted.
    """

    operation: Operation
    priority: Priority
    deadline: float
    """Absolute, on the executor's clock."""
    num_items: int
    nbytes: int
    """Bound of the memory `prepare` takes: what `in_flight_bytes` counts from `submit` to `finished`."""

    @abstractmethod
    def prepare(self) -> Sequence[Item] | Sequence[StorageKey]:
        """Takes the memory, on the worker's thread when the job is dispatched, and returns the batch.

        Items for GET and PUT, keys for STAT and DELETE. A shorter sequence stands for the first items;
        the others settle FULL. Nothing is settled while it runs, so it must keep to the deadline itself.

        Raises:
            PoolFull: no memory for any item; all settle FULL.
        """

    @abstractmethod
    def settled(self, index: int, outcome: Outcome, header: FrameHeader | None) -> None:
        """Item `index` ended: called exactly once an item, and never after `finished`.

        `header` is given with every GET that is OK, its frame having been verified, except for ranges
        that don't start at 0: those the caller verifies, having the header from the first range.
        """

    @abstractmethod
    def landed(self, index: int, outcome: Outcome) -> None:
        """The backend ended a PUT or DELETE that the core had already reported as TIMEOUT or closed.

        Late reads aren't reported: nobody may use what they brought.
        """

    @abstractmethod
    def finished(self) -> None:
        """The backend has let go of all memory, and every item has been settled. Called exactly once.

        For a call that never returns it never comes: its memory stays quarantined.
        """
