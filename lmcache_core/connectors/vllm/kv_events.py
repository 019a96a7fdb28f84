"""What our tiers hold, in terms of vLLM's blocks: a router sends a request to where its prefix lies.

A worker hears of chunks that come to a tier or leave it, by key; the scheduler knows which of vLLM's blocks
a chunk is. `publishing` carries the news from one to the other, and makes vLLM's events of what is told.
"""

from __future__ import annotations

import threading
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

from lmcache_core.connectors.vllm.guard import guarded, nothing
from lmcache_core.events import ChunkAdmitted, ChunkEvicted, Event
from lmcache_core.identity import Content

MAX_TOKENS = 8 << 20
"""Chunks of so many tokens are remembered, for what may yet be told of them: some 50 MB."""

ExtraKeys: TypeAlias = Sequence[tuple[Any, ...] | None]


def wanted(vllm_config: Any) -> bool:
    """Whether vLLM publishes KV events."""
    config = vllm_config.kv_events_config
    return config is not None and bool(config.enable_kv_cache_events)


class News(NamedTuple):
    """A tier of one rank holds one part of a chunk, or no longer does."""

    rank: int
    part: str
    tier: str
    chunk: str
    """Its hash in hex: what of its key is the same in all parts."""
    here: bool


class RankNews:
    """An observer of one rank's cache; what it heard is taken once a step, in order for each tier."""

    KINDS: tuple[type[Event], ...] = (ChunkAdmitted, ChunkEvicted)

    def __init__(self, rank: int, parts: Iterable[str]) -> None:
        """`parts` are the digests of those that matter."""
        self._rank = rank
        self._parts = frozenset(parts)
        self._lock = threading.Lock()  # guards the list
        self._news: list[News] = []

    def on_event(self, event: Event) -> None:
        assert isinstance(event, ChunkAdmitted | ChunkEvicted)
        kind, _, name = event.key.partition("-")
        part, _, chunk = name.partition("-")
        if kind == "c" and part in self._parts:
            news = News(self._rank, part, event.tier, chunk, isinstance(event, ChunkAdmitted))
            with self._lock:
                self._news.append(news)

    def take(self) -> list[News]:
        if not self._news:  # usual: one read
            return []
        with self._lock:
            news, self._news = self._news, []
        return news


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """Blocks that follow each other are in a tier from now on; or, with `stored` false, no longer."""

    stored: bool
    tier: str
    first_token: int
    """Of the chunk that the blocks are of."""
    blocks: Sequence[bytes]
    """vLLM's hashes."""
    parent: bytes | None = None
    """Of the block before the first."""
    tokens: Sequence[int] = ()
    lora: tuple[int, str] | None = None
    """vLLM's id and name of the adapter."""
    extra_keys: ExtraKeys = ()


@dataclass(slots=True)
class _Chunk:
    """What can be told of a chunk, or of a prompt's tail."""

    first_token: int
    blocks: Sequence[bytes]
    parent: bytes | None
    tokens: array[int]
    lora: tuple[int, str] | None
    extra_keys: ExtraKeys
    holders: dict[str, set[tuple[int, str]]] = field(default_factory=dict)
    """Tier → the (rank, part) that it holds."""


