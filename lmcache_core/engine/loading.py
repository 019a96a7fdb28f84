"""Retrieve and prefetch: from frames in the tiers to the host engine's KV."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence

from lmcache_core.engine.plan import Plan, plan_hit
from lmcache_core.engine.results import KVTarget, RetrieveResult
from lmcache_core.engine.shape import FrameShape
from lmcache_core.events import BroughtNear, Event, Retrieved
from lmcache_core.identity import Content
from lmcache_core.storage import Priority
from lmcache_core.tiers import Tier, TierChain

MISFIT = "a frame of another shape, codec or place"


class Loader:
    """The part of an engine that loads whole frames."""

    def __init__(
        self, chain: TierChain, shape: FrameShape, emit: Callable[[Event], None], *, tails: bool
    ) -> None:
        self._chain = chain
        self._shape = shape
        self._emit = emit
        self._tails = tails

    def plan(self, content: Content, tiers: Sequence[Tier], limit: int | None, skip: int = 0) -> Plan:
        """What can be loaded of `content` behind its first `skip` tokens, up to `limit`."""
        return plan_hit(
            content,
            self._shape.part,
            tiers=tiers if skip < content.num_tokens else (),
            limit=limit,
            tails=self._tails,
            deadlines=self._chain.deadlines(),
            start_chunk=skip // content.model.chunk_tokens,
        )

    def retrieve(
        self, content: Content, target: KVTarget, tiers: Sequence[Tier], limit: int | None, skip: int
    ) -> RetrieveResult:
        """See `CacheEngine.retrieve`."""
        started = time.monotonic()
        plan = self.plan(content, tiers, limit, skip)
        marks = bytearray(content.num_tokens)
        by_tier: dict[str, int] = {}
        loaded = nbytes = 0
        stream = self._chain.stream(plan.keys, plan.runs, plan.deadlines, among=tiers)
        try:
            for position, (frame, tier) in enumerate(stream):
                with frame:
                    first, count = plan.tokens_of(position + plan.start)
                    fits = self._shape.fits(frame.header, first, count)
                    if fits:
                        target.scatter(first, count, frame.segments(readonly=True))
                if not fits:
                    self._chain.reject(frame.key, tier, MISFIT)
                    break
                marks[first : first + count] = b"\1" * count
                by_tier[tier] = by_tier.get(tier, 0) + count
                loaded += count
                nbytes += frame.header.frame_nbytes
        finally:
            stream.close()
        self._emit(
            Retrieved(
                num_tokens=loaded,
                num_wanted_tokens=content.num_tokens - skip,
                tokens_by_tier=tuple(by_tier.items()),
                nbytes=nbytes,
                seconds=time.monotonic() - started,
            )
        )
        return RetrieveResult(
            mask=memoryview(marks).toreadonly().cast("?"), num_tokens=loaded, tokens_by_tier=by_tier
        )

    def bring_near(
        self, content: Content, tiers: Sequence[Tier], limit: int | None
    ) -> Generator[tuple[str, int], None, None]:
        """Loads frames into the memory tier, whatever the tiers promote by themselves.

        Yields each frame's tier and number of tokens, first token first.
        """
        if not self._chain.has_memory_tier:
            return
        started = time.monotonic()
        nbytes: dict[str, int] = {}
        plan = self.plan(content, tiers, limit)
        marks = self._chain.mark(plan.keys)
        stream = self._chain.stream(plan.keys, plan.runs, plan.deadlines, Priority.PREFETCH, tiers)
        try:
            for position, (frame, tier) in enumerate(stream):
                with frame:
                    if not self._chain.keep_in_memory(frame, marks):
                        return
                    nbytes[tier] = nbytes.get(tier, 0) + frame.header.frame_nbytes
                yield tier, plan.tokens_of(position + plan.start)[1]
        finally:
            stream.close()
            self._emit(BroughtNear(bytes_by_tier=tuple(nbytes.items()), seconds=time.monotonic() - started))
