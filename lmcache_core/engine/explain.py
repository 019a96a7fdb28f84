"""Why a request misses: which model field, chunk or tier is to blame."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from lmcache_core.config import CacheConfig
from lmcache_core.events import Event, EventBus, TierDown
from lmcache_core.frame import FrameKind
from lmcache_core.identity import (
    TAIL_UNIT,
    Content,
    FieldDifference,
    ModelRecord,
    StorageKey,
    Tokens,
    chunk_key,
    differences,
)
from lmcache_core.identity.tokens import TOKEN_NBYTES, token_bytes
from lmcache_core.registry import Registry, discover
from lmcache_core.tiers import StorageTier, TierChain, build_chain


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
class ModelFinding:
    """One stored model record: how it differs from the model asked about, and how much it answers."""

    record: ModelRecord
    same: bool
    """It is the model asked about. Without one, always false."""
    differences: tuple[FieldDifference, ...]
    part: str
    """Digest of the part that answers most; empty when no part was ever stored."""
    pieces: tuple[PieceFinding, ...]
    num_tokens: int
    """The prefix of the request that is held under this model and part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What was found. `verdict` is the one sentence that answers the question."""

    num_tokens: int
    tiers: tuple[TierFinding, ...]
    models: tuple[ModelFinding, ...]
    verdict: str


def explain(
    config: CacheConfig,
    tokens: Tokens,
    *,
    model: ModelRecord | None = None,
    part: str = "",
    salt: bytes = b"",
    lora: bytes = b"",
    registry: Registry | None = None,
) -> Explanation:
    """Opens the config's tiers, reads the stored model records and looks the request up under each.

    `model` (and the digest of its `part`) is the one that missed; without it the request is looked up
    under every stored model. Tiers that another process owns show as down, with the reason.

    Raises:
        ConfigError, PluginError: as `CacheEngine`.
    """
    num_tokens = len(token_bytes(tokens)) // TOKEN_NBYTES
    events = EventBus()
    down = _DownReasons()
    events.subscribe(down)
    chain = build_chain(config, registry or discover(), parts=(part,) if part else (), events=events)
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
        parts = sorted({key.split("-")[1] for key in _stored_keys(chain, "c-")})
        records = {record.digest: record for record in _records(chain)}
        if model is not None:
            records.setdefault(model.digest, model)
        found = [
            _look_up(chain, record, model, [part] if part and record is model else parts, tokens, salt, lora)
            for record in records.values()
        ]
    finally:
        chain.close(time.monotonic())  # nothing was written: there is nothing to wait for
    found.sort(key=lambda finding: (not finding.same, -finding.num_tokens, len(finding.differences)))
    return Explanation(
        num_tokens=num_tokens,
        tiers=tiers,
        models=tuple(found),
        verdict=_verdict(num_tokens, tiers, found, model),
    )


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
        for frame, _ in chain.stream([key], chain.locate([key], chain.tiers, deadlines), deadlines):
            with frame:
                if frame.header.kind is FrameKind.RECORD:
                    with suppress(ValueError):  # of another release: it can't answer for a request of ours
                        records.append(ModelRecord.from_json(bytes(frame.segments()[0])))
    return records


def _look_up(
    chain: TierChain,
    record: ModelRecord,
    model: ModelRecord | None,
    parts: Sequence[str],
    tokens: Tokens,
    salt: bytes,
    lora: bytes,
) -> ModelFinding:
    content = Content(record, lora=lora, salt=salt)
    content.extend(tokens)
    best: tuple[int, str, tuple[PieceFinding, ...]] = (0, "", ())
    for digest in parts:
        pieces = _pieces(chain, content, digest)
        held = 0
        for piece in pieces:
            if not piece.tiers:
                break
            held += piece.num_tokens
        if held > best[0] or not best[1]:
            best = (held, digest, tuple(pieces))
    return ModelFinding(
        record=record,
        same=model is not None and record.digest == model.digest,
        differences=() if model is None else tuple(differences(model, record)),
        part=best[1],
        pieces=best[2],
        num_tokens=best[0],
    )


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


def _verdict(
    num_tokens: int,
    tiers: Sequence[TierFinding],
    found: Sequence[ModelFinding],
    model: ModelRecord | None,
) -> str:
    down = [f"{tier.name} ({tier.reason})" for tier in tiers if tier.state == "down"]
    also = f" Not looked at, being down: {'; '.join(down)}." if down else ""
    if num_tokens < TAIL_UNIT:
        return f"{num_tokens} tokens are too few: KV is kept in multiples of {TAIL_UNIT} tokens.{also}"
    mine = [finding for finding in found if finding.same]
    best = next(iter(mine or found), None)
    if best is not None and best.num_tokens:
        if best.num_tokens >= num_tokens - num_tokens % TAIL_UNIT:
            return f"It is a hit: {best.num_tokens} of {num_tokens} tokens are held.{also}"
        return (
            f"{best.num_tokens} of {num_tokens} tokens are held; the first piece that no tier holds starts "
            f"at token {best.num_tokens}: a token differs there or before, or it was never stored, or it "
            f"was evicted.{also}"
        )
    if model is not None:
        others = [finding for finding in found if not finding.same]
        if others and others[0].num_tokens:
            fields = ", ".join(difference.field for difference in others[0].differences)
            return (
                f"Another model holds {others[0].num_tokens} of these tokens; this one differs from it in: "
                f"{fields}.{also}"
            )
    if not found or all(not finding.part for finding in found):
        return f"No tier holds any chunk of any model.{also}"
    return (
        "No stored model holds the start of this request: its first tokens differ from all that was "
        f"stored (another prompt, salt or adapter), or they were evicted or never stored.{also}"
    )
