"""The scheduler's side: what each request can load, what it will have to save, and in which step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmcache_core.connectors.vllm.behind import behind
from lmcache_core.connectors.vllm.contents import Contents, OnGrowth
from lmcache_core.connectors.vllm.groups import Group, blocks_at_most, common_block_tokens, requests_wait
from lmcache_core.connectors.vllm.hits import split_by_tier
from lmcache_core.connectors.vllm.lookups import Arrival, Held, Lookups
from lmcache_core.connectors.vllm.plan import Load, Report, Save, Step
from lmcache_core.connectors.vllm.unconfirmed import Unconfirmed
from lmcache_core.identity import Content, NamedContent

QUICK_S = 0.002
"""How long the first question waits for a prefetch: usually enough to learn that there is nothing."""


@dataclass(slots=True)
class _Tracked:
    """One unfinished request."""

    request: Any
    content: Content
    limit: int | None = None
    """Nothing from this token on is loaded: it failed before."""
    arrival: Arrival | None = None
    gives_up_at: float | None = None
    """When the wait for slower tiers ends, however much has arrived. None before the first question."""
    looked_far: bool = False
    """Slower tiers have given what they have, or had their time."""
    sources: Sequence[tuple[str, int]] = ()
    """(tier, tokens) of what they gave, first token first."""
    hit: Mapping[str, int] = field(default_factory=dict)
    """Tokens of the last load that was promised, by the tier they came from."""
    first: int = 0
    """The engine has the tokens before it, whole chunks: they are neither looked up nor brought near."""
    held: Held | None = None
    """Counted from `first` on."""
    asked_at: float = 0.0
    """When `held` was pinned."""
    offer: NamedContent | None = None
    """What `held` covers."""
    num_local: int = 0
    """Tokens that the engine had by itself when it last asked."""
    saved: int = 0
    """Tokens `[0, saved)` were loaded, or given to the workers to save."""
    stale: bool = False
    """It begins with KV that the engine may have from before a reset."""


class SchedulerSide:
    """Tracks every unfinished request. For the scheduler's thread; waits at most 2 ms.

    It does no I/O but for requests with an adapter: its files are read when they are first seen, and their
    state is looked up each time.
    """

    def __init__(
        self,
        lookups: Lookups,
        groups: Sequence[Group],
        *,
        num_blocks: int,
        loads: bool,
        saves: bool,
        tails: bool,
        prefetch_deadline_s: float,
        prefetches: int,
        pin_ttl_s: float,
        on_hit: Callable[[Mapping[str, int]], None] = lambda by_tier: None,
        on_growth: OnGrowth | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`num_blocks` is how many vLLM has for all requests together.

        `on_hit` is told how many tokens each tier gave, with every load that is promised.

        `on_growth` hears of what requests' contents learn.
        """
        self._lookups = lookups
        self._chunk_tokens = lookups.model.chunk_tokens
        self._block_tokens = block_tokens = common_block_tokens(groups)
        self._groups = groups
        self._num_blocks = num_blocks
        self._requests_wait = requests_wait(groups)
        self._waiting: dict[str, int] = {}  # requests that do → the blocks that each may take
        self._loads = loads
        self._saves = saves
        self._tails = tails
        self._unit = block_tokens if tails else self._chunk_tokens  # what a prefix may end at
        self._prefetch_deadline_s = prefetch_deadline_s
        self._prefetches = prefetches
        self._repin_after_s = pin_ttl_s / 2
        self._on_hit = on_hit
        self._unconfirmed = Unconfirmed(block_tokens)
        self._clock = clock
        self.mediums = lookups.mediums
        self.contents = Contents(lookups.model, on_growth)
        self._tracked: dict[str, _Tracked] = {}
        # Of all requests, also those left out: tokens whose KV vLLM had itself, or was promised here.
        self._known: dict[str, int] = {}
        self._engine_forgot = True  # its own KV at the last reset, as well
        self._begun: set[str] = set()  # requests that were given blocks since the last step was planned
        self._allocated: list[Any] = []  # those of them that weren't looked at yet
        self._loads_elsewhere = False  # for one of them that was
        self._arrivals: list[Arrival] = []  # that may still run, at most `prefetches`
        self._pending: list[Load] = []  # promised since the last step was planned
        self._step = 0
        self._in_doubt = 0  # the last step with loads that may have failed, as far as a worker can know
        self._confirmed = 0  # the last one whose report came

    # -- the life of a request -------------------------------------------------------------------

    def matched(self, request: Any, num_local: int) -> tuple[int | None, bool]:
        """How many tokens after the first `num_local` can be loaded; None: ask again.

        And whether the request then waits until that is done.
        """
        self._look_for_loads_elsewhere()
        if self._unconfirmed.shared_by(request, num_local):
            return None, False
        self._known[request.request_id] = num_local
        tracked = self._track(request)
        if tracked is not None:
            tracked.stale = num_local > 0 and not self._engine_forgot
        if tracked is None or not self._loads:
            return 0, False
        if getattr(request, "skip_reading_prefix_cache", False):  # as for the log probabilities of a prompt
            return 0, False
        most = request.num_tokens if tracked.limit is None else min(tracked.limit, request.num_tokens)
        if min(most, request.num_tokens - 1) - num_local < self._block_tokens - 1:
            self._let_go(tracked)  # no block is left that a load could save
            return 0, False
        self.contents.grow(tracked.content, request, request.num_tokens)
        first = num_local // self._chunk_tokens * self._chunk_tokens
        end = self._hold(tracked, first, most)
        if end < most // self._unit * self._unit and not tracked.looked_far:
            if self._still_arriving(tracked):
                return None, False
            tracked.looked_far = True
            self._end_arrival(tracked)
            end = self._hold(tracked, first, most, again=True)
        whole = end // self._block_tokens * self._block_tokens
        # The last token is always computed: its logits are not stored.
        num_tokens = min(whole, request.num_tokens - 1) - num_local
        if num_tokens <= 0:
            self._release(tracked)
            return 0, False
        if self._requests_wait and not self._may_wait(request):
            return None, False
        if tracked.offer is None:
            tracked.offer = NamedContent.of(tracked.content, end)
        tracked.num_local = num_local
        return num_tokens, self._requests_wait

    def allocated(self, request: Any, block_ids: Sequence[Sequence[int]], num_tokens: int) -> None:
        """vLLM has taken `num_tokens` of what was offered, and gives each group blocks to load them into.

        For a request that waited it comes again when the load is done, with no tokens.
        """
        self._begun.add(request.request_id)
        self._allocated.append(request)
        tracked = self._tracked.get(request.request_id)
        if tracked is None or num_tokens <= 0:
            self._waiting.pop(request.request_id, None)
            if tracked is not None:
                self._let_go(tracked)
            return
        if self._requests_wait:
            self._waiting[request.request_id] = blocks_at_most(self._groups, request.num_tokens)
        assert tracked.held is not None
        assert tracked.offer is not None
        first, end = tracked.num_local, tracked.num_local + num_tokens
        tracked.hit = split_by_tier(first, end, tracked.sources, self.mediums)
        self._on_hit(tracked.hit)
        self._pending.append(
            Load(
                request_id=request.request_id,
                content=tracked.offer,
                first=first,
                end=end,
                block_ids=block_ids,
                lookup_ids=tracked.held.lookup_ids,
            )
        )
        self._known[request.request_id] = end
        if not self._requests_wait:
            self._unconfirmed.add(self._step + 1, request, first)
        tracked.saved = max(tracked.saved, tracked.offer.num_tokens)
        tracked.held = tracked.offer = None  # the workers end these pins
        self._let_go(tracked)

    def hit_by_tier(self, request_id: str) -> Mapping[str, int]:
        """Tokens of the request's last load that was promised, by the tier they came from."""
        tracked = self._tracked.get(request_id)
        return {} if tracked is None else tracked.hit

    def step(self) -> Step:
        """The plan for the step that vLLM has just scheduled, with what was promised since the last."""
        self._look_for_loads_elsewhere()
        self._step += 1
        step = Step(loads=self._pending, number=self._step, confirmed=self._confirmed)
        self._pending = []
        self._unconfirmed.settle(self._confirmed, self._step)
        return step

    def plan_saves(self, step: Step, scheduled: Any) -> None:
        """Adds what the step completes.

        A step is in doubt while a load in it may fail that a worker doesn't hear of before it saves: another
        rank's, or another connector's. A request of that step may be computed behind the load, whose ever it
        is: KV may be shared. So of a step in doubt only what was computed before it is saved, and nothing
        until its report has come; vLLM has then taken back what failed.
        """
        begun, self._begun = self._begun, set()
        doubt = self._another_rank_may_fail(step) or self._loads_elsewhere
        self._loads_elsewhere = False
        sure = self._in_doubt <= self._confirmed
        if doubt:
            self._in_doubt, step.awaited = step.number, True
        if not self._saves or not sure:
            return
        for request_id, num_scheduled in scheduled.num_scheduled_tokens.items():
            tracked = self._tracked.get(request_id)
            if tracked is None or tracked.stale or (doubt and request_id in begun):
                continue
            if (end := self._complete(tracked, 0 if doubt else num_scheduled)) > tracked.saved:
                tracked.saved = end  # whatever happens now: it is tried once
                blocks = scheduled.kv_connector_block_state.get_block_ids(request_id)
                self.contents.grow(tracked.content, tracked.request, end)
                content = NamedContent.of(tracked.content, end)
                step.saves.append(Save(request_id=request_id, content=content, block_ids=blocks))

    def reported(self, report: Report) -> None:
        """Takes the workers' report: what failed once isn't tried again for that request."""
        self._confirmed = max(self._confirmed, report.step)
        self._unconfirmed.settle(self._confirmed, self._step)
        for request_id, first in report.failed.items():
            tracked = self._tracked.get(request_id)
            if tracked is not None:
                tracked.limit = 0 if self._requests_wait else first // self._chunk_tokens * self._chunk_tokens
                tracked.saved = min(tracked.saved, first)

    def finished(self, request_id: str) -> None:
        """The request is gone, however it ended."""
        self._waiting.pop(request_id, None)
        self._known.pop(request_id, None)
        tracked = self._tracked.pop(request_id, None)
        if tracked is not None:
            self._let_go(tracked)

    def forget(self, epoch: bytes, *, engine_forgot: bool) -> None:
        """The model's weights may be others from now on: no KV of before is loaded, or saved later.

        A request under way is saved only if it is computed anew. Where the engine has not let go of what it
        holds itself (`engine_forgot`), requests that begin with KV of its own aren't saved either.
        """
        for tracked in self._tracked.values():
            self._let_go(tracked)
        self._tracked.clear()
        self._engine_forgot = engine_forgot
        self.contents.new_epoch(epoch)

    def close(self) -> None:
        """Lets go of all requests."""
        for request_id in list(self._tracked):
            self.finished(request_id)
        self._lookups.close()

    # -- inside ----------------------------------------------------------------------------------

    def _track(self, request: Any) -> _Tracked | None:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            content = self.contents.of(request)
            if content is None:
                return None
            tracked = self._tracked[request.request_id] = _Tracked(request, content)
        return tracked

    def _hold(self, tracked: _Tracked, first: int, most: int, *, again: bool = False) -> int:
        """The end of what is pinned from `first` on: as it was found before, unless that is long ago."""
        now = self._clock()
        if first < tracked.first:  # the engine has lost some of what it had
            self._end_arrival(tracked)
            tracked.looked_far, again = False, True
        if tracked.held is None or again or now >= tracked.asked_at + self._repin_after_s:
            self._release(tracked)
            tracked.first, tracked.asked_at = first, now
            tracked.held = self._lookups.hold(behind(tracked.content, first), most - first)
        return tracked.first + tracked.held.num_tokens

    def _may_wait(self, request: Any) -> bool:
        """Whether all that wait fit into vLLM's memory at once, even if they must be computed from scratch.

        One that is taken back has no blocks any more, but keeps its place: vLLM goes on to nobody behind it
        until it has some, while those behind hold theirs.
        """
        wanted = blocks_at_most(self._groups, request.num_tokens) + sum(self._waiting.values())
        return not self._waiting or wanted <= self._num_blocks

    def _still_arriving(self, tracked: _Tracked) -> bool:
        """Whether to wait for more from slower tiers; starts bringing it when there is room for that."""
        if not self._lookups.has_far_tiers:
            return False
        now = self._clock()
        if tracked.gives_up_at is None:
            tracked.gives_up_at = now + self._prefetch_deadline_s
        if tracked.arrival is None:
            self._arrivals = [arrival for arrival in self._arrivals if not arrival.done]
            if len(self._arrivals) < self._prefetches:
                tracked.arrival = self._lookups.bring_near(behind(tracked.content, tracked.first))
                self._arrivals.append(tracked.arrival)
                tracked.arrival.wait(QUICK_S)
        arrived = tracked.arrival is not None and tracked.arrival.done
        return not arrived and now < tracked.gives_up_at

    def _end_arrival(self, tracked: _Tracked) -> None:
        if tracked.arrival is not None:
            tracked.arrival.cancel()
            tracked.sources = [("", tracked.first), *tracked.arrival.sources]
            tracked.arrival = None

    def _let_go(self, tracked: _Tracked) -> None:
        """Ends what the request waits for and holds; the next question starts anew."""
        self._end_arrival(tracked)
        self._release(tracked)
        tracked.gives_up_at, tracked.looked_far, tracked.sources = None, False, ()

    def _release(self, tracked: _Tracked) -> None:
        if tracked.held is not None:
            held, tracked.held, tracked.offer = tracked.held, None, None
            self._lookups.release(held)

    def _another_rank_may_fail(self, step: Step) -> bool:
        """Behind requests that wait there is nothing to compute before all ranks' reports."""
        return self._lookups.several_ranks and bool(step.loads) and not self._requests_wait

    def _look_for_loads_elsewhere(self) -> None:
        """Whether vLLM counts on KV that it neither had nor was promised here: the load of another connector,
        beside this one in its MultiConnector, in the step that is being planned. It does so only after it has
        given the request its blocks."""
        allocated, self._allocated = self._allocated, []
        for request in allocated:
            known = self._known.get(request.request_id, 0)
            if request.num_computed_tokens > known:
                self._loads_elsewhere = True
                if not self._requests_wait:
                    self._unconfirmed.add(self._step + 1, request, known)

    def _complete(self, tracked: _Tracked, num_scheduled: int) -> int:
        """How many leading tokens' KV will be complete and confirmed after this step, as far as saved."""
        request = tracked.request
        confirmed = min(request.num_computed_tokens + num_scheduled, request.num_tokens)
        end: int = confirmed // self._chunk_tokens * self._chunk_tokens
        if self._tails and tracked.saved < request.num_prompt_tokens <= confirmed:
            end = max(end, request.num_prompt_tokens // self._block_tokens * self._block_tokens)
        return end
