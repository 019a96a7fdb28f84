"""What engines hand in (sources, targets) and get back (results)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from lmcache_core.memory import PoolStats


class KVSource(Protocol):
    """Where a store takes KV from: the host engine's memory, which only this object knows."""

    def gather(self, first_token: int, num_tokens: int, payload: Sequence[memoryview]) -> None:
        """Writes the KV of tokens `[first_token, first_token + num_tokens)` into `payload`.

        `payload` has one writable flat view a layer, `[heads, tokens, content]`, all of it to be filled,
        valid during the call only. What this raises reaches the caller of `store`.
        """


class KVTarget(Protocol):
    """Where a retrieve puts KV: the host engine's memory."""

    def scatter(self, first_token: int, num_tokens: int, payload: Sequence[memoryview]) -> None:
        """Copies verified KV of tokens `[first_token, first_token + num_tokens)` out of `payload`.

        Calls come in token order without gaps. `payload` as for `KVSource.gather`, but read-only.
        """


class LayerSource(Protocol):
    """Where a store takes KV from, a layer at a time."""

    def gather_layer(self, layer: int, first_token: int, num_tokens: int, segment: memoryview) -> None:
        """As `KVSource.gather`, for one layer, counted from 0: `segment` is `[heads, tokens, content]`.

        It may return before the bytes are there: see `wait_gathered`.
        """

    def wait_gathered(self) -> None:
        """Returns when all that was gathered is in its segments. Called before frames are committed."""


class LayerTarget(Protocol):
    """Where a retrieve puts KV, a layer at a time."""

    def scatter_layer(self, layer: int, first_token: int, num_tokens: int, segment: memoryview) -> None:
        """As `KVTarget.scatter`, for one layer, counted from 0.

        All of a layer's calls come before the layer is yielded, some of them earlier than those of the
        layers before it.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedLayer:
    """One layer of a layerwise retrieve, scattered."""

    layer: int
    num_tokens: int
    """Tokens, behind the skipped ones, whose KV of all layers up to this one is in the target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreResult:
    """What a store did. `num_tokens` are newly taken by at least one tier; writing goes on behind."""

    num_tokens: int
    num_known_tokens: int
    """Tokens whose chunks were there already, or are being stored by another thread."""
    num_skipped_tokens: int
    """Tokens of chunks for which no memory or no tier was to be had, and of all after them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupResult:
    """The longest prefix that can be loaded now."""

    num_tokens: int
    tokens_by_tier: Mapping[str, int]
    lookup_id: str = ""
    """Names the pins taken, for `lookup_unpin`; empty without them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrieveResult:
    """What was loaded. `mask[i]` is true where token i's KV was scattered: `[num tokens] bool`."""

    mask: memoryview[bool] = field(repr=False)
    num_tokens: int
    tokens_by_tier: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """One tier's gauges and counters."""

    name: str
    medium: str
    """`memory`, `file` or `network`; of a tier that was never up, `network`."""
    state: str
    """`up` or `down`."""
    entries: int
    used_bytes: int
    capacity_bytes: int | None
    waiting_writes: int
    counters: Mapping[str, int]
    last_error: str
    """What went wrong last, if anything did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """All tiers, nearest first, and the frame memory. Prints as a table."""

    tiers: tuple[TierStats, ...]
    memory: PoolStats

    def __str__(self) -> str:
        rows = [("tier", "state", "entries", "MiB", "of MiB", "waiting", "counters")]
        for tier in self.tiers:
            bound = "-" if tier.capacity_bytes is None else f"{tier.capacity_bytes / 2**20:.1f}"
            counters = ", ".join(f"{what} {count}" for what, count in sorted(tier.counters.items()))
            used = f"{tier.used_bytes / 2**20:.1f}"
            rows.append(
                (tier.name, tier.state, str(tier.entries), used, bound, str(tier.waiting_writes), counters)
            )
        widths = [max(len(row[column]) for row in rows) for column in range(6)]
        lines = ["  ".join([*map(str.ljust, row[:6], widths), row[6]]).rstrip() for row in rows]
        lines += [f"{tier.name}: last error: {tier.last_error}" for tier in self.tiers if tier.last_error]
        memory = self.memory
        lines.append(
            f"memory: {memory.used_bytes / 2**20:.1f} of {memory.capacity_bytes / 2**20:.1f} MiB used, "
            f"{memory.leases} leases, {memory.lost_leases} lost, {memory.refused} allocations refused"
        )
        return "\n".join(lines)
