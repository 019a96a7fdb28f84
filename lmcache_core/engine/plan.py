"""Which frames make up the longest prefix of a request that can be loaded, and from where."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lmcache_core.identity import Content, Part, StorageKey, chunk_key
from lmcache_core.tiers import Deadlines, Run, Tier, find_first, locate


@dataclass(frozen=True, slots=True)
class Plan:
    """`keys` of whole chunks, then of at most one tail. Runs cover `keys[start:]` without a gap."""

    keys: Sequence[StorageKey]
    runs: Sequence[Run]
    deadlines: Deadlines
    """The request's time, part of which the plan has used."""
    start: int
    chunk_tokens: int
    tail: tuple[int, int] | None
    """First token and number of tokens of the last key, when it is a tail."""

    @classmethod
    def of_hashes(
        cls,
        hashes: Sequence[bytes],
        part: Part,
        chunk_tokens: int,
        tiers: Sequence[Tier],
        limit: int | None,
        deadlines: Deadlines,
    ) -> Plan:
        """The plan for the whole chunks named by `hashes`."""
        wanted = hashes if limit is None else hashes[: max(limit, 0) // chunk_tokens]
        keys = [chunk_key(part.digest, digest) for digest in wanted]
        runs = locate(keys, tiers, deadlines)
        return cls(keys[: runs[-1].stop] if runs else [], runs, deadlines, 0, chunk_tokens, None)

    @classmethod
    def nothing(cls, plan: Plan) -> Plan:
        """A plan like `plan` that found nothing."""
        return cls([], [], plan.deadlines, 0, plan.chunk_tokens, None)

    @property
    def num_tokens(self) -> int:
        """The prefix's length, the part before `start` included."""
        if self.tail is not None:
            return sum(self.tail)
        return len(self.keys) * self.chunk_tokens

    def tokens_of(self, position: int) -> tuple[int, int]:
        """(first token, number of tokens) of `keys[position]`."""
        if self.tail is not None and position == len(self.keys) - 1:
            return self.tail
        return position * self.chunk_tokens, self.chunk_tokens

    def tokens_by_tier(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for run in self.runs:
            first, _ = self.tokens_of(run.start)
            last, num_tokens = self.tokens_of(run.stop - 1)
            counts[run.tier.name] = counts.get(run.tier.name, 0) + last + num_tokens - first
        return counts

    def places(self) -> Iterator[tuple[str, StorageKey]]:
        """(tier name, key) of every frame."""
        for run in self.runs:
            for position in range(run.start, run.stop):
                yield run.tier.name, self.keys[position]


def plan_hit(
    content: Content,
    part: Part,
    *,
    tiers: Sequence[Tier],
    limit: int | None,
    tails: bool,
    deadlines: Deadlines,
    start_chunk: int = 0,
) -> Plan:
    """The longest prefix of `content`, at most `limit` tokens, from chunk `start_chunk` on."""
    chunk_tokens = content.model.chunk_tokens
    most = content.num_tokens if limit is None else max(min(limit, content.num_tokens), 0)
    keys = content.keys(part)[: most // chunk_tokens]
    start = min(start_chunk, len(keys))
    runs = locate(keys, tiers, deadlines, start)
    keys = keys[: runs[-1].stop if runs else start]
    tail = None
    if tails and len(keys) >= start_chunk:
        named = [tail for tail in content.tails_after(part, len(keys)) if tail.end <= most]
        run = find_first([tail.key for tail in named], tiers, deadlines)
        if run is not None:
            found = named[run.start]
            tail = (found.first_token, found.num_tokens)
            keys.append(found.key)
            runs.append(Run(run.tier, len(keys) - 1, len(keys)))
    return Plan(keys, runs, deadlines, start, chunk_tokens, tail)
