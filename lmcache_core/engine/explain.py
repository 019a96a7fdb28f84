"""Why a request misses: which model field, chunk or tier is to blame."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile

from lmcache_core.config import CacheConfig
from lmcache_core.engine.verdict import verdict
from lmcache_core.events import Event, EventBus, TierDown
from lmcache_core.frame import FrameHeader, FrameKind
from lmcache_core.identity import (
    TAIL_UNIT,
    Content,
    FieldDifference,
    ModelRecord,
    Part,
    StorageKey,
    Tokens,
    chunk_key,
    differences,
)
from lmcache_core.identity.tokens import TOKEN_NBYTES, token_bytes
from lmcache_core.registry import Registry, discover
from lmcache_core.tiers import StorageTier, TierChain, build_chain, locate


@dataclass(frozen=True, slots=True, kw_only=True)
class TierFinding:
    """One tier as it was found. `reason` says why it is down."""

    name: str
    state: str
    entries: int
    used_bytes: int
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceFinding:
    """One chunk or tail of the request, and the tiers that hold it."""

    first_token: int
    num_tokens: int
    tiers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFinding:
    """A stored part that isn't one of those asked about, and holds more of the request than they do."""

    digest: str
    num_tokens: int
    differences: tuple[FieldDifference, ...]
    """As far as its frames show any; other layers, heads or attention groups may look alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFinding:
    """One stored model record: how it differs from the model asked about, and how much it answers."""

    record: ModelRecord
    same: bool
    """It is the model asked about. Without one, always false."""
    differences: tuple[FieldDifference, ...]
    part: str
    """Digest of the part that answers: of those asked about the one that holds least, else the one that
    holds most; empty when no part was ever stored."""
    pieces: tuple[PieceFinding, ...]
    num_tokens: int
    """The prefix of the request that is held under this model and part."""
    window: str = ""
    """Digest of a part that has lost what a longer hit needs of it, where that ends the prefix."""
    other_part: PartFinding | None = None
    """Of the model asked about."""
    otherwise: Mapping[str, int] | None = None
    """Of the model asked about: name of another LoRA and salt → the tokens held under them, if those are
    more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What was found. `verdict` is the one sentence that answers the question."""

    num_tokens: int
    tiers: tuple[TierFinding, ...]
    models: tuple[ModelFinding, ...]
    verdict: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    tokens: Tokens
    model: ModelRecord | None
    parts: Sequence[Part]
    starts: Mapping[str, Callable[[int], int]]
    unit_tokens: int
    salt: bytes
    lora: bytes
    otherwise: Mapping[str, tuple[bytes, bytes]]


def explain(
    config: CacheConfig,
    tokens: Tokens,
    *,
    model: ModelRecord | None = None,
    parts: Sequence[Part] = (),
    starts: Mapping[str, Callable[[int], int]] | None = None,
    unit_tokens: int = TAIL_UNIT,
    salt: bytes = b"",
    lora: bytes = b"",
    otherwise: Mapping[str, tuple[bytes, bytes]] | None = None,
    registry: Registry | None = None,
) -> Explanation:
    """Opens the config's tiers, reads the stored model records and looks the request up under each.

    `model` is the one that missed, and needs all of `parts`; without it the request is looked up under
    every stored model. `starts` is for parts, by digest, of which a hit of n tokens needs only what follows
    the first `start(n)`, whole chunks. A prompt's end is stored in multiples of `unit_tokens`. `otherwise`
    names other (LoRA, salt) to try for `model`. Tiers that another process owns show as down, with the
    reason.

    Raises:
        ConfigError, PluginError: as `CacheEngine`.
    """
    question = _Question(
        tokens=tokens,
        model=model,
        parts=parts,
        starts=starts or {},
        unit_tokens=unit_tokens,
        salt=salt,
        lora=lora,
        otherwise=otherwise or {},
    )
    registry = registry or discover()
    found = _answer(config, question, (), registry)
    if not parts or _asked(found).num_tokens >= found.num_tokens // unit_tokens * unit_tokens:
        return found
    # A tier that several processes share has a place for each: what was opened is whoever wrote last.
    # Engines beside each other have one place, that of the largest part.
    size = _asked(found).record.chunk_tokens
    largest = max(parts, key=lambda part: part.num_layers * part.segment_nbytes(size))
    again = _answer(config, question, [largest], registry)
    return again if _asked(again).num_tokens > _asked(found).num_tokens else found


def _answer(
    config: CacheConfig, question: _Question, places: Sequence[Part], registry: Registry
) -> Explanation:
    """What is found where those would be stored that keep the parts `places`."""
    tokens, model, asked = question.tokens, question.model, [part.digest for part in question.parts]
    num_tokens = len(token_bytes(tokens)) // TOKEN_NBYTES
    events = EventBus()
    down = _DownReasons()
    events.subscribe(down)
    chain = build_chain(config, registry, parts=[part.digest for part in places], events=events)
    try:
        tiers = tuple(
            TierFinding(
                name=tier.name,
                state="up" if not isinstance(tier, StorageTier) or tier.usable else "down",
                entries=len(tier.index),
                used_bytes=tier.index.stats().used_bytes,
                reason=down.reasons.get(tier.name, ""),
            )
            for tier in chain.tiers
        )
        stored = sorted({key.split("-")[1] for key in _stored_keys(chain, "c-")})
        records = {record.digest: record for record in _records(chain)}
        if model is not None:
            records[model.digest] = model
        found = []
        for record in records.values():
            content = Content(record, lora=question.lora, salt=question.salt)
            content.extend(tokens)
            if record is model:
                mine = _look_up_asked(chain, content, question, stored)
                whole = [digest for digest in asked if digest not in question.starts]
                better = _otherwise(chain, mine, tokens, question.otherwise, whole or asked or stored)
                found.append(replace(mine, otherwise=better))
            else:
                found.append(_look_up(chain, content, model, stored))
    finally:
        chain.close(time.monotonic())  # nothing was written: there is nothing to wait for
    found.sort(key=lambda finding: (not finding.same, -finding.num_tokens, len(finding.differences)))
    return Explanation(
        num_tokens=num_tokens,
        tiers=tiers,
        models=tuple(found),
        verdict=verdict(num_tokens, tiers, found, question.unit_tokens),
    )


def _asked(found: Explanation) -> ModelFinding:
    """What was found of the model asked about, which comes first."""
    return found.models[0]


class _DownReasons:
    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}

    def on_event(self, event: Event) -> None:
        if isinstance(event, TierDown):
            self.reasons[event.tier] = event.reason


def _stored_keys(chain: TierChain, prefix: str) -> set[StorageKey]:
    deadlines = chain.deadlines()
    return {key for tier in chain.tiers for key in tier.list_keys(prefix, deadlines.of(tier))}


def _records(chain: TierChain) -> list[ModelRecord]:
    records = []
    for key in sorted(_stored_keys(chain, "n-")):
        deadlines = chain.deadlines()
        for frame, _ in chain.stream([key], locate([key], chain.tiers, deadlines), deadlines):
            with frame:
                if frame.header.kind is FrameKind.RECORD:
                    with suppress(ValueError):  # of another release: it can't answer for a request of ours
                        records.append(ModelRecord.from_json(bytes(frame.segments()[0])))
    return records


def _look_up(
    chain: TierChain, content: Content, model: ModelRecord | None, parts: Sequence[str]
) -> ModelFinding:
    """The part that holds most of `content`."""
    best: tuple[int, str, list[PieceFinding]] = (0, "", [])
    for digest in parts:
        pieces = _pieces(chain, content, digest)
        held = _in_a_row(pieces)
        if held > best[0] or not best[1]:
            best = (held, digest, pieces)
    record = content.model
    return ModelFinding(
        record=record,
        same=record is model,
        differences=() if model is None else tuple(differences(model, record)),
        part=best[1],
        pieces=tuple(best[2]),
        num_tokens=best[0],
    )


def _look_up_asked(
    chain: TierChain, content: Content, question: _Question, stored: Sequence[str]
) -> ModelFinding:
    """Of the parts that are all needed the one that holds least, and any other that holds more."""
    parts, starts = question.parts, question.starts
    if not parts:
        return _look_up(chain, content, content.model, stored)
    asked = [_look_up(chain, content, content.model, [part.digest]) for part in parts]
    whole = [finding for finding in asked if finding.part not in starts]
    least = min(whole or asked, key=lambda finding: finding.num_tokens)
    most = least.num_tokens if whole else content.num_chunks * content.model.chunk_tokens
    end, window = _end_by_windows(chain, content, starts, most)
    least = replace(least, num_tokens=end, window=window)
    names = {part.digest for part in parts}
    other = _look_up(chain, content, content.model, [digest for digest in stored if digest not in names])
    if other.num_tokens <= least.num_tokens:
        return least
    part = next(part for part in parts if part.digest == least.part)
    header = _header(chain, _first_key(content, other))
    return replace(
        least,
        other_part=PartFinding(
            digest=other.part,
            num_tokens=other.num_tokens,
            differences=() if header is None else _part_differences(part, header),
        ),
    )


def _end_by_windows(
    chain: TierChain, content: Content, starts: Mapping[str, Callable[[int], int]], end: int
) -> tuple[int, str]:
    """The longest hit up to `end` that all of `starts` can serve, and the part that made it the shorter."""
    size, window = content.model.chunk_tokens, ""
    left = list(starts)
    while left and end:
        part = left.pop(0)
        first = starts[part](end) // size
        tails = [digest for count, digest in content.tail_hashes_after(end // size) if count == end % size]
        names = [*content.hashes[first : end // size], *tails]
        holders = _holders(chain, [chunk_key(part, digest) for digest in names])
        if not all(holders):
            end, window = (first + holders.index(())) * size, part
            left = list(starts)  # each needs other tokens for another end
    return end, window


def _otherwise(
    chain: TierChain,
    asked: ModelFinding,
    tokens: Tokens,
    tried: Mapping[str, tuple[bytes, bytes]],
    parts: Sequence[str],
) -> dict[str, int]:
    found = {}
    for name, (lora, salt) in tried.items():
        content = Content(asked.record, lora=lora, salt=salt)
        content.extend(tokens)
        held = _look_up(chain, content, asked.record, parts).num_tokens
        if held > asked.num_tokens:
            found[name] = held
    return found


def _first_key(content: Content, finding: ModelFinding) -> StorageKey:
    """Of the first piece of a finding that holds something."""
    num_tokens = finding.pieces[0].num_tokens
    if num_tokens == content.model.chunk_tokens:
        return chunk_key(finding.part, content.hashes[0])
    return chunk_key(finding.part, dict(content.tail_hashes_after(0))[num_tokens])


def _header(chain: TierChain, key: StorageKey) -> FrameHeader | None:
    deadlines = chain.deadlines()
    for frame, _ in chain.stream([key], locate([key], chain.tiers, deadlines), deadlines):
        with frame:
            return frame.header
    return None  # gone, late or damaged


def _part_differences(asked: Part, stored: FrameHeader) -> tuple[FieldDifference, ...]:
    """As far as a frame shows its part."""
    sizes = {segment.raw_nbytes // stored.num_tokens for segment in stored.segments}
    fields: tuple[tuple[str, str | int, str | int], ...] = (
        ("part.content_format", asked.content_format, stored.content_format),
        ("part.num_layers", asked.num_layers, len(stored.segments)),
        ("part.token_nbytes", asked.segment_nbytes(1), max(sizes)),
    )
    return tuple(
        FieldDifference(field=name, ours=ours, theirs=theirs)
        for name, ours, theirs in fields
        if ours != theirs
    )


def _in_a_row(pieces: Sequence[PieceFinding]) -> int:
    """The tokens of the pieces that are held, up to the first that isn't."""
    return sum(piece.num_tokens for piece in takewhile(lambda piece: piece.tiers, pieces))


