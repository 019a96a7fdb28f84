"""The verbs of the cache: store, lookup, retrieve, prefetch, pin, clear."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from copy import copy
from pathlib import Path
from types import TracebackType
from typing import Self

from lmcache_core.config import CacheConfig, load_config
from lmcache_core.engine.layerwise import LayerwiseLoad
from lmcache_core.engine.loading import Loader
from lmcache_core.engine.masks import skipped_tokens
from lmcache_core.engine.plan import Plan, plan_hit
from lmcache_core.engine.prefetch import Prefetch
from lmcache_core.engine.recent import RecentContents
from lmcache_core.engine.results import (
    EngineStats,
    KVSource,
    KVTarget,
    LayerSource,
    LayerTarget,
    LoadedLayer,
    LookupResult,
    RetrieveResult,
    StoreResult,
)
from lmcache_core.engine.shape import FrameShape
from lmcache_core.engine.statistics import Statistics
from lmcache_core.engine.storing import Storer
from lmcache_core.errors import ConfigError
from lmcache_core.events import Event, EventBus, LookedUp, Observer
from lmcache_core.identity import Content, Extra, ModelRecord, Part, Tokens
from lmcache_core.registry import Registry, discover
from lmcache_core.tiers import MemoryTier, Tier, TierChain, build_chain

CLOSE_DEADLINE_S = 30.0
PIN_ATTEMPTS = 4
LONGEST_WAIT_S = 1e6


class CacheEngine:
    """One model part's cache over a chain of tiers. Thread-safe; a context manager.

    Requests are given as tokens (int32 or int64 arrays, or sequences of ints) or as a `Content`, which
    hashes them once. Nothing that a tier does raises out of `store`, `lookup`, `retrieve`, `prefetch`,
    or costs more than that tier's deadline: what can't be had in time, or can't be proved right, is a
    miss.

    Raises:
        ConfigError: the config or a tier's place can't work. The message says what to change.
        PluginError: a plugin doesn't keep what it declares.
    """

    def __init__(
        self,
        config: CacheConfig | Path | str | Mapping[str, object],
        *,
        model: ModelRecord,
        part: Part,
        registry: Registry | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.config = config if isinstance(config, CacheConfig) else load_config(config)
        if model.chunk_tokens != self.config.chunk_tokens:
            raise ConfigError(
                f"the model record counts {model.chunk_tokens} tokens a chunk, the config "
                f"{self.config.chunk_tokens}: build the record with the config's chunk_tokens"
            )
        self.model = model
        self._events = EventBus()
        self._statistics = Statistics()
        self._events.subscribe(self._statistics, *Statistics.KINDS)
        for observer in observers:
            self._events.subscribe(observer)
        shape = FrameShape(part)
        self._chain: TierChain = build_chain(
            self.config,
            registry or discover(),
            parts=(part.digest,),
            events=self._events,
            frame_nbytes=shape.header(model.key, None, 0, model.chunk_tokens).frame_nbytes,
        )
        self._serve(shape)
        self._recent = RecentContents(model)

    def beside(self, part: Part) -> CacheEngine:
        """The cache of another part of the model, over the same tiers, memory and observers.

        `stats` are of all parts together, and closing one engine closes the tiers of all. Memory is cut for
        this one's frames: ask the engine of the part with the largest.
        """
        other = copy(self)
        other._serve(FrameShape(part))
        return other

    # -- requests --------------------------------------------------------------------------------

    def content(
        self, tokens: Tokens, *, salt: bytes = b"", lora: bytes = b"", extras: Sequence[Extra] = ()
    ) -> Content:
        """A request's identity under this engine's model. Extend it as the request grows."""
        content = Content(self.model, lora=lora, salt=salt)
        content.extend(tokens, extras)
        return content

    @property
    def memory_tiers(self) -> tuple[str, ...]:
        """Names of the tiers whose frames lie in this process's memory, for a `search_range`."""
        return tuple(tier.name for tier in self._chain.tiers if isinstance(tier, MemoryTier))

    # -- verbs -----------------------------------------------------------------------------------

    def store(
        self, request: Content | Tokens, source: KVSource, *, mask: Sequence[bool] | None = None
    ) -> StoreResult:
        """Takes the KV of all whole chunks, and of the tail in steps of 16 tokens, that isn't there yet.

        When this returns, `source`'s memory may be reused: writing to farther tiers goes on in the
        background from frames of our own. `mask` (`F…FT…T`, as long as the tokens) leaves out a prefix.

        Raises:
            ValueError: the mask isn't `F…FT…T`, or its F part is no multiple of the chunk size.
            Whatever `source.gather` raises.
        """
        content = self._content(request)
        return self._storer.store(content, source, self._skip(content, mask))

    def store_layers(
        self, request: Content | Tokens, source: LayerSource, *, mask: Sequence[bool] | None = None
    ) -> Generator[int, None, StoreResult]:
        """`store`, a layer at a time as the caller computes them: one `next` gathers one layer, from 0 up.

        Yields the layer gathered. Frames are taken at the first `next`, for as many tokens as there is
        memory for, and may be found by others once the last layer is in, not before: closing the generator
        earlier drops them. It returns the `StoreResult`.

        Raises:
            ValueError: as `store`, at once.
            Whatever `source` raises, out of `next`; then nothing is stored.
        """
        content = self._content(request)
        return self._storer.store_layers(content, source, self._skip(content, mask))

    def lookup(
        self,
        request: Content | Tokens | None = None,
        *,
        hashes: Sequence[bytes] | None = None,
        search_range: Sequence[str] | None = None,
        limit: int | None = None,
        pin: bool = False,
        owner: str = "",
        ttl_s: float | None = None,
    ) -> LookupResult:
        """The length in tokens of the longest prefix that is held, by whichever tiers.

        Takes tokens, a `Content`, or the chunk `hashes` of one (then tails aren't looked for).
        `search_range` names the tiers to ask; `limit` bounds the answer. With `pin`, what was found
        stays for `ttl_s` (the config's `pin_ttl` when None) or until `lookup_unpin`.

        Raises:
            ConfigError: `search_range` names an unknown tier.
            ValueError: not exactly one of `request` and `hashes`.
        """
        started = time.monotonic()
        if (request is None) == (hashes is None):
            raise ValueError("give lookup either a request or hashes")
        if not all(isinstance(digest, bytes) for digest in hashes or ()):
            raise ValueError("hashes are the bytes of a content's chunk hashes, as Content.hashes has them")
        tiers = self._tiers(search_range)
        content = None if request is None else self._content(request)
        named = list(hashes or ())
        deadlines = self._chain.deadlines()  # of the whole call, however often it looks

        def plan_now() -> Plan:
            if content is None:
                size = self.model.chunk_tokens
                return Plan.of_hashes(named, self.part, size, tiers, limit, deadlines)
            tails = self.config.tails
            return plan_hit(content, self.part, tiers=tiers, limit=limit, tails=tails, deadlines=deadlines)

        plan, lookup_id = plan_now(), ""
        if pin and plan.keys:
            plan, lookup_id = self._pinned(
                plan, plan_now, owner=owner, ttl_s=self.config.pin_ttl if ttl_s is None else ttl_s
            )
        num_tokens = len(named) * self.model.chunk_tokens if content is None else content.num_tokens
        self._events.emit(
            LookedUp(
                num_tokens=num_tokens, num_hit_tokens=plan.num_tokens, seconds=time.monotonic() - started
            )
        )
        return LookupResult(
            num_tokens=plan.num_tokens, tokens_by_tier=plan.tokens_by_tier(), lookup_id=lookup_id
        )

    def lookup_unpin(self, lookup_id: str) -> int:
        """Ends the pins of a lookup. Returns how many there still were (expired ones are none).

        The empty id of a lookup that pinned nothing is taken, and does nothing.

        Raises:
            LeaseError: no such lookup, or unpinned before.
        """
        if not lookup_id:
            return 0
        count = self._chain.pins.unpin(lookup_id)
        self._chain.pool.wake()
        return count

    def pin(self, request: Content | Tokens, *, owner: str = "", ttl_s: float | None = None) -> LookupResult:
        """`lookup` with `pin`: what is held of the request now, kept from eviction."""
        return self.lookup(request, pin=True, owner=owner, ttl_s=ttl_s)

    def unpin(self, lookup_id: str) -> int:
        return self.lookup_unpin(lookup_id)

    def retrieve(
        self,
        request: Content | Tokens,
        target: KVTarget,
        *,
        mask: Sequence[bool] | None = None,
        limit: int | None = None,
        search_range: Sequence[str] | None = None,
    ) -> RetrieveResult:
        """Loads the longest prefix it can, frame by frame, and scatters each once it is proved right.

        `mask` (`F…FT…T`) says what the caller has already: those tokens are neither loaded nor marked.
        `limit` bounds the prefix in tokens. The tokens loaded always follow the skipped ones without a
        gap; a frame that is gone, late or damaged ends them.

        Raises:
            ValueError: the mask isn't `F…FT…T`, or its F part is no multiple of the chunk size.
            ConfigError: `search_range` names an unknown tier.
            Whatever `target.scatter` raises.
        """
        content = self._content(request)
        skip = self._skip(content, mask)
        return self._loader.retrieve(content, target, self._tiers(search_range), limit, skip)

    def retrieve_layers(
        self,
        request: Content | Tokens,
        target: LayerTarget,
        *,
        mask: Sequence[bool] | None = None,
        limit: int | None = None,
        search_range: Sequence[str] | None = None,
    ) -> Generator[LoadedLayer, None, None]:
        """`retrieve`, a layer at a time: the next two layers come while the caller computes this one.

        Yields every layer once, in order, as it is scattered, with the number of tokens that are good for
        it: a prefix (behind the skipped tokens) that never grows and has every layer so far. It shrinks
        where a chunk's later segment is late, lost or damaged: then nothing of that chunk and of those
        after it may be used, and who used them in earlier layers computes again from that token on, from
        the first layer. The generator can go on being used for the shorter prefix.

        Nothing is read before the first `next`. Closing the generator gives all memory back; what a tier
        is still writing into stays set aside until the tier lets go. Frames read by segments stay where
        they are (no promotion), and aren't tried in farther tiers when they fail.

        Raises:
            ValueError, ConfigError: as `retrieve`, at once.
            Whatever `target.scatter_layer` raises, out of `next`.
        """
        content, tiers = self._content(request), tuple(self._tiers(search_range))
        skip = self._skip(content, mask)

        def layers() -> Generator[LoadedLayer, None, None]:
            plan = self._loader.plan(content, tiers, limit, skip)
            emit, root = self._events.emit, self.model.key
            load = LayerwiseLoad(self._chain, self._shape, plan, target, tiers, emit, root=root)
            yield from load.run(content.num_tokens - skip)

        return layers()

    def prefetch(
        self,
        request: Content | Tokens,
        *,
        limit: int | None = None,
        search_range: Sequence[str] | None = None,
    ) -> Prefetch:
        """Starts bringing the longest prefix into the memory tier, behind other loads. Returns at once.

        Without a memory tier there is nowhere to bring it: nothing is done.
        """
        content, tiers = self._content(request), self._tiers(search_range)
        return Prefetch(self._loader.bring_near(content, tiers, limit))

    def clear(
        self, request: Content | Tokens | None = None, *, search_range: Sequence[str] | None = None
    ) -> dict[str, int]:
        """Removes this part's frames (of one request, or all known) from the tiers; counts by tier.

        What is pinned or being read stays; what is being written is waited for, and goes. Costs at most each
        tier's deadline, after which a late write may still land.

        Raises:
            ConfigError: `search_range` names an unknown tier.
        """
        tiers = self._tiers(search_range)
        if request is not None:
            content = self._content(request)
            keys = content.keys(self.part)
            for chunk in range(content.num_chunks + 1):
                keys += [tail.key for tail in content.tails_after(self.part, chunk)]
            return self._chain.remove(keys, tiers, "cleared")
        known = self._chain.known(f"c-{self.part.digest}-", tiers)
        return self._chain.remove(known, tiers, "cleared")

    def flush(self, timeout_s: float = CLOSE_DEADLINE_S) -> bool:
        """Waits until all background writes are done. False when the time ran out first."""
        return self._chain.flush(time.monotonic() + min(timeout_s, LONGEST_WAIT_S))

    def stats(self) -> EngineStats:
        """Gauges and counters of every tier and of the frame memory; prints as a table. No I/O."""
        return EngineStats(
            tiers=tuple(self._statistics.of(tier, closed=self._chain.closed) for tier in self._chain.tiers),
            memory=self._chain.pool.stats(),
        )

    def subscribe(self, observer: Observer, *kinds: type[Event]) -> Callable[[], None]:
        """Adds an observer of this engine's events, of all `kinds` when none is named.

        Calling what is returned removes it.
        """
        return self._events.subscribe(observer, *kinds)

    def close(self, timeout_s: float = CLOSE_DEADLINE_S) -> None:
        """Finishes background writes, as far as the time allows, and closes the tiers. Idempotent.

        From then on the engine is an empty cache that takes nothing.
        """
        self._chain.close(time.monotonic() + min(timeout_s, LONGEST_WAIT_S))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- inside ----------------------------------------------------------------------------------

    def _serve(self, shape: FrameShape) -> None:
        emit, tails = self._events.emit, self.config.tails
        self.part = shape.part
        self._shape = shape
        self._storer = Storer(
            self._chain,
            self.model,
            shape,
            emit,
            tails=tails,
            allocate_deadline_s=self.config.allocate_deadline,
        )
        self._loader = Loader(self._chain, shape, emit, tails=tails)

    def _pinned(
        self, plan: Plan, plan_again: Callable[[], Plan], *, owner: str, ttl_s: float
    ) -> tuple[Plan, str]:
        """Pins a plan, and looks again: what left in between is no part of the answer."""
        for _ in range(PIN_ATTEMPTS):
            places = set(plan.places())
            lookup_id = self._chain.pins.pin(places, owner=owner, ttl_s=ttl_s)
            plan = plan_again()
            if places.issuperset(plan.places()):
                return plan, lookup_id
            self.lookup_unpin(lookup_id)
        return Plan.nothing(plan), ""

    def _content(self, request: Content | Tokens) -> Content:
        if isinstance(request, Content):
            if request.model.digest != self.model.digest:
                raise ValueError(
                    f"this content was made for model {request.model.key}, the engine is for "
                    f"{self.model.key}: make it with engine.content()"
                )
            if not request.persistent and self._chain.persistent_tiers:
                raise ConfigError(
                    f"tier {self._chain.persistent_tiers[0]!r} outlives the process, and this content's "
                    f"names don't: {request.not_persistent_reason}"
                )
            return request
        return self._recent.of(request)

    def _skip(self, content: Content, mask: Sequence[bool] | None) -> int:
        return skipped_tokens(mask, content.num_tokens, self.model.chunk_tokens)

    def _tiers(self, search_range: Sequence[str] | None) -> Sequence[Tier]:
        if self._chain.closed:
            return ()
        if search_range is None:
            return self._chain.tiers
        if isinstance(search_range, str):
            raise ConfigError(
                f"search_range is a list of tier names: [{search_range!r}], not {search_range!r}"
            )
        by_name = {tier.name: tier for tier in self._chain.tiers}
        unknown = [name for name in search_range if name not in by_name]
        if unknown:
            raise ConfigError(f"no tier is named {unknown[0]!r}; the tiers are {', '.join(by_name)}")
        return [tier for tier in self._chain.tiers if tier.name in search_range]