class BlockEvents:
    """The scheduler's side: a block is told of once, when a tier holds it in all ranks and parts.

    Requests with a `cache_salt` are left out: the keys that vLLM publishes with a block name the salt, which
    is a secret here. What lay in a tier before the start is told of when it comes to a nearer one. For one
    thread.
    """

    def __init__(
        self,
        *,
        block_tokens: int,
        hash_tokens: int,
        num_holders: int,
        extra_keys: Callable[[Any, int, int], tuple[Any, ...] | None],
    ) -> None:
        """vLLM hashes every `hash_tokens` tokens; `num_holders` is the number of ranks times parts.

        `extra_keys` gives what a request's tokens from one place to another are known by besides.
        """
        self._block_tokens = block_tokens
        self._hash_tokens = hash_tokens
        self._num_holders = num_holders
        self._extra_keys = extra_keys
        self._chunks: OrderedDict[str, _Chunk] = OrderedDict()  # what was asked for longest ago first
        self._num_tokens = 0
        self._held: Counter[tuple[str, bytes]] = Counter()
        # (tier, block) → chunks and tails that hold it there. Those of one place are prefixes of each other.
        self._told: list[Told] = []

    @guarded(nothing)
    def grown(self, request: Any, content: Content, first: int) -> None:
        """`content` knows the request's tokens from `first` on: its chunks may be told of from now on."""
        if request.cache_salt:
            return
        size = content.model.chunk_tokens
        hashes = content.hashes
        for i in range(first // size, len(hashes)):
            self._know(hashes[i], request, i * size, (i + 1) * size)
        i, rest = divmod(request.num_prompt_tokens, size)
        rest -= rest % self._block_tokens
        if rest and first < request.num_prompt_tokens <= content.num_tokens:
            for count, digest in content.tail_hashes_after(i):
                if count == rest:  # the one that a prompt's end is stored as
                    self._know(digest, request, i * size, i * size + count)

    def heard(self, news: Iterable[News]) -> None:
        for each in news:
            chunk = self._chunks.get(each.chunk)
            if chunk is None:
                continue  # of no request of ours
            holders = chunk.holders.setdefault(each.tier, set())
            was_whole = len(holders) == self._num_holders
            if each.here:
                holders.add((each.rank, each.part))
            else:
                holders.discard((each.rank, each.part))
            if was_whole != (len(holders) == self._num_holders):
                self._tell(chunk, each.tier, stored=each.here)

    def forget(self) -> None:
        """Takes back all that was told: nothing of it is used any more."""
        while self._chunks:
            self._drop_oldest()

    def take(self) -> list[Told]:
        """What is new: where several blocks come at once, parents first; where they go, parents last."""
        told, self._told = self._told, []
        return [
            each
            for stored, run in groupby(told, key=lambda each: each.stored)
            for each in sorted(run, key=lambda each: each.first_token, reverse=not stored)
        ]

    def _know(self, digest: bytes, request: Any, first: int, end: int) -> None:
        name = digest.hex()
        if name in self._chunks:
            self._chunks.move_to_end(name)
            return
        blocks = self._blocks(request, first, end)
        if len(blocks) < (end - first) // self._block_tokens:
            return  # vLLM hasn't hashed them
        lora = request.lora_request
        self._chunks[name] = _Chunk(
            first_token=first,
            blocks=blocks,
            parent=self._blocks(request, first - self._block_tokens, first)[0] if first else None,
            tokens=array("i", request.all_token_ids[first:end]),
            lora=None if lora is None else (lora.adapter_id, lora.name),
            extra_keys=[
                self._extra_keys(request, start, start + self._block_tokens)
                for start in range(first, end, self._block_tokens)
            ],
        )
        self._num_tokens += end - first
        while self._num_tokens > MAX_TOKENS:
            self._drop_oldest()

    def _blocks(self, request: Any, first: int, end: int) -> list[bytes]:
        """Hashes of the blocks in tokens `[first, end)`: a block's is that of its last part."""
        step = self._block_tokens // self._hash_tokens
        hashes = request.block_hashes[first // self._hash_tokens : end // self._hash_tokens]
        return list(hashes[step - 1 :: step])

    def _drop_oldest(self) -> None:
        """What can't be taken back later is taken back now."""
        _, chunk = self._chunks.popitem(last=False)
        self._num_tokens -= len(chunk.tokens)
        for tier, holders in chunk.holders.items():
            if len(holders) == self._num_holders:
                self._tell(chunk, tier, stored=False)

    def _tell(self, chunk: _Chunk, tier: str, *, stored: bool) -> None:
        keys = [(tier, block) for block in chunk.blocks]
        if stored:
            known = sum(key in self._held for key in keys)
            self._held.update(keys)
            if known < len(keys):
                self._told.append(
                    Told(
                        stored=True,
                        tier=tier,
                        first_token=chunk.first_token,
                        blocks=chunk.blocks[known:],
                        parent=chunk.blocks[known - 1] if known else chunk.parent,
                        tokens=chunk.tokens[known * self._block_tokens :].tolist(),
                        lora=chunk.lora,
                        extra_keys=chunk.extra_keys[known:],
                    )
                )
            return
        self._held.subtract(keys)
        gone = [key for key in keys if not self._held[key]]
        for key in gone:
            del self._held[key]
        if gone:
            blocks = [block for _, block in gone]
            self._told.append(Told(stored=False, tier=tier, first_token=chunk.first_token, blocks=blocks))
