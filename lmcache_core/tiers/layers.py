"""Frames that are read a segment at a time: header and first segment together, then layer by layer."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial

from lmcache_core.errors import Corrupt
from lmcache_core.frame import FrameHeader, padded_nbytes, payload, verify_segment
from lmcache_core.memory import Lease
from lmcache_core.storage import Outcome, Priority
from lmcache_core.tiers.flights import Ticket
from lmcache_core.tiers.index import Resident
from lmcache_core.tiers.jobs import Wanted, why
from lmcache_core.tiers.storage_tier import StorageTier

log = logging.getLogger(__name__)

LOST = "the frame's first segment did not come"


class LayeredFrame:
    """One frame of a tier with ranged reads. For one reader; segments arrive on any thread.

    `expected` says where the segments lie. The header that comes with the first one is the frame's own:
    its checksums prove the others, which wait for it. Two ranges may see two copies of a key: then a
    checksum differs, and that segment, as the whole rest, doesn't come.
    """

    def __init__(
        self, tier: StorageTier, copy: Resident, expected: FrameHeader, clock: Callable[[], float]
    ) -> None:
        self.tier = tier
        self.header: FrameHeader | None = None
        self.arrived_at = [0.0] * len(expected.segments)
        self._copy = copy
        self._expected = expected
        self._clock = clock
        self._tickets = [Ticket[Lease](copy.key) for _ in expected.segments]
        self._token: int | None = None  # of the copy that the header is from
        self._lock = threading.Lock()  # guards the two below, and that `header` is set between them
        self._early: list[tuple[int, Lease, Outcome]] = []  # segments that came before the header
        self._lost = False  # there will be no header

    @property
    def least_range_nbytes(self) -> int:
        return min(self.range_of(index)[1] for index in range(len(self._expected.segments)))

    def range_of(self, index: int) -> tuple[int, int]:
        """(offset, length) of segment `index`; of the first with the header before it."""
        offset = self._expected.segment_offsets[index]
        nbytes = padded_nbytes(self._expected.segments[index].stored_nbytes)
        return (offset, nbytes) if index else (0, offset + nbytes)

    # -- the reader's side -----------------------------------------------------------------------

    def wanted(self, index: int) -> Wanted:
        offset, nbytes = self.range_of(index)
        return Wanted(self._copy, nbytes, offset, whole=False)

    def take(self, index: int, timeout_s: float) -> Lease | None:
        """The proved segment's lease, the caller's to release; None when it doesn't come (in time)."""
        return self._tickets[index].result(timeout_s)

    def segment(self, index: int, lease: Lease) -> memoryview:
        """The stored bytes that `take` gave, read-only: without header and padding."""
        memory = lease.memory.toreadonly()
        if index == 0:
            return payload(memory, self._expected, 0)
        return memory[: self._expected.segments[index].stored_nbytes]

    def abandon(self) -> None:
        """Gives up what has not been taken; what comes later is released as it comes."""
        for ticket in self._tickets:
            ticket.abandon()

    # -- the tier's side -------------------------------------------------------------------------

    def arrived(self, index: int, lease: Lease | None, header: FrameHeader | None, outcome: Outcome) -> None:
        """A range came, or didn't. The first comes verified; the others are checked on another thread."""
        if index == 0:
            self._headed(lease, header, outcome)
        elif lease is None:
            self._tickets[index].deliver(None, why(outcome))
        else:
            with self._lock:
                lost = self._lost
                early = self.header is None and not lost
                if early:
                    self._early.append((index, lease, outcome))
            if lost:
                self._refuse(index, lease, LOST)
            elif not early:
                self.tier.verify(partial(self._prove, index, lease, outcome))

    def _headed(self, lease: Lease | None, header: FrameHeader | None, outcome: Outcome) -> None:
        good = lease is not None and header is not None
        with self._lock:
            early, self._early = self._early, []
            self._lost = not good
            self._token = outcome.token
            self.header = header if good else None
        self.arrived_at[0] = self._clock()
        self._tickets[0].deliver(lease, "" if good else why(outcome))
        for index, waiting, came in early:
            if good:
                self.tier.verify(partial(self._prove, index, waiting, came))
            else:
                self._refuse(index, waiting, LOST)

    def _prove(self, index: int, lease: Lease, outcome: Outcome) -> None:
        try:
            assert self.header is not None
            verify_segment(lease.memory, self.header, index)
        except Corrupt as error:
            self._refuse(index, lease, str(error))
            two_copies = None not in (self._token, outcome.token) and self._token != outcome.token
            if not two_copies:  # else each may be whole
                self.tier.reads.reject(self._copy.key, str(error))
            return
        except BaseException as error:  # recorded boundary: whatever it was, the reader waits for an answer
            log.exception("tier %s: verifying %s failed", self.tier.name, self._copy.key)
            self._refuse(index, lease, f"it could not be verified: {type(error).__name__}: {error}")
            return
        self.arrived_at[index] = self._clock()
        self._tickets[index].deliver(lease)

    def _refuse(self, index: int, lease: Lease, reason: str) -> None:
        lease.release()
        self._tickets[index].deliver(None, reason)


def read_segments(tier: StorageTier, frames: Sequence[LayeredFrame], index: int, deadline: float) -> None:
    """Starts reading segment `index` of each frame. Only for threads where no Ctrl-C comes."""
    frame_of = {frame.wanted(index): frame for frame in frames}

    def arrived(wanted: Wanted, lease: Lease | None, header: FrameHeader | None, outcome: Outcome) -> None:
        frame_of[wanted].arrived(index, lease, header, outcome)

    tier.reads.queue.expire()
    tier.reads.load_ranges(list(frame_of), Priority.LOAD, deadline, arrived)
