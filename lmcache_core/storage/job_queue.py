"""The order of waiting jobs: by priority, then first come first served; any can be taken out."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

from lmcache_core.storage.call import Priority

T = TypeVar("T")


class JobQueue(Generic[T]):
    """Every operation takes constant time. Not thread-safe: its owner's lock guards it."""

    def __init__(self) -> None:
        self._waiting: tuple[OrderedDict[T, None], ...] = tuple(OrderedDict() for _ in Priority)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, entry: T, priority: Priority, *, front: bool = False) -> None:
        """Adds `entry` behind (or before) the others of its priority."""
        waiting = self._waiting[priority]
        waiting[entry] = None
        self._length += 1
        if front:
            waiting.move_to_end(entry, last=False)

    def pop(self) -> T | None:
        """Takes the next entry; None when there is none."""
        for waiting in self._waiting:
            if waiting:
                self._length -= 1
                return waiting.popitem(last=False)[0]
        return None

    def remove(self, entry: T, priority: Priority) -> None:
        del self._waiting[priority][entry]
        self._length -= 1
