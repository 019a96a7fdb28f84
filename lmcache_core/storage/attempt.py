"""One call into a backend: the `Call` that the backend is given."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Protocol

from lmcache_core.identity.keys import StorageKey
from lmcache_core.storage.contract import Item, Outcome

Target = Item | StorageKey


class AttemptOwner(Protocol):
    """What an attempt needs of the transfer it belongs to."""

    @property
    def deadline(self) -> float: ...

    @property
    def cancelled(self) -> bool: ...

    def remaining(self) -> float: ...

    def item_done(self, attempt: Attempt, position: int, outcome: Outcome) -> None: ...

    def breach(self, what: str) -> None: ...


class Attempt:
    """Some or all items of a transfer, asked for once. Position p of the call is item `indices[p]`."""

    __slots__ = (
        "_transfer",
        "answered",
        "failure",
        "indices",
        "inside",
        "judged",
        "last_read",
        "open",
        "started",
        "targets",
        "timed_out",
    )

    def __init__(
        self, transfer: AttemptOwner, indices: Sequence[int], targets: Sequence[Target], started: float
    ) -> None:
        self._transfer = transfer
        self.indices = indices
        self.targets = targets
        self.started = started
        # What the backend still holds: items, and 1 while its method runs. Guarded by the transfer's lock.
        self.open = len(indices) + 1
        self.answered = False  # some item came back with an answer
        self.failure = ""  # why an item failed, where one did
        self.timed_out = False  # the backend itself said that the deadline had passed
        self.judged = False  # the breaker has been told of this attempt
        self.inside = True  # its method runs; guarded by the transfer's lock
        self.last_read: tuple[int, Item, Outcome] | None = None  # to be verified where the method returns

    @property
    def deadline(self) -> float:
        return self._transfer.deadline

    @property
    def cancelled(self) -> bool:
        return self._transfer.cancelled

    def remaining(self) -> float:
        return self._transfer.remaining()

    def done(self, index: int, outcome: Outcome) -> None:
        try:
            position = operator.index(index)
        except TypeError:
            position = -1
        if 0 <= position < len(self.indices):
            self._transfer.item_done(self, position, outcome)
        else:
            # Not raised: that could end a driver's completion thread. The item it meant stays unsettled.
            self._transfer.breach(f"settled item {index!r} of a batch of {len(self.indices)}")
