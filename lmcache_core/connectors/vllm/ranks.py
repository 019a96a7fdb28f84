"""The scheduler's lookups where each rank is a process of its own: all are asked, and the least counts."""

from __future__ import annotations

import itertools
import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from lmcache_core.connectors.vllm import wire
from lmcache_core.connectors.vllm.grouped import common_end
from lmcache_core.connectors.vllm.lookups import Held
from lmcache_core.identity import Content, ModelRecord, NamedContent

log = logging.getLogger(__name__)

T = TypeVar("T")

DEADLINE_S = 1.0
"""For one question to all ranks together."""
AGREE_ATTEMPTS = 4
"""How often ranks that have different prefixes are asked for what they share."""
COOL_DOWN_S = 5.0
"""How long a rank that didn't answer isn't asked. Meanwhile nothing is a hit."""


@dataclass(frozen=True, slots=True)
class RankAddress:
    """How a rank's lookups are reached, as its worker tells the scheduler."""

    path: str
    nonce: bytes
    model_json: bytes
    mediums: Mapping[str, str]
    """Tier → medium, nearest first."""
    has_far_tiers: bool


class RankLookups:
    """All ranks' caches as one: a prefix counts only as far as every rank has it. For one thread.

    A rank that is gone or late makes everything a miss until it answers again.
    """

    several_ranks = True

    def __init__(
        self, addresses: Sequence[RankAddress], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.model = ModelRecord.from_json(addresses[0].model_json)
        self.mediums = addresses[0].mediums
        self.has_far_tiers = any(address.has_far_tiers for address in addresses)
        self._ranks = [_Rank(number, address, clock) for number, address in enumerate(addresses)]
        self._arrival_ids = itertools.count()

    def hold(self, content: Content, limit: int) -> Held:
        names = _names(content)
        for _ in range(AGREE_ATTEMPTS):
            answers = self.ask([wire.Hold(names, limit)] * len(self._ranks), wire.Found)
            found = [answer for answer in answers if answer is not None]
            ends = {answer.num_tokens for answer in found}
            held = Held(
                min(ends, default=0), tuple([] if each is None else each.lookup_ids for each in answers)
            )
            if len(found) == len(self._ranks) and len(ends) == 1:
                return held
            self.release(held)
            if len(found) < len(self._ranks):
                break
            limit = common_end(ends, self.model.chunk_tokens)  # what a window needs ends there, too
        return Held(0, ((),) * len(self._ranks))

    def release(self, held: Held) -> None:
        calls = [wire.Release([*lookup_ids]) if lookup_ids else None for lookup_ids in held.lookup_ids]
        self.ask(calls, bool)

    def bring_near(self, content: Content) -> RankArrival:
        arrival_id = next(self._arrival_ids)
        self.ask([wire.BringNear(arrival_id, _names(content))] * len(self._ranks), bool)
        return RankArrival(self, arrival_id, len(self._ranks))

    def ask(self, calls: Sequence[wire.Call | None], answer: type[T]) -> list[T | None]:
        """Each rank's answer to its call, asked at once; None from one that has none or isn't called."""
        until = time.monotonic() + DEADLINE_S
        asked = [
            rank for rank, call in zip(self._ranks, calls, strict=True) if call and rank.send(call, until)
        ]
        return [rank.receive(answer, until) if rank in asked else None for rank in self._ranks]

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()


class RankArrival:
    """A prefix on its way into every rank's memory."""

    def __init__(self, lookups: RankLookups, arrival_id: int, num_ranks: int) -> None:
        self._lookups = lookups
        self._arrival_id = arrival_id
        self._waiting = [True] * num_ranks
        self.sources: list[tuple[str, int]] = []

    @property
    def done(self) -> bool:
        self.wait(0.0)
        return not any(self._waiting)

    def wait(self, timeout_s: float | None = None) -> int:
        """Waits at most that long, and not for ranks that are gone."""
        call = wire.Arrived(self._arrival_id, timeout_s or 0.0)
        self._waiting = [answer is not None and not answer.done for answer in self._ask(call)]
        return 0

    def cancel(self) -> None:
        self._ask(wire.Cancel(self._arrival_id))
        self._waiting = [False] * len(self._waiting)

    def _ask(self, call: wire.Call) -> list[wire.Progress | None]:
        """Asks the ranks that aren't done; what the last of them says has come is what counts."""
        answers = self._lookups.ask([call if waits else None for waits in self._waiting], wire.Progress)
        for answer in answers:
            if answer is not None:
                self.sources = answer.sources
        return answers


class _Rank:
    """The connection to one rank; made when it is needed, given up at the first thing that goes wrong."""

    def __init__(self, number: int, address: RankAddress, clock: Callable[[], float]) -> None:
        self._number = number
        self._address = address
        self._clock = clock
        self._connection: socket.socket | None = None
        self._not_before = 0.0

    def send(self, call: wire.Call, until: float) -> bool:
        if self._connection is None and not self._connect(until):
            return False
        assert self._connection is not None
        try:
            wire.send(self._connection, call, until)
        except wire.WireError as error:
            self._give_up(error)
            return False
        return True

    def receive(self, answer: type[T], until: float) -> T | None:
        if self._connection is None:
            return None
        try:
            return msgspec.msgpack.decode(wire.receive(self._connection, until), type=answer)
        except (wire.WireError, msgspec.MsgspecError) as error:
            self._give_up(error)  # a late answer must not be taken for the next one
            return None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connect(self, until: float) -> bool:
        if self._clock() < self._not_before:
            return False
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection = connection
        try:
            connection.settimeout(max(until - time.monotonic(), 0.001))
            connection.connect(self._address.path)
            connection.sendall(self._address.nonce)
        except OSError as error:
            self._give_up(error)
            return False
        return True

    def _give_up(self, error: Exception) -> None:
        log.warning("rank %d doesn't answer lookups (%s); nothing is loaded meanwhile", self._number, error)
        self._not_before = self._clock() + COOL_DOWN_S
        self.close()


def _names(content: Content) -> wire.Names:
    named = NamedContent.whole(content)
    return wire.Names(named.hashes, named.tail_hashes_after(named.num_chunks))
