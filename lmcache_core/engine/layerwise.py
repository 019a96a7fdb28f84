"""Retrieve layer by layer: layer i+1 comes while the host engine computes layer i."""

from __future__ import annotations

from collections.abc import Callable, Generator

from lmcache_core.engine.loading import MISFIT
from lmcache_core.engine.plan import Plan
from lmcache_core.engine.results import LayerTarget, LoadedLayer
from lmcache_core.engine.shape import FrameShape
from lmcache_core.events import Event, LayerLoaded, Retrieved
from lmcache_core.identity import StorageKey
from lmcache_core.tiers import Frame, LayeredFrame, MemoryTier, Run, Tier, TierChain

WINDOW = 2
"""Layers on their way or waiting to be scattered: one arrives while another is used."""
GRACE_S = 0.25
"""How long past a tier's deadline its answer may take."""


class LayerwiseLoad:
    """One `retrieve_layers` under way. For one thread.

    A chunk comes in one of three ways: from the memory tier, where its frame is borrowed until the last
    layer; a segment at a time, from a tier with ranged reads, in memory for `WINDOW` layers; or whole, from
    any other tier, scattered into all layers before the first is yielded. The first chunk that fails, at
    whatever layer, ends the prefix there: neither it nor any later one is good for this or a later layer.
    """

    def __init__(
        self,
        chain: TierChain,
        shape: FrameShape,
        plan: Plan,
        target: LayerTarget,
        tiers: tuple[Tier, ...],
        emit: Callable[[Event], None],
        *,
        root: StorageKey,
    ) -> None:
        """`root` is the first chunk's parent: the model's key."""
        self._chain = chain
        self._shape = shape
        self._plan = plan
        self._target = target
        self._tiers = tiers
        self._emit = emit
        self._root = root
        self._stop = len(plan.keys)  # positions from here on are no good
        self._borrowed: dict[int, Frame] = {}  # by position, as is the next
        self._layered: dict[int, LayeredFrame] = {}
        self._from: dict[int, str] = {}  # names of the tiers they came from
        self._num_bytes = 0

    def run(self, num_wanted_tokens: int) -> Generator[LoadedLayer, None, None]:
        """Yields each layer once it is scattered. Closing it gives everything back."""
        started = self._chain.now()
        num_layers = self._shape.part.num_layers
        deadlines = self._plan.deadlines
        requested_at: list[float] = []
        try:
            whole = self._sort()
            self._chain.touch(self._plan.keys)
            for layer in range(min(WINDOW, num_layers)):
                requested_at.append(self._request(layer))
            self._take_whole(whole)
            whole_at = self._chain.now() if whole else 0.0
            for layer in range(num_layers):
                nbytes = self._scatter(layer)
                arrived_at = [frame.arrived_at[layer] for frame in self._layered.values()]
                self._emit(
                    LayerLoaded(
                        layer=layer,
                        num_tokens=self._num_tokens(),
                        nbytes=nbytes,
                        requested_at=requested_at[layer],
                        arrived_at=max(requested_at[layer], whole_at, *arrived_at),
                        scattered_at=self._chain.now(),
                    )
                )
                if layer + WINDOW < num_layers:
                    requested_at.append(self._request(layer + WINDOW))
                if layer == num_layers - 1:
                    self._end(num_wanted_tokens, self._chain.now() - started)
                handed_over = self._chain.now()
                yield LoadedLayer(layer=layer, num_tokens=self._num_tokens())
                deadlines.extend(self._chain.now() - handed_over)  # the caller's time is not the tiers'
        finally:
            self._give_up_from(0)

    # -- starting --------------------------------------------------------------------------------

    def _sort(self) -> list[Run]:
        """Finds out which chunks come a segment at a time; returns the others, a run each."""
        whole: list[Run] = []
        for run in self._plan.runs:
            for position in range(run.start, run.stop):
                first, count = self._plan.tokens_of(position)
                parent = self._plan.keys[position - 1] if position else self._root
                header = self._shape.header(self._plan.keys[position], parent, first, count)
                layered = self._chain.layered(run.tier, header)
                if layered is None:
                    whole.append(Run(run.tier, position, position + 1))
                else:
                    self._layered[position] = layered
                    self._from[position] = run.tier.name
        return whole

    def _take_whole(self, whole: list[Run]) -> None:
        """Borrows what is in memory; scatters what comes whole, all layers of it."""
        memory = {tier.name for tier in self._tiers if isinstance(tier, MemoryTier)}
        stream = self._chain.stream(self._plan.keys, whole, self._plan.deadlines, among=self._tiers)
        try:
            for run in whole:
                position = run.start
                if position >= self._stop:
                    return
                frame, tier = next(stream, (None, ""))
                if frame is None or not self._fits(frame, position, tier):
                    self._give_up_from(position)
                    return
                self._from[position] = tier
                self._num_bytes += frame.nbytes
                if tier in memory:
                    self._borrowed[position] = frame
                    continue
                with frame:
                    first, count = self._plan.tokens_of(position)
                    for layer in range(self._shape.part.num_layers):
                        segment = frame.segment(layer, readonly=True)
                        self._target.scatter_layer(layer, first, count, segment)
        finally:
            stream.close()

    def _fits(self, frame: Frame, position: int, tier: str) -> bool:
        if self._shape.fits(frame.header, *self._plan.tokens_of(position)):
            return True
        frame.release()
        self._chain.reject(frame.key, tier, MISFIT)
        return False

    # -- each layer ------------------------------------------------------------------------------

    def _request(self, layer: int) -> float:
        frames = list(self._layered.values())
        if frames:
            self._chain.read_layer(frames, layer, self._plan.deadlines)
        return self._chain.now()

    def _scatter(self, layer: int) -> int:
        """Scatters one layer of every chunk that is good; how many bytes were read for it."""
        nbytes = 0
        for position in sorted((*self._borrowed, *self._layered)):
            if position >= self._stop:
                break
            first, count = self._plan.tokens_of(position)
            borrowed = self._borrowed.get(position)
            if borrowed is not None:
                segment = borrowed.segment(layer, readonly=True)
                self._target.scatter_layer(layer, first, count, segment)
                continue
            frame = self._layered[position]
            wait_s = self._plan.deadlines.of(frame.tier) - self._chain.now() + GRACE_S
            lease = frame.take(layer, wait_s)
            if lease is None:
                self._give_up_from(position)
                break
            with lease:
                header = frame.header
                if layer == 0 and (header is None or not self._shape.fits(header, first, count)):
                    self._chain.reject(self._plan.keys[position], frame.tier.name, MISFIT)
                    self._give_up_from(position)
                    break
                self._target.scatter_layer(layer, first, count, frame.segment(layer, lease))
                nbytes += lease.nbytes
        self._num_bytes += nbytes
        return nbytes

    def _give_up_from(self, position: int) -> None:
        """Nothing from `position` on is good for this layer or a later one. Idempotent."""
        self._stop = min(self._stop, position)
        for at in [at for at in self._borrowed if at >= position]:
            self._borrowed.pop(at).release()
        for at in [at for at in self._layered if at >= position]:
            self._layered.pop(at).abandon()

    # -- results ---------------------------------------------------------------------------------

    def _num_tokens(self) -> int:
        return sum(self._plan.tokens_of(at)[1] for at in range(self._plan.start, self._stop))

    def _end(self, num_wanted_tokens: int, seconds: float) -> None:
        by_tier: dict[str, int] = {}
        for at in range(self._plan.start, self._stop):
            count = self._plan.tokens_of(at)[1]
            by_tier[self._from[at]] = by_tier.get(self._from[at], 0) + count
        self._emit(
            Retrieved(
                num_tokens=sum(by_tier.values()),
                num_wanted_tokens=num_wanted_tokens,
                tokens_by_tier=tuple(by_tier.items()),
                nbytes=self._num_bytes,
                seconds=seconds,
            )
        )
