"""What engines hand in (sources, targets) and get back (results)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


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

        Calls come in token order without gaps. `payload` as for `KVSource.gather`, only to be read.
        """


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
    state: str
    """`up` or `down`."""
    entries: int
    used_bytes: int
    capacity_bytes: int | None
    waiting_writes: int
    counters: Mapping[str, int]
