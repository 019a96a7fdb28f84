"""What the demo's processes tell each other: one JSON object a line."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

QUESTIONS = (
    "What is a chunk?",
    "What is the first promise?",
    "What is the name of the connector for Transformers?",
)
MIN_DOCUMENT_TOKENS = 4000


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is to do."""

    phase: str
    """`first`: without the cache, then warm. `restart`: warm in a new process."""
    config: str
    """Path of the tiers' YAML file."""
    model: str | None
    """Directory of the model; None for the packaged one."""
    model_cache: str
    """Directory where the packaged model is kept once it is converted."""
    repeats: int
    max_new_tokens: int


class Stage(msgspec.Struct, frozen=True, tag="stage"):
    """A new piece of work begins; `weight` is about how many seconds it takes."""

    text: str
    weight: float


class Answer(msgspec.Struct, frozen=True, tag="answer", kw_only=True):
    """One question was answered. `first_token_s` has one entry a repetition."""

    question: int
    run: str
    """`cold`, `warm` or `restart`."""
    tokens: list[int]
    text: str
    first_token_s: list[float]
    num_loaded_tokens: int
    num_computed_tokens: int
    tokens_by_tier: dict[str, int] = {}


class Document(msgspec.Struct, frozen=True, tag="document", kw_only=True):
    """The document was read; it has so many tokens."""

    num_tokens: int


class Ready(msgspec.Struct, frozen=True, tag="ready", kw_only=True):
    """All is done; the worker waits to be killed. `flushed`: all writes had reached their tiers."""

    flushed: bool
    down: dict[str, str] = {}
    """Tiers that could not be used, and why."""
    failed: dict[str, str] = {}
    """Tiers that could be used, but failed at times, and how the last time."""


class Failed(msgspec.Struct, frozen=True, tag="failed", kw_only=True):
    """The worker ends here, for a reason that the user can do something about."""

    reason: str


Message: TypeAlias = Stage | Answer | Document | Ready | Failed


@dataclass(slots=True)
class Results:
    """What the parent collects."""

    answers: dict[tuple[str, int], Answer] = field(default_factory=dict)
    """By run and question."""
    document_tokens: int = 0
    flushed: bool = True
    down: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
