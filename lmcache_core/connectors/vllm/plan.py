"""What the two sides tell each other: a step's loads and saves, and which loads failed. Without vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lmcache_core.identity import NamedContent


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Tokens `[first, end)` of a request were promised: they go into its blocks before the forward."""

    request_id: str
    content: NamedContent
    """At least `end` tokens."""
    first: int
    """A multiple of the block sizes; blocks before it may be shared with others and are not written."""
    end: int
    block_ids: Sequence[Sequence[int]]
    """All of the request's blocks in each attention group, first token first."""
    lookup_ids: Sequence[Sequence[str]]
    """Each rank's pins, which end with the load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """`content` will be complete in these blocks when the step's forward is done."""

    request_id: str
    content: NamedContent
    block_ids: Sequence[Sequence[int]]
    """All of the request's blocks in each attention group, first token first."""


@dataclass(slots=True, kw_only=True)
class Step:
    """One step's loads and saves."""

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    number: int = 0
    """Counts the steps, from 1."""
    confirmed: int = 0
    """The last step whose report the scheduler had dealt with when it planned this one."""
    awaited: bool = False
    """The scheduler waits for this step's report, also where nothing is loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How a step's loads went; every step that has some or is awaited is reported."""

    step: int
    failed: Mapping[str, int]
    """Request id → its first token that wasn't loaded."""

    def with_rank(self, other: Report) -> Report:
        """The report of both ranks."""
        failed = dict(self.failed)
        for request_id, first in other.failed.items():
            failed[request_id] = min(first, failed.get(request_id, first))
        return Report(step=max(self.step, other.step), failed=failed)