def _pieces(chain: TierChain, content: Content, part: str) -> list[PieceFinding]:
    """The whole chunks, then the longest tail after the last chunk found in a row, if any is held."""
    holders = _holders(chain, [chunk_key(part, digest) for digest in content.hashes])
    pieces = [
        PieceFinding(first_token=content.chunk(i)[0], num_tokens=content.chunk(i)[1], tiers=tiers)
        for i, tiers in enumerate(holders)
    ]
    in_a_row = next((i for i, piece in enumerate(pieces) if not piece.tiers), len(pieces))
    first = in_a_row * content.model.chunk_tokens
    tails = content.tail_hashes_after(in_a_row)
    for (count, _), tiers in zip(
        tails, _holders(chain, [chunk_key(part, digest) for _, digest in tails]), strict=True
    ):
        if tiers:
            pieces.insert(in_a_row, PieceFinding(first_token=first, num_tokens=count, tiers=tiers))
            break
    return pieces


def _holders(chain: TierChain, keys: Sequence[StorageKey]) -> list[tuple[str, ...]]:
    deadlines = chain.deadlines()
    held = {tier.name: tier.held(keys, deadlines.of(tier)) for tier in chain.tiers}
    return [tuple(name for name, flags in held.items() if flags[i]) for i in range(len(keys))]
