"""The worker's side: moves KV between this rank's blocks and its cache engine, as the scheduler planned."""

from __future__ import annotations

import logging
from collections.abc import Callable

from lmcache_core.connectors.vllm.blocks import RequestBlocks
from lmcache_core.connectors.vllm.plan import Load, Report, Save, Step
from lmcache_core.engine import CacheEngine
from lmcache_core.errors import LMCacheError
from lmcache_core.kernels import OpaqueBlocks

log = logging.getLogger(__name__)


class WorkerSide:
    """One rank's loads and saves. For one thread; nothing that a tier does raises out of it."""

    def __init__(
        self,
        engine: CacheEngine,
        blocks: OpaqueBlocks,
        block_tokens: int,
        *,
        rank: int,
        on_lost: Callable[[int], None],
    ) -> None:
        """`on_lost` is told how many tokens a failed load leaves to compute."""
        self._engine = engine
        self._blocks = blocks
        self._block_tokens = block_tokens
        self._rank = rank
        self._on_lost = on_lost
        self._near = engine.memory_tiers
        self._report: Report | None = None  # of this step
        self._failed_blocks: set[int] = set()  # of this step
        self._bad_blocks: dict[int, int] = {}
        # Block id → the step in which it was promised and not filled. Until the scheduler has dealt with
        # that step's report, what is computed on such a block is not stored.

    def load(self, step: Step) -> None:
        """Fills the blocks of everything promised for this step; what can't be had is reported."""
        failed: dict[str, int] = {}
        for load in step.loads:
            end = max(self._load(load), load.first)
            if end < load.end:
                log.warning(
                    "request %s: %d promised tokens could not be loaded; they must be computed",
                    *(load.request_id, load.end - end),
                )
                self._on_lost(load.end - end)
                failed[load.request_id] = end
                blocks = load.block_ids[end // self._block_tokens : -(-load.end // self._block_tokens)]
                self._failed_blocks.update(blocks)
                self._bad_blocks.update(dict.fromkeys(blocks, step.number))
        if step.loads:
            self._report = Report(step=step.number, failed=failed)

    def save(self, step: Step) -> None:
        """Takes what the step's forward has completed. The blocks may be reused when this returns."""
        if self._bad_blocks:
            self._bad_blocks = {
                block: number for block, number in self._bad_blocks.items() if number > step.confirmed
            }
        for save in step.saves:
            if self._bad_blocks.keys().isdisjoint(save.block_ids) and not self._save(save):
                return  # no memory: the others would wait for it in vain, one after the other

    def report(self) -> Report | None:
        """How the step's loads went, once."""
        report, self._report = self._report, None
        return report

    def failed_blocks(self) -> set[int]:
        """The step's blocks that were promised and not filled, once."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def _load(self, load: Load) -> int:
        """Returns the end of the tokens that are in place."""
        target = RequestBlocks(
            self._blocks, self._block_tokens, load.block_ids, first=load.first, end=load.end
        )
        try:
            return self._engine.retrieve(load.content, target, search_range=self._near).num_tokens
        except Exception:  # recorded boundary: a load that fails is computed
            log.exception("request %s: loading failed", load.request_id)
            return load.first
        finally:
            try:
                self._engine.lookup_unpin(load.lookup_ids[self._rank])
            except LMCacheError as error:
                log.warning("request %s: %s", load.request_id, error)

    def _save(self, save: Save) -> bool:
        """Whether there was room for all of it."""
        source = RequestBlocks(self._blocks, self._block_tokens, save.block_ids)
        try:
            return not self._engine.store(save.content, source).num_skipped_tokens
        except Exception:  # recorded boundary: what can't be stored will be computed again
            log.exception("request %s: storing failed", save.request_id)
            return True
