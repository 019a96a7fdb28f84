"""vLLM's offloaded chunks as frames of a chain of tiers.

The engine's verbs speak of prefixes that start at a request's first token; vLLM names one chunk at a time,
by a hash of all that is before it. So this stands on the chain itself.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from lmcache_core.config import CacheConfig
from lmcache_core.connectors.vllm.tier_identity import OffloadIdentity
from lmcache_core.engine.record import store_record
from lmcache_core.engine.shape import FrameShape
from lmcache_core.errors import ConfigError
from lmcache_core.events import Event, EventBus, FrameRejected, StoreShed
from lmcache_core.identity import Content, StorageKey
from lmcache_core.kernels.checks import address_of
from lmcache_core.registry import Registry
from lmcache_core.tiers import Frame, Marks, MemoryTier, build_chain, locate

log = logging.getLogger(__name__)

MISFIT = "a frame of another shape, codec or place"

Copy = Callable[[Sequence[memoryview]], bool]
"""Moves a chunk between vLLM's memory and a frame's segments. False: it is too late, nothing was moved."""


class ChunkFrames:
    """Stores, finds and loads chunks by vLLM's hashes. Thread-safe; nothing that a tier does raises.

    Raises:
        ConfigError: the tier can't work as configured, or the hashes mean nothing to another process.
        PluginError: a plugin doesn't keep what it declares.
    """

    def __init__(
        self,
        identity: OffloadIdentity,
        config: CacheConfig,
        registry: Registry,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._identity = identity
        self._shape = FrameShape(identity.part)
        self._allocate_deadline_s = config.allocate_deadline
        self._clock = clock
        self._epoch = b""
        self._has_record = False
        events = EventBus()
        self.losses = Losses()
        events.subscribe(self.losses, FrameRejected, StoreShed)
        model = identity.model
        self.chain = build_chain(
            config,
            registry,
            parts=(identity.part.digest,),
            events=events,
            frame_nbytes=self._shape.header(model.key, None, 0, model.chunk_tokens).frame_nbytes,
            clock=clock,
        )
        if (reason := self._content([]).not_persistent_reason) and self.chain.persistent_tiers:
            self.close(clock())
            raise ConfigError(f"tier {config.tiers[0].name!r} outlives the process: {reason}")

    def names(self, digests: Sequence[bytes]) -> list[StorageKey]:
        """The storage keys of the chunks that these hashes name, each by itself."""
        return self._content(digests).keys(self._identity.part)

    def new_epoch(self) -> None:
        """From now on nothing is shared with what was stored before: the weights may be others."""
        self._epoch = os.urandom(16)

    def mark(self) -> Marks:
        """A moment: what is stored with it evicts nothing that was used after it."""
        return self.chain.mark(())

    def known(self, name: StorageKey) -> bool | None:
        """Whether the chunk is held; None where a store must be asked for that."""
        for tier in self.chain.tiers:
            if tier.contains(name):
                return True
            if not isinstance(tier, MemoryTier) and tier.readable and not tier.exact:
                return None
        return False

    def num_held(self, names: Sequence[StorageKey]) -> int:
        """How many of `names` are held before the first that isn't. Asks; costs at most a deadline."""
        runs = locate(names, self.chain.tiers, self.chain.deadlines())
        return runs[-1].stop if runs else 0

    def touch(self, names: Sequence[StorageKey]) -> None:
        self.chain.touch(names)

    def store(self, name: StorageKey, first_token: int, gather: Copy, marks: Marks) -> bool:
        """Takes a chunk, or has it already. When this returns, vLLM's memory may be reused."""
        until = self._clock() + self._allocate_deadline_s
        model = self._identity.model
        if not self._has_record:
            store_record(self.chain, model, marks, until)
            self._has_record = True

        def store() -> bool:
            header = self._shape.header(name, model.key, first_token, model.chunk_tokens)
            frame = self.chain.allocate(header, until)
            if frame is None:
                return False
            with frame:
                return gather(frame.segments()) and self.chain.put(frame, marks)

        return self.chain.once(name, store) is not False

    def load(
        self,
        names: Sequence[StorageKey],
        first_tokens: Sequence[int],
        scatter: Callable[[int, Sequence[memoryview]], bool],
    ) -> int:
        """Loads chunks in order until one can't be had; how many could. Each is proved right before
        `scatter(position, segments)` sees it."""
        deadlines = self.chain.deadlines()
        runs = locate(names, self.chain.tiers, deadlines)
        stream = self.chain.stream(names, runs, deadlines)
        loaded = 0
        try:
            for frame, tier in stream:
                with frame:
                    if not self._fits(frame, first_tokens[loaded]):
                        self.chain.reject(frame.key, tier, MISFIT)
                        break
                    if not scatter(loaded, frame.segments()):
                        break
                loaded += 1
        finally:
            stream.close()
        return loaded

    def close(self, until: float) -> None:
        """Writes what waits, as far as the time allows. Idempotent."""
        self.chain.close(until)

    def _fits(self, frame: Frame, first_token: int) -> bool:
        return self._shape.fits(frame.header, first_token, self._identity.model.chunk_tokens)

    def _content(self, digests: Sequence[bytes]) -> Content:
        identity = self._identity
        return Content.from_host(identity.model, identity.scheme, digests, lora=self._epoch)


class HostRows:
    """vLLM's CPU tier: chunk `row` occupies the first bytes of `view[row]`.

    Copying is only for who has the row: a `Job` until it ends.
    """

    def __init__(self, view: memoryview) -> None:
        """
        Raises:
            ValueError: the view isn't the writable, dense matrix that vLLM promises.
        """
        if view.readonly or not view.c_contiguous or not view.strides:
            raise ValueError("vLLM's view of its CPU tier isn't writable and dense")
        self._memory = view.cast("B")
        self._row_nbytes = view.strides[0]
        self._address = address_of(self._memory)

    def gather(self, row: int, segments: Sequence[memoryview]) -> None:
        """From vLLM's memory; without the GIL."""
        source = self._start(row)
        for segment in segments:
            ctypes.memmove(address_of(segment), source, segment.nbytes)
            source += segment.nbytes

    def scatter(self, row: int, segments: Sequence[memoryview]) -> None:
        """Into vLLM's memory; without the GIL."""
        target = self._start(row)
        for segment in segments:
            ctypes.memmove(target, address_of(segment), segment.nbytes)
            target += segment.nbytes

    def release(self) -> None:
        """Lets go of vLLM's memory, which is then unmapped."""
        self._memory.release()

    def _start(self, row: int) -> int:
        if not 0 <= row < len(self._memory) // self._row_nbytes:
            raise ValueError(f"row {row} of {len(self._memory) // self._row_nbytes}")
        return self._address + row * self._row_nbytes


class Losses:
    """An observer that counts what is lost, and logs damaged frames: the medium may be going bad."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the counts
        self._counts: Counter[str] = Counter()

    def on_event(self, event: Event) -> None:
        if isinstance(event, FrameRejected):
            log.warning("tier %s: %s is dropped: %s", event.tier, event.key, event.reason)
        with self._lock:
            self._counts["rejected_frames" if isinstance(event, FrameRejected) else "shed_stores"] += 1

    def take(self) -> Mapping[str, int]:
        """What was counted since the last time."""
        if not self._counts:  # usual: one read
            return {}
        with self._lock:
            counts, self._counts = self._counts, Counter()
            return counts
