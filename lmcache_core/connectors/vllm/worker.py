"""The worker's side: moves KV between this rank's blocks and its cache, as the scheduler planned."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from lmcache_core.connectors.vllm.blocks import RequestBlocks
from lmcache_core.connectors.vllm.grouped import GroupedCache
from lmcache_core.connectors.vllm.groups import requests_wait
from lmcache_core.connectors.vllm.memory import Blocks
from lmcache_core.connectors.vllm.plan import Load, Report, Save, Step

log = logging.getLogger(__name__)


class WorkerSide:
    """One rank's loads and saves. For one thread; nothing that a tier does raises out of it."""

    def __init__(
        self,
        cache: GroupedCache,
        blocks: Sequence[Blocks],
        *,
        rank: int,
        on_lost: Callable[[int], None],
    ) -> None:
        """`blocks` are of the cache's groups; `on_lost` is told how many tokens a failed load leaves."""
        self._cache = cache
        self._blocks = tuple(blocks)
        self.rank = rank
        self._on_lost = on_lost
        self._chunk_tokens = cache.model.chunk_tokens
        self._requests_wait = requests_wait(cache.groups)
        self._report: Report | None = None  # of this step
        self._arrived: set[str] = set()  # requests that waited for this step's loads
        self._failed: set[str] = set()  # those of them whose load failed
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
                if not self._requests_wait:
                    block_tokens, [block_ids] = self._cache.groups[0].block_tokens, load.block_ids
                    blocks = block_ids[end // block_tokens : -(-load.end // block_tokens)]
                    self._failed_blocks.update(blocks)
                    self._bad_blocks.update(dict.fromkeys(blocks, step.number))
        if step.loads or step.awaited:
            self._report = Report(step=step.number, failed=failed)
        if self._requests_wait:
            self._arrived.update(load.request_id for load in step.loads)
            self._failed.update(failed)

    def save(self, step: Step) -> None:
        """Takes what the step's forward has completed. The blocks may be reused when this returns."""
        if self._bad_blocks:
            self._bad_blocks = {
                block: number for block, number in self._bad_blocks.items() if number > step.confirmed
            }
        for save in step.saves:
            good = not self._bad_blocks or self._bad_blocks.keys().isdisjoint(save.block_ids[0])
            if good and not self._save(save):
                return  # no memory: the others would wait for it in vain, one after the other

    def report(self) -> Report | None:
        """How the step's loads went, once; None where nobody asks."""
        report, self._report = self._report, None
        return report

    def failed_blocks(self) -> set[int]:
        """The step's blocks that were promised and not filled, once. None of requests that wait."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def arrived(self) -> tuple[set[str], set[str]]:
        """The requests that waited for this step's loads, and those of them to take back, once."""
        arrived, self._arrived = self._arrived, set()
        failed, self._failed = self._failed, set()
        return arrived, failed

    def _load(self, load: Load) -> int:
        """Returns the end of the tokens that are in place in every group."""
        try:
            return min(self._load_group(load, index) for index in range(len(self._blocks)))
        except Exception:  # recorded boundary: a load that fails is computed
            log.exception("request %s: loading failed", load.request_id)
            return load.first
        finally:
            self._cache.release(load.lookup_ids[self.rank])

    def _load_group(self, load: Load, index: int) -> int:
        group, engine = self._cache.groups[index], self._cache.engines[index]
        target = RequestBlocks(
            self._blocks[index],
            group.block_tokens,
            load.block_ids[index],
            first=load.first,
            end=load.end,
        )
        if target.num_missing > group.first_needed(load.end):
            raise ValueError(f"no blocks for tokens [{group.first_needed(load.end)}, {target.num_missing})")
        wanted = max(load.first, group.first_needed(load.end))
        skip = wanted // self._chunk_tokens * self._chunk_tokens
        mask = _after(skip, load.content.num_tokens)
        found = engine.retrieve(load.content, target, mask=mask, search_range=self._cache.near)
        return skip + found.num_tokens

    def _save(self, save: Save) -> bool:
        """Whether there was room for all of it."""
        try:
            return all(self._save_group(save, index) for index in range(len(self._blocks)))
        except Exception:  # recorded boundary: what can't be stored will be computed again
            log.exception("request %s: storing failed", save.request_id)
            return True

    def _save_group(self, save: Save, index: int) -> bool:
        group, engine = self._cache.groups[index], self._cache.engines[index]
        source = RequestBlocks(self._blocks[index], group.block_tokens, save.block_ids[index])
        num_tokens = save.content.num_tokens
        skip = source.num_missing // self._chunk_tokens * self._chunk_tokens
        end = min(skip + self._chunk_tokens, num_tokens)
        if source.num_missing > max(skip, group.first_needed(end - 1)):
            skip = end  # what is missing of this chunk would be needed
        if skip >= num_tokens:
            return True
        return not engine.store(save.content, source, mask=_after(skip, num_tokens)).num_skipped_tokens


def _after(skip: int, num_tokens: int) -> memoryview[bool] | None:
    """The mask of all tokens but the first `skip`."""
    return memoryview(bytes(skip) + b"\1" * (num_tokens - skip)).cast("?") if skip else None
