"""A frame in memory: its header and a lease on its bytes."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from lmcache_core.frame import FrameHeader, payload, seal
from lmcache_core.identity.keys import StorageKey
from lmcache_core.memory import Lease


class Frame:
    """Header and bytes of one frame; owns `lease` and gives it back once, on `release`.

    The payload is never written after the frame was first stored. `sealed` says whether the bytes carry
    the header and its checksums yet, which they need only to leave the process.
    """

    __slots__ = ("header", "lease", "sealed")

    def __init__(self, header: FrameHeader, lease: Lease, *, sealed: bool) -> None:
        self.header = header
        self.lease = lease
        self.sealed = sealed

    @property
    def key(self) -> StorageKey:
        return self.header.key

    @property
    def nbytes(self) -> int:
        return self.header.frame_nbytes

    def segments(self, *, readonly: bool = False) -> list[memoryview]:
        """One view a segment, of exactly its stored bytes. They die with the lease."""
        return [self.segment(index, readonly=readonly) for index in range(len(self.header.segments))]

    def segment(self, index: int, *, readonly: bool = False) -> memoryview:
        memory = self.lease.memory.toreadonly() if readonly else self.lease.memory
        return payload(memory, self.header, index)

    def seal(self) -> None:
        """Writes header and checksums into the bytes, once."""
        if not self.sealed:
            self.header = seal(self.lease.memory, self.header)
            self.sealed = True

    def share(self, owner: str) -> Frame:
        """The same bytes under a lease of their own."""
        return Frame(self.header, self.lease.share(owner), sealed=self.sealed)

    def release(self) -> None:
        self.lease.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
