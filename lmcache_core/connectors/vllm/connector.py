"""vLLM's connector API (0.32): hooks of the scheduler and of the workers, handed on to our two sides.

A hook never raises into the engine: what goes wrong is logged, and costs at most the KV it was about.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from lmcache_core.connectors.vllm.groups import common_block_tokens
from lmcache_core.connectors.vllm.guard import guarded, nothing
from lmcache_core.connectors.vllm.kv_events import RankNews, wanted
from lmcache_core.connectors.vllm.lookups import LocalLookups, Lookups
from lmcache_core.connectors.vllm.metadata import AddressMetadata, ReportMetadata, StepMetadata
from lmcache_core.connectors.vllm.metrics import ConnectorMetrics, ConnectorStats, Tally, hit_sources
from lmcache_core.connectors.vllm.plan import Step
from lmcache_core.connectors.vllm.rank import cache_here, close_rank, open_rank
from lmcache_core.connectors.vllm.ranks import RankAddress, RankLookups
from lmcache_core.connectors.vllm.scheduler import SchedulerSide
from lmcache_core.connectors.vllm.server import LookupServer
from lmcache_core.connectors.vllm.settings import cache_config, read_settings
from lmcache_core.connectors.vllm.support import attention_groups, check_config
from lmcache_core.connectors.vllm.versions import check_version
from lmcache_core.connectors.vllm.worker import WorkerSide
from lmcache_core.errors import UnsupportedModel

if TYPE_CHECKING:
    from lmcache_core.connectors.vllm.publishing import NewsBatch, Publisher

log = logging.getLogger(__name__)


class LMCacheCoreConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """One side of the connector, by `role`.

    Raises:
        UnsupportedModel: a model or setting whose KV can't be told apart or moved; says why.
        ConfigError: `kv_connector_extra_config` or the config it names can't be used.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._transfer = vllm_config.kv_transfer_config
        self._settings = read_settings(self._transfer.kv_connector_extra_config)
        check_version()
        check_config(vllm_config)
        self._groups = attention_groups(kv_cache_config)
        self._worker: WorkerSide | None = None
        self._registered = False
        self._server: LookupServer | None = None
        self._asked_where = False  # with this step
        self._tally = Tally()
        self._news: RankNews | None = None
        self._publisher: Publisher | None = None
        self._scheduler: SchedulerSide | None = None
        self._pool: Any = None
        if role is KVConnectorRole.SCHEDULER:
            self._warn()
            cache = cache_here(self._transfer.engine_id)
            if cache is not None:  # the one worker shares this process
                self._scheduler = self._make_scheduler(LocalLookups(cache))

    @property
    def requires_kv_delivery(self) -> bool:
        """A store that is dropped is a miss later, no harm."""
        return False

    # -- the scheduler's hooks -------------------------------------------------------------------

    @guarded(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        return self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    @guarded(dict)
    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        if self._scheduler is None:
            return hit_sources({}, {}, num_external_tokens)
        by_tier = self._scheduler.hit_by_tier(request.request_id)
        return hit_sources(by_tier, self._scheduler.mediums, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        if self._scheduler is None:
            return StepMetadata(where=True)
        step = self._scheduler.step()
        self._plan_saves(step, scheduler_output)
        return StepMetadata(step)

    @guarded(nothing)
    def update_connector_output(self, connector_output: Any) -> None:
        metadata = connector_output.kv_connector_worker_meta
        if isinstance(metadata, ReportMetadata):
            self._reach(metadata.addresses)
            if self._scheduler is not None and metadata.report is not None:
                self._scheduler.reported(metadata.report)
        if connector_output.invalid_block_ids:  # also another connector's
            self._forget_shared()
        if self._publisher is not None:
            self._publisher.heard(connector_output.kv_cache_events)

    @guarded(list)
    def take_events(self) -> list[Any]:
        return [] if self._publisher is None else self._publisher.take()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """What vLLM's MultiConnector calls when a connector beside ours knows one group only."""
        return self.request_finished_all_groups(request, (block_ids,))

    @guarded(lambda: (False, None))
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._scheduler is not None:
            self._scheduler.finished(request.request_id)
        return False, None

    @guarded(lambda: False)
    def reset_cache(self) -> bool | None:
        if self._scheduler is not None:
            self._scheduler.forget(os.urandom(16), engine_forgot=self._engine_forgot())
        if self._publisher is not None:
            self._publisher.blocks.forget()
        return True

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._pool = gpu_block_pool

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Takes the addresses of all ranks: {(stage, rank in the stage): address}.

        vLLM's MultiConnector hands on the first handshake that it is given: where that isn't ours, the ranks
        are asked with the first step.
        """
        told = [metadata[place] for place in sorted(metadata)]
        self._reach({i: each.address for i, each in enumerate(told) if isinstance(each, AddressMetadata)})
        if self._scheduler is None:
            log.warning(
                "vLLM has handed on another connector's handshake: the ranks are asked where they are with "
                "the first step, whose requests are not cached"
            )

    # -- the workers' hooks ----------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """
        Raises:
            UnsupportedModel: the KV is of another engine than the one that this connector was made for.
        """
        if self._registered:
            raise UnsupportedModel(
                "vLLM keeps one connector a process, and another engine was made in this one: end that one "
                "with llm.llm_engine.engine_core.shutdown(), or start a new process. By default, with "
                "VLLM_ENABLE_V1_MULTIPROCESSING=1, each engine has a process of its own"
            )
        self._registered = True
        rank = open_rank(self._vllm_config, self._kv_cache_config, kv_caches, self._settings)
        rank.cache.engines[0].subscribe(self._tally, *Tally.KINDS)
        self._worker = WorkerSide(
            rank.cache,
            rank.blocks,
            rank=rank.number,
            on_lost=lambda num_tokens: self._tally.add(lost_tokens=num_tokens),
        )

        if wanted(self._vllm_config):
            self._news = RankNews(rank.number, rank.cache.full_parts)
            rank.cache.engines[0].subscribe(self._news, *RankNews.KINDS)

    def get_handshake_metadata(self) -> AddressMetadata | None:
        """Where the scheduler reaches this rank's lookups, unless it shares the process."""
        address = self._address()
        return None if address is None else AddressMetadata(address)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            metadata = self._get_connector_metadata()
            self._asked_where = metadata.where
            self._worker.load(metadata.step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Everything was loaded before the forward."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """All layers of a block are saved together, after the forward."""

    @guarded(nothing)
    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.save(self._get_connector_metadata().step)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        arrived, failed = (set(), set()) if self._worker is None else self._worker.arrived()
        return KVConnectorTransferResults(finished_recving=arrived, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._worker is None else self._worker.failed_blocks()

    def build_connector_worker_meta(self) -> ReportMetadata | None:
        if self._worker is None:
            return None
        report, address = self._worker.report(), self._answer_where()
        if report is None and address is None:
            return None
        return ReportMetadata(report, {} if address is None else {self._worker.rank: address})

    @guarded(nothing)
    def _answer_where(self) -> RankAddress | None:
        return self._address() if self._asked_where else None

    @guarded(nothing)
    def get_kv_connector_kv_cache_events(self) -> NewsBatch | None:
        news = [] if self._news is None else self._news.take()
        if not news:
            return None
        from lmcache_core.connectors.vllm.publishing import NewsBatch

        return NewsBatch(news)

    @guarded(nothing)
    def get_kv_connector_stats(self) -> ConnectorStats | None:
        return self._tally.take()

    # -- both ------------------------------------------------------------------------------------

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats:
        return ConnectorStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> ConnectorMetrics:
        return ConnectorMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @guarded(nothing)
    def shutdown(self) -> None:
        """Lets go of all requests; the worker closes its engine, which writes what waits."""
        if self._scheduler is not None:
            self._scheduler.close()
        if self._server is not None:
            self._server.close()
        if self._worker is not None:
            self._worker = None
            close_rank(self._transfer.engine_id)

    @guarded(nothing)
    def _plan_saves(self, step: Step, scheduler_output: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.plan_saves(step, scheduler_output)

    def _engine_forgot(self) -> bool:
        """Whether vLLM's own prefix cache was reset: it is before ours, unless any block is in use."""
        if not self._vllm_config.cache_config.enable_prefix_caching:
            return True
        forgot = self._pool is not None and self._pool.num_gpu_blocks - self._pool.get_num_free_blocks() == 1
        if not forgot:
            log.warning(
                "vLLM's own prefix cache was not reset, since requests hold blocks: until it is (which "
                "reset_running_requests=True does), requests that begin with KV of it are not stored"
            )
        return forgot

    def _forget_shared(self) -> None:
        """Empties vLLM's own prefix cache; requests under way keep their blocks.

        vLLM itself leaves blocks there that a failed load never filled, until its request has computed them,
        which it may not live to do. Which others were computed behind them by then isn't known.
        """
        if self._pool is not None and self._vllm_config.cache_config.enable_prefix_caching:
            self._pool.evict_blocks(set(range(self._pool.num_gpu_blocks)))

    def _address(self) -> RankAddress | None:
        """Where this rank's lookups are reached; None where the scheduler shares the process."""
        parallel = self._vllm_config.parallel_config
        cache = cache_here(self._transfer.engine_id)
        alone = parallel.world_size == 1 and parallel.distributed_executor_backend == "uni"
        if cache is None or alone:
            return None
        self._server = self._server or LookupServer(cache)
        return RankAddress(
            path=self._server.path,
            nonce=self._server.nonce,
            model_json=cache.model.to_json(),
            mediums=cache.mediums,
            has_far_tiers=cache.has_far_tiers,
        )

    def _reach(self, addresses: Mapping[int, RankAddress]) -> None:
        """Takes the ranks' addresses once all are there: one that is missing makes everything a miss."""
        if self._scheduler is None and len(addresses) == self._vllm_config.parallel_config.world_size:
            self._scheduler = self._make_scheduler(RankLookups([addresses[i] for i in sorted(addresses)]))

    def _make_scheduler(self, lookups: Lookups) -> SchedulerSide:
        if wanted(self._vllm_config) and any(group.window is None for group in self._groups):
            from lmcache_core.connectors.vllm.publishing import Publisher

            self._publisher = Publisher(
                self._vllm_config, self._kv_cache_config, self._groups, lookups.mediums
            )
        config = cache_config(self._settings, common_block_tokens(self._groups))
        return SchedulerSide(
            lookups,
            self._groups,
            num_blocks=self._kv_cache_config.num_blocks - 1,  # the null block is nobody's
            loads=self._transfer.is_kv_consumer,
            saves=self._transfer.is_kv_producer,
            tails=config.tails,
            prefetch_deadline_s=self._settings.prefetch_deadline,
            prefetches=self._settings.prefetches,
            pin_ttl_s=config.pin_ttl,
            on_growth=None if self._publisher is None else self._publisher.blocks.grown,
            on_hit=lambda by_tier: self._tally.add_of_tiers("hit_tokens", by_tier),
        )

    def _warn(self) -> None:
        policy = self._transfer.kv_load_failure_policy
        if self._transfer.is_kv_consumer and policy != "recompute":
            log.warning(
                "kv_load_failure_policy is %r: a request whose KV is lost after it was promised will fail; "
                'set it to "recompute"',
                policy,
            )
