"""From a config to a running chain of tiers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from lmcache_core.config import ByteSize, CacheConfig, TierConfig
from lmcache_core.config.faults import Place
from lmcache_core.errors import BackendError, ConfigError, LMCacheError, PluginError
from lmcache_core.events import EventBus
from lmcache_core.identity.keys import StorageKey
from lmcache_core.memory import MemoryPool, PinTable
from lmcache_core.registry import Registry
from lmcache_core.storage import (
    Backend,
    Breaker,
    RetryBudget,
    TierExecutor,
    TierHost,
    Verifier,
)
from lmcache_core.storage.serial import SerialThread
from lmcache_core.tiers.backends import PreparedTier, prepare_tiers
from lmcache_core.tiers.chain import TierChain
from lmcache_core.tiers.memory_tier import MemoryTier
from lmcache_core.tiers.requests import Policy
from lmcache_core.tiers.storage_tier import StorageTier, StorageTierOptions

MAX_SLABS = 1024
BackendFactory = Callable[[], Backend[Any]]


def build_chain(
    config: CacheConfig,
    registry: Registry,
    *,
    parts: Sequence[str],
    events: EventBus,
    frame_nbytes: int | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> TierChain:
    """Builds and opens every tier, nearest first, each for as long as its deadline.

    A store that can't be reached now, or takes longer, leaves its tier down until it can.

    `frame_nbytes` is the size of the frames most often kept, for memory to be cut to fit.

    Raises:
        ConfigError: a tier that can never work as configured.
        PluginError: a plugin that doesn't keep what it declares.
            Either way, what was opened is closed again.
    """
    tiers = prepare_tiers(config, registry)
    if frame_nbytes is not None:
        _check_frame_fits(config, tiers, frame_nbytes)
    staging = int(config.memory.staging)
    memory_bytes = sum(int(tier.config.capacity or 0) for tier in tiers if tier.resident) + staging
    pool = MemoryPool(
        memory_bytes,
        reserved_bytes=staging // 2,
        slab_nbytes=None if frame_nbytes is None else _slab_nbytes(frame_nbytes, memory_bytes),
        huge_pages=config.memory.huge_pages,
        clock=clock,
        events=events,
        debug=config.memory.debug_leases,
    )
    books, verifier = SerialThread("lmcache-tiers"), Verifier()
    chain = TierChain(
        pool,
        PinTable(clock),
        events.emit,
        load_window_bytes=max(staging // 4, 1),
        behind=books.submit,
        clock=clock,
    )
    chain.on_close(verifier.close)
    chain.on_close(books.close)
    try:
        for prepared in tiers:
            tier = prepared.config
            try:
                policy = Policy(write=tier.write == "through", promote=tier.promote, deadline_s=tier.deadline)
                if prepared.resident:
                    chain.add(_memory_tier(tier, prepared.make(), chain, parts, events), policy)
                else:
                    storage_tier = _storage_tier(
                        tier, prepared.make, config, chain, parts, books, verifier, events, clock
                    )
                    chain.add(storage_tier, policy)
                    storage_tier.start()
            except ConfigError as error:
                raise ConfigError(f"{prepared.where}: {error}") from error
            except PluginError as error:
                raise PluginError(f"{prepared.where}: backend {tier.backend!r}: {error}") from error
    except BaseException:
        chain.close(clock())
        raise
    return chain


def _check_frame_fits(config: CacheConfig, tiers: Sequence[PreparedTier], frame_nbytes: int) -> None:
    """A bound below one frame (one for loads and one for stores in memory) would refuse everything."""
    bounds: list[tuple[Place, ByteSize, int]] = [
        (("memory", "staging"), config.memory.staging, 2 * frame_nbytes)
    ]
    for position, prepared in enumerate(tiers):
        tier, most = prepared.config, prepared.offers.max_value_bytes
        bounds.append((("tiers", position, "in_flight_bytes"), tier.in_flight_bytes, frame_nbytes))
        if tier.capacity is not None:
            bounds.append((("tiers", position, "capacity"), tier.capacity, frame_nbytes))
        if most is not None and most < frame_nbytes:
            fault = f"backend {tier.backend!r} stores values of at most {most:,} bytes"
            remedy = f"{_frame(config, frame_nbytes)}: set a smaller chunk_tokens"
            raise ConfigError(config.located(("tiers", position), f"{fault}; {remedy}"))
    for place, value, least in bounds:
        if value < least:
            enough = ByteSize(-(-least // 2**20) * 2**20)
            fault = f"{value} is too little: {_frame(config, frame_nbytes)}"
            raise ConfigError(
                config.located(place, f"{fault}; set at least {enough}, or a smaller chunk_tokens")
            )


def _frame(config: CacheConfig, frame_nbytes: int) -> str:
    return f"a chunk of {config.chunk_tokens} tokens of this model is a frame of {frame_nbytes:,} bytes"


def _slab_nbytes(frame_nbytes: int, memory_bytes: int) -> int:
    """One frame, or as many as keep the slabs countable."""
    return frame_nbytes * -(-memory_bytes // (MAX_SLABS * frame_nbytes))


def _memory_tier(
    config: TierConfig, backend: Backend[Any], chain: TierChain, parts: Sequence[str], events: EventBus
) -> MemoryTier:
    host = TierHost(
        tier=config.name,
        deadline_s=config.deadline,
        max_in_flight=1,
        capacity_bytes=config.capacity,
        parts=tuple(parts),
        pool=chain.pool,
        on_lost=lambda copies, reason: None,
        on_lost_all=lambda reason: None,
    )
    try:
        backend.open(host)
    except BackendError as error:
        raise ConfigError(str(error)) from error
    except LMCacheError:
        raise
    except Exception as error:  # recorded boundary: plugin code
        raise PluginError(f"open raised {type(error).__name__}: {error}") from error
    return MemoryTier(config.name, backend, int(config.capacity or 0), pins=chain.pins, events=events)


def _storage_tier(
    config: TierConfig,
    factory: BackendFactory,
    cache: CacheConfig,
    chain: TierChain,
    parts: Sequence[str],
    books: SerialThread,
    verifier: Verifier,
    events: EventBus,
    clock: Callable[[], float],
) -> StorageTier:
    def open_tier(
        lost: Callable[[Sequence[tuple[StorageKey, int | None]], str], None],
        lost_all: Callable[[str], None],
    ) -> TierExecutor:
        backend = factory()
        most = backend.capabilities.max_in_flight
        max_in_flight = most if config.max_in_flight is None else min(most, config.max_in_flight)
        host = TierHost(
            tier=config.name,
            deadline_s=config.deadline,
            max_in_flight=max_in_flight,
            capacity_bytes=config.capacity,
            parts=tuple(parts),
            pool=chain.pool,
            on_lost=lost,
            on_lost_all=lost_all,
        )

        def breaker() -> Breaker:
            return Breaker(
                failures=config.breaker.failures, cool_down_s=config.breaker.cool_down, clock=clock
            )

        return TierExecutor(
            backend,
            host,
            max_in_flight=max_in_flight,
            in_flight_bytes=config.in_flight_bytes,
            queue_limit=config.queue,
            read_breaker=breaker(),
            write_breaker=breaker(),
            retry=RetryBudget(),
            verifier=verifier,
            events=events,
            clock=clock,
        )

    options = StorageTierOptions(
        name=config.name,
        capacity_bytes=config.capacity,
        deadline_s=config.deadline,
        max_queued=config.queue,
        max_in_flight=config.max_in_flight,
        in_flight_bytes=config.in_flight_bytes,
        allocate_deadline_s=cache.allocate_deadline,
        keeps_waiting=not chain.has_memory_tier,
    )
    return StorageTier(
        options,
        open_tier,
        pool=chain.pool,
        pins=chain.pins,
        events=events,
        behind=books.submit,
        clock=clock,
    )
