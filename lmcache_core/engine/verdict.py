"""The one sentence that answers why a request misses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lmcache_core.identity import FieldDifference

if TYPE_CHECKING:
    from lmcache_core.engine.explain import ModelFinding, TierFinding


def verdict(
    num_tokens: int,
    tiers: Sequence[TierFinding],
    found: Sequence[ModelFinding],
    unit_tokens: int,
) -> str:
    """`found` starts with the model asked about, if there is one, and goes on with those that hold most."""
    down = [f"{tier.name} ({tier.reason})" for tier in tiers if tier.state == "down"]
    also = f" Not looked at, being down: {'; '.join(down)}." if down else ""
    if num_tokens < unit_tokens:
        return f"{num_tokens} tokens are too few: KV is kept in multiples of {unit_tokens} tokens.{also}"
    best = next(iter(found), None)
    held = 0 if best is None else best.num_tokens
    if held >= num_tokens - num_tokens % unit_tokens:
        return f"It is a hit: {held} of {num_tokens} tokens are held.{also}"
    if best is not None and best.window and not best.otherwise:
        return (
            f"{held} of {num_tokens} tokens are a hit; of what follows, layers with a window lack KV that "
            f"they need (part {best.window}): it was evicted, or never stored.{also}"
        )
    if better := _elsewhere(found, held):
        return f"{better[0].upper()}{better[1:]}.{also}"
    if held:
        return (
            f"{held} of {num_tokens} tokens are held; the first piece that no tier holds starts "
            f"at token {held}: a token differs there or before, or it was never stored, or it "
            f"was evicted.{also}"
        )
    if not found or all(not finding.part for finding in found):
        return f"No tier holds any chunk of any model.{also}"
    return (
        "No stored model holds the start of this request: its first tokens differ from all that was "
        f"stored (another prompt, salt or adapter), or they were evicted or never stored.{also}"
    )


def _elsewhere(found: Sequence[ModelFinding], held: int) -> str:
    """Where more of the request is held than where it was asked for; empty for nowhere."""
    mine = [finding for finding in found if finding.same]
    if not mine:
        return ""
    asked, others = mine[0], [finding for finding in found if not finding.same]
    if asked.otherwise:
        name, num_tokens = max(asked.otherwise.items(), key=lambda item: item[1])
        return f"{num_tokens} of these tokens are held, but under {name}; {held} are under what was asked for"
    if asked.other_part is not None:
        fields = _fields(asked.other_part.differences) or "other layers, heads or attention group"
        return (
            f"another part of this model holds {asked.other_part.num_tokens} of these tokens, the one asked "
            f"about {held}; they differ in: {fields}"
        )
    if others and others[0].num_tokens > held:
        return (
            f"another model holds {others[0].num_tokens} of these tokens; this one differs from it in: "
            f"{_fields(others[0].differences)}"
        )
    return ""


def _fields(differences: Sequence[FieldDifference]) -> str:
    return ", ".join(difference.field for difference in differences)
