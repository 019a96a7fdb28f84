"""The config file's structure. Every default and every description of a key stands here, once."""

from __future__ import annotations

import re
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from lmcache_core.config.faults import NOWHERE, Origin, Place
from lmcache_core.config.types import ByteSize, Duration

TOKENS_PER_TAIL_UNIT = 16
SMALLEST_FRAME = ByteSize("8KiB")
"""A page of header and a page of payload: a bound on bytes below it refuses everything."""
SHORTEST_DEADLINE = Duration("1ms")
_TIER_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")


def _check_least(key: str, value: float, least: float) -> None:
    """
    Raises:
        ValueError: `value` can never work; names the key, as `faults.explain` reads it.
    """
    if value < least:
        raise ValueError(f"{key}: {value} can't work; set at least {least}")


class BreakerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a tier that fails is left alone for a while. Reads and writes each have their own breaker."""

    failures: Annotated[
        int, Meta(ge=1, description="Failures in a row after which the tier is no longer asked.")
    ] = 5
    cool_down: Annotated[
        Duration, Meta(description="How long it is left alone before one operation tries it again.")
    ] = Duration("5s")


class TierConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One storage tier."""

    name: Annotated[
        str, Meta(description="Names the tier in messages, statistics and search ranges; unique in the file.")
    ]
    backend: Annotated[
        str,
        Meta(description="The plugin that stores the data; `lmcache-core plugins` lists those installed."),
    ]
    options: Annotated[
        dict[str, object],
        Meta(description="The backend's own options; its README lists them."),
    ] = {}
    capacity: Annotated[
        ByteSize | None,
        Meta(
            description="Hard bound on the bytes this tier occupies, temporaries and index included. "
            "Required unless the store is shared or evicts by itself. At least 8KiB."
        ),
    ] = None
    write: Annotated[
        Literal["through", "never"],
        Meta(description="`through`: new chunks are written here in the background. `never`: only read."),
    ] = "through"
    promote: Annotated[
        Literal["always", "on_second_hit", "never"],
        Meta(description="When a chunk found here is copied to the tiers before it."),
    ] = "always"
    deadline: Annotated[
        Duration,
        Meta(description="How long one call to the tier may take, at least 1ms. A later answer is a miss."),
    ] = Duration("5s")
    max_in_flight: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Calls at once, at most. Without it the backend's own limit holds."),
    ] = None
    in_flight_bytes: Annotated[
        ByteSize,
        Meta(
            description="Bytes that running and queued calls may cover; at least one frame of the model. "
            "Beyond it the tier answers busy."
        ),
    ] = ByteSize("512MiB")
    queue: Annotated[int, Meta(ge=1, description="Calls that may wait for their turn.")] = 1024
    breaker: BreakerConfig = BreakerConfig()

    def __post_init__(self) -> None:
        if not _TIER_NAME.fullmatch(self.name):
            raise ValueError(
                f"name: {self.name!r} is not a tier name; use up to 32 of a-z, 0-9, '_' and '-', "
                "starting with a letter or digit"
            )
        if self.capacity is not None:
            _check_least("capacity", self.capacity, SMALLEST_FRAME)
        _check_least("in_flight_bytes", self.in_flight_bytes, SMALLEST_FRAME)
        _check_least("deadline", self.deadline, SHORTEST_DEADLINE)


class MemoryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The process's frame memory, beside what memory tiers are given as their capacity."""

    staging: Annotated[
        ByteSize,
        Meta(
            description="Memory for frames on their way between the engine and the tiers; at least two "
            "frames of the model."
        ),
    ] = ByteSize("512MiB")
    huge_pages: Annotated[bool, Meta(description="Ask the kernel for huge pages.")] = True
    debug_leases: Annotated[
        bool, Meta(description="Remember where each lease was taken, to report lost ones. Slow.")
    ] = False

    def __post_init__(self) -> None:
        _check_least("staging", self.staging, ByteSize(2 * SMALLEST_FRAME))  # one to load, one to store


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """A whole config file. It knows where it was read from, so that a later error can name the line."""

    tiers: Annotated[
        list[TierConfig], Meta(min_length=1, description="The storage tiers, nearest first; at least one.")
    ]
    chunk_tokens: Annotated[
        int,
        Meta(
            ge=TOKENS_PER_TAIL_UNIT,
            le=65536,
            multiple_of=TOKENS_PER_TAIL_UNIT,
            description="Tokens in a chunk, a multiple of 16. What another value stored isn't found.",
        ),
    ] = 256
    tails: Annotated[
        bool, Meta(description="Also store what follows the last whole chunk, in multiples of 16 tokens.")
    ] = True
    allocate_deadline: Annotated[
        Duration,
        Meta(description="How long a store may wait for memory; then it is skipped."),
    ] = Duration("100ms")
    pin_ttl: Annotated[Duration, Meta(description="How long a pin holds when its caller names no time.")] = (
        Duration("60s")
    )
    memory: MemoryConfig = MemoryConfig()

    def __post_init__(self) -> None:
        names: dict[str, int] = {}
        for position, tier in enumerate(self.tiers):
            first = names.setdefault(tier.name, position)
            if first != position:
                twin = f"tiers[{first}] is named {tier.name!r} too"
                raise ValueError(f"tiers[{position}].name: {twin}; give each its own name")

    @property
    def origin(self) -> Origin:
        """Where it was read from; without a name and lines unless that was a file."""
        found: Origin = self.__dict__.get("_origin", NOWHERE)
        return found

    def remember(self, origin: Origin) -> None:
        """Sets `origin`, which isn't part of the configuration: it is neither compared nor shown."""
        msgspec.structs.force_setattr(self, "_origin", origin)

    def located(self, place: Place, message: str = "") -> str:
        """`message` with what it is about before it: `cache.yaml, line 7: tiers[1].options: …`."""
        return self.origin.located(place, message)
